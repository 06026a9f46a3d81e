"""Which backend computes an operator. It is chosen here and nowhere else.

The choice depends on device, type and size of the input and on what is installed; `use` and the environment variable
SOT_BACKEND override it. The first time that a backend computes an operator is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

logger = logging.getLogger("sot")
BACKENDS = ("auto", "numba", "triton", "torch", "reference")


def installed(package: str) -> bool:
    """Whether a package can be imported. It is not."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook says so
        return False


HAS_NUMBA = installed("numba")
HAS_TRITON = installed("triton")  # of torch 2.7 on it is 3.3 or later, which the kernels are written for


@dataclass
class Operator:
    """The backends of an operator, in order of preference, each with what it can compute.

    Those that are not installed are left out. `exported` names those whose operations any runtime knows, `transformed`
    the one that torch.func sees through.
    """

    backends: Mapping[str, Callable[..., bool]]
    exported: tuple[str, ...] = ("reference",)
    transformed: str = "reference"

    def __post_init__(self) -> None:
        missing = {"numba": not HAS_NUMBA, "triton": not HAS_TRITON}
        self.backends = {name: accepts for name, accepts in self.backends.items() if not missing.get(name)}

    def choose(self, *arguments: Any) -> str:
        """The backend for these arguments."""
        if torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export():  # programs have to run without this package
            return next(name for name in self.exported if self.backends[name](*arguments))
        if torch._C._are_functorch_transforms_active():
            return self.transformed
        if _asked in self.backends and self.backends[_asked](*arguments):
            return _asked
        return next(name for name, accepts in self.backends.items() if accepts(*arguments))


def anything(*arguments: Any) -> bool:
    """What a backend without limits accepts."""
    return True


def checked(name: str, source: str) -> str:
    """The name of a backend; ValueError if there is no such, or if it is not installed."""
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    if (name == "numba" and not HAS_NUMBA) or (name == "triton" and not HAS_TRITON):
        raise ValueError(f"{source} is {name!r}, which is not installed: pip install {name}")
    return name


_asked = checked(os.environ.get("SOT_BACKEND") or "auto", "the environment variable SOT_BACKEND")
_logged: set[tuple[str, str]] = set()


class use:
    """Compute every operator by this backend, wherever it can: at once, or within a `with` block.

    `auto` chooses by device, type, size and what is installed; `torch` has no kernels of its own; `reference` is the
    definition, which is slow and has torch's own gradients.
    """

    def __init__(self, backend: str) -> None:
        global _asked
        self.before = _asked
        _asked = checked(backend, "the backend")

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: Any) -> None:
        global _asked
        _asked = self.before


def asked() -> str:
    """The backend that was asked for, or `auto`."""
    return _asked


def log_once(operator: str, backend: str) -> None:
    """Say which backend computes an operator, the first time."""
    if (operator, backend) not in _logged:
        _logged.add((operator, backend))
        logger.info("%s is computed by %s.", operator, backend)
