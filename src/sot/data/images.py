"""Images with labels, as Trainer reads them.

Every random choice for an image is drawn from the seed, the epoch and the number of the image alone, so that a run
that is interrupted and resumed sees the same images whatever was drawn before.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from sot.data.hub import hub_images, hub_streams
from sot.data.picture_tables import picture_table
from sot.data.pictures import check_file
from sot.data.shards import shard_images
from sot.data.sources import ImageData, Stream, Subset, check_folds, digits, file_name, folder, tar_file, torch_set
from sot.data.spec import check_pictures
from sot.data.splits import Split
from sot.data.tags import PictureColumns, is_picture_table
from sot.errors import SettingError
from sot.files import counted

logger = logging.getLogger("sot")
MAX_BAD_SHARE = 0.5
QUICKLY_CHECKED = 20_000  # images whose first bytes are read in seconds
LEFT_OUT = -100  # the label that torch's cross-entropy passes over


def load_images(
    spec: str,
    seed: int = 0,
    val_share: float = 0.2,
    columns: PictureColumns | None = None,
    *,
    stratified: bool = False,
    fold: tuple[int, int] | None = None,
) -> ImageData:
    """`digits`, a folder, a .tar file, a table, `torch/NAME@FOLDER`, `hfds/NAME`, `hfids/NAME` or `wds/NAME@FOLDER`.

    What comes in one piece is split as `Split` says; `val_share` 1 keeps all of it to evaluate on. `columns` are a
    table's.
    """
    split = Split(seed, val_share, stratified, fold)
    return check_folds(_open(spec, split, columns), split, spec)


def _open(spec: str, split: Split, columns: PictureColumns | None) -> ImageData:
    check_pictures(spec)
    if spec == "digits":
        return digits(split)
    if is_picture_table(spec):
        return picture_table(Path(spec), columns or PictureColumns(), split)
    path = Path(spec)
    if spec and path.is_dir():  # the path of no name is the current folder
        return folder(path, split)
    if path.is_file() and path.suffix == ".tar":
        return tar_file(path, split)
    kind, (name, _, root) = spec.partition("/")[0], spec.partition("@")
    if kind in ("hfds", "hfids"):
        return hub_images(spec, split) if kind == "hfds" else hub_streams(spec, split.val_share == 1)
    return torch_set(name, root) if kind == "torch" else shard_images(name, root, split.val_share == 1)


def make_seed(*key: int) -> int:
    """A seed that depends on every number of the key."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Draw from generators seeded by `key`, and leave the global ones as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = make_seed(*key)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed costs a millisecond on every call
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class _Transformed:
    """Where images come from, and what becomes of each."""

    def __init__(self, source: Any, transform: Callable[[Any], Any], seed: int = 0) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Other random choices for every epoch, and another order of a stream; Trainer calls this."""
        self.epoch = epoch

    def item(self, index: int, image: Image.Image, label: int) -> dict[str, Any]:
        """What Trainer reads of an image."""
        with seeded(self.seed, self.epoch, index):
            pixels = self.transform(image)
        return {
            "pixel_values": pixels,
            "labels": label if isinstance(label, tuple) else int(label),
            "index": index,
            "epoch": self.epoch,
        }


class ImageSet(_Transformed, Dataset[dict[str, Any]]):
    """What Trainer reads: transformed images; an image that cannot be read is named and the next one served."""

    noun = "Image"

    def __init__(self, source: Any, transform: Callable[[Any], Any], seed: int = 0) -> None:
        super().__init__(source, transform, seed)
        self.bad: set[int] = set()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.item(index, *self._read(index))

    def _read(self, index: int) -> tuple[Image.Image, int]:
        position = index
        while True:
            try:
                return self.load(position)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                self._count(position, error)
                position = (position + 1) % len(self.source)

    def load(self, position: int) -> tuple[Image.Image, int]:
        """An image and its label."""
        item: tuple[Image.Image, int] = self.source[position]
        return item

    def _count(self, position: int, error: Exception) -> None:
        if position in self.bad:
            return
        self.bad.add(position)
        logger.warning("%s %s is left out: %s", self.noun, file_name(self.source, position), error)
        if len(self.bad) > MAX_BAD_SHARE * len(self.source):
            names = ", ".join(file_name(self.source, bad) for bad in sorted(self.bad)[:5])
            count, nouns = len(self.source), f"{self.noun.lower()}s"
            raise ValueError(f"{len(self.bad)} of {count} {nouns} cannot be read, more than half: {names}")


def without_unreadable(source: Any, strict: bool, read: Any = None, noun: str = "images") -> tuple[Any, list[str]]:
    """A source without the images that cannot be read, and what is wrong with each of those.

    Files are opened and not decoded, if they are not too many; `strict` decodes every image and refuses bad ones.
    Others than images have a `read` of their own, for both.
    """
    if isinstance(source, Stream) or not (strict or len(source) <= QUICKLY_CHECKED):
        return source, []
    found = {}
    for index in range(len(source)):
        try:
            if read is not None:
                read(source[index][0])
            else:
                source[index] if strict else check_file(file_name(source, index))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            found[index] = f"{file_name(source, index)}: {getattr(error, 'reason', error)}"
    said = "; ".join([*found.values()][:5])
    if strict and found:
        raise SettingError("{strict}: {} cannot be read: {}", counted(len(found), noun), said)
    if len(found) > MAX_BAD_SHARE * len(source):
        raise ValueError(f"{len(found)} of {len(source)} {noun} cannot be read, more than half: {said}")
    good = [index for index in range(len(source)) if index not in found]
    return (Subset(source, good) if found else source), [*found.values()]


class EvaluationSet(ImageSet):
    """The same to evaluate on, where what comes in place of an image must not count: its label is `LEFT_OUT`."""

    def _read(self, index: int) -> tuple[Image.Image, int]:
        image, label = super()._read(index)
        nothing: Any = (float(LEFT_OUT),) * len(label) if isinstance(label, tuple) else LEFT_OUT
        return image, nothing if index in self.bad else label


class ImageStream(_Transformed, IterableDataset[dict[str, Any]]):
    """The same from a stream, each image once and as it comes, to evaluate on."""

    def _read(self) -> Iterator[tuple[Image.Image, int]]:
        return self.source.read(None, 0, 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number, (image, label) in enumerate(self._read()):
            yield self.item(first + number * step, image, label)


class TrainingStream(ImageStream):
    """A stream to train on: every process reads other shards, and every worker of it as many whole batches."""

    def __init__(
        self,
        source: Stream,
        transform: Callable[[Image.Image], Tensor],
        seed: int,
        batch_size: int,
        workers: int,
        process: tuple[int, int],
    ) -> None:
        super().__init__(source, transform, seed)
        self.process, self.workers = process, max(1, workers)
        self.share = math.ceil(source.samples / (process[1] * self.workers) / batch_size) * batch_size

    def __len__(self) -> int:
        return self.share * self.workers

    def _read(self) -> Iterator[tuple[Image.Image, int]]:
        return islice(self._again(), self.share)

    def _again(self) -> Iterator[tuple[Image.Image, int]]:
        """From the start where a share of the shards is smaller than that of the batches."""
        while True:
            count = 0
            for item in self.source.read(make_seed(self.seed, self.epoch), *self.process):
                yield item
                count += 1
            if count == 0:
                raise ValueError("no image of the data can be read")


def evaluation_set(source: Any, transform: Callable[[Image.Image], Tensor], seed: int = 0) -> ImageSet | ImageStream:
    """The images of a source, whatever kind it is, to evaluate on."""
    kind = ImageStream if isinstance(source, Stream) else EvaluationSet
    return kind(source, transform, seed)


def stack(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch, with nothing mixed."""
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


def processor_transform(processor: Any) -> Callable[[Image.Image], Tensor]:
    """The image processor that is saved with a model, for one image."""
    return partial(_process, processor)  # which workers can be sent


def check_processor(processor: Any, name: str) -> tuple[int, ...]:
    """The shape in which an image processor gives every image; one that gives various shapes is refused."""
    shapes = [tuple(_process(processor, Image.new("RGB", size)).shape) for size in ((80, 60), (60, 80))]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the image processor of {name} gives images various sizes: it needs a crop_size")
    return shapes[0]


def _process(processor: Any, image: Image.Image) -> Tensor:
    return torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"][0])
