"""`sot models`: how large models are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from sot.cli.options import LinesOption, console, progress
from sot.files import rich_table

if TYPE_CHECKING:
    from sot.models.complexity import Complexity


def models(
    pattern: Annotated[
        str | None, typer.Argument(help="Wildcard over timm names. Default: the paper's models.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="A comparison table of the paper: 5a, 5b or 5c.")] = None,
    training: Annotated[bool, typer.Option("--training", help="Print what training on ImageNet takes.")] = False,
    as_json: LinesOption = False,
) -> None:
    """List models with parameters and multiply-adds, beside the paper's figures."""
    import timm

    from sot.models.complexity import measure_complexity
    from sot.paper.comparison import PAPER_FIGURES, find_models

    if table is not None:
        _show_comparison(table, as_json, pattern, training)
        return
    names = find_models(pattern)
    if training:
        _show_training(names, as_json)
        return
    rows = []
    for name in progress(names, "Counting"):
        model = timm.create_model(name)
        rows.append((name, measure_complexity(model, model.default_cfg["input_size"]), PAPER_FIGURES.get(name)))
    _show_counts(rows, as_json)


def _show_counts(rows: list[tuple[str, Complexity, tuple[float, float] | None]], as_json: bool) -> None:
    if as_json:
        for name, count, paper in rows:
            record = {"model": name, **vars(count), "paper_params": None, "paper_macs": None}
            if paper:
                record |= {"paper_params": paper[0] * 1e6, "paper_macs": paper[1] * 1e9}
            typer.echo(json.dumps(record))
        return
    caption = "MACs: convolutions and linear layers, as the paper counts; all MACs: attention products too."
    table = rich_table(["model"], ["params M", "paper", "MACs G", "paper", "all MACs G"], caption=caption)
    for name, count, paper in rows:
        figures = [f"{figure:g}" for figure in paper] if paper else ["", ""]
        macs, all_macs = f"{count.layer_macs / 1e9:.2f}", f"{count.all_macs / 1e9:.2f}"
        table.add_row(name, f"{count.params / 1e6:.2f}", figures[0], macs, figures[1], all_macs)
    console.print(table)


def _show_comparison(name: str, as_json: bool, pattern: str | None, training: bool) -> None:
    from sot.paper import counts as tables

    if pattern is not None or training:
        raise ValueError(f"--table {name} takes neither a pattern nor --training")
    comparison = tables.find_comparison(name)
    measured = [tables.measure_row(row) for row in progress(comparison.rows, "Counting")]
    if as_json:
        typer.echo(tables.as_json(measured))
    else:
        console.print(tables.comparison_table(comparison, measured))


def _show_training(names: list[str], as_json: bool) -> None:
    import timm

    from sot.models.complexity import IMAGENET_PICTURES, measure_training

    caption = "float32; an epoch has 1.28 million images; minutes on one device that sustains 10 Tera-MACs a second."
    columns = ("state GB", "saved MB/image", "GB at batch 128", "MACs G/image", "MACs P/epoch", "min/epoch")
    table = rich_table(["model"], columns, caption=caption)
    for name in progress(names, "Counting"):
        model = timm.create_model(name)
        cost = measure_training(model, model.default_cfg["input_size"])
        if as_json:
            typer.echo(json.dumps({"model": name, **vars(cost)}))
            continue
        state, saved, epoch = cost.state_bytes / 1e9, cost.saved_bytes / 1e6, cost.macs * IMAGENET_PICTURES
        cells = (state, saved, state + 128 * saved / 1e3, cost.macs / 1e9, epoch / 1e15, epoch / 10e12 / 60)
        table.add_row(name, *(f"{value:.1f}" if value >= 10 else f"{value:.2f}" for value in cells))
    if not as_json:
        console.print(table)
