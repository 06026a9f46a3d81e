"""`sot bench …`: ratios measured in turns in one process. A new one is a function that gives cases, or rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sot.cli.options import JsonOption, RecipeOption, SetOption, console, progress, refuse_both
from sot.files import write_atomically

if TYPE_CHECKING:
    from sot.bench.cases import Case, Measurement, Size

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory beside the published formulae.")

ThreadsOption = Annotated[int, typer.Option(help="Threads that torch computes with.", min=1)]
RoundsOption = Annotated[int, typer.Option(help="Calls of each function.", min=1)]
SizeOption = Annotated[
    list[str] | None, typer.Option("--size", help="Tiny, Small or Base; repeatable, all by default.")
]
BatchOption = Annotated[int, typer.Option(help="Samples in a batch.", min=1)]
TokensOption = Annotated[int, typer.Option(help="Word tokens of a sample.", min=1)]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print the table of docs/benchmarks.md.")]
PictureOption = Annotated[Path | None, typer.Option(help="Write the ratios as a bar chart, a PNG file.")]


def choose_sizes(names: list[str] | None, batch: int, tokens: int) -> tuple[Size, ...]:
    """The sizes of these names with this many samples and tokens."""
    from sot.bench.cases import SIZES

    known = {size.name.lower(): size for size in SIZES}
    for name in names or []:
        if name.lower() not in known:
            raise ValueError(f"unknown size {name!r}; accepted: {', '.join(size.name for size in SIZES)}")
    chosen = [known[name.lower()] for name in names] if names else list(SIZES)
    return tuple(replace(size, batch=batch, tokens=tokens) for size in chosen)


def run_cases(cases: list[Case], rounds: int) -> list[Measurement]:
    """Time one case after the other, with a bar on a terminal."""
    from sot.bench.cases import run_case

    return [row for case in cases for row in run_case(case, rounds, progress_bar(case.title))]


def progress_bar(title: str) -> Callable[[Iterable[int]], Iterable[int]]:
    """Wraps rounds to show how many are done, on a terminal only."""
    return lambda items: progress(list(items), title)


def show(
    title: str,
    measure: Callable[[], list[Measurement]],
    threads: int,
    rounds: int,
    as_json: bool,
    markdown: bool,
    picture: Path | None,
) -> None:
    """Measure with pinned threads, then print or draw: what every command of this file ends with."""
    from sot.bench.report import BenchReport
    from sot.bench.timing import thread_count

    refuse_both("--json", "--markdown", as_json and markdown)
    if picture is not None and picture.suffix != ".png":
        raise ValueError(f"the picture must end in .png, got {picture}")
    with thread_count(threads):
        report = BenchReport(title, threads, rounds, measure())
    if picture is not None:
        write_atomically(picture, report.picture())
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    elif markdown:
        typer.echo(report.markdown())
    else:
        console.print(report.table())


@app.command()
def head(
    size: SizeOption = None,
    batch: BatchOption = 64,
    tokens: TokensOption = 196,
    threads: ThreadsOption = 1,
    rounds: RoundsOption = 30,
    growth: Annotated[bool, typer.Option("--growth", help="How time grows with tokens and batch instead.")] = False,
    as_json: JsonOption = False,
    markdown: MarkdownOption = False,
    picture: PictureOption = None,
) -> None:
    """The whole head, forward and backward, beside the published one and its matrix products alone."""
    from sot.bench.head_cost import growth_rows, head_cases

    sizes = choose_sizes(size, batch, tokens)

    def measure() -> list[Measurement]:
        return growth_rows(rounds, sizes[0], progress_bar("growth")) if growth else run_cases(head_cases(sizes), rounds)

    show("sot bench head", measure, threads, rounds, as_json, markdown, picture)


@app.command()
def normalize(
    size: SizeOption = None,
    batch: BatchOption = 64,
    tokens: TokensOption = 196,
    threads: ThreadsOption = 1,
    rounds: RoundsOption = 30,
    as_json: JsonOption = False,
    markdown: MarkdownOption = False,
    picture: PictureOption = None,
) -> None:
    """Each normalisation by itself, beside SVD and the published formulae."""
    from sot.bench.norm_cost import normalize_cases

    sizes = choose_sizes(size, batch, tokens)

    def measure() -> list[Measurement]:
        return run_cases(normalize_cases(sizes), rounds)

    show("sot bench normalize", measure, threads, rounds, as_json, markdown, picture)


@app.command()
def memory(
    size: SizeOption = None,
    batch: BatchOption = 64,
    tokens: TokensOption = 196,
    growth: Annotated[bool, typer.Option("--growth", help="How the peak grows with tokens and batch instead.")] = False,
    as_json: JsonOption = False,
    markdown: MarkdownOption = False,
    picture: PictureOption = None,
) -> None:
    """What the head holds in memory, at its peak and between forward and backward."""
    from sot.bench.head_cost import memory_growth_rows, memory_rows

    sizes = choose_sizes(size, batch, tokens)
    measure = (lambda: memory_growth_rows(sizes[0])) if growth else (lambda: memory_rows(sizes))
    show("sot bench memory", measure, 1, 0, as_json, markdown, picture)


@app.command()
def train(
    model: Annotated[str, typer.Option(help="Any timm model.")] = "sot_7",
    data: Annotated[str, typer.Option(help="As in sot train.")] = "digits",
    recipe: RecipeOption = "demo",
    settings: SetOption = None,
    steps: Annotated[int, typer.Option(help="Steps of a round; the first is not counted.", min=3)] = 16,
    threads: ThreadsOption = 1,
    rounds: RoundsOption = 10,
    as_json: JsonOption = False,
    markdown: MarkdownOption = False,
    picture: PictureOption = None,
) -> None:
    """A step of `sot train` beside a bare loop over the same model and loader."""
    from sot.bench.training_cost import train_rows
    from sot.training.recipe import load_recipe

    chosen = load_recipe(recipe).changed(settings or [])

    def measure() -> list[Measurement]:
        return train_rows(model, data, chosen, steps, rounds, progress_bar("sot train"))

    show("sot bench train", measure, threads, rounds, as_json, markdown, picture)


@app.command()
def model(
    name: Annotated[
        str, typer.Option("--model", help="sot_tiny, sot_small or sot_base; any timm model for --runtimes.")
    ] = "sot_tiny",
    batch: Annotated[int, typer.Option(help="Pictures in a forward pass.", min=1)] = 16,
    train_batch: Annotated[int, typer.Option(help="Pictures in a step of training.", min=2)] = 8,
    runtimes: Annotated[
        bool, typer.Option("--runtimes", help="Eager, folded, compiled, int8 and ONNX instead.")
    ] = False,
    threads: ThreadsOption = 1,
    rounds: RoundsOption = 10,
    as_json: JsonOption = False,
    markdown: MarkdownOption = False,
    picture: PictureOption = None,
) -> None:
    """A whole model beside the published formulation and DeiT, or in several runtimes."""
    from sot.bench.model_cost import model_cases
    from sot.bench.runtimes import runtime_cases

    def measure() -> list[Measurement]:
        return run_cases(runtime_cases(name) if runtimes else model_cases(name, batch, train_batch), rounds)

    show("sot bench model", measure, threads, rounds, as_json, markdown, picture)
