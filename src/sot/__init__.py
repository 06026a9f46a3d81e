"""Second-order transformers: classify from the class token and the word tokens.

`import sot` loads no other library. timm and transformers know our models once both sides are imported, in any order.
"""

from typing import TYPE_CHECKING

from sot.lazy import lazily
from sot.registration import watch_imports

if TYPE_CHECKING:
    from sot.core.head import POOLS as POOLS
    from sot.core.head import HeadConfig as HeadConfig
    from sot.core.head import SecondOrderHead as SecondOrderHead
    from sot.core.head_config import Fusion as Fusion
    from sot.core.normalizers import NORMS as NORMS
    from sot.models.accelerate import accelerate as accelerate
    from sot.models.audio import SoTForAudioClassification as SoTForAudioClassification
    from sot.models.auto_model import SoTModel as SoTModel
    from sot.models.configuration import SoTConfig as SoTConfig
    from sot.models.equip import equip as equip
    from sot.models.inference import optimize_for_inference as optimize_for_inference
    from sot.models.modeling import SoTForImageClassification as SoTForImageClassification
    from sot.models.modeling import SoTForSequenceClassification as SoTForSequenceClassification
    from sot.models.vision import SecondOrderTransformer as SecondOrderTransformer
    from sot.probe.classifier import Classifier as Classifier

__version__ = "0.1.0"

_HOMES = {  # of the public names, each loaded when it is first asked for
    "Classifier": "probe.classifier",
    "Fusion": "core.head_config",
    "HeadConfig": "core.head",
    "NORMS": "core.normalizers",
    "POOLS": "core.head",
    "SecondOrderHead": "core.head",
    "SecondOrderTransformer": "models.vision",
    "SoTConfig": "models.configuration",
    "SoTForAudioClassification": "models.audio",
    "SoTForImageClassification": "models.modeling",
    "SoTForSequenceClassification": "models.modeling",
    "SoTModel": "models.auto_model",
    "accelerate": "models.accelerate",
    "equip": "models.equip",
    "optimize_for_inference": "models.inference",
}
__all__ = ["__version__", *_HOMES]
__getattr__, __dir__ = lazily(__name__, _HOMES, "__version__")

watch_imports()
