"""What has tokens: the SoT family, and any backbone with our head. Importing any of it registers all of it.

The family is registered with timm and the configuration with transformers. The classes of models follow when a
configuration is made, before transformers looks for them: they take the large part of transformers, and its quantisers.
"""

import logging

from sot.models import configuration as configuration
from sot.models import vision as vision


def _is_of_others(record: logging.LogRecord) -> bool:
    """Drops what torch tells the authors of torchao, which transformers imports for its quantisers if it is there."""
    return "register_constant() on Enum subclasses is deprecated" not in str(record.msg)


logging.getLogger("torch.utils._pytree").addFilter(_is_of_others)
