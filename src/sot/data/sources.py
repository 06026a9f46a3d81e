"""Where images come from: scikit-learn's digits, folders, tar files, torchvision's sets."""

from __future__ import annotations

import logging
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import torch
from PIL import Image
from timm.data.readers import create_reader
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key

from sot.data.pictures import PICTURE_SUFFIXES, open_picture, to_rgb
from sot.data.splits import Split
from sot.data.tags import check_classes
from sot.errors import SettingError
from sot.files import counted

logger = logging.getLogger("sot")
SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test", "eval")}
PURPOSES = {"train": "train", "val": "validate"}


@dataclass
class ImageData:
    """Images `(image, class number)` to train on and to validate on, and the names of the classes.

    Where an image may have several classes, `multi_label`, it comes with a target for each instead of a number.
    """

    train: Sequence[tuple[Image.Image, int]] | Any
    val: Sequence[tuple[Image.Image, int]] | Any
    labels: list[str]
    multi_label: bool = False


class Stream(ABC):
    """Images that can only be read one after the other, from files (`shards`) that processes divide among them."""

    samples: int  # 0 where that is not known, which is enough to evaluate
    shards: int

    @abstractmethod
    def read(self, order: int | None, part: int, parts: int) -> Iterator[tuple[Image.Image, int]]:
        """One part of the images, shuffled by the seed `order` or as they stand; loader workers divide it further."""

    def check_readers(self, processes: int, workers: int) -> None:
        """Refuse more readers than there are shards: some would wait for images that never come."""
        if processes * max(1, workers) > self.shards:
            parts = f"{processes} processes × {max(1, workers)} workers"
            raise ValueError(f"the data has {counted(self.shards, 'shards')}, too few for {parts} to read one each")


class Subset:
    """Some images of a source, and their file names if it has any."""

    def __init__(self, source: Any, indices: Sequence[int]) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        item: tuple[Image.Image, int] = self.source[self.indices[index]]
        return item

    def filename(self, index: int) -> str:
        """Name of the file of an image."""
        return file_name(self.source, self.indices[index])


def file_name(source: Any, index: int) -> str:
    """Name of the file of an image, or its number."""
    return str(source.filename(index)) if hasattr(source, "filename") else f"number {index}"


class Pictures:
    """Images in RGB from items `(image or file, class number)`; unlike timm's, nothing is skipped in silence."""

    noun = "images"
    suffixes = PICTURE_SUFFIXES

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        picture, label = self.items[index]
        label = label if isinstance(label, tuple) else int(label)  # targets, where an image may have several labels
        return to_rgb(picture) if isinstance(picture, Image.Image) else open_picture(picture), label

    def filename(self, index: int) -> str:
        """Path of an image, where the items have one."""
        return str(self.items[index][0]) if isinstance(self.items, list) else file_name(self.items, index)


def choose_split(spec: str, found: Collection[str], key: str, needed: bool = True) -> str | None:
    """The name under which a set has what to train on (`train`) or to validate on (`val`)."""
    chosen = next((name for name in SPLITS[key] if name in found), None)
    if chosen is None and needed:
        has, accepted = ", ".join(found) or "none", ", ".join(SPLITS[key])
        raise ValueError(f"{spec} has no split to {PURPOSES[key]} on: it has {has}; accepted names: {accepted}")
    return chosen


def check_available(available: int, wanted: int) -> None:
    """Raise ValueError for more samples than there are."""
    if wanted > available:
        raise ValueError(f"there are {available} samples to draw from, fewer than {wanted}")


def drawn(available: int, wanted: int) -> list[int]:
    """Numbers of `wanted` of the samples, the same for every seed of a run; 0 is all of them."""
    check_available(available, wanted)
    order = torch.randperm(available, generator=torch.Generator().manual_seed(0)).tolist()
    return order[:wanted] if wanted else list(range(available))


def part_of(source: Any, samples: int) -> Any:
    """Some images of a source that comes in one piece, always the same; 0 is all of it."""
    if not samples:
        return source
    if isinstance(source, Stream):
        raise ValueError(f"{samples} images cannot be drawn from a stream: accepted is data that comes in one piece")
    return Subset(source, drawn(len(source), samples))


def class_numbers(source: Any, decode: bool = False) -> list[Any] | None:
    """The class, or targets, of every image; None where the source keeps no list of them, unless it may `decode`."""
    if isinstance(source, Subset):
        numbers = class_numbers(source.source, decode)
        return None if numbers is None else [numbers[index] for index in source.indices]
    if isinstance(source, Pictures):
        return class_numbers(source.items, decode)
    known = next((getattr(source, name) for name in ("targets", "labels", "_labels") if hasattr(source, name)), None)
    if known is not None and len(known) == len(source):
        return [int(label) for label in known]
    items = source if isinstance(source, list) else getattr(source, "samples", None)  # of torchvision's folders
    if isinstance(items, list) and len(items) == len(source):
        return [item[1] for item in items]
    return [source[index][1] for index in range(len(source))] if decode else None


