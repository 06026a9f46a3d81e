"""One reader of saved folders: configuration, weights, processor or tokenizer, classes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.utils import logging

from sot.files import one_line, read_object, weights_of
from sot.models.configuration import SoTConfig, modality_of
from sot.models.modeling import SoTForImageClassification, SoTForSequenceClassification

KINDS: dict[str, Any] = {"image": SoTForImageClassification, "text": SoTForSequenceClassification}
PROCESSORS: dict[str, Any] = {"image": AutoImageProcessor, "text": AutoTokenizer}
PROCESSOR_FILES = {  # objects of JSON, as far as there are any
    "image": ("preprocessor_config.json", "processor_config.json"),
    "text": ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
}


# --- what every model folder has ---------------------------------------------------------------------------


def folder_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} is not a model: it has no config.json")
    return read_object(file)


def needs_code(folder: Path) -> bool:
    """Whether a model cannot be built without the code in its folder: transformers does not know its type."""
    settings = folder_config(folder)
    return bool(settings.get("auto_map")) and settings.get("model_type") not in CONFIG_MAPPING


def open_processor(name: str, modality: str, trust: bool = False) -> Any:
    """The image processor or tokenizer of a name or folder: OSError without one, ValueError names a damaged file."""
    for file in (Path(name) / each for each in PROCESSOR_FILES[modality]):
        if file.is_file():
            read_object(file)
    try:
        return PROCESSORS[modality].from_pretrained(name, trust_remote_code=trust)
    except Exception as error:  # tokenizers raises no other kind
        what = "image processor" if modality == "image" else "tokenizer"
        raise OSError(f"the {what} in {name} cannot be loaded: {one_line(error)}") from error


def knows_words(tokenizer: Any) -> bool:
    """Whether it was read from files: AutoTokenizer makes one of special tokens alone where there are none."""
    made = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens, "▁"}  # T5's space among them
    return any(word not in made for word in tokenizer.get_vocab())


def show_bars_on_terminals_only() -> None:
    """Keep the libraries from drawing bars for reading and writing files into logs."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


# --- what sot trained --------------------------------------------------------------------------------------


def load_model(folder: Path) -> tuple[Any, Any]:
    """A trained model and its image processor or tokenizer, from a folder."""
    config = load_config(folder)
    show_bars_on_terminals_only()
    with weights_of(folder):
        model, loading = KINDS[config.modality].from_pretrained(folder, output_loading_info=True)
    missing = sorted(loading["missing_keys"])  # transformers draws them anew, and says so in a log only
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ValueError(f"the weights in {folder} are not whole: they lack {shown}")
    return model.eval(), load_processor(folder, config)


def load_config(folder: Path) -> Any:
    """The configuration of a trained model; any other is refused."""
    if folder_config(folder).get("auto_map"):
        raise ValueError(f"{folder} brings code of its own (auto_map in its config.json), which is not run")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(config, SoTConfig):
        raise ValueError(f"{folder} is a model of type {config.model_type}, not one that sot trained")
    return config


def load_processor(folder: Path, config: SoTConfig) -> Any:
    """The image processor or tokenizer of a trained model."""
    processor = open_processor(str(folder), str(config.modality))
    if config.modality != "text":
        return processor
    if not knows_words(processor):
        raise ValueError(f"{folder} has lost its tokenizer: there is no tokenizer.json beside the model")
    processor.model_max_length = trained_length(folder) or processor.model_max_length
    return processor


def trained_length(folder: Path) -> int | None:
    """Tokens at which training cut texts, if the folder is that of a run."""
    file = folder / "recipe.yaml"
    if not file.is_file():
        return None
    try:
        return int(yaml.safe_load(file.read_text())["max_length"])
    except (yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is damaged: {one_line(error)}") from None


def folder_modality(folder: Path) -> str:
    """What a trained model reads, without loading it."""
    return modality_of(folder_config(folder))


def class_names(folder: Path) -> list[str]:
    """The classes of a trained model."""
    names = folder_config(folder).get("id2label")
    if not isinstance(names, dict):
        raise ValueError(f"{folder} names no classes: it is not a model that sot trained")
    return [names[str(index)] for index in range(len(names))]
