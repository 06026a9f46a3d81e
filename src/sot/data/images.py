"""Images with labels: folders, tar files and everything else timm.data reads, or scikit-learn's digits.

Every random choice for a picture is drawn from the seed, the epoch and the number of the picture alone, so that a run
that is interrupted and resumed sees the same pictures whatever was drawn before.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from sot.recipe import Recipe

logger = logging.getLogger("sot")
MAX_BAD_SHARE = 0.01
SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test", "eval")}


@dataclass
class ImageData:
    """Pictures `(image, class number)` to train on and to validate on, and the names of the classes."""

    train: Sequence[tuple[Image.Image, int]] | Any
    val: Sequence[tuple[Image.Image, int]] | Any
    labels: list[str]


class Subset:
    """Some pictures of a source, and their file names if it has any."""

    def __init__(self, source: Any, indices: Sequence[int]) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        item: tuple[Image.Image, int] = self.source[self.indices[index]]
        return item

    def filename(self, index: int) -> str:
        """Name of the file of a picture."""
        return file_name(self.source, self.indices[index])


def file_name(source: Any, index: int) -> str:
    """Name of the file of a picture, or its number."""
    return str(source.filename(index)) if hasattr(source, "filename") else f"number {index}"


class Pictures:
    """Files of a folder of class folders, decoded when asked for; unlike timm's own, nothing is skipped in silence."""

    def __init__(self, files: list[tuple[str, int]]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.files[index]
        with Image.open(path) as picture:
            return picture.convert("RGB"), label

    def filename(self, index: int) -> str:
        """Path of a picture."""
        return self.files[index][0]


# --- reading -----------------------------------------------------------------------------------------------


def load_images(spec: str, seed: int = 0, val_share: float = 0.2) -> ImageData:
    """`digits`, a folder, a .tar file, or a name of timm.data: `torch/cifar10@FOLDER`, `hfds/NAME`, `wds/…@FOLDER`."""
    if spec == "digits":
        return _digits(seed, val_share)
    path = Path(spec)
    if path.is_dir():
        return _folder(path, seed, val_share)
    if path.is_file() and path.suffix == ".tar":
        source = timm.data.create_dataset("", root=spec, search_split=False)
        return _random_split(source, _class_names(source), seed, val_share)
    if "/" in spec and spec.split("/")[0] in ("torch", "hfds", "hfids", "wds", "tfds"):
        return _by_timm(spec)
    raise ValueError(
        f"unknown data {spec!r}; accepted: digits, a folder, a .tar file, or torch/…, hfds/…, wds/… of timm.data"
    )


def _digits(seed: int, val_share: float) -> ImageData:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pictures = [Image.fromarray((image * 255 / 16).astype(np.uint8)).convert("RGB") for image in bunch.images]
    source = list(zip(pictures, bunch.target.tolist()))
    return _random_split(source, [str(name) for name in bunch.target_names], seed, val_share)


def _folder(path: Path, seed: int, val_share: float) -> ImageData:
    found = {
        key: next((path / name for name in names if (path / name).is_dir()), None) for key, names in SPLITS.items()
    }
    if found["train"] is None or found["val"] is None:
        if found["train"] is not None:
            path = found["train"]
        files, labels = _files(path)
        return _random_split(Pictures(files), labels, seed, val_share)
    (train, labels), (val, val_labels) = _files(found["train"]), _files(found["val"])
    if labels != val_labels:
        odd = sorted(set(labels) ^ set(val_labels))
        raise ValueError(f"the classes of {found['train']} and {found['val']} differ: {', '.join(odd[:5])}")
    return ImageData(Pictures(train), Pictures(val), labels)


def _files(path: Path) -> tuple[list[tuple[str, int]], list[str]]:
    from timm.data.readers.reader_image_folder import find_images_and_targets

    files, classes = find_images_and_targets(str(path))
    if not files:
        raise ValueError(f"{path} holds no pictures: it needs one folder for each class")
    if len(classes) < 2:
        raise ValueError(f"a classifier needs at least two classes, {path} has {', '.join(classes) or 'none'}")
    return files, list(classes)


def _by_timm(spec: str) -> ImageData:
    name, _, root = spec.partition("@")
    try:
        train = timm.data.create_dataset(name, root=root or None, split="train", is_training=True, download=True)
        val = timm.data.create_dataset(name, root=root or None, split="validation", download=True)
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"timm.data cannot open {spec!r}: {error}") from error
    return ImageData(train, val, _class_names(train))


