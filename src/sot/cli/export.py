"""`sot export`: a trained model for other runtimes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sot.cli.options import JsonOption, console, plain


def export(
    folder: Annotated[Path, typer.Argument(help="A trained model.")],
    to: Annotated[str, typer.Option(help="onnx or torch.")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", help="File to write; model.onnx or model.pt2 in FOLDER.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model for onnxruntime or torch, for any number of samples and tokens, and check it."""
    from sot.evaluation.export import export_model

    result = export_model(folder, to, out)
    if as_json:
        typer.echo(json.dumps({"file": str(result.file), "differences": result.differences}))
        return
    table = Table("samples", title=plain(f"{result.file}, {result.file.stat().st_size / 1e6:.1f} MB"))
    table.add_column("largest difference of a logit", justify="right")
    for samples, difference in result.differences.items():
        table.add_row(str(samples), f"{difference:.1e}")
    console.print(table)
