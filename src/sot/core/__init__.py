"""Section 3 of the paper. Imports torch and nothing else."""

from sot.core.head import POOLS as POOLS
from sot.core.head import SecondOrderHead as SecondOrderHead
from sot.core.head_config import Fusion as Fusion
from sot.core.head_config import HeadConfig as HeadConfig
from sot.core.normalizers import NORMS as NORMS
from sot.core.pooling import Pool as Pool