def _class_names(source: Any) -> list[str]:
    mapping = getattr(getattr(source, "reader", None), "class_to_idx", None) or getattr(source, "class_to_idx", None)
    if mapping:
        return [str(name) for name in sorted(mapping, key=mapping.get)]
    features = getattr(getattr(getattr(source, "reader", None), "dataset", None), "features", {})
    names = next((feature.names for feature in features.values() if hasattr(feature, "names")), None)
    if names is None:
        raise ValueError("the data does not name its classes")
    return list(names)


def _random_split(source: Any, labels: list[str], seed: int, val_share: float) -> ImageData:
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed)).tolist()
    num_val = max(1, round(len(order) * val_share))
    if num_val >= len(order):
        raise ValueError(f"{len(order)} pictures are too few to split into training and validation")
    return ImageData(Subset(source, order[num_val:]), Subset(source, order[:num_val]), labels)


# --- serving -----------------------------------------------------------------------------------------------


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Draw from generators seeded by `key`, and leave the global ones as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed costs a millisecond on every call
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class ImageSet(Dataset[dict[str, Any]]):
    """What Trainer reads: transformed pictures; a picture that cannot be read is named and the next one served."""

    def __init__(self, source: Any, transform: Callable[[Image.Image], Tensor], seed: int = 0) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.epoch = 0
        self.bad: set[int] = set()

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        """Other random choices for every epoch; Trainer calls this."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = index
        while True:
            try:
                image, label = self.source[position]
                break
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                self._count(position, error)
                position = (position + 1) % len(self.source)
        with seeded(self.seed, self.epoch, index):
            pixels = self.transform(image)
        return {"pixel_values": pixels, "labels": int(label), "index": index, "epoch": self.epoch}

    def _count(self, position: int, error: Exception) -> None:
        if position in self.bad:
            return
        self.bad.add(position)
        logger.warning("Cannot read picture %s: %s", file_name(self.source, position), error)
        if len(self.bad) > MAX_BAD_SHARE * len(self.source):
            names = ", ".join(file_name(self.source, bad) for bad in sorted(self.bad)[:5])
            raise ValueError(f"{len(self.bad)} of {len(self.source)} pictures cannot be read, more than 1 %: {names}")


class Collate:
    """Stacks pictures; mixup or cutmix mixes them and their labels, drawn from the seed, epoch and first picture."""

    def __init__(self, recipe: Recipe, num_classes: int) -> None:
        self.seed = recipe.seed
        self.mixup = None
        if recipe.mixup > 0 or recipe.cutmix > 0:
            self.mixup = timm.data.Mixup(
                recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing, num_classes=num_classes
            )

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        images = torch.stack([item["pixel_values"] for item in items])
        labels = torch.tensor([item["labels"] for item in items])
        if self.mixup is not None:
            with seeded(self.seed, items[0]["epoch"], items[0]["index"]):
                images, labels = self.mixup(images, labels)
        return {"pixel_values": images, "labels": labels}


def stack(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch to evaluate: nothing mixed."""
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


def train_transform(recipe: Recipe, data_config: dict[str, Any]) -> Callable[[Image.Image], Tensor]:
    """timm's training augmentation with the recipe's strengths."""
    transform: Callable[[Image.Image], Tensor] = timm.data.create_transform(
        data_config["input_size"],
        is_training=True,
        scale=recipe.scale,
        ratio=(1.0, 1.0) if recipe.scale == (1.0, 1.0) else None,
        hflip=recipe.flip,
        color_jitter=recipe.color_jitter or None,
        auto_augment=recipe.rand_augment,
        re_prob=recipe.erasing,
        re_mode="pixel",
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
    )
    return transform


def eval_transform(data_config: dict[str, Any]) -> Callable[[Image.Image], Tensor]:
    """timm's evaluation transform."""
    transform: Callable[[Image.Image], Tensor] = timm.data.create_transform(**data_config, is_training=False)
    return transform
