"""The command line. Each command parses, calls the package, and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sot.core.head import Fusion

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True)


@app.callback()
def describe() -> None:
    """Second-order transformers: classify from the class token and the word tokens."""


@app.command()
def models(
    pattern: Annotated[str | None, typer.Argument(help="Wildcard over all timm names; the paper's by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per model.")] = False,
) -> None:
    """List models: parameters, multiply-adds in both conventions, and the paper's figures."""
    import timm

    from sot.models.complexity import PAPER_FIGURES, find_models, measure

    names = find_models(pattern)
    rows = []
    for name in track(names, "Counting", console=errors, transient=True, disable=not errors.is_terminal):
        model = timm.create_model(name)
        rows.append((name, measure(model, model.default_cfg["input_size"]), PAPER_FIGURES.get(name)))
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


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Weights of the authors' code: .pth, .pt, .tar or .safetensors.")],
    target: Annotated[Path, typer.Argument(help="Where to write ours: a .safetensors file.")],
    fusion: Annotated[Fusion, typer.Option(help="Fusion the weights were trained with.")] = Fusion.SUM,
) -> None:
    """Rename weights laid out like the authors' code, and report every key."""
    from sot.models.convert import convert_state_dict, load_converted, read_weights, write_weights

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


def main() -> None:
    """Run the command line; what a user got wrong is one sentence and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        errors.print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
