"""The command line. Each command parses, calls the package, and prints."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table
from safetensors import SafetensorError

from sot.cli import bench, explain, probe, reproduce, runs, ui, use
from sot.cli.runs import console, errors, is_first_process, progress
from sot.core.fusion import Fusion

if TYPE_CHECKING:
    from sot.models.complexity import Complexity
    from sot.models.survey import Surveyed

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def describe() -> None:
    """Second-order transformers: classify from the class token and the word tokens."""


@app.command()
def models(
    pattern: Annotated[str | None, typer.Argument(help="Wildcard over all timm names; the paper's by default.")] = None,
    table: Annotated[str | None, typer.Option(help="A comparison table of the paper instead: 5a, 5b or 5c.")] = None,
    training: Annotated[bool, typer.Option("--training", help="What training them on ImageNet takes instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per model.")] = False,
) -> None:
    """List models: parameters, multiply-adds in both conventions, and the paper's figures."""
    import timm

    from sot.models.complexity import measure_complexity
    from sot.paper.figures import PAPER_FIGURES, find_models

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
    table = Table("model", caption=caption)
    for column in ("params M", "paper", "MACs G", "paper", "all MACs G"):
        table.add_column(column, justify="right")
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
        console.print(tables.as_table(comparison, measured))


def _show_training(names: list[str], as_json: bool) -> None:
    import timm

    from sot.models.complexity import IMAGENET_PICTURES, measure_training

    caption = "float32; an epoch has 1.28 million pictures; minutes on one device that sustains 10 Tera-MACs a second."
    table = Table("model", caption=caption)
    for column in ("state GB", "saved MB/picture", "GB at batch 128", "MACs G/picture", "MACs P/epoch", "min/epoch"):
        table.add_column(column, justify="right")
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


@app.command()
def backbones(
    pattern: Annotated[
        str | None, typer.Argument(help="Wildcard over all timm names; one small model of each family by default.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every architecture of timm.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per architecture.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/backbones.md.")] = False,
) -> None:
    """List timm's architectures: where each has its tokens, or why it is refused."""
    from sot.models.survey import COLUMNS, find_backbones, markdown, survey

    if as_json and as_markdown:
        raise ValueError("--json and --markdown exclude each other")
    if everything and pattern is not None:
        raise ValueError(f"--all and the pattern {pattern!r} exclude each other")
    names = find_backbones("*" if everything else pattern)
    bar = progress(names, "Probing")
    found = [survey(name) for name in bar]
    if as_json:
        for backbone in found:
            typer.echo(json.dumps(backbone.to_dict()))
        return
    if as_markdown:
        typer.echo(markdown(found))
        return
    _show_backbones(found, COLUMNS)


def _show_backbones(found: list[Surveyed], columns: tuple[str, ...]) -> None:
    refused = [backbone for backbone in found if backbone.layout is None]
    if len(refused) < len(found):
        headers = [Column(name, no_wrap=name == "model", overflow="fold") for name in columns]
        table = Table(*headers, caption="norm: the backbone's own that comes next, ours, or none.")
        for backbone in found:
            if backbone.layout is not None:
                table.add_row(*backbone.cells())
        console.print(table)
    for backbone in refused:
        console.print(f"{backbone.model}: {backbone.reason}", style="yellow", highlight=False, soft_wrap=True)
    console.print(f"{len(found) - len(refused)} work, {len(refused)} refused.")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Weights of the authors' code: .pth, .pt, .tar or .safetensors.")],
    target: Annotated[Path, typer.Argument(help="Where to write ours: a .safetensors file.")],
    fusion: Annotated[Fusion, typer.Option(help="Fusion the weights were trained with.")] = Fusion.SUM,
) -> None:
    """Rename weights laid out like the authors' code, and report every key."""
    from sot.paper.convert import convert_state_dict, load_converted, read_weights, write_weights

    if target.suffix != ".safetensors":
        raise ValueError(f"the target must end in .safetensors, got {target}")
    result = convert_state_dict(read_weights(source), fusion.value)
    table = Table("theirs", "ours")
    for theirs, ours in result.used.items():
        table.add_row(theirs, ours)
    for theirs, reason in result.unused.items():
        table.add_row(theirs, f"not used: {reason}", style="yellow")
    console.print(table)
    console.print(f"{len(result.used)} keys used, {len(result.unused)} not used.")
    model = load_converted(result.state, fusion.value)
    write_weights(model, target)
    console.print(f"Wrote {target} for {model.default_cfg['architecture']}.", soft_wrap=True)


runs.register(app)
use.register(app)
probe.register(app)
explain.register(app)
reproduce.register(app)
ui.register(app)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line; what a user got wrong is one sentence and exit code 2."""
    try:
        with nullcontext() if is_first_process() else redirect_stdout(io.StringIO()):
            app()
    except (ValueError, OSError, SafetensorError) as error:
        errors.print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
