"""`sot bench …`: ratios measured in turns in one process. A new one is a function that gives cases, or rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sot.cli.groups import options_of, parameters_of, with_parameters
from sot.cli.options import JsonOption, RecipeOption, SetOption, console, progress, refuse_both
from sot.errors import SettingError
from sot.files import as_png, write_atomically

if TYPE_CHECKING:
    import torch

    from sot.bench.cases import Case, Measurement, Size

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory beside the published formulae.")

SizeOption = Annotated[
    list[str] | None, typer.Option("--size", help="Tiny, Small or Base; repeatable, all by default.")
]
BatchOption = Annotated[int, typer.Option(help="Samples in a batch.", min=1)]
TokensOption = Annotated[int, typer.Option(help="Word tokens of a sample.", min=1)]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print the table of the documentation.")]
Measure = Callable[["Asked"], list[Any]]  # gives measurements


@dataclass(frozen=True)
class Asked:
    """What can be asked for of several measurements."""

    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps or xpu: on it, with the heads side by side.")] = (
        None
    )
    threads: Annotated[str, typer.Option(help="Threads that torch computes with, such as 1, or 1,2 for both.")] = "1"
    rounds: Annotated[int, typer.Option(help="Calls of each function.", min=1)] = 30
    as_json: JsonOption = False
    markdown: MarkdownOption = False
    picture: Annotated[Path | None, typer.Option(help="Write the ratios as a bar chart, a PNG file.")] = None

    def __post_init__(self) -> None:
        refuse_both("--json", "--markdown", self.as_json and self.markdown)
        if self.picture is not None and self.picture.suffix != ".png":
            raise ValueError(f"the picture must end in .png, got {self.picture}")
        refuse_both("--picture", f"--threads {self.threads}", self.picture is not None and len(self.thread_counts) > 1)

    @property
    def thread_counts(self) -> list[int]:
        """How many threads, one number a report."""
        counts = self.threads.split(",")
        if not all(count.isdecimal() and int(count) > 0 for count in counts):
            raise SettingError("{threads} must be numbers from 1 on, such as 1 or 1,2, got {!r}", self.threads)
        return [int(count) for count in counts]

    @property
    def torch_device(self) -> torch.device:
        """Where to compute: a CPU by default."""
        from sot.bench.timing import find_device

        return find_device(self.device or "cpu")

    def run(self, make: Callable[[], list[Case]]) -> list[Measurement]:
        """Time one case after the other on the device, with a bar on a terminal."""
        from sot.bench.cases import run_case

        device = self.torch_device
        with nullcontext() if device.type == "cpu" else device:  # what is made is made there
            cases = make()
        return [row for case in cases for row in run_case(case, self.rounds, progress_bar(case.title), device)]


def measured(*without: str, **defaults: Any) -> Callable[[Callable[..., Measure]], Callable[..., Measure]]:
    """Make a command of a function that says what to measure: with the options of `Asked`, but for some."""
    shared = [option for option in options_of(Asked) if option.name not in without]
    shared = [option.replace(default=defaults.get(option.name, option.default)) for option in shared]

    def register(function: Callable[..., Measure]) -> Callable[..., Measure]:
        def command(**given: Any) -> None:
            asked: dict[str, Any] = {"rounds": 0} | {option.name: given.pop(option.name) for option in shared}
            show(f"sot bench {function.__name__}", function(**given), Asked(**asked))

        command.__doc__ = function.__doc__
        app.command(function.__name__)(with_parameters(command, [*parameters_of(function), *shared]))
        return function

    return register


def choose_sizes(names: list[str] | None, batch: int, tokens: int) -> tuple[Size, ...]:
    """The sizes of these names with this many samples and tokens."""
    from sot.bench.cases import SIZES

    known = {size.name.lower(): size for size in SIZES}
    for name in names or []:
        if name.lower() not in known:
            raise ValueError(f"unknown size {name!r}; accepted: {', '.join(size.name for size in SIZES)}")
    chosen = [known[name.lower()] for name in names] if names else list(SIZES)
    return tuple(replace(size, batch=batch, tokens=tokens) for size in chosen)


def progress_bar(title: str) -> Callable[[Iterable[int]], Iterable[int]]:
    """Wraps rounds to show how many are done, on a terminal only."""
    return lambda items: progress(list(items), title)


def show(title: str, measure: Measure, asked: Asked) -> None:
    """Measure with pinned threads, then print or draw: what every measurement ends with."""
    from sot.bench.report import BenchReport
    from sot.bench.timing import thread_count

    device = asked.torch_device  # before long work
    reports = []
    for count in asked.thread_counts:
        with thread_count(count):
            reports.append(BenchReport(title, count, asked.rounds, measure(asked), device))
    if asked.picture is not None:
        write_atomically(asked.picture, as_png(reports[0].figure()))
    if asked.as_json:
        typer.echo(json.dumps([report.to_dict() for report in reports] if len(reports) > 1 else reports[0].to_dict()))
    elif asked.markdown:
        typer.echo("\n\n".join(report.markdown() for report in reports))
    else:
        console.print(*(report.table() for report in reports))


@measured()
def head(
    size: SizeOption = None,
    batch: BatchOption = 64,
    tokens: TokensOption = 196,
    growth: Annotated[bool, typer.Option("--growth", help="How time grows with tokens and batch instead.")] = False,
) -> Measure:
    """The whole head, forward and backward, beside the published one and its matrix products alone."""
    from sot.bench.head_cost import growth_rows, head_cases
    from sot.bench.rivals import rival_head_cases

    sizes = choose_sizes(size, batch, tokens)

    def measure(asked: Asked) -> list[Measurement]:
        if growth:
            refuse_both("--growth", "--device", asked.device is not None)
            return growth_rows(asked.rounds, sizes[0], progress_bar("growth"))
        return asked.run(lambda: head_cases(sizes) + (rival_head_cases(sizes) if asked.device else []))

    return measure


@measured()
def normalize(size: SizeOption = None, batch: BatchOption = 64, tokens: TokensOption = 196) -> Measure:
    """Each normalisation by itself, beside SVD and the published formulae."""
    from sot.bench.norm_cost import normalize_cases

    sizes = choose_sizes(size, batch, tokens)
    return lambda asked: asked.run(lambda: normalize_cases(sizes))


@measured("device", "threads", "rounds")
def memory(
    size: SizeOption = None,
    batch: BatchOption = 64,
    tokens: TokensOption = 196,
    growth: Annotated[bool, typer.Option("--growth", help="How the peak grows with tokens and batch instead.")] = False,
) -> Measure:
    """What the head holds in memory, at its peak and between forward and backward."""
    from sot.bench.head_cost import memory_growth_rows, memory_rows

    sizes = choose_sizes(size, batch, tokens)
    return lambda asked: memory_growth_rows(sizes[0]) if growth else memory_rows(sizes)


@measured("device", rounds=10)
def train(
    model: Annotated[str, typer.Option(help="Any timm model.")] = "sot_7",
    data: Annotated[str, typer.Option(help="As in sot train.")] = "digits",
    recipe: RecipeOption = "demo",
    settings: SetOption = None,
    steps: Annotated[int, typer.Option(help="Steps of a round; the first is not counted.", min=3)] = 16,
) -> Measure:
    """A step of `sot train` beside a bare loop over the same model and loader."""
    from sot.bench.training_cost import train_rows
    from sot.training.recipe import load_recipe

    chosen = load_recipe(recipe).changed(settings or [])
    return lambda asked: train_rows(model, data, chosen, steps, asked.rounds, progress_bar("sot train"))


@measured(rounds=10)
def model(
    name: Annotated[
        str,
        typer.Option(
            "--model", help="sot_tiny, sot_small or sot_base; sot_7 too for --compiled, any timm model for --runtimes."
        ),
    ] = "sot_tiny",
    batch: Annotated[int, typer.Option(help="Images in a forward pass.", min=1)] = 16,
    train_batch: Annotated[int, typer.Option(help="Images in a step of training.", min=2)] = 8,
    runtimes: Annotated[
        bool, typer.Option("--runtimes", help="Eager, folded, compiled, int8 and ONNX instead.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Exact head, eager and by torch.compile instead, forward and training.")
    ] = False,
) -> Measure:
    """A whole model beside the published formulation and DeiT, or in several runtimes."""
    from sot.bench.model_cost import model_cases
    from sot.bench.rivals import rival_model_cases
    from sot.bench.runtimes import compiled_cases, runtime_cases

    def make(heads: bool) -> list[Case]:
        if runtimes:
            return runtime_cases(name)
        if compiled:
            return compiled_cases(name, batch, train_batch)
        return model_cases(name, batch, train_batch) + (rival_model_cases(name, batch, train_batch) if heads else [])

    def measure(asked: Asked) -> list[Measurement]:
        refuse_both("--runtimes", "--compiled", runtimes and compiled)
        refuse_both("--runtimes", "--device", runtimes and asked.device is not None)
        return asked.run(lambda: make(asked.device is not None))

    return measure
