"""Second-order transformers: classify from the class token and the word tokens."""

import sot.models.peers  # noqa: F401  registers them with timm
from sot.core.head import POOLS, Fusion, HeadConfig, SecondOrderHead
from sot.core.normalizers import NORMS
from sot.models.configuration import SoTConfig
from sot.models.equip import equip
from sot.models.inference import optimize_for_inference
from sot.models.modeling import SoTForImageClassification, SoTForSequenceClassification
from sot.models.vision import SecondOrderTransformer

__version__ = "0.1.0"
__all__ = [
    "NORMS",
    "POOLS",
    "Fusion",
    "HeadConfig",
    "SecondOrderHead",
    "SecondOrderTransformer",
    "SoTConfig",
    "SoTForImageClassification",
    "SoTForSequenceClassification",
    "equip",
    "optimize_for_inference",
]
