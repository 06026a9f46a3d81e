"""Libraries that come with an extra of the package, and how to install them."""

from __future__ import annotations

import importlib.util
from importlib import metadata

DISTRIBUTION = "second-order-transformer"


def install_hint(extra: str) -> str:
    """The command that installs an extra: by its libraries, so that it works from a checkout as from a wheel."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from its sources, without installation
        required = []
    parts = (requirement.split(";") for requirement in required)
    wanted = [name.strip() for name, *marker in parts if f"extra == '{extra}'" in "".join(marker).replace('"', "'")]
    if not wanted:
        return f"pip install -e '.[{extra}]' in the checkout of {DISTRIBUTION}"
    return "pip install " + " ".join(f"'{name}'" for name in wanted)


def need(module: str, what: str, extra: str) -> None:
    """Refuse `what` if the library it needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{what} needs the library {module}: {install_hint(extra)}")
