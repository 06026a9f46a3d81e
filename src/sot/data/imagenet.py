"""ImageNet's classes under the names that data and models give them: synsets, descriptions, plain numbers."""

from __future__ import annotations

from collections.abc import Collection
from importlib import resources

from timm.data import ImageNetInfo

SUBSETS = {"ImageNet-A": "imagenet_a_synsets.txt", "ImageNet-R": "imagenet_r_synsets.txt"}
SAME_ORDER = 0.9  # share of names to recognise: published lists differ in some spellings


def match_classes(wanted: list[str], names: list[str]) -> list[int] | None:
    """The model's column of every class of the data: by name, or by synset if the model has ImageNet's 1000 classes."""
    if not set(wanted) <= set(names):
        synsets = ImageNetInfo().label_names()
        if not (set(wanted) <= set(synsets) and _in_order(names)):
            return None
        names = synsets
    columns = {name: column for column, name in enumerate(names)}
    return [columns[name] for name in wanted]


def columns_for(data: str, wanted: list[str], names: list[str]) -> list[int]:
    """`match_classes`, or ValueError naming classes of `data` that the model does not have."""
    columns = match_classes(wanted, names)
    if columns is None:
        unknown = [name for name in wanted if name not in names]
        raise ValueError(f"{data} has classes the model was not trained on: {', '.join(unknown[:5])}")
    return columns


def _in_order(names: list[str]) -> bool:
    """Whether these are the 1000 classes in their usual order, described or numbered."""
    described = ImageNetInfo().label_descriptions()
    if len(names) != len(described):
        return False
    known = [
        name in (str(column), f"LABEL_{column}") or _first(name) == _first(description)
        for column, (name, description) in enumerate(zip(names, described))
    ]
    return sum(known) >= SAME_ORDER * len(names)


def _first(description: str) -> str:
    """`tench` of `tench, Tinca tinca`, however it is written."""
    return description.split(",")[0].replace("_", " ").strip().lower()


def subset_name(classes: Collection[str]) -> str | None:
    """The test set that has exactly these classes."""
    folder = resources.files("timm.data") / "_info"
    found = {name: set((folder / file).read_text().split()) for name, file in SUBSETS.items()}
    return next((name for name, synsets in found.items() if synsets == set(classes)), None)


def readable(labels: list[str]) -> list[str]:
    """`English springer` for n02102040; what is no code of ImageNet stays, and so does one whose name another has."""
    info = ImageNetInfo()
    known = set(info.label_names())
    named = [info.label_name_to_description(label).split(",")[0] if label in known else label for label in labels]
    return [name if named.count(name) == 1 else label for name, label in zip(named, labels)]
