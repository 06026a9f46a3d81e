"""`sot tune`: search the settings of a recipe."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sot.cli.options import (
    AccumulationOption,
    DevOption,
    EncodingOption,
    HeadOption,
    JsonOption,
    LabelOption,
    LogOption,
    MultiLabelOption,
    OverwriteOption,
    PairOption,
    RegressionOption,
    SeparatorOption,
    SetOption,
    TaskOption,
    TextOption,
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
    read_tags,
    refuse,
)
from sot.cli.runs import likely_recipe
from sot.cli.texts import check_text_model, check_texts, source_of, text_data
from sot.files import counted, rich_table

if TYPE_CHECKING:
    from sot.core.head_config import HeadConfig
    from sot.training.recipe import Recipe
    from sot.training.tune import Outcome, Tuner

of_search = partial(typer.Option, rich_help_panel="Search")
TABLES = (".csv", ".tsv", ".txt", ".jsonl")
ModelArgument = Annotated[str, typer.Argument(help="As --model of sot finetune or sot train.")]
DataOption = Annotated[str | None, of_data(help="As --data of sot finetune or sot train.")]
OutOption = Annotated[
    Path, typer.Option("--out", help="Folder of the search: its trials, best.yaml, and the winner in best.")
]
RecipeOption = Annotated[
    str | None,
    of_training(help="Recipe name (see `sot recipes`) or YAML file. Default: text for texts, else as sot train."),
]
SearchOption = Annotated[
    list[str] | None,
    of_search(help="lr=1e-5..1e-3:log, epochs=3,5 or head.dropout=0.5,0.8. Added to the recipe's grid. Repeatable."),
]
SamplerOption = Annotated[str | None, of_search(help="grid, random or tpe. Default: grid if every setting is a list.")]
TrialsOption = Annotated[int | None, of_search(help="Number of trials. Default: the whole grid, or 20.", min=1)]
PruneOption = Annotated[
    bool | None,
    of_search("--prune/--no-prune", help="Stop trials below the median early. Default: yes, but not for a grid."),
]
SeedsOption = Annotated[int, of_search(help="Runs per trial with different seeds. Their mean counts.", min=1)]
HeldOutOption = Annotated[float, of_search(help="Share of the training data to choose by.", min=0.01, max=0.9)]
MetricOption = Annotated[str | None, of_search(help="Score to choose by. Default: the task's own.")]
StorageOption = Annotated[
    str | None, of_search(help="Optuna storage URL, or a file that machines share. Default: study.db in --out.")
]
StudyOption = Annotated[str | None, of_search(help="Name of the study in the storage. Default: the name of --out.")]
ResumeOption = Annotated[bool, of_output("--resume", help="Continue the search in --out, or join it.")]
DryRunOption = Annotated[bool, of_search("--dry-run", help="Print the cost and train nothing.")]
PretrainedOption = Annotated[bool, of_training("--pretrained", help="Images: start from the published weights.")]


def tune(
    model: ModelArgument,
    out: OutOption,
    task: TaskOption = None,
    data: DataOption = None,
    dev: DevOption = None,
    text: TextOption = "sentence",
    pair: PairOption = None,
    label: LabelOption = "label",
    regression: RegressionOption = False,
    encoding: EncodingOption = None,
    multi_label: MultiLabelOption = False,
    separator: SeparatorOption = None,
    recipe: RecipeOption = None,
    head: HeadOption = None,
    settings: SetOption = None,
    search: SearchOption = None,
    sampler: SamplerOption = None,
    trials: TrialsOption = None,
    prune: PruneOption = None,
    seeds: SeedsOption = 1,
    held_out: HeldOutOption = 0.2,
    metric: MetricOption = None,
    storage: StorageOption = None,
    study: StudyOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    pretrained: PretrainedOption = False,
    workers: WorkersOption = 0,
    accumulation: AccumulationOption = 1,
    log: LogOption = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Search the settings of a recipe on held-out data, then train the winner.

    The held-out part is taken from the training data. The winner is trained on all of it.
    """
    from sot.data.spec import check_pictures

    report_to = check_log(log)
    columns = (text, pair, label)
    texts = _reads_texts(task, data)
    given = (recipe or ("text" if texts else likely_recipe(str(data))), settings, head)
    _check(given, sampler, metric, (out, resume, overwrite, dry_run))
    if data is not None and not texts and not data.startswith("hfds/"):
        check_pictures(data)
    tags = read_tags(label, multi_label, separator)
    if texts:
        refuse(f"recipe {given[0]} is for texts", {"--pretrained": pretrained, "--workers": bool(workers)})
        check_text_model(model)
        check_texts(task, data, dev, columns, encoding=encoding, tags=tags, regression=regression)
    _check_search(given, search, sampler)
    from sot.training.tune import Plan, Tuner

    recipe = recipe or ("text" if texts else _image_recipe(model, data))
    trained = _trained(recipe, settings, head)
    metric = None if metric == "auto" else metric
    plan = Plan(search or [], _pinned(settings, head), sampler, trials, prune, seeds, held_out, metric, storage, study)
    share = {"share": held_out, "seed": trained[0].seed, "accumulation": accumulation}
    if trained[0].task == "text":
        table, name = text_data(task, data, dev, columns, regression=regression, encoding=encoding, tags=tags)
        job = _text_job(model, table, name, source_of(data, dev, columns, regression, tags), share)
    else:
        job = _image_job(
            model,
            task,
            data,
            label,
            tags,
            {**share, "pretrained": pretrained or _starts_pretrained(model, recipe), "workers": workers},
        )
    tuner = Tuner(job, trained, plan)
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


