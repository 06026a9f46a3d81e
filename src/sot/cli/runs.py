"""Commands that train models: train, finetune, recipes, demo."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # as in every file of the command line: what loads torch is imported where a command runs
    from sot.core.head import HeadConfig
    from sot.training.recipe import Recipe

console = Console()
errors = Console(stderr=True)

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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
BatchOption = Annotated[int, typer.Option(help="Samples at a time.", min=1)]


def is_first_process() -> bool:
    """Of the processes that torchrun or accelerate started, the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def progress(items: Iterable[Any], title: str) -> Iterable[Any]:
    """The items, with a bar that says how many are done and how long is left, on a terminal only."""
    return track(items, title, console=errors, transient=True, disable=not errors.is_terminal)


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


def _prepare(name: str, settings: list[str] | None, head: str | None, task: str) -> tuple[Recipe, HeadConfig | None]:
    """The recipe and head of a training command, refused if they are for the other one."""
    from sot.training.recipe import load_recipe

    recipe = load_recipe(name).changed(settings or [])
    parsed = parse_head(head, recipe)
    if recipe.task != task:
        use = "text: use sot finetune" if task == "image" else "images: use sot train"
        raise ValueError(f"recipe {name} is for {use}")
    return recipe, parsed


def _own_size(model: str, recipe: str) -> list[str]:
    """The package's recipes size pictures for timm models: of others it is the processor's, until a user sets it."""
    from sot.models.equip import is_timm
    from sot.training.recipe import recipe_names

    return ["img_size=null"] if recipe in recipe_names() and not is_timm(model) else []


def _check_log(log: str) -> str:
    if log not in ("tensorboard", "wandb", "all", "none"):
        raise ValueError(f"--logger must be tensorboard, wandb, all or none, got {log!r}")
    if log == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ValueError("--logger wandb needs the library wandb: pip install wandb")
    return log


def print_scores(scores: dict[str, float], as_json: bool, title: str) -> None:
    """Scores as a table or as JSON."""
    if as_json:
        typer.echo(json.dumps(scores))
        return
    table = Table("score", title=Text(title))
    table.add_column("value", justify="right")
    for name, value in scores.items():
        table.add_row(name.removeprefix("eval_"), f"{value:.4f}")
    console.print(table)


def recipes(name: Annotated[str | None, typer.Argument(help="Print this one; without it, list all.")] = None) -> None:
    """List the recipes, or print one."""
    from sot.training.recipe import load_recipe, recipe_names

    if name is not None:
        typer.echo(load_recipe(name).to_yaml(), nl=False)
        return
    table = Table("recipe", "task", "about")
    for each in recipe_names():
        recipe = load_recipe(each)
        table.add_row(each, recipe.task, recipe.about)
    console.print(table)


def train(
    model: Annotated[
        str,
        typer.Option(help="A timm name (sot_tiny, …), or a Hugging Face vision model: hub name or folder."),
    ],
    data: Annotated[
        str,
        typer.Option(help="digits, a folder, a .tar file, torch/NAME@FOLDER, hfds/NAME, hfids/NAME, wds/NAME@FOLDER."),
    ],
    out: OutOption,
    recipe: Annotated[str, typer.Option(help="A name of `sot recipes`, or a YAML file.")] = "digits",
    head: HeadOption = None,
    settings: SetOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Start from a name's published weights; a folder's are always read.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes that load pictures.", min=0)] = 0,
    accumulation: AccumulationOption = 1,
    log: LogOption = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Train an image classifier by a recipe."""
    report_to = _check_log(log)
    chosen, parsed = _prepare(recipe, [*_own_size(model, recipe), *(settings or [])], head, "image")
    from sot.training.train_images import train_images

    metrics = train_images(
        model,
        data,
        out,
        chosen,
        parsed,
        resume=resume,
        overwrite=overwrite,
        pretrained=pretrained,
        workers=workers,
        accumulation=accumulation,
        report_to=report_to,
    )
    print_scores(metrics, as_json, f"{model} on {data}, in {out}")


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


def finetune(
    model: Annotated[str, typer.Option(help="A Hugging Face text model: hub name or folder.")],
    out: OutOption,
    task: TaskOption = None,
    data: DataOption = None,
    dev: DevOption = None,
    text: TextOption = "sentence",
    pair: PairOption = None,
    label: LabelOption = "label",
    regression: RegressionOption = False,
    recipe: Annotated[str, typer.Option(help="A name of `sot recipes`, or a YAML file.")] = "text",
    head: HeadOption = None,
    settings: SetOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    accumulation: AccumulationOption = 1,
    log: LogOption = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a text classifier by a recipe."""
    report_to = _check_log(log)
    chosen, parsed = _prepare(recipe, settings, head, "text")
    columns = (text, pair, label)
    table, name = text_data(task, data, dev, columns, regression=regression)
    from sot.training.run import full_name
    from sot.training.train_texts import fine_tune

    source: dict[str, Any] = {"source": data and full_name(data), "dev": dev and full_name(str(dev))}
    source |= {"columns": [*columns], "regression": regression}
    options = {"resume": resume, "overwrite": overwrite, "accumulation": accumulation, "report_to": report_to}
    metrics = fine_tune(model, table, name, out, chosen, parsed, source=source, **options)  # type: ignore[arg-type]
    print_scores(metrics, as_json, f"{model} on {name}, in {out}")


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs and the picture.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(help="How many seeds for each head.", min=1)] = 3,
    settings: SetOption = None,
) -> None:
    """Train class token, word tokens and both on real pictures, and compare: minutes on a laptop."""
    from transformers.utils import logging

    from sot.training.demo import run_demo, summary

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    accuracies = run_demo(out, range(seeds), lambda text: errors.print(text, highlight=False), settings or [])
    table = Table("head", title=f"digits, accuracy in % over {seeds} seeds")
    table.add_column("mean", justify="right")
    table.add_column("spread", justify="right")
    for row in summary(accuracies):
        table.add_row(*row)
    console.print(table)
    console.print(
        f"Curves: {out / 'demo.png'}. Next: sot train --model deit_tiny_patch16_224 --data FOLDER --out RUN",
        soft_wrap=True,
    )


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (train, finetune, recipes, demo):
        app.command()(command)
