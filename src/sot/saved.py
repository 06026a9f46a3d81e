"""What the config.json of a saved model says, read without torch: commands refuse mistakes before they load it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex

from sot.errors import SettingError
from sot.extras import DISTRIBUTION
from sot.files import read_object
from sot.limits import code_of, read_settings

MODEL_TYPE = DISTRIBUTION  # all of a config.json that transformers quotes where it does not know us: what to install
FORMER_TYPES = ("sot",)  # of folders saved before, which are read like the others
MODALITIES = ("image", "text", "audio")
RUN_FILE = "run.json"  # of a run of training


def folder_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder."""
    file = folder / "config.json"
    if file.is_file():
        return read_settings(file)
    if (folder / RUN_FILE).is_file():
        raise SettingError("{} is an unfinished run: continue it with {resume}", folder)
    raise ValueError(f"{folder} is not a model: it has no config.json")


def is_own_type(kind: Any) -> bool:
    """Whether a `model_type` is that of our models."""
    return kind == MODEL_TYPE or kind in FORMER_TYPES


def is_trained(model: str) -> bool:
    """Whether a name is the folder of a model that sot trained."""
    file = Path(model) / "config.json"
    return file.is_file() and is_own_type(read_object(file).get("model_type"))


def modality_of(settings: Mapping[str, Any]) -> str:
    """What the model of a config.json reads; the first ones did not say so, and had a layout if it was images."""
    modality = settings.get("modality") or ("image" if settings.get("layout") else "text")
    if modality not in MODALITIES:
        raise ValueError(f"modality must be one of {', '.join(MODALITIES)}, got {modality!r}")
    if (modality != "text") != bool(settings.get("layout")):
        raise ValueError(f"a model of modality {modality!r} {'has no' if modality == 'text' else 'needs a'} layout")
    return str(modality)


def trained_config(folder: Path) -> dict[str, Any]:
    """The config.json of a trained model; any other is refused, and so is one that brings code."""
    settings = folder_config(folder)
    code, kind = code_of(settings), settings.get("model_type", MODEL_TYPE)
    if code:
        raise ValueError(f"{folder} brings code of its own ({code} in its config.json), which is not run")
    if not is_own_type(kind):
        raise ValueError(f"{folder} is a model of type {kind}, not one that sot trained")
    return settings


def folder_modality(folder: Path) -> str:
    """What a trained model reads."""
    return modality_of(trained_config(folder))


def class_names(folder: Path) -> list[str]:
    """The classes of a trained model."""
    names = folder_config(folder).get("id2label")
    if not isinstance(names, dict) or any(str(index) not in names for index in range(len(names))):
        raise ValueError(f"{folder} names no classes: it is not a model that sot trained")
    return [names[str(index)] for index in range(len(names))]


def class_index(labels: list[str], name: str | SupportsIndex, what: str) -> int:
    """The number of a class given by name or number."""
    if isinstance(name, SupportsIndex) and not isinstance(name, bool) and 0 <= operator.index(name) < len(labels):
        return operator.index(name)
    if name in labels:
        return labels.index(str(name))
    shown = ", ".join(labels[:10]) + (", …" if len(labels) > 10 else "")
    raise ValueError(f"the {what} {name!r} is not a class of the model; accepted: {shown}")
