"""Section 3 of the paper. Imports torch and nothing else, and that where a name is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sot.core.head import POOLS as POOLS
    from sot.core.head import SecondOrderHead as SecondOrderHead
    from sot.core.head_config import Fusion as Fusion
    from sot.core.head_config import HeadConfig as HeadConfig
    from sot.core.normalizers import NORMS as NORMS
    from sot.core.pooling import Pool as Pool

_HOMES = {
    "Fusion": "head_config",
    "HeadConfig": "head_config",
    "NORMS": "normalizers",
    "POOLS": "head",
    "Pool": "pooling",
    "SecondOrderHead": "head",
}
_MODULES = ("head", "head_config", "normalize", "normalizers", "packed", "plugins", "pooling")
__all__ = ["NORMS", "POOLS", "Fusion", "HeadConfig", "Pool", "SecondOrderHead"]


def __getattr__(name: str) -> Any:
    """A public name from the module that has it, or a module; settings of a head need no torch."""
    if name in _HOMES:
        return getattr(import_module(f"sot.core.{_HOMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"sot.core.{name}")
    raise AttributeError(f"module 'sot.core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
