"""`sot bench launches` and `sot bench kernels`: what is counted, not measured, and needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from sot.cli.bench import MarkdownOption, SizeOption, app, choose_sizes
from sot.cli.options import JsonOption, console, progress, refuse_both
from sot.files import rich_table

Table = tuple[list[str], list[str], Sequence[Sequence[str]], str]  # columns of words, of numbers, rows, caption


def show_counts(title: str, rows: list[dict[str, Any]], table: Table, as_json: bool, markdown: bool) -> None:
    """Print as JSON, as Markdown or for a terminal."""
    words, numbers, lines, caption = table
    if as_json:
        typer.echo(json.dumps({"benchmark": title, "rows": rows}))
    elif markdown:
        header = [[*words, *numbers], ["---"] * len(words) + ["---:"] * len(numbers)]
        typer.echo("\n".join([*(f"| {' | '.join(line)} |" for line in [*header, *lines]), "", caption]))
    else:
        console.print(rich_table(words, numbers, lines, title=title, caption=caption))


@app.command()
def launches(
    size: SizeOption = None,
    norm: Annotated[bool, typer.Option("--norm", help="Each way to compute exact svPN by itself instead.")] = False,
    as_json: JsonOption = False,
    markdown: MarkdownOption = False,
) -> None:
    """Kernels that each head launches on an accelerator, forward and backward, beside the published one."""
    from sot.bench.launches import head_launches, norm_launches

    refuse_both("--json", "--markdown", as_json and markdown)
    counted = (norm_launches if norm else head_launches)(choose_sizes(size, 2, 196))
    first = {row.size: row.both for row in reversed(counted)}  # the published head, or Triton
    lines = [
        (row.size, row.name, str(row.forward), str(row.backward), f"{row.both / first[row.size]:.2f}")
        for row in counted
    ]
    caption = "Counted on shapes: torch's operators that write, and our kernels; a product or decomposition is one."
    name, ratio = ("exact svPN", "of Triton's") if norm else ("head", "of the published")
    table = ["size", name], ["forward", "backward", ratio], lines, caption
    rows = [{**vars(row), "both": row.both} for row in counted]
    show_counts("sot bench launches", rows, table, as_json, markdown)


@app.command()
def kernels(
    estimate: Annotated[
        bool, typer.Option("--estimate", help="What exact adds to a step on an A100 and an H100 instead.")
    ] = False,
    columns: Annotated[list[int] | None, typer.Option(help="Of the matrices; repeatable.", min=2, max=64)] = None,
    architecture: Annotated[list[str] | None, typer.Option(help="sm_80, sm_90, gfx942, …; repeatable.")] = None,
    as_json: JsonOption = False,
    markdown: MarkdownOption = False,
) -> None:
    """Registers, stack and shared memory of the Triton kernels, compiled here: no GPU is needed."""
    refuse_both("--json", "--markdown", as_json and markdown)
    refuse_both("--estimate", "--columns", estimate and bool(columns))
    refuse_both("--estimate", "--architecture", estimate and bool(architecture))
    rows, table = _estimates() if estimate else _resources(columns, architecture)
    show_counts("sot bench kernels", rows, table, as_json, markdown)


def _resources(columns: list[int] | None, architectures: list[str] | None) -> tuple[list[dict[str, Any]], Table]:
    from sot.bench.kernels import ARCHITECTURES, COLUMNS, KERNELS, check_architecture, compile_kernel

    targets = [check_architecture(name) for name in architectures or ARCHITECTURES]
    jobs = [(name, size) for name in KERNELS for size in columns or COLUMNS]
    found = {
        (name, size): [compile_kernel(name, size, target) for target in targets]
        for name, size in progress(jobs, "Compiling")
    }
    lines = [
        (name, str(size), *(f"{one.registers} / {one.stack} / {one.shared}" for one in compiled))
        for (name, size), compiled in found.items()
    ]
    caption = "Registers of a thread / bytes of its stack / bytes of shared memory."
    rows = [asdict(one) for compiled in found.values() for one in compiled]
    for row in rows:
        row["instructions"] = len(row.pop("code"))
    return rows, (["kernel"], ["columns", *targets], lines, caption)


def _estimates() -> tuple[list[dict[str, Any]], Table]:
    from sot.bench.kernel_estimate import ASSUMED, estimates

    found = estimates()
    rows = [{**asdict(one), "added": one.added, "share": one.share} for one in found]
    lines = []
    for one in found:
        parts = one.arithmetic, one.memory, one.launches, one.added, one.step
        milliseconds = (f"{1000 * value:.2f}" for value in parts)
        lines.append((one.gpu, one.size, str(one.batch), *milliseconds, f"{100 * one.share:.1f}"))
    numbers = ["batch", "arithmetic ms", "memory ms", "launches ms", "exact ms", "step ms", "exact % of the step"]
    return rows, (["GPU", "size"], numbers, lines, ASSUMED)
