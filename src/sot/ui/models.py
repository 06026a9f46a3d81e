"""Models of the page: those of the given folders, or a small one trained on the spot; examples for them."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

import sot
from sot.core.head import HeadConfig
from sot.data.images import load_images
from sot.models.folder import class_names, folder_modality, load_model
from sot.training.recipe import Recipe, load_recipe

SENTENCES = ("The cat sleeps on the mat.", "The cats sleeps on the mat.", "A film that is not half as bad as it looks.")
DIGITS = [str(number) for number in range(10)]


@dataclass(frozen=True)
class Shown:
    """A model that the page offers."""

    name: str
    modality: str
    labels: list[str]
    model: Any
    processor: Any


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last part of each folder, or all of it where two would be called the same."""
    short = [folder.resolve().name for folder in folders]
    return [name if short.count(name) == 1 else str(folder) for name, folder in zip(short, folders)]


def check_folders(folders: Sequence[Path]) -> None:
    """Raise for a folder that is no model, or given twice, before any of them is opened."""
    for folder in folders:
        if folder_modality(folder) == "audio":
            raise ValueError(f"{folder} is a model for sounds, and the page shows pictures and texts: use sot explain")
        if folders.count(folder) > 1:
            raise ValueError(f"{folder} was given twice")


def open_models(
    folders: Sequence[Path], bar: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, title: items
) -> dict[str, Shown]:
    """The models of the folders by name."""
    check_folders(folders)
    found = {}
    for name, folder in bar(list(zip(names_of(folders), folders)), "Opening"):
        found[name] = Shown(name, folder_modality(folder), class_names(folder), *load_model(folder))
    return found


def small_recipe() -> Recipe:
    """That of `sot demo`, evaluated once: its curves are nobody's concern here."""
    recipe = load_recipe("demo")
    return recipe.changed([f"evaluate_every={recipe.epochs}"])


def small_model(recipe: Recipe, say: Callable[[str], None]) -> Path:
    """The folder of a model trained on scikit-learn's digits by `recipe`; trained now unless it is kept already."""
    mark = hashlib.sha256(recipe.to_yaml().encode()).hexdigest()[:8]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "sot" / f"digits-{sot.__version__}-{mark}"
    if not (folder / "model.safetensors").is_file():
        from sot.training.train_images import train_images

        say("Training a small model on scikit-learn's digits, once: a minute or so.")
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        try:
            head = HeadConfig.from_dict(recipe.head)
            train_images("sot_7", "digits", unfinished, recipe, head, report_to="none", overwrite=True)
            for checkpoint in unfinished.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def example_pictures(labels: list[str]) -> dict[str, Image.Image]:
    """Pictures that scikit-learn brings along: digits for a model of digits, photographs for any other."""
    if labels != DIGITS:
        from sklearn.datasets import load_sample_images

        bunch = load_sample_images()
        return {Path(name).stem: Image.fromarray(image) for name, image in zip(bunch.filenames, bunch.images)}
    unseen = load_images("digits", small_recipe().seed).val  # by the small model
    first = {label: picture for picture, label in reversed([unseen[index] for index in range(len(unseen))])}
    return {f"digit-{label}": first[label].resize((128, 128), Image.Resampling.BICUBIC) for label in sorted(first)}
