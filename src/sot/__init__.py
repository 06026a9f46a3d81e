"""Second-order transformers: classify from the class token and the word tokens.

`import sot` loads no other library. timm and transformers know our models once both sides are imported, in any order.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "Classifier": "sot.probe.classifier",
    "Fusion": "sot.core.head_config",
    "HeadConfig": "sot.core.head",
    "NORMS": "sot.core.normalizers",
    "POOLS": "sot.core.head",
    "SecondOrderHead": "sot.core.head",
    "SecondOrderTransformer": "sot.models.vision",
    "SoTConfig": "sot.models.configuration",
    "SoTForAudioClassification": "sot.models.audio",
    "SoTForImageClassification": "sot.models.modeling",
    "SoTForSequenceClassification": "sot.models.modeling",
    "SoTModel": "sot.models.auto_model",
    "accelerate": "sot.models.accelerate",
    "equip": "sot.models.equip",
    "optimize_for_inference": "sot.models.inference",
}
_ROOMS = ("bench", "core", "data", "evaluation", "explain", "models", "ops", "paper", "probe", "training")
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """A public name, or a package inside of this one."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"sot.{name}")
    raise AttributeError(f"module 'sot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


watch_imports()