def _reads_texts(task: str | None, data: str | None) -> bool:
    """Whether the data are texts: those of a task, or a table that names no files."""
    from sot.data.glue import task_of
    from sot.data.tags import has_pictures, is_picture_table

    if task is not None or data is None or task_of(data) is not None:
        return task is not None or data is not None
    return data.endswith(TABLES) and not (is_picture_table(data) and has_pictures(data))


def _trained(recipe: str, settings: list[str] | None, head: str | None) -> tuple[Recipe, HeadConfig | None]:
    """The recipe and head that are searched around."""
    from sot.training.recipe import load_recipe

    return read_recipe(recipe, settings, head, load_recipe(recipe).task)


def _check(given: Any, sampler: str | None, metric: str | None, folder: Any) -> None:
    """Refuse what can be told without loading torch; `given` are a recipe, its settings and its head."""
    from sot.training.recipe import METRICS
    from sot.training.run_folder import check_out
    from sot.training.search import SAMPLERS

    out, resume, overwrite, dry_run = folder
    if not dry_run:
        check_out(out, resume, overwrite)
    if sampler not in (None, *SAMPLERS):
        raise ValueError(f"--sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
    _trained(*given)
    if metric not in (None, *METRICS):
        raise ValueError(f"--metric must be one of {', '.join(METRICS)}, got {metric!r}")


def _check_search(given: Any, search: list[str] | None, sampler: str | None) -> None:
    """Refuse what cannot be searched, or not so."""
    from sot.training.search import choose_sampler, search_space

    space, _ = search_space(_trained(*given), search or [], _pinned(*given[1:]))
    choose_sampler(space, sampler, None)


def _image_recipe(model: str, data: str | None) -> str:
    from sot.training.choice import choose_recipe

    return choose_recipe(model, str(data), weights=False)[0]


def _starts_pretrained(model: str, recipe: str) -> bool:
    from sot.training.choice import FINETUNE, has_weights

    return recipe == FINETUNE and has_weights(model)


def _pinned(settings: list[str] | None, head: str | None) -> list[str]:
    """What the user has fixed: no longer searched, whatever the recipe's grid says."""
    named = [part.partition("=")[0].strip() for part in (head or "").split(",")]
    of_head = [f"head.{name}" for name in (["norm", "exponent"] if "paper" in named else []) + named]
    return [*(setting.partition("=")[0].strip() for setting in settings or []), *of_head]


def _text_job(model: str, table: Any, name: str, source: dict[str, Any], options: Any) -> Any:
    from sot.training.tuning_jobs import text_job

    return text_job(model, table, name, source=source, **options)


def _image_job(model: str, task: str | None, data: str | None, label: str, tags: Any, options: dict[str, Any]) -> Any:
    from sot.training.tuning_jobs import image_job

    if task is not None or data is None:
        raise ValueError("a recipe for images needs --data with images, and no --task")
    return image_job(model, data, columns=picture_columns(data, label, tags), **options)


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
        console.print(f"time: {most}about {_duration(cost.seconds)} on this machine, by a few timed steps")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{minutes // 60} h {minutes % 60} min"
        if minutes > 90
        else f"{minutes} min"
    )


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
