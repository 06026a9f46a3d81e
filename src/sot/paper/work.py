"""What a table has to train, one unit for each row, task and seed, and where the results are kept.

A result is found by what was trained, not by its place in a table: rows that tables share are trained once, and results
of several machines are merged by copying files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

import sot
from sot.core.head import HeadConfig
from sot.data.imagenet import columns_for
from sot.data.images import load_images
from sot.data.sources import check_available
from sot.data.texts import TextData, load_task
from sot.errors import SettingError
from sot.evaluation.evaluate import open_images
from sot.files import digest, read_object, write_atomically
from sot.models.complexity import IMAGENET_PICTURES, Logits, count_parameters, measure_complexity
from sot.paper.table import TableRow
from sot.training.image_model import build_model, data_config
from sot.training.recipe import Recipe
from sot.training.train_images import train_images
from sot.training.train_texts import build_text_model, fine_tune

logger = logging.getLogger("sot")
IMAGENET_A = "imagenet_a"


@dataclass(frozen=True)
class Where:
    """What the user has: pictures, folders of GLUE tasks, ImageNet-A, and the model of rows that name none."""

    data: str | None = None
    texts: Path | None = None
    imagenet_a: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class Unit:
    """One training: a row with one seed, of texts on one task."""

    row: TableRow
    recipe: Recipe
    model: str
    task: str | None
    about_data: dict[str, Any]

    @property
    def head(self) -> HeadConfig | None:
        """None is the conventional one."""
        return None if self.row.conventional else HeadConfig.from_dict(self.recipe.head)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two units the same, whatever the table, the machine and defaults added later."""
        recipe = _beyond_defaults(self.recipe, Recipe())
        recipe["head"] = None if self.head is None else _beyond_paper(self.head)
        for words in ("about", "grid"):
            recipe.pop(words, None)
        model = Path(os.path.abspath(self.model)).name  # "." too, and a link by its own name
        return {"model": model, "task": self.task, "data": self.about_data, "recipe": recipe}

    @property
    def key(self) -> str:
        """Name of its files."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str | None:
        """Of the weights of a text model that is a folder, which may be called like another; None of one of the hub."""
        return None if self.task is None else _fingerprint(os.path.abspath(self.model))


@functools.cache
def _fingerprint(folder: str) -> str | None:
    files = [*Path(folder).glob("config.json"), *sorted(Path(folder).glob("*.safetensors"))]
    together = "".join(map(digest, files)).encode()
    return hashlib.sha256(together).hexdigest()[:16] if files else None


def _beyond_defaults(settings: Any, defaults: Any) -> dict[str, Any]:
    usual = asdict(defaults)
    return {name: value for name, value in asdict(settings).items() if value != usual[name]}


def _beyond_paper(head: HeadConfig) -> dict[str, Any]:
    """What differs from the paper's head: results of version 0.1.0, whose default it was, keep their names."""
    different = _beyond_defaults(head, HeadConfig.paper(pool=head.pool))
    return different if head.pool == "mgcrp" else {"pool": head.pool, **different}


def plan(rows: Sequence[TableRow], seeds: Iterable[int], where: Where, as_of_imagenet: bool = False) -> list[Unit]:
    """All units, seed by seed so that every row has a first result early; missing data and models are refused here.

    `as_of_imagenet` takes its numbers of pictures and classes for pictures that are not there, to count what it takes.
    """
    units = []
    needed = any(row.recipe.task == "image" for row in rows)
    pictures = _describe_pictures(where.data, as_of_imagenet) if needed else {}
    if pictures and where.imagenet_a is not None:
        columns_for(where.imagenet_a, load_images(where.imagenet_a, val_share=1).labels, pictures["labels"])
    tasks = sorted({task for row in rows for task in row.tasks})
    texts = {task: _describe_texts(task, read_task(where.texts, task)) for task in tasks}
    for row in rows:
        for about in [texts[task] for task in row.tasks] or [pictures]:
            check_available(about["train"], row.recipe.train_samples)
    for seed in seeds:
        for row in rows:
            model = row.model or where.model
            if model is None:
                raise SettingError("row {!r} needs {model}, a text model of Hugging Face by name or folder", row.name)
            for task in row.tasks or (None,):
                about = pictures if task is None else texts[task]
                units.append(Unit(row, replace(row.recipe, seed=seed), model, task, about))
    return units


def read_task(texts: Path | None, task: str) -> TextData:
    """The texts of a task."""
    return load_task(task, task_folder(texts, task), "{texts}, a folder in which its own has")


def task_folder(texts: Path | None, task: str) -> Path | None:
    """The folder of a task, whatever its spelling: CoLA, SST-2, …; None leaves it to the hub."""
    if texts is None:
        return None
    for folder in sorted(texts.iterdir()) if texts.is_dir() else []:
        if folder.is_dir() and folder.name.lower().replace("-", "") == task:
            return folder
    raise ValueError(f"{texts} has no folder for task {task}")


def _describe_pictures(data: str | None, as_of_imagenet: bool) -> dict[str, Any]:
    if data is None and as_of_imagenet:
        return {"train": IMAGENET_PICTURES, "val": 50_000, "labels": [str(number) for number in range(1000)]}
    if data is None:
        raise SettingError("images are needed: give {data}, as in sot train")
    pictures = load_images(data)
    return {"train": len(pictures.train), "val": len(pictures.val), "labels": pictures.labels}


