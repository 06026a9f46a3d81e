"""Which timm architectures take the second-order head, and where each has its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import timm

from sot.models.from_timm import timm_layout
from sot.models.layout import Layout
from sot.models.variants import register_peers

COLUMNS = ("family", "model", "tokens", "class token", "prefix", "width", "norm", "removed")
SIZES = (
    *("zepto", "atto", "femto", "pico", "nano", "xx", "xxs", "xxtiny", "ti", "xs", "xtiny", "t", "tiny"),
    *("mini", "s", "small", "base"),
)


@dataclass(frozen=True)
class Surveyed:
    """A timm architecture: its layout, or the reason why it has none."""

    model: str
    family: str
    layout: Layout | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """One flat record; the fields of the layout are missing where there is none."""
        record: dict[str, Any] = {"model": self.model, "family": self.family, "works": self.layout is not None}
        return record | (self.layout.to_dict() if self.layout else {"reason": self.reason})

    def cells(self) -> list[str]:
        """Words for `COLUMNS`."""
        if self.layout is None:
            return [self.family, self.model, "refused", "", "", "", "", self.reason]
        layout = self.layout
        return [
            self.family,
            self.model,
            "sequence" if layout.format == "NLC" else "map",
            "yes" if layout.has_class_token else "no",
            str(layout.num_prefix_tokens),
            str(layout.dim),
            layout.norm or ("ours" if layout.needs_norm else "none"),
            ", ".join(layout.unused),
        ]


@cache
def families() -> dict[str, str]:
    """Every architecture that timm knows, the peers among them, and its family: the module that has its code."""
    register_peers()
    return {name: module for module in timm.list_modules() for name in timm.list_models(module=module)}


def find_backbones(pattern: str | None) -> list[str]:
    """One small model of each family, or all of timm that match a wildcard pattern."""
    if pattern is None:
        smallest: dict[str, str] = {}
        for name, family in families().items():
            smallest[family] = min(smallest.get(family, name), name, key=_smallness)
        return list(smallest.values())
    register_peers()
    names = timm.list_models(pattern)
    if not names:
        raise ValueError(f"no architecture of timm matches {pattern!r}; try 'swin*', or '*' for every one")
    return names


def _smallness(name: str) -> tuple[Any, ...]:
    """Orders names by the size that they speak of, then by their numbers; timm's own test models come last."""
    words = [word.strip("0123456789") for word in name.split("_")]
    rank = min((SIZES.index(word) for word in words if word in SIZES), default=len(SIZES))
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    return name.startswith("test_"), rank, not numbers, numbers, name


def survey(name: str) -> Surveyed:
    """Find the tokens of an architecture on the meta device, where nothing is computed."""
    try:
        return Surveyed(name, families()[name], timm_layout(name, {}, None))
    except ValueError as error:
        return Surveyed(name, families()[name], None, str(error))


def markdown(backbones: Iterable[Surveyed]) -> str:
    """The table as docs/backbones.md has it; names of code are set as code."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for backbone in backbones:
        family, model, *rest = backbone.cells()
        if backbone.layout and backbone.layout.norm:
            rest[4] = f"`{rest[4]}`"
        if backbone.layout and backbone.layout.unused:
            rest[5] = ", ".join(f"`{name}`" for name in backbone.layout.unused)
        lines.append(f"| {family} | `{model}` | {' | '.join(rest)} |")
    return "\n".join(lines)
