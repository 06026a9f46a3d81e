"""What the heads that are compared are called. Loads no torch, to refuse mistakes at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from sot.core.choices import POOLS
from sot.core.head_config import HeadConfig

POOLINGS: dict[str, dict[str, str | float]] = {
    "gap": {"pool": "gap"},
    "max": {"pool": "max"},
    "attn": {"pool": "attn"},
    "ep1": {"pool": "ep", "num_queries": 1},
    "ep8": {"pool": "ep", "num_queries": 8},
    "ep32": {"pool": "ep", "num_queries": 32},
    "mhc3": {"pool": "mhc3"},
    "gcp": {"pool": "gcp"},
    "mgcrp": {"pool": "mgcrp", "norm": "svpn_fast"},
    "mgcrp-exact": {"pool": "mgcrp", "norm": "svpn"},
    "mgcrp-exact-0.25": {"pool": "mgcrp", "norm": "svpn", "exponent": 0.25},
}


def _config(**settings: str | float) -> HeadConfig:
    return HeadConfig.from_dict({**settings, "pre_norm": True})


TRAINED: dict[str, HeadConfig] = {
    "class": _config(fusion="class"),
    **{name: _config(fusion="word", **pooling) for name, pooling in POOLINGS.items()},
    **{f"class+{name}": _config(fusion="sum", **pooling) for name, pooling in POOLINGS.items()},
}


PLAIN = ("majority", "logreg")  # what there is without any head of ours
HEADS: dict[str, HeadConfig | None] = {**TRAINED, "sot": None, **dict.fromkeys(PLAIN)}  # None: not of one form


def check_names(names: Sequence[str]) -> None:
    """Refuse names of heads that do not exist, before there is a backbone to ask."""
    for name in names:
        _add_foreign(name)
    unknown = [name for name in names if name not in HEADS and name != "all"]
    if unknown or not names:
        raise ValueError(f"unknown head {', '.join(map(repr, unknown)) or '(none)'}; accepted: all, {', '.join(HEADS)}")


def _add_foreign(name: str) -> None:
    """Know the head of a pooling that is not ours, if there is one of this name."""
    pool = name.removeprefix("class+")
    if name in HEADS or pool in POOLS.own:
        return
    with suppress(ValueError):
        HEADS[name] = _config(pool=pool, fusion="word" if pool == name else "sum")


def is_second_order(config: HeadConfig) -> bool:
    """Whether it pools products of the channels of words."""
    return config.pool in ("mgcrp", "gcp") and config.fusion != "class"
