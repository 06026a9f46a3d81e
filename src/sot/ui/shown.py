"""Models of the page: those of the given folders, or a small one trained on the spot; examples for them."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import TrainerCallback

import sot
from sot.core.head import HeadConfig
from sot.data.imagenet import readable
from sot.data.images import load_images
from sot.models.folder import class_names, folder_modality, load_model
from sot.training.recipe import Recipe, load_recipe
from sot.ui.arguments import check_folders

SENTENCES = ("The cat sleeps on the mat.", "The cats sleeps on the mat.", "A film that is not half as bad as it looks.")
DIGITS = [str(number) for number in range(10)]
SMALL_NAME = "digits"


@dataclass(frozen=True)
class Shown:
    """A model that the page offers; one that is still `awaited` has neither weights nor processor yet."""

    name: str
    modality: str
    labels: list[str]
    model: Any = None
    processor: Any = None
    awaited: Training | None = None

    def ready(self) -> Shown:
        """The model itself, when it is trained."""
        return self if self.awaited is None else self.awaited.result()

    def stop(self) -> None:
        """Wait for it no longer."""
        if self.awaited is not None:
            self.awaited.stop()


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last part of each folder, or all of it where two would be called the same."""
    short = [folder.resolve().name for folder in folders]
    return [name if short.count(name) == 1 else str(folder) for name, folder in zip(short, folders)]


def open_models(
    folders: Sequence[Path], bar: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, title: items
) -> dict[str, Shown]:
    """The models of the folders by name."""
    check_folders(folders)
    found = {}
    for name, folder in bar(list(zip(names_of(folders), folders)), "Opening"):
        model, processor = load_model(folder)
        labels = readable(class_names(folder))
        model.config.id2label = dict(enumerate(labels))
        found[name] = Shown(name, folder_modality(folder), labels, model, processor)
    return found


def small_recipe() -> Recipe:
    """That of `sot demo`, shorter and evaluated once: somebody waits for it."""
    return load_recipe("demo").changed(["epochs=6", "warmup_epochs=0.5", "lr=3e-3", "evaluate_every=6"])


class Training(TrainerCallback):
    """The small model in the making, in a thread of its own: how far it is, and what became of it."""

    def __init__(self, recipe: Recipe) -> None:
        self.share, self.stopped = 0.0, False
        self._recipe, self._future = recipe, Future[Shown]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            (shown,) = open_models([small_model(self._recipe, [self])]).values()
            self._future.set_result(replace(shown, name=SMALL_NAME))
        except BaseException as error:
            self._future.set_exception(error)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer calls it."""
        self.share = state.global_step / state.max_steps
        if self.stopped:
            raise CancelledError

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within so many seconds."""
        return bool(futures_wait([self._future], seconds).done)

    def result(self) -> Shown:
        """The model, as soon as it is there."""
        return self._future.result()

    def stop(self) -> None:
        """End it, and leave nothing half written."""
        self.stopped = True
        self._thread.join()


def small_folder(recipe: Recipe) -> Path:
    """Where the small model is kept."""
    mark = hashlib.sha256(recipe.to_yaml().encode()).hexdigest()[:8]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "sot" / f"digits-{sot.__version__}-{mark}"


def is_kept(recipe: Recipe) -> bool:
    """Whether it has been trained before."""
    return (small_folder(recipe) / "model.safetensors").is_file()


def small_model(recipe: Recipe, callbacks: Sequence[TrainerCallback] = ()) -> Path:
    """The folder of a model trained on scikit-learn's digits by `recipe`; trained now unless it is kept already."""
    folder = small_folder(recipe)
    if not is_kept(recipe):
        from sot.training.train_images import train_images

        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        try:
            head = HeadConfig.from_dict(recipe.head)
            train_images(
                "sot_7", "digits", unfinished, recipe, head, report_to="none", overwrite=True, callbacks=callbacks
            )
            for checkpoint in unfinished.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def first_models(say: Callable[[str], None]) -> dict[str, Shown]:
    """Where none was named: the small model, in the making unless it is kept."""
    recipe = small_recipe()
    if is_kept(recipe):
        (shown,) = open_models([small_folder(recipe)]).values()
        return {SMALL_NAME: replace(shown, name=SMALL_NAME)}
    say("Training a small model on scikit-learn's digits, once. The page shows how far it is.")
    return {SMALL_NAME: Shown(SMALL_NAME, "image", DIGITS, awaited=Training(recipe))}


def example_pictures(labels: list[str]) -> dict[str, Image.Image]:
    """Pictures that scikit-learn brings along: digits for a model of digits, photographs for any other."""
    if labels != DIGITS:
        from sklearn.datasets import load_sample_images

        bunch = load_sample_images()
        return {Path(name).stem: Image.fromarray(image) for name, image in zip(bunch.filenames, bunch.images)}
    unseen = load_images("digits", small_recipe().seed).val  # by the small model
    first = {label: picture for picture, label in reversed([unseen[index] for index in range(len(unseen))])}
    return {f"digit-{label}": first[label].resize((128, 128), Image.Resampling.BICUBIC) for label in sorted(first)}
