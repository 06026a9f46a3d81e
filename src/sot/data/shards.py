"""Images in tar shards (webdataset), read by timm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm.data
from PIL import Image

from sot.data.sources import ImageData, Stream, choose_split
from sot.extras import need


class Shards(Stream):
    """One split of a folder of shards that its `_info.json` describes."""

    def __init__(self, root: str, split: str) -> None:
        self.root, self.split = root, split
        reader = self._reader(None)
        self.samples, self.shards = reader.num_samples, len(reader.split_info.filenames)

    def _reader(self, order: int | None) -> Any:
        from timm.data.readers.reader_wds import ReaderWds

        return ReaderWds(self.root, split=self.split, is_training=order is not None, seed=order or 0)

    def read(self, order: int | None, part: int, parts: int) -> Iterator[tuple[Image.Image, int]]:
        reader = self._reader(order)  # a new one, as its shuffling goes on from where the last epoch left it
        reader.dist_rank, reader.dist_num_replicas = part, parts
        return iter(reader)


def shard_images(name: str, root: str, evaluate: bool) -> ImageData:
    """`wds/NAME@FOLDER`; its `_info.json` has `splits` and, unless NAME is one of ImageNet, the classes."""
    need("webdataset", name, "data")
    if not root:
        raise ValueError(f"{name} needs the folder of its shards: {name}@FOLDER")
    from timm.data.readers.reader_wds import _load_info

    info = _load_info(root)
    splits = info.get("splits", {})
    if not splits:
        wanted = "splits, each with name, num_samples, filenames and shard_lengths"
        raise ValueError(f"{root} needs an _info.json that lists its {wanted}")
    train, val = None if evaluate else choose_split(root, splits, "train"), choose_split(root, splits, "val")
    labels = _class_names(name, root, info)
    return ImageData(None if train is None else Shards(root, train), Shards(root, str(val)), labels)


def _class_names(name: str, root: str, info: dict[str, Any]) -> list[str]:
    if "label_names" in info:
        return [str(label) for label in info["label_names"]]
    if "num_classes" in info:
        return [str(number) for number in range(info["num_classes"])]
    try:
        return list(timm.data.ImageNetInfo(name.split("/", 1)[1].removesuffix("-wds")).label_names())
    except AssertionError:
        raise ValueError(f"{root}/_info.json does not say the classes: give label_names or num_classes") from None
