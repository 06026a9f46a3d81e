"""The figures that the paper prints for its models."""

from __future__ import annotations

import timm

from sot.paper.comparison import load_comparisons

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
    if pattern is None:
        return [name for name in PAPER_FIGURES if timm.is_model(name)]
    names = [name for name in PAPER_FIGURES if name in timm.list_models(pattern)]
    names += [name for name in timm.list_models(pattern) if name not in names]
    if not names:
        raise ValueError(f"no model matches {pattern!r}; try 'sot_*', 'deit*' or '*' for all of timm")
    return names
