"""What commands share: options, consoles, and reading and printing of what several take and give."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from sot.files import rich_table

if TYPE_CHECKING:  # as in every file of the command line: what loads torch is imported where a command runs
    from sot.core.head import HeadConfig
    from sot.training.recipe import Recipe

console = Console()
errors = Console(stderr=True)

# --- options ---------------------------------------------------------------------------------------------------

OutOption = Annotated[Path, typer.Option("--out", help="Folder of the run: model, metrics, curves, checkpoints.")]
HeadOption = Annotated[
    str | None,
    typer.Option(help="Head settings as fusion=sum,pool=mgcrp,…; paper: its norm; none: no second order."),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Recipe settings as key=value; repeatable.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --out from its last whole checkpoint.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")]
AccumulationOption = Annotated[int, typer.Option(help="Steps over which a batch is accumulated.", min=1)]
LogOption = Annotated[str, typer.Option("--logger", help="tensorboard, wandb, all or none.")]
RecipeOption = Annotated[str, typer.Option(help="A name of `sot recipes`, or a YAML file.")]
WorkersOption = Annotated[int, typer.Option(help="Processes that load pictures.", min=0)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
LinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per model.")]
BatchOption = Annotated[int, typer.Option(help="Samples at a time.", min=1)]
TaskOption = Annotated[
    str | None, typer.Option(help="cola, rte, mnli, qnli, sst2, mrpc, …, or acceptability (built in).")
]
DataOption = Annotated[
    str | None, typer.Option(help="Folder of a GLUE task, a .csv, .tsv or .jsonl table, or hfds/NAME[:CONFIG].")
]
DevOption = Annotated[Path | None, typer.Option(help="Table to evaluate on, where --data is a table.")]
TextOption = Annotated[str, typer.Option(help="Column of the text.")]
PairOption = Annotated[str | None, typer.Option(help="Column of the second text of a pair.")]
LabelOption = Annotated[str, typer.Option(help="Column of the label.")]
RegressionOption = Annotated[
    bool, typer.Option("--regression", help="Labels of a table are numbers to predict, not classes.")
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
        use = "text: use sot finetune" if task == "image" else "images: use sot train"
        raise ValueError(f"recipe {name} is for {use}")
    return recipe, parsed


def check_log(log: str) -> str:
    """What `--logger` was given, refused if it is unknown or not installed."""
    if log not in ("tensorboard", "wandb", "all", "none"):
        raise ValueError(f"--logger must be tensorboard, wandb, all or none, got {log!r}")
    if log == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ValueError("--logger wandb needs the library wandb: pip install wandb")
    return log


def text_data(
    task: str | None,
    data: str | None,
    dev: Path | None,
    columns: tuple[str, str | None, str],
    labels: Any = None,
    regression: bool = False,
) -> tuple[Any, str]:
    """Texts and what they are called; a table is one to train on, or, for a model that knows `labels`, to evaluate.

    A model of one label predicts numbers.
    """
    from sot.data.texts import Columns, load_set, load_table, load_task

    if task is not None:
        given, usual = (dev, *columns), (None, *astuple(Columns()))
        for option, value, default in zip(("--dev", "--text", "--pair", "--label"), given, usual):
            if value != default:
                raise ValueError(f"{option} {value} is for tables, and task {task} has its own")
        if regression:
            raise ValueError(f"--regression is for tables, and task {task} has its own")
        return load_task(task, data), task
    if data is None:
        raise ValueError("name a --task, or give --data a table with columns --text and --label")
    regression |= labels is not None and len(labels) == 1
    if data.startswith("hfds/"):
        if dev is not None:
            raise ValueError(f"--dev {dev} is for tables, and {data} has its own")
        return load_set(data, Columns(*columns), labels, regression), data
    train = Path(data) if labels is None else None
    return load_table(train, dev if train else Path(data), Columns(*columns), labels, regression), Path(data).name


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


def progress(items: Iterable[Any], title: str) -> Iterable[Any]:
    """The items, with a bar that says how many are done and how long is left, on a terminal only."""
    return track(items, title, console=errors, transient=True, disable=not errors.is_terminal)


def plain(text: str) -> Text:
    """What users wrote, as it is: no markup, no emoji; of bytes that are no text their numbers."""
    return Text(text.encode(errors="backslashreplace").decode())


def print_scores(scores: dict[str, float], as_json: bool, title: str) -> None:
    """Scores as a table or as JSON."""
    if as_json:
        typer.echo(json.dumps(scores))
        return
    rows = ((name.removeprefix("eval_"), f"{value:.4f}") for name, value in scores.items())
    console.print(rich_table(["score"], ["value"], rows, title=Text(title)))
