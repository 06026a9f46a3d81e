"""Everything that `import sot` offers; what comes from `sot.models` registers the models with timm and transformers."""

from sot.core.fusion import Fusion as Fusion
from sot.core.head import POOLS as POOLS
from sot.core.head import HeadConfig as HeadConfig
from sot.core.head import SecondOrderHead as SecondOrderHead
from sot.core.normalizers import NORMS as NORMS
from sot.models.accelerate import accelerate as accelerate
from sot.models.configuration import SoTConfig as SoTConfig
from sot.models.equip import equip as equip
from sot.models.inference import optimize_for_inference as optimize_for_inference
from sot.models.modeling import SoTForImageClassification as SoTForImageClassification
from sot.models.modeling import SoTForSequenceClassification as SoTForSequenceClassification
from sot.models.vision import SecondOrderTransformer as SecondOrderTransformer
