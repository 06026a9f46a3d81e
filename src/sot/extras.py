"""Libraries that come with an extra of the package."""

from __future__ import annotations

import importlib.util


def need(module: str, what: str, extra: str) -> None:
    """Refuse `what` if the library it needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{what} needs the library {module}: pip install 'second-order-transformer[{extra}]'")
