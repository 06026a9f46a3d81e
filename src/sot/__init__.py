"""Second-order transformers: classify from the class token and the word tokens."""

# ruff: noqa: F403, F405  the names are those of sot.public

import sys
from typing import TYPE_CHECKING, Any

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
    "accelerate",
    "equip",
    "optimize_for_inference",
]

# `sot` and `python -m sot` parse before they load torch, timm and transformers: help and mistyped options come at once.
# Whoever else imports the package gets all of it, registered. While Python looks for the module of -m, argv[0] is "-m".
_is_module = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("sot", "-msot")

if TYPE_CHECKING or not (_is_module or "sot_program" in sys.modules):
    from sot.public import *
else:

    def __getattr__(name: str) -> Any:
        """A public name, for code that a command loads."""
        if name not in __all__:
            raise AttributeError(f"module 'sot' has no attribute {name!r}")
        from sot import public

        return getattr(public, name)
