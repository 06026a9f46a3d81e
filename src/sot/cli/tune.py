"""`sot tune`: search the settings of a recipe."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sot.cli.groups import grouped
from sot.cli.options import (
    AccumulationOption,
    HeadOption,
    JsonOption,
    LogOption,
    OverwriteOption,
    SetOption,
    WorkersOption,
    check_log,
    console,
    errors,
    of_data,
    of_output,
    of_training,
    picture_columns,
    print_scores,
    print_table,
    read_recipe,
    refuse,
)
from sot.cli.runs import likely_recipe
from sot.cli.texts import TextOptions, check_text_model
from sot.files import counted, in_words, rich_table

if TYPE_CHECKING:
    from sot.core.head_config import HeadConfig
    from sot.training.recipe import Recipe
    from sot.training.tune import Outcome, Tuner
    from sot.training.tuning_jobs import TuningJob

of_search = partial(typer.Option, rich_help_panel="Search")
TABLES = (".csv", ".tsv", ".txt", ".jsonl")


@dataclass(frozen=True)
class SearchedData(TextOptions):
    """Texts, or images."""

    data: Annotated[str | None, of_data(help="As --data of sot finetune or sot train.")] = None


@dataclass(frozen=True)
class SearchOptions:
    """How to search."""

    searches: Annotated[
        list[str] | None,
        of_search(
            "--search",
            help="lr=1e-5..1e-3:log, epochs=3,5 or head.dropout=0.5,0.8. Added to the recipe's grid. Repeatable.",
        ),
    ] = None
    sampler: Annotated[str | None, of_search(help="grid, random or tpe. Default: grid if every setting is a list.")] = (
        None
    )
    trials: Annotated[int | None, of_search(help="Number of trials. Default: the whole grid, or 20.", min=1)] = None
    prune: Annotated[
        bool | None,
        of_search("--prune/--no-prune", help="Stop trials below the median early. Default: yes, but not for a grid."),
    ] = None
    seeds: Annotated[int, of_search(help="Runs per trial with different seeds. Their mean counts.", min=1)] = 1
    held_out: Annotated[float, of_search(help="Share of the training data to choose by.", min=0.01, max=0.9)] = 0.2
    metric: Annotated[str | None, of_search(help="Score to choose by. Default: the task's own.")] = None
    storage: Annotated[
        str | None, of_search(help="Optuna storage URL, or a file that machines share. Default: study.db in --out.")
    ] = None
    study: Annotated[str | None, of_search(help="Name of the study in the storage. Default: the name of --out.")] = None

    def named(self) -> dict[str, Any]:
        """As a `Plan` takes them, whose metric is the task's own if none is named."""
        return {**vars(self), "metric": None if self.metric == "auto" else self.metric}


@grouped
def tune(
    *,
    named: Annotated[str | None, typer.Argument(metavar="model", hidden=True)] = None,
    model: Annotated[str | None, typer.Option("--model", help="As --model of sot finetune or sot train.")] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the search: its trials, best.yaml, and the winner in best.")
    ],
    given: SearchedData,
    recipe: Annotated[
        str | None,
        of_training(help="Recipe name (see `sot recipes`) or YAML file. Default: text for texts, else as sot train."),
    ] = None,
    head: HeadOption = None,
    settings: SetOption = None,
    search: SearchOptions,
    resume: Annotated[bool, of_output("--resume", help="Continue the search in --out, or join it.")] = False,
    overwrite: OverwriteOption = False,
    dry_run: Annotated[bool, of_search("--dry-run", help="Print the cost and train nothing.")] = False,
    pretrained: Annotated[bool, of_training("--pretrained", help="Images: start from the published weights.")] = False,
    workers: WorkersOption = 0,
    accumulation: AccumulationOption = 1,
    log: LogOption = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Search the settings of a recipe on held-out data, then train the winner.

    The held-out part is taken from the training data. The winner is trained on all of it.
    """
    report_to = check_log(log)
    model = _one_of(model, named)
    texts = _reads_texts(given)
    likely = (recipe or ("text" if texts else likely_recipe(model, str(given.data))), settings, head)
    _check(likely, search, (out, resume, overwrite, dry_run))
    if texts:
        refuse(f"recipe {likely[0]} is for texts", {"--pretrained": pretrained, "--workers": bool(workers)})
    _check_data(model, given, texts)
    _check_search(likely, search)
    from sot.training.recipe_choice import choose_recipe
    from sot.training.tune import Plan, Tuner

    recipe = recipe or ("text" if texts else choose_recipe(model, str(given.data), weights=False)[0])
    trained = _trained(recipe, settings, head)
    job = _job(model, given, recipe, trained[0], pretrained, workers, share=search.held_out, accumulation=accumulation)
    tuner = Tuner(job, trained, Plan(**search.named(), pinned=_pinned(settings, head)))
    if tuner.idle:
        errors.print(f"Not searched, as the head has no words: {', '.join(tuner.idle)}.", highlight=False)
    if dry_run:
        _print_cost(tuner, as_json)
        return
    options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "report_to": report_to}
    outcome = tuner.run(
        out, tell=lambda line: errors.print(line, highlight=False, markup=False, soft_wrap=True), **options
    )
    _print_outcome(outcome, f"{model} on {job.data}", out, as_json)


def _one_of(model: str | None, named: str | None) -> str:
    """The model, by option or, as before, by itself."""
    if model is not None and named is not None:
        raise ValueError(f"give one model, got {named!r} and --model {model!r}")
    if model is None and named is None:
        raise ValueError("--model is missing: a name of timm or Hugging Face, or a folder")
    return model or named or ""


def _reads_texts(given: SearchedData) -> bool:
    """Whether the data are texts: those of a task, or a table that names no files."""
    from sot.data.glue import task_of
    from sot.data.tags import has_pictures, is_picture_table

    if given.task is not None or given.data is None or task_of(given.data) is not None:
        return given.task is not None or given.data is not None
    return given.data.endswith(TABLES) and not (is_picture_table(given.data) and has_pictures(given.data))


def _trained(recipe: str, settings: list[str] | None, head: str | None) -> tuple[Recipe, HeadConfig | None]:
    """The recipe and head that are searched around."""
    from sot.training.recipe import load_recipe

    return read_recipe(recipe, settings, head, load_recipe(recipe).task)


def _check(likely: Any, search: SearchOptions, folder: Any) -> None:
    """Refuse what can be told without loading torch; `likely` are a recipe, its settings and its head."""
    from sot.training.recipe import METRICS
    from sot.training.run_folder import check_out
    from sot.training.search import check_sampler

    out, resume, overwrite, dry_run = folder
    if not dry_run:
        check_out(out, resume, overwrite)
    if search.sampler is not None:
        check_sampler(search.sampler)
    _trained(*likely)
    if search.metric not in (None, *METRICS):
        raise ValueError(f"--metric must be one of {', '.join(METRICS)}, got {search.metric!r}")


def _check_search(likely: Any, search: SearchOptions) -> None:
    """Refuse what cannot be searched, or not so."""
    from sot.training.search import choose_sampler, search_space

    space, _ = search_space(_trained(*likely), search.searches or [], _pinned(*likely[1:]))
    choose_sampler(space, search.sampler, None)


def _check_data(model: str, given: SearchedData, texts: bool) -> None:
    from sot.data.spec import check_pictures

    if texts:
        check_text_model(model)
        given.check()
    elif given.data is not None and not given.data.startswith("hfds/"):
        check_pictures(given.data)


def _pinned(settings: list[str] | None, head: str | None) -> list[str]:
    """What the user has fixed: no longer searched, whatever the recipe's grid says."""
    named = [part.partition("=")[0].strip() for part in (head or "").split(",")]
    of_head = [f"head.{name}" for name in (["norm", "exponent"] if "paper" in named else []) + named]
    return [*(setting.partition("=")[0].strip() for setting in settings or []), *of_head]


