"""Section 3 of the paper. Imports torch and nothing else, and that where a name is first asked for."""

from typing import TYPE_CHECKING

from sot.lazy import lazily

if TYPE_CHECKING:
    from sot.core.head import POOLS as POOLS
    from sot.core.head import SecondOrderHead as SecondOrderHead
    from sot.core.head_config import Fusion as Fusion
    from sot.core.head_config import HeadConfig as HeadConfig
    from sot.core.normalizers import NORMS as NORMS
    from sot.core.pooling import Pool as Pool

_HOMES = {"Fusion": "head_config", "HeadConfig": "head_config", "NORMS": "normalizers", "POOLS": "head"}
_HOMES |= {"Pool": "pooling", "SecondOrderHead": "head"}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
