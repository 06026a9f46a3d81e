"""Data sets that the `datasets` library opens: by their name on the hub, or in a local folder.

timm's own readers of these take lower-case names and columns called image and label only, and the streaming one passes
an argument that `datasets` no longer has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from sot.data.pictures import to_rgb
from sot.data.sources import ImageData, Pictures, Stream, choose_split, divided
from sot.data.splits import Split
from sot.extras import need

SHUFFLE_BUFFER = 4096


def load_splits(spec: str, streaming: bool = False) -> dict[str, Any]:
    """The splits of `hfds/NAME[:CONFIG][@CACHE]`; NAME is a hub name or a folder."""
    need("datasets", spec, "data")
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    name, _, cache = spec.split("/", 1)[1].partition("@")
    name, _, config = (name, "", "") if Path(name).is_dir() else name.partition(":")
    try:
        return dict(datasets.load_dataset(name, config or None, cache_dir=cache or None, streaming=streaming))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"datasets cannot open {name!r}: {error.__cause__ or error}") from error


class _Rows:
    """Rows as `(image, class number)`."""

    def __init__(self, dataset: Any, columns: tuple[str, str]) -> None:
        self.dataset, self.columns = dataset, columns

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        row = self.dataset[index]
        return row[self.columns[0]], row[self.columns[1]]

    @property
    def targets(self) -> list[int]:
        """The class numbers alone."""
        return list(self.dataset[self.columns[1]])


class HubStream(Stream):
    """One split, read from where it lies and never stored."""

    def __init__(self, dataset: Any, split: str, columns: tuple[str, str]) -> None:
        self.dataset, self.columns, self.shards = dataset, columns, dataset.num_shards
        stated = (dataset.info.splits or {}).get(split)
        self.samples = (stated and stated.num_examples) or 0

    def read(self, order: int | None, part: int, parts: int) -> Iterator[tuple[Image.Image, int]]:
        from datasets.distributed import split_dataset_by_node

        rows = self.dataset if order is None else self.dataset.shuffle(seed=order, buffer_size=SHUFFLE_BUFFER)
        for row in split_dataset_by_node(rows, part, parts):
            yield to_rgb(row[self.columns[0]]), int(row[self.columns[1]])


def hub_images(spec: str, split: Split) -> ImageData:
    """`hfds/NAME`; without a split to validate on, the one to train on is split."""
    splits = load_splits(spec)
    train = choose_split(spec, splits, "train", needed=split.val_share < 1)
    val = choose_split(spec, splits, "val", needed=train is None)
    first = splits[str(train or val)]
    columns, labels = _columns(spec, first)
    if labels is None:
        labels = [str(number) for number in range(1 + max(first.unique(columns[1])))]
    sources = {name: Pictures(_Rows(splits[name], columns)) for name in (train, val) if name is not None}
    if train is None or val is None:
        return divided(sources[str(train or val)], labels, split)
    return ImageData(sources[train], sources[val], labels)


def hub_streams(spec: str, evaluate: bool) -> ImageData:
    """`hfids/NAME`: the same sets, streamed."""
    splits = load_splits(spec, streaming=True)
    train, val = None if evaluate else choose_split(spec, splits, "train"), choose_split(spec, splits, "val")
    columns, labels = _columns(spec, splits[str(val)])
    if labels is None:
        raise ValueError(f"{spec} does not name its classes: open it as {spec.replace('hfids/', 'hfds/', 1)}")
    streams = {name: HubStream(splits[name], name, columns) for name in (train, val) if name is not None}
    if train is not None and not streams[train].samples:
        stored = spec.replace("hfids/", "hfds/", 1)
        raise ValueError(f"{spec} does not say how many images {train} has: open it as {stored}, which stores them")
    return ImageData(None if train is None else streams[train], streams[str(val)], labels)


def _columns(spec: str, dataset: Any) -> tuple[tuple[str, str], list[str] | None]:
    """The columns of images and classes, and the names of the classes if it has them."""
    import datasets

    features = dataset.features or {}
    image = next((name for name, kind in features.items() if isinstance(kind, datasets.Image)), None)
    named = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if image is None or not (named or "label" in features):
        columns = ", ".join(features) or "none that are known"
        raise ValueError(f"{spec} needs a column of images and one of classes; it has {columns}")
    label = "label" if "label" in named or not named else named[0]
    if named:
        return (image, label), list(features[label].names)
    kind = str(getattr(features[label], "dtype", features[label]))
    if "int" not in kind:
        raise ValueError(f"the column 'label' of {spec} must hold classes or whole numbers, not {kind}")
    return (image, label), None
