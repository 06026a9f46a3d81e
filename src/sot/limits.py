"""What the JSON of a model folder may ask for: a stranger's is read in seconds and little memory, and runs no code."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sot.files import read_object

MOST_BYTES = 2**26  # of a file of JSON; the largest tokenizers have half as many
MOST_LABELS = 100_000  # transformers writes a name for each in several tables
MOST_NESTING = 50
BOUNDS: dict[str, tuple[re.Pattern[str], float, float]] = {  # by how a setting's name ends
    "layers or iterations": (  # the deepest models have some two hundred; the layer before the last is called -2
        re.compile(r"(layers?|depths?|blocks|stages|iterations)$"), -1000, 1000),
    "attention heads": (re.compile(r"heads?$"), 0, 100_000),
    "pixels a side": (re.compile(r"^(size|crop_size|shortest_edge|longest_edge|height|width)$"), 0, 8192),
    "samples a second": (re.compile(r"^sampling_rate$"), 1, 400_000),
    "seconds of sound": (re.compile(r"^(chunk_length(_s)?|max_seconds)$"), 0.01, 600),
    "steps of a convolution": (re.compile(r"_strides?$"), 1, math.inf),
    "samples at once": (re.compile(r"^(n_fft|hop_length|win_length)$"), 1, 10_000),
    "frequencies": (re.compile(r"^(feature_size|num_mel_bins)$"), 1, 1000),
    "frames or tokens": (re.compile(r"^max_length$"), 0, 2**20),
    "tokens": (re.compile(r"^model_max_length$"), 1, math.inf),  # 10³⁰ where nobody knows it
}  # fmt: skip
CLASSES = {"num_labels", "num_classes", "id2label", "label2id", "label_names"}  # numbers and tables of them
WORDS = {"vocab", "added_tokens_encoder", "added_tokens.json", "label2id"}  # tables from anybody's words to numbers


def read_settings(file: Path) -> dict[str, Any]:
    """The JSON object of a file, refused if it asks for more than anybody's model needs."""
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"{file} has {file.stat().st_size:,} bytes; at most {MOST_BYTES:,} are accepted")
    settings = read_object(file)
    _check(file, settings, file.name, 0)
    return settings


def _check(file: Path, value: Any, name: str, depth: int) -> None:
    """Raise ValueError for what is nested too deep, for too many classes, and for a number beyond its limit."""
    if depth > MOST_NESTING:
        raise ValueError(f"{file} is damaged: it is nested more than {MOST_NESTING} deep")
    count = len(value) if isinstance(value, dict | list) else value if isinstance(value, int | float) else 0
    if name in CLASSES and count > MOST_LABELS:
        raise ValueError(f"{file} has {count:,} classes; at most {MOST_LABELS:,} are accepted")
    if isinstance(value, int | float):
        _check_number(file, value, name)
    elif name not in WORDS:  # of which one is "player"
        for key, each in _parts(value, name):
            _check(file, each, key, depth + 1)


def _parts(value: Any, name: str) -> Iterable[tuple[str, Any]]:
    """Settings by their names; of a list its entries, or if all are whole numbers how many and each, or their sum."""
    if isinstance(value, dict):
        return value.items()
    if not isinstance(value, list) or not value:
        return ()
    if not all(isinstance(each, int) for each in value):
        return ((name, each) for each in value)
    numbers = [sum(value)] if name.endswith(("depths", "blocks")) else [len(value), *value]  # or numbers of layers
    return ((name, each) for each in numbers)


def _check_number(file: Path, value: float, name: str) -> None:
    for what, (pattern, least, most) in BOUNDS.items():
        if not least <= value <= most and pattern.search(name):
            bound = f"at most {most:,}" if value > most else f"at least {least:,}"
            raise ValueError(f"{file} asks for {name}={value:,}; {bound} {what} are accepted")


def code_of(settings: Any) -> str | None:
    """The setting, however deep, that would have transformers run code which comes with a model, or fetch some."""
    if isinstance(settings, list):
        return next(filter(None, map(code_of, settings)), None)
    if not isinstance(settings, dict):
        return None
    for name, value in settings.items():
        kernel = name.endswith("attn_implementation") and "/" in str(value)  # a name on the hub
        if kernel or (name == "auto_map" and value):
            return name
    return next(filter(None, map(code_of, settings.values())), None)
