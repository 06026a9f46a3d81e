"""`sot backbones`: where architectures have their tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from sot.cli.options import LinesOption, console, progress, refuse_both

if TYPE_CHECKING:
    from sot.models.survey import Surveyed


def backbones(
    pattern: Annotated[
        str | None, typer.Argument(help="Wildcard over timm names. Default: one small model of each family.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every timm architecture.")] = False,
    as_json: LinesOption = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/backbones.md.")] = False,
) -> None:
    """List timm architectures: where each has its tokens, or why it is refused."""
    from sot.models.survey import COLUMNS, find_backbones, markdown, survey

    refuse_both("--json", "--markdown", as_json and as_markdown)
    refuse_both("--all", f"the pattern {pattern!r}", everything and pattern is not None)
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
