"""What `sot train` and `sot finetune` share: options of a run, its words, cross-validation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sot.cli.options import of_data, of_start, of_training, print_scores, print_table
from sot.files import rich_table, visible

if TYPE_CHECKING:
    from sot.core.head import HeadConfig
    from sot.training.recipe import Recipe

ChosenRecipeOption = Annotated[
    str | None,
    of_training(
        "--recipe",
        help="Recipe name (see `sot recipes`) or YAML file. Default: finetune for models with weights, else scratch.",
    ),
]
MetricOption = Annotated[
    str | None, of_training(help="Keep the best epoch by macro_f1, accuracy, mcc, loss, … auto: the task's own score.")
]
PatienceOption = Annotated[
    int | None, of_training(help="Stop after this many evaluations without a better score.", min=1)
]
BalanceOption = Annotated[bool, of_training("--balance", help="Weight classes by inverse frequency.")]
FreezeOption = Annotated[bool, of_start("--freeze", help="Train the head only.")]
LoraOption = Annotated[int | None, of_start(help="Train LoRA adapters of this rank in the backbone.", min=1)]
WeightsOption = Annotated[
    Path | None, of_start(help="Weights to start from: .safetensors, or a torch file of tensors only.")
]
FoldsOption = Annotated[int | None, of_data(help="Cross-validate with this many folds.", min=2)]


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
    check_weights(weights)


def check_weights(weights: Path | None) -> None:
    """Refuse a file of weights that is not there."""
    if weights is not None and not weights.is_file():
        raise ValueError(f"--weights: no such file: {weights}")


def likely_recipe(data: str) -> str:
    """The recipe that images get where none is named, as far as that is known without loading timm.

    A model without weights takes `scratch` instead, which has the same keys and head as `finetune`.
    """
    return "digits" if data == "digits" else "finetune"


def say(line: str) -> None:
    """A line of a run's log, at once."""
    from sot.cli.options import is_first_process

    if is_first_process():
        print(visible(line), file=sys.stderr, flush=True)


def own_head(model: str, asked: str | None, parsed: HeadConfig | None) -> HeadConfig | None:
    """The head of the model to continue from, if that has one and the user names no other."""
    from sot.core.head_config import HeadConfig
    from sot.saved import folder_config, is_trained

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
