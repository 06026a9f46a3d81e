"""What `sot train` and `sot finetune` share: options of a run, its words, cross-validation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sot.cli.options import print_scores, print_table
from sot.files import rich_table

if TYPE_CHECKING:
    from sot.core.head import HeadConfig
    from sot.training.recipe import Recipe

ChosenRecipeOption = Annotated[
    str | None, typer.Option("--recipe", help="A name of `sot recipes`, or a YAML file; by default what fits.")
]
MetricOption = Annotated[
    str | None,
    typer.Option(help="Keep the best epoch by macro_f1, accuracy, mcc, loss, …; auto is the task's own."),
]
PatienceOption = Annotated[
    int | None, typer.Option(help="Stop after so many evaluations without a better score.", min=1)
]
BalanceOption = Annotated[bool, typer.Option("--balance", help="Weigh classes in the loss by how rare they are.")]
FreezeOption = Annotated[bool, typer.Option("--freeze", help="Train the head alone.")]
LoraOption = Annotated[int | None, typer.Option(help="Train low-rank adapters of this rank in the backbone.", min=1)]
WeightsOption = Annotated[
    Path | None, typer.Option(help="File of weights to start from: safetensors, or torch's of weights alone.")
]
FoldsOption = Annotated[int | None, typer.Option(help="Cross-validate with so many folds.", min=2)]


def run_settings(metric: str | None, patience: int | None, balance: bool, freeze: bool, lora: int | None) -> list[str]:
    """Options that stand for settings of the recipe, as such."""
    given: dict[str, Any] = {"metric": metric, "patience": patience, "lora": lora}
    flags = {"balance": balance, "freeze": freeze}
    said = [f"{name}={value}" for name, value in given.items() if value is not None]
    return [*said, *(f"{name}=true" for name, value in flags.items() if value)]


def check_run(out: Path, resume: bool, overwrite: bool, weights: Path | None) -> None:
    """Refuse what the files can tell, before any library is loaded."""
    from sot.training.run_folder import check_out

    check_out(out, resume, overwrite)
    if weights is not None and not weights.is_file():
        raise ValueError(f"--weights: no such file: {weights}")


def say(line: str) -> None:
    """A line of a run's log, at once."""
    from sot.cli.options import is_first_process

    if is_first_process():
        print(line, file=sys.stderr, flush=True)


def own_head(model: str, asked: str | None, parsed: HeadConfig | None) -> HeadConfig | None:
    """The head of the model to continue from, if that has one and the user names no other."""
    from sot.core.head import HeadConfig
    from sot.saved import folder_config
    from sot.training.starting import is_trained

    if asked is not None or not is_trained(model):
        return parsed
    return HeadConfig.from_saved(folder_config(Path(model))["head"])


def run(
    train: Callable[..., dict[str, float]],
    out: Path,
    folds: int | None,
    recipe: Recipe,
    identity: Mapping[str, Any],
    options: Mapping[str, Any],
    title: str,
    as_json: bool,
) -> None:
    """Train once, or once for every fold, and print the scores; `train` takes the folder and `options`."""
    if folds is None:
        print_scores(train(out, **options), as_json, f"{title}, in {out}")
        return
    from sot.training.folds import cross_validate, summarized

    how = {name: options[name] for name in ("resume", "overwrite")}
    rest = {name: value for name, value in options.items() if name not in how}
    found = cross_validate(lambda *a, **k: train(*a, **{**rest, **k}), folds, out, identity, recipe, say=say, **how)
    table = summarized(found)
    if as_json:
        typer.echo(json.dumps({"folds": found, **table}))
        return
    rows = [
        (name.removeprefix("eval_"), f"{row['mean']:.4f}", f"± {row['interval']:.4f}") for name, row in table.items()
    ]
    print_table(f"{title}, {folds} folds, in {out}", rich_table(["score"], ["mean", "95 % CI"], rows))