def _describe_texts(task: str, texts: TextData) -> dict[str, Any]:
    if texts.train is None or texts.dev is None:
        raise ValueError(f"task {task} needs a training and a development set")
    return {"train": len(texts.train), "val": len(texts.dev), "labels": texts.labels}


def _read_result(file: Path) -> dict[str, Any] | None:
    """What was kept, or nothing of a file that is damaged."""
    try:
        result = read_object(file)
    except ValueError as error:
        logger.warning("The result %s; it counts as missing.", error)
        return None
    if isinstance(result.get("scores"), dict):
        return result
    logger.warning("The result %s is damaged: it has no scores; it counts as missing.", file)
    return None


class Store:
    """Results and runs of a folder."""

    def __init__(self, out: Path) -> None:
        self.results, self.runs = out / "results", out / "runs"

    def result(self, unit: Unit) -> dict[str, Any] | None:
        """What the unit scored, if it has been trained."""
        file = self.results / f"{unit.key}.json"
        result = _read_result(file) if file.is_file() else None
        if result is None or None in (known := {result.get("fingerprint"), unit.fingerprint}) or len(known) == 1:
            return result
        raise SettingError("{} is of other weights than {}: give another {out}", file, unit.model)

    def run(self, unit: Unit) -> Path:
        """Folder of its training."""
        return self.runs / unit.key

    def keep(self, unit: Unit, result: Mapping[str, Any]) -> None:
        """Write a result."""
        self.results.mkdir(parents=True, exist_ok=True)
        named = {} if unit.fingerprint is None else {"fingerprint": unit.fingerprint}
        text = json.dumps({**unit.identity, **named, **result}, indent=1)
        write_atomically(self.results / f"{unit.key}.json", text + "\n")

    def merge(self, other: Path) -> int:
        """Take the results that another folder has and this one lacks; returns how many."""
        if not (other / "results").is_dir():
            raise ValueError(f"{other} has no folder results: sot reproduce did not write it")
        self.results.mkdir(parents=True, exist_ok=True)
        taken = 0
        for file in sorted((other / "results").glob("*.json")):
            ours = self.results / file.name
            if not (ours.is_file() and _read_result(ours)) and _read_result(file):
                write_atomically(ours, file.read_bytes())
                taken += 1
        return taken


def lacks(unit: Unit, store: Store, where: Where) -> bool:
    """Whether something has yet to be trained or evaluated for a unit; a model that is not here is refused."""
    result, run = store.result(unit), store.run(unit)
    if result is None:
        return True
    if _left_to_evaluate(unit, result, where) is None:
        return False
    if not (run / "model.safetensors").is_file():
        raise ValueError(f"{run} holds no model to evaluate on {where.imagenet_a}: only its result is here")
    return True


def _left_to_evaluate(unit: Unit, result: Mapping[str, Any], where: Where) -> str | None:
    """ImageNet-A, if the user has it and the result does not."""
    return where.imagenet_a if unit.task is None and IMAGENET_A not in result["scores"] else None


def _size(unit: Unit, texts: TextData | None) -> dict[str, int | None]:
    """Parameters and multiply-adds of the model of a unit; a text has any length."""
    if texts is not None:
        return {"params": count_parameters(build_text_model(unit.model, texts, unit.recipe, unit.head)), "macs": None}
    model = build_model(unit.model, unit.about_data["labels"], unit.recipe, unit.head, False)
    size = measure_complexity(Logits(model), data_config(model)["input_size"])
    return {"params": size.params, "macs": size.all_macs}


def do(unit: Unit, store: Store, where: Where, workers: int = 0) -> None:
    """Train a unit, from its last checkpoint if it was interrupted, and keep its scores."""
    processes = PartialState()
    result = store.result(unit)
    processes.wait_for_everyone()  # all have looked before one writes
    run, head = store.run(unit), unit.head
    if result is None:
        begun = (run / "run.json").is_file()
        options: dict[str, Any] = {"resume": begun, "overwrite": not begun, "report_to": "none"}
        wall, busy = time.monotonic(), time.process_time()
        if unit.task is None:
            assert where.data is not None
            texts = None
            scores = train_images(unit.model, where.data, run, unit.recipe, head, workers=workers, **options)
        else:
            texts = read_task(where.texts, unit.task)
            scores = fine_tune(unit.model, texts, unit.task, run, unit.recipe, head, **options)
        times = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - busy}
        epochs = unit.recipe.epochs + unit.recipe.cooldown_epochs
        result = {
            "scores": {name.removeprefix("eval_"): value for name, value in scores.items() if name != "epoch"},
            **_size(unit, texts),
            **times,
            "samples": epochs * (unit.recipe.train_samples or int(unit.about_data["train"])),
            "device": processes.device.type,
            "resumed": begun,  # then the times are those of the rest
            "version": sot.__version__,
        }
        _keep_on_first(store, unit, result)
    harder = _left_to_evaluate(unit, result, where)
    if harder is not None:
        evaluation = open_images(run, harder).evaluate(unit.recipe.batch_size, iter)
        result["scores"][IMAGENET_A] = evaluation.scores["accuracy"]
        _keep_on_first(store, unit, result)


def _keep_on_first(store: Store, unit: Unit, result: Mapping[str, Any]) -> None:
    processes = PartialState()
    if processes.is_main_process:
        store.keep(unit, result)
    processes.wait_for_everyone()