def divided(source: Any, labels: list[str], split: Split) -> ImageData:
    """Images that come in one piece, to train on and to validate on."""
    numbers = class_numbers(source)
    if numbers is None:
        split, numbers = replace(split, stratified=False), [0] * len(source)
    train, val = split.divide(numbers)
    return ImageData(Subset(source, train), Subset(source, val), labels)


def check_folds(data: ImageData, split: Split, spec: str) -> ImageData:
    """The data; ValueError where a fold of it is wanted that does not come in one piece."""
    if split.fold is not None and not isinstance(data.train, Subset):
        raise SettingError("{folds} divides data that comes in one piece, and {} has a part of its own", spec)
    return data


def digits(split: Split) -> ImageData:
    """scikit-learn's 1797 images of digits, 8 × 8, divided as in published results, by the seed alone."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pictures = [Image.fromarray((image * 255 / 16).astype(np.uint8)).convert("RGB") for image in bunch.images]
    source = list(zip(pictures, bunch.target.tolist()))
    return divided(source, [str(name) for name in bunch.target_names], replace(split, stratified=False))


def folder(path: Path, split: Split, kind: type[Pictures] = Pictures) -> ImageData:
    """Class folders in `train` and `val`, or in the folder itself, which is then split; `kind` is of its files."""
    found = {
        key: next((path / name for name in names if _has_folders(path / name)), None) for key, names in SPLITS.items()
    }
    if found["train"] is None or found["val"] is None:
        files, labels = _files(found["train"] or found["val"] or path, kind)
        if set(labels) <= {name for names in SPLITS.values() for name in names}:
            raise ValueError(f"{path} needs one folder for each class in {' and '.join(labels)}")
        return divided(kind(files), labels, split)
    (train, labels), (val, val_labels) = _files(found["train"], kind), _files(found["val"], kind)
    if labels != val_labels:
        odd = sorted(set(labels) ^ set(val_labels))
        raise ValueError(f"the classes of {found['train']} and {found['val']} differ: {', '.join(odd[:5])}")
    return ImageData(kind(train), kind(val), labels)


def _has_folders(path: Path) -> bool:
    """Whether it can be a split: a folder of images alone is a class that is called so."""
    return path.is_dir() and any(entry.is_dir() and entry.name[0] != "." for entry in os.scandir(path))


def _files(path: Path, kind: type[Pictures]) -> tuple[list[tuple[str, int]], list[str]]:
    """The files in the folder of each class, however deep; what is hidden is no image of anybody's."""
    found = [file for file, _ in find_images_and_targets(str(path), types=set(kind.suffixes))[0]]
    places = [(file, file[len(str(path)) :].strip(os.sep).split(os.sep)) for file in found]
    places = [(file, parts) for file, parts in places if not any(part.startswith(".") for part in parts)]
    stray = [file for file, parts in places if len(parts) == 1]
    if stray:
        logger.warning("Left out %s in no folder of a class, first %s.", counted(len(stray), kind.noun), stray[0])
    classes = sorted({parts[0] for _, parts in places if len(parts) > 1}, key=natural_key)
    if not classes:
        raise ValueError(f"{path} holds no {kind.noun}: it needs one folder for each class")
    check_classes(classes, path)
    numbers = {name: number for number, name in enumerate(classes)}
    return [(file, numbers[parts[0]]) for file, parts in places if len(parts) > 1], classes


def tar_file(path: Path, split: Split) -> ImageData:
    """A .tar file of class folders, read in place."""
    try:
        reader = create_reader("", root=str(path))
    except (OSError, ValueError, tarfile.TarError) as error:  # timm unpacks an empty list where there are no images
        raise ValueError(f"{path} is not a .tar file with one folder of images for each class: {error}") from error
    labels = sorted(reader.class_name_to_idx, key=reader.class_name_to_idx.get)
    check_classes(labels, path)
    return divided(Pictures(reader), labels, split)


def torch_set(name: str, root: str) -> ImageData:
    """A set of torchvision that timm knows, in its folder; downloaded there if it is not."""
    if not root:
        raise ValueError(f"{name} needs the folder of its files: {name}@FOLDER")
    train, val = (_open_torch(name, root, split) for split in ("train", "validation"))
    for part in (train, val):
        if hasattr(part, "loader"):  # of folders; torchvision's own heeds neither EXIF nor 16 bits
            part.loader = open_picture
    if hasattr(train, "samples") and train.samples == val.samples:  # timm falls back to the folder itself
        raise ValueError(f"{root} has no folder to validate on: it needs train and val")
    labels = next((getattr(train, key) for key in ("wnids", "classes", "all_categories") if hasattr(train, key)), None)
    if labels is None:
        raise ValueError(f"{name} does not name its classes")
    return ImageData(Pictures(train), Pictures(val), [str(label) for label in labels])


def _open_torch(name: str, root: str, split: str) -> Any:
    def create(download: bool) -> Any:
        return timm.data.create_dataset(name, root=root, split=split, download=download)

    try:
        try:
            return create(download=False)
        except RuntimeError:  # what torchvision raises where it finds no files
            logger.warning("Downloading %s into %s.", name, root)
            return create(download=True)
    except (AssertionError, OSError, RuntimeError, TypeError) as error:
        raise ValueError(f"timm.data cannot open {name} in {root}: {error}") from error
