"""What `sot train` and `sot finetune` share: options of a run, its words, cross-validation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sot.cli.options import (
    AccumulationOption,
    HeadOption,
    JsonOption,
    LogOption,
    OverwriteOption,
    SetOption,
    check_log,
    is_first_process,
    of_data,
    of_output,
    of_start,
    of_training,
    print_scores,
    print_table,
    read_recipe,
)
from sot.files import counted, rich_table, visible

if TYPE_CHECKING:
    from sot.core.head_config import HeadConfig
    from sot.training.recipe import Recipe


def check_weights(weights: Path | None) -> None:
    """Refuse a file of weights that is not there."""
    if weights is not None and not weights.is_file():
        raise ValueError(f"--weights: no such file: {weights}")


def likely_recipe(model: str, data: str, weights: bool = False) -> str:
    """The recipe that images get where none is named, as far as that is known without loading timm.

    A timm model without weights takes `scratch` instead, which has the same keys and head as `finetune`.
    """
    if data == "digits":
        return data
    return "scratch" if model.startswith("sot_") and not weights and not Path(model).is_dir() else "finetune"


def say(line: str) -> None:
    """A line of a run's log, at once."""
    if is_first_process():
        print(visible(line), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RunOptions:
    """What can be asked for of any run."""

    out: Annotated[Path, typer.Option("--out", help="Folder of the run: model, metrics, curves, checkpoints.")]
    head: HeadOption = None
    settings: SetOption = None
    metric: Annotated[
        str | None,
        of_training(help="Keep the best epoch by macro_f1, accuracy, mcc, loss, … auto: the task's own score."),
    ] = None
    patience: Annotated[
        int | None, of_training(help="Stop after this many evaluations without a better score.", min=1)
    ] = None
    balance: Annotated[bool, of_training("--balance", help="Weight classes by inverse frequency.")] = False
    folds: Annotated[int | None, of_data(help="Cross-validate with this many folds.", min=2)] = None
    weights: Annotated[
        Path | None, of_start(help="Weights to start from: .safetensors, or a torch file of tensors only.")
    ] = None
    freeze: Annotated[bool, of_start("--freeze", help="Train the head only.")] = False
    lora: Annotated[int | None, of_start(help="Train LoRA adapters of this rank in the backbone.", min=1)] = None
    resume: Annotated[bool, of_output("--resume", help="Continue the run in --out from its last checkpoint.")] = False
    overwrite: OverwriteOption = False
    accumulation: AccumulationOption = 1
    log: LogOption = "tensorboard"
    as_json: JsonOption = False

    def check(self) -> None:
        """Refuse what the files can tell, before any library is loaded."""
        from sot.training.run_folder import check_out

        check_log(self.log)
        check_out(self.out, self.resume, self.overwrite)
        check_weights(self.weights)

    @property
    def wanted(self) -> list[str]:
        """Settings of the recipe, and options that stand for such."""
        names = ("metric", "patience", "lora", "balance", "freeze")
        given = {name: value for name in names if (value := getattr(self, name)) not in (None, False)}
        said = (f"{name}={'true' if value is True else value}" for name, value in given.items())
        return [*(self.settings or []), *said]

    def recipe_and_head(
        self, name: str, model: str, task: str, own: Sequence[str] = ()
    ) -> tuple[Recipe, HeadConfig | None]:
        """The recipe of this name; its head is that of the model to continue from, unless the user names another."""
        recipe, head = read_recipe(name, [*own, *self.wanted], self.head, task)
        from sot.core.head_config import HeadConfig
        from sot.saved import folder_config, is_trained

        if self.head is None and is_trained(model):
            head = HeadConfig.from_saved(folder_config(Path(model))["head"])
        return recipe, head

    def say_of_warmup(self, name: str, recipe: Recipe) -> None:
        """Tell that fewer epochs have shortened the warm-up of the recipe of this name."""
        from sot.training.recipe import load_recipe

        own = load_recipe(name)
        if recipe.epochs < own.epochs and recipe.warmup_epochs < own.warmup_epochs and not self._sets("warmup_epochs"):
            share = f"{recipe.warmup_epochs:g} of {counted(recipe.epochs, 'epochs')}"
            say(f"Warm-up shortened to {share}: recipe {name} has {own.warmup_epochs:g} of {own.epochs}.")

    def _sets(self, name: str) -> bool:
        return any(setting.partition("=")[0].strip() == name for setting in self.settings or [])

    def carry_out(
        self, train: Callable[..., dict[str, float]], recipe: Recipe, identity: dict[str, Any], title: str, chosen: str
    ) -> None:
        """Train once, or once for every fold, and print the scores; `train` takes the folder and how it is done."""
        how: dict[str, Any] = {"weights": self.weights, "accumulation": self.accumulation, "report_to": self.log}
        how |= {"chosen": chosen, "say": say}
        again = {"resume": self.resume, "overwrite": self.overwrite}
        if self.folds is None:
            print_scores(train(self.out, **how, **again), self.as_json, f"{title}, in {self.out}")
            return
        from sot.training.folds import cross_validate, summarized

        found = cross_validate(
            lambda folder, **turn: train(folder, **how, **turn),
            self.folds,
            self.out,
            identity,
            recipe,
            say=say,
            **again,
        )
        table = summarized(found)
        if self.as_json:
            typer.echo(json.dumps({"folds": found, **table}))
            return
        rows = [
            (name.removeprefix("eval_"), f"{row['mean']:.4f}", f"± {row['interval']:.4f}")
            for name, row in table.items()
        ]
        print_table(f"{title}, {self.folds} folds, in {self.out}", rich_table(["score"], ["mean", "95 % CI"], rows))
