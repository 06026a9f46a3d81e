"""`sot export`: a trained model for other runtimes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sot.cli.options import JsonOption, console, plain
from sot.files import rich_table


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    to: Annotated[str, typer.Option(help="onnx or torch.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write. Default: model.onnx or model.pt2 in the folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export a model to ONNX or torch.export, and check its outputs."""
    from sot.evaluation.formats import export_target
    from sot.saved import folder_config

    folder_config(folder)
    export_target(folder, to, out)
    from sot.evaluation.export import export_model

    result = export_model(folder, to, out)
    if as_json:
        typer.echo(json.dumps({"file": str(result.file), "differences": result.differences}))
        return
    title = plain(f"{result.file}, {result.file.stat().st_size / 1e6:.1f} MB")
    rows = ((str(samples), f"{difference:.1e}") for samples, difference in result.differences.items())
    console.print(rich_table(["samples"], ["largest difference of a logit"], rows, title=title))
