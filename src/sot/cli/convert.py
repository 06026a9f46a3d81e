"""`sot convert`: weights of the authors' code as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from sot.cli.options import console
from sot.files import counted

Fusions = Literal["sum", "concat", "aggr_all", "late", "class", "word"]  # as `Fusion` has them, without torch


def convert(
    source: Annotated[Path, typer.Argument(help="Weights of the authors' code: .pth, .pt, .tar or .safetensors.")],
    target: Annotated[Path, typer.Argument(help="Our weights: a .safetensors file to write.")],
    fusion: Annotated[Fusions, typer.Option(help="Fusion the weights were trained with.")] = "sum",
) -> None:
    """Convert weights of the authors' code, and report every key."""
    from sot.paper.convert import convert_state_dict, load_converted, read_weights, write_weights

    if target.suffix != ".safetensors":
        raise ValueError(f"the target must end in .safetensors, got {target}")
    result = convert_state_dict(read_weights(source), fusion)
    table = Table("theirs", "ours")
    for theirs, ours in result.used.items():
        table.add_row(theirs, ours)
    for theirs, reason in result.unused.items():
        table.add_row(theirs, f"not used: {reason}", style="yellow")
    console.print(table)
    console.print(f"{counted(len(result.used), 'keys')} used, {len(result.unused)} not used.")
    model = load_converted(result.state, fusion)
    write_weights(model, target)
    console.print(f"Wrote {target} for {model.default_cfg['architecture']}.", soft_wrap=True)