def _job(
    model: str, given: SearchedData, name: str, recipe: Recipe, pretrained: bool, workers: int, **options: Any
) -> TuningJob:
    """What the recipe of this name trains over and over."""
    from sot.training.recipe_choice import FINETUNE, has_weights
    from sot.training.tuning_jobs import image_job, text_job

    options["seed"] = recipe.seed
    if recipe.task == "text":
        return text_job(model, *given.read(), source=given.source(), **options)
    if given.task is not None or given.data is None:
        raise ValueError("a recipe for images needs --data with images, and no --task")
    options |= {"pretrained": pretrained or (name == FINETUNE and has_weights(model)), "workers": workers}
    return image_job(model, given.data, columns=picture_columns(given.data, given.label, given.tags), **options)


def _print_cost(tuner: Tuner, as_json: bool) -> None:
    with TemporaryDirectory() as folder:
        cost = tuner.cost(Path(folder))
    if as_json:
        typer.echo(json.dumps(asdict(cost)))
        return
    most = "" if cost.exact else "at most "
    train, held = tuner.job.samples
    console.print(f"{tuner.sampler}: {cost.trials} trainings on {train:,} samples, scored on {held:,} held out")
    for name, values in tuner.space.items():
        console.print(f"  {name}: {values if isinstance(values, str) else str(values)}", highlight=False, markup=False)
    console.print(f"steps: {most}{cost.steps:,}, and {most}{cost.winner_steps:,} for the winner on all samples")
    if cost.seconds is None:
        console.print("time: no estimate, as an epoch has too few steps to time")
    else:
        console.print(f"time: {most}about {in_words(cost.seconds)} on this machine, by a few timed steps")


def _print_outcome(outcome: Outcome, title: str, out: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(outcome)))
        return
    from sot.training.keeping import SMALLER_IS_BETTER
    from sot.training.tuning_report import shown

    done = [row for row in outcome.rows if row["value"] is not None]
    hidden = ("state", "value", "ended", "error")
    done.sort(key=lambda row: row["value"], reverse=outcome.metric not in SMALLER_IS_BETTER)
    names = [name for name in outcome.rows[0] if name not in hidden]
    cells = [[f"{row['value']:.4f}", *(shown(row[name]) for name in names)] for row in done[:10]]
    heading = f"{title}: the best of {counted(len(outcome.rows), 'trials')} on the held-out part"
    print_table(heading, rich_table([], [outcome.metric, *names], cells))
    if outcome.development is not None:
        print_scores(outcome.development, False, f"The winner on the development set, in {out / 'best'}")
        console.print(
            f"All trials: {out / 'trials.csv'} and trials.png. Its recipe: {out / 'best.yaml'}", soft_wrap=True
        )
    else:
        where = "; ".join(outcome.elsewhere)
        console.print(f"Trials still run elsewhere ({where}). The last to end trains the winner.")
