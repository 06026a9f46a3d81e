"""The paper's comparison tables as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml


@dataclass(frozen=True)
class Row:
    """A model and what the paper prints for it: millions of parameters, giga multiply-adds, top-1 in %.

    With `side` it is equipped: a head of `side`×`side` and the DenseNet embedding. `why` explains a figure of the paper
    that the model cannot meet.
    """

    name: str
    model: str
    params: float
    macs: float
    imagenet: float
    imagenet_a: float | None = None
    side: int | None = None
    fusion: str = "sum"
    why: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether the paper counts it as its own: layers alone, without the products of attention."""
        return "ours" in self.name


@dataclass(frozen=True)
class Comparison:
    """One table."""

    name: str
    title: str
    rows: list[Row]


@cache
def load_comparisons() -> dict[str, Comparison]:
    """Tables 5a, 5b and 5c."""
    tables = yaml.safe_load((resources.files("sot.paper") / "comparison.yaml").read_text())
    return {
        name: Comparison(name, table["title"], [Row(**row) for row in table["rows"]]) for name, table in tables.items()
    }
