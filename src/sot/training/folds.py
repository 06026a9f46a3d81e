"""Cross-validation: a run for every fold of the data, and what they score on average."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sot.evaluation.metrics import interval
from sot.files import as_csv, read_object, write_atomically
from sot.training.recipe import Recipe
from sot.training.run import KEPT_FILE
from sot.training.run_folder import RUN_FILE, open_run

Scores = dict[str, float]


def cross_validate(
    train: Callable[..., Scores],
    folds: int,
    out: Path,
    identity: Mapping[str, Any],
    recipe: Recipe,
    *,
    resume: bool,
    overwrite: bool,
    say: Callable[[str], None] | None = None,
) -> list[Scores]:
    """Scores of every fold, each a run in a folder of its own below `out`; `resume` does those that are left.

    `train` takes the folder of the run, `fold`, `resume` and `overwrite`, and returns scores.
    """
    found: list[Scores] = []
    with open_run(out, {**identity, "folds": folds}, recipe, resume, overwrite) as continued:
        for number in range(folds):
            folder = out / f"fold-{number + 1}"
            if continued and (folder / KEPT_FILE).is_file():
                kept = read_object(folder / KEPT_FILE)
                found.append({name: value for name, value in kept.items() if name.startswith("eval_")})
                continue
            if say is not None:
                say(f"fold {number + 1} of {folds}")
            begun = (folder / RUN_FILE).is_file()
            found.append(train(folder, fold=(number, folds), resume=begun, overwrite=False))
            rows = [{"fold": index + 1, **scores} for index, scores in enumerate(found)]
            write_atomically(out / "folds.csv", as_csv(rows))
            write_atomically(out / "folds.json", json.dumps(summarized(found), indent=1))
    return found


def summarized(found: Sequence[Scores]) -> dict[str, dict[str, float | None]]:
    """Mean of every score over the folds, and half of Student's 95 % interval."""
    values = {name: [scores[name] for scores in found] for name in found[0]}
    return {name: {"mean": float(np.mean(each)), "interval": interval(each)} for name, each in values.items()}
