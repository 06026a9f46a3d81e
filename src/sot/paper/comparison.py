"""The paper's comparison tables as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml


@dataclass(frozen=True)
class ComparedModel:
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
    rows: list[ComparedModel]


@cache
def load_comparisons() -> dict[str, Comparison]:
    """Tables 5a, 5b and 5c."""
    tables = yaml.safe_load((resources.files("sot.paper") / "comparison.yaml").read_text())
    return {
        name: Comparison(name, table["title"], [ComparedModel(**row) for row in table["rows"]])
        for name, table in tables.items()
    }


# Params in M and FLOPs in G as printed in tables 2 and 5; the paper's FLOPs are multiply-adds.
PAPER_FIGURES = {"sot_7": (5.44, 1.06)} | {
    row.model: (row.params, row.macs)
    for row in sorted(
        (row for table in load_comparisons().values() for row in table.rows if row.side is None),
        key=lambda row: not row.is_ours,
    )
}


def find_models(pattern: str | None) -> list[str]:
    """The models of the paper that can be built here, or all of timm that match a wildcard pattern."""
    import timm

    if pattern is None:
        return [name for name in PAPER_FIGURES if timm.is_model(name)]
    names = [name for name in PAPER_FIGURES if name in timm.list_models(pattern)]
    names += [name for name in timm.list_models(pattern) if name not in names]
    if not names:
        raise ValueError(f"no model matches {pattern!r}; try 'sot_*', 'deit*' or '*' for all of timm")
    return names
