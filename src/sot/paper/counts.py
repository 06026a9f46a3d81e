"""The paper's comparison tables beside the models that are built here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import timm
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from torch import nn

from sot.core.head import HeadConfig
from sot.files import rich_table
from sot.models.complexity import measure_complexity
from sot.models.equip import equip
from sot.paper.comparison import ComparedModel, Comparison, load_comparisons

PARAMS_TOLERANCE, MACS_TOLERANCE = 0.01, 0.03  # fractions of the paper's figures
ROUNDING = 0.05  # its figures have one decimal
NOTHING = "–"


@dataclass(frozen=True)
class Measured:
    """A row with our counts, or with the reason why there are none."""

    row: ComparedModel
    params: int | None = None
    macs: int | None = None
    reason: str = ""

    def deviations(self) -> tuple[float, float] | None:
        """Of our parameters and multiply-adds from the paper's, as fractions."""
        if self.params is None or self.macs is None:
            return None
        return self.params / 1e6 / self.row.params - 1, self.macs / 1e9 / self.row.macs - 1

    def is_close(self) -> bool:
        """Whether both counts are the paper's, up to tolerance and rounding."""
        deviations = self.deviations()
        if deviations is None:
            return False
        params, macs = (abs(deviation) for deviation in deviations)
        few = params <= max(PARAMS_TOLERANCE, ROUNDING / self.row.params)
        return few and macs <= max(MACS_TOLERANCE, ROUNDING / self.row.macs)

    @property
    def note(self) -> str:
        """Why there are no counts, or why they are not the paper's."""
        if self.reason or self.is_close():
            return self.reason
        return self.row.why or "not the paper's figures"

    def to_dict(self) -> dict[str, Any]:
        """A flat record; accuracies of ours are None until somebody trains the model."""
        row = self.row
        return {
            "name": row.name,
            "model": row.model,
            "params": self.params,
            "paper_params": row.params * 1e6,
            "macs": self.macs,
            "paper_macs": row.macs * 1e9,
            "counts_attention": not row.is_ours,
            "imagenet": None,
            "paper_imagenet": row.imagenet,
            "imagenet_a": None,
            "paper_imagenet_a": row.imagenet_a,
            "note": self.note,
        }

    def cells(self) -> list[str]:
        """Words for the columns of `comparison_table`."""
        row, deviations = self.row, self.deviations()
        ours = change = [NOTHING, NOTHING]
        if self.params is not None and self.macs is not None and deviations is not None:
            ours = [f"{self.params / 1e6:.2f}", f"{self.macs / 1e9:.2f}"]
            change = [f"{100 * deviation:+.1f}" for deviation in deviations]
        counts = [ours[0], f"{row.params:.1f}", change[0], ours[1], f"{row.macs:.1f}", change[1]]
        accuracies = [NOTHING if value is None else f"{value:.1f}" for value in (row.imagenet, row.imagenet_a)]
        return [row.name, *counts, *(f"{NOTHING} / {accuracy}" for accuracy in accuracies)]


def find_comparison(name: str) -> Comparison:
    """A table by its number in the paper."""
    tables = load_comparisons()
    if name not in tables:
        raise ValueError(f"unknown table {name!r}; accepted: {', '.join(tables)}")
    return tables[name]


def build(row: ComparedModel) -> nn.Module:
    """The model of a row on the meta device, where nothing is computed."""
    with torch.device("meta"):
        if row.side is None:
            return timm.create_model(row.model)
        head = HeadConfig.paper(left_dim=row.side, right_dim=row.side, fusion=row.fusion)
        return equip(row.model, 1000, head, pretrained=False, embed="densenet")


def measure_row(row: ComparedModel) -> Measured:
    """Count as the paper does: its own models without the products of attention, equipped ones without positions."""
    if not timm.is_model(row.model):
        return Measured(row, reason=f"{row.model} is not registered with timm")
    try:
        model = build(row)
    except ValueError as error:
        return Measured(row, reason=str(error))
    positions = sum(p.numel() for name, p in model.named_parameters() if row.side and name.endswith("pos_embed"))
    count = measure_complexity(model, (3, 224, 224))
    return Measured(row, count.params - positions, count.layer_macs if row.is_ours else count.all_macs)


def as_json(measured: Iterable[Measured]) -> str:
    """One JSON object per row."""
    return "\n".join(json.dumps(row.to_dict()) for row in measured)


def comparison_table(comparison: Comparison, measured: Iterable[Measured]) -> Table:
    """For a terminal, the notes below it."""
    measured = list(measured)
    caption = (
        "%: deviation from the paper. MACs of ours: convolutions and linear layers; of the others: attention products "
        "too. Accuracies: top-1 in %, measured here / in the paper."
    )
    notes = [f"{row.row.name}: {row.note}." for row in measured if row.note]
    title = f"Table {comparison.name}: {comparison.title}"
    numbers = ("params M", "paper", "%", "MACs G", "paper", "%", "ImageNet", "ImageNet-A")
    columns = [Column("model", no_wrap=True), *(Column(name, justify="right", no_wrap=True) for name in numbers)]
    narrow: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": 0, "show_edge": False}  # fits 80 columns
    about = {"title": title, "caption": "\n".join([caption, *notes]), "caption_justify": "left"}
    return rich_table(columns, (), (row.cells() for row in measured), **about, **narrow)
