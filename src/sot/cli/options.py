"""What commands share: options, consoles, and reading and printing of what several take and give."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from sot.files import rich_table, visible
from sot.lines import with_lines

if TYPE_CHECKING:  # as in every file of the command line: what loads torch is imported where a command runs
    from sot.core.head import HeadConfig
    from sot.data.tags import Tags
    from sot.training.recipe import Recipe


class VisibleConsole(Console):
    """Shows the control characters of whatever it prints: a file may be called what a terminal obeys."""

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        """As usual, of the texts alone."""
        for text, style, control in super().render(*args, **kwargs):
            yield Segment(text if control else visible(text), style, control)


console = VisibleConsole()
errors = VisibleConsole(stderr=True)
SECONDS_A_LINE = 30  # of progress where there is no terminal

# --- options ---------------------------------------------------------------------------------------------------

of_data = partial(typer.Option, rich_help_panel="Data")
of_training = partial(typer.Option, rich_help_panel="Training")
of_start = partial(typer.Option, rich_help_panel="Start from")
of_output = partial(typer.Option, rich_help_panel="Output")

HeadOption = Annotated[
    str | None,
    of_training(
        help="Head settings, e.g. fusion=sum,pool=mgcrp. paper: the paper's norm. none: no second-order pooling."
    ),
]
SetOption = Annotated[list[str] | None, of_training("--set", help="Recipe setting as key=value. Repeatable.")]
OverwriteOption = Annotated[bool, of_output("--overwrite", help="Replace the run in --out.")]
AccumulationOption = Annotated[int, of_training(help="Gradient accumulation steps.", min=1)]
LogOption = Annotated[str, of_output("--logger", help="Logger: tensorboard, wandb, all or none.")]
RecipeOption = Annotated[str, of_training(help="Recipe name (see `sot recipes`) or YAML file.")]
WorkersOption = Annotated[int, of_data(help="Processes that load images.", min=0)]
JsonOption = Annotated[bool, of_output("--json", help="Print JSON instead of tables.")]
LinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per model.")]
BatchOption = Annotated[int, typer.Option(help="Batch size.", min=1)]
TaskOption = Annotated[
    str | None, of_data(help="GLUE task: cola, rte, mnli, qnli, sst2, mrpc, …; or acceptability (built in).")
]
DevOption = Annotated[Path | None, of_data(help="Table to validate on. Default: a stratified fifth of --data.")]
TextOption = Annotated[str, of_data(help="Text column; `text` if there is no `sentence`.")]
PairOption = Annotated[str | None, of_data(help="Column of the second text of a pair.")]
LabelOption = Annotated[str, of_data(help="Label column.")]
EncodingOption = Annotated[
    str | None, of_data(help="Encoding of the tables, e.g. latin-1. Default: UTF-8, or UTF-16 by its mark.")
]
RegressionOption = Annotated[bool, of_data("--regression", help="Labels are numbers to predict.")]
MultiLabelOption = Annotated[
    bool, of_data("--multi-label", help="Several labels per sample: --label tags, or --label a,b,c for 0/1 columns.")
]
SeparatorOption = Annotated[
    str | None, of_data(help="Separator of the labels in a cell. Default with --multi-label: a semicolon.")
]

# --- what is read -----------------------------------------------------------------------------------------------


def parse_head(text: str | None, recipe: Recipe) -> HeadConfig | None:
    """The recipe's head with the settings of the command line; `paper` has the paper's norm, `none` is None."""
    from sot.core.head_config import HeadConfig, merge_head
    from sot.training.recipe import parse_setting

    if text == "none":
        return None
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    of_paper = parts[:1] == ["paper"]
    settings: dict[str, Any] = {"norm": None} if of_paper else {}  # withdraws the recipe's
    for part in parts[of_paper:]:
        if not part.partition("=")[2]:
            raise ValueError(f"a head setting has the form key=value, got {part!r}; or --head paper, or --head none")
        name, value = parse_setting(part)
        settings[name] = value
    merged = merge_head(recipe.head, settings)
    return HeadConfig.paper(**merged) if of_paper else HeadConfig.from_dict(merged)


def read_recipe(name: str, settings: list[str] | None, head: str | None, task: str) -> tuple[Recipe, HeadConfig | None]:
    """The recipe and head of a training command, refused if they are for the other one."""
    from sot.training.recipe import load_recipe

    recipe = load_recipe(name).changed(settings or [])
    parsed = parse_head(head, recipe)
    if recipe.task != task:
        uses = {"text": "text: use sot finetune", "image": "images: use sot train", "audio": "sounds: use sot train"}
        raise ValueError(f"recipe {name} is for {uses[recipe.task]}")
    return recipe, parsed


def check_log(log: str) -> str:
    """What `--logger` was given, refused if it is unknown or not installed."""
    if log not in ("tensorboard", "wandb", "all", "none"):
        raise ValueError(f"--logger must be tensorboard, wandb, all or none, got {log!r}")
    if log == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ValueError("--logger wandb needs the library wandb: pip install wandb")
    return log


def read_tags(label: str, multi_label: bool, separator: str | None) -> Tags | None:
    """Where a table has several labels for a sample; None if each has one."""
    from sot.data.tags import SEPARATOR, Tags

    if not multi_label and separator is None:
        return None
    columns = tuple(part.strip() for part in label.split(",") if part.strip())
    if separator is not None and (len(columns) > 1 or not separator):
        raise ValueError(f"--separator {separator!r} divides the cells of one column, got --label {label}")
    return Tags(columns, separator or SEPARATOR)


def picture_columns(data: str, label: str, tags: Tags | None) -> Any:
    """Where a table of images has their labels; None of data that is none."""
    from sot.data.tags import PictureColumns, is_picture_table

    if is_picture_table(data):
        return PictureColumns(label, tags)
    refuse(f"{data} is no table of images", {"--multi-label": tags is not None, "--label": label != "label"})
    return None


def refuse(why: str, options: Mapping[str, bool]) -> None:
    """Raise ValueError for options that were given and would be ignored."""
    given = [name for name, is_given in options.items() if is_given]
    if given:
        raise ValueError(f"{why}: leave out {' and '.join(given)}")


def refuse_both(first: str, second: str, both: bool) -> None:
    """Raise ValueError for two options that were both given and cannot be."""
    if both:
        raise ValueError(f"{first} and {second} exclude each other")


# --- what is printed --------------------------------------------------------------------------------------------


def is_first_process() -> bool:
    """Of the processes that torchrun or accelerate started, the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def progress(items: Iterable[Any], title: str, total: float | None = None) -> Iterable[Any]:
    """The items, with a bar that says how many are done and how long is left; plain lines where no terminal is.

    What is printed meanwhile goes where it would: rich sends all of it to the bar's own stream unless it is told so.
    """
    if not errors.is_terminal:
        return with_lines(items, title, total or length_hint(items) or None, _say, SECONDS_A_LINE)
    columns = (TextColumn(title), BarColumn(), TaskProgressColumn(show_speed=True), TimeRemainingColumn())
    return _with_bar(items, total, Progress(*columns, console=errors, transient=True, redirect_stdout=False))


def _with_bar(items: Iterable[Any], total: float | None, bar: Progress) -> Iterable[Any]:
    with bar:
        yield from bar.track(items, total)


def _say(line: str) -> None:
    errors.print(line, soft_wrap=True, markup=False, highlight=False)


def plain(text: str) -> Text:
    """What users wrote, as it is: no markup, no emoji; control characters, and bytes that are no text, as escapes."""
    return Text(visible(text))


def print_scores(scores: dict[str, float], as_json: bool, title: str) -> None:
    """Scores as a table or as JSON."""
    if as_json:
        typer.echo(json.dumps(scores))
        return
    rows = ((name.removeprefix("eval_"), f"{value:.4f}") for name, value in scores.items())
    print_table(title, rich_table(["score"], ["value"], rows))


def print_table(title: str, table: Table) -> None:
    """A table under a line that says what it is of, however narrow the table is."""
    console.print(plain(title), soft_wrap=True)
    console.print(table)
