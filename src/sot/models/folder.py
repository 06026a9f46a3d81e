"""One reader of saved folders: configuration, weights, processor, classes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer
from transformers.utils import logging

from sot.files import one_line, weights_of
from sot.limits import read_settings
from sot.models.audio import SoTForAudioClassification
from sot.models.configuration import SoTConfig
from sot.models.modeling import SoTForImageClassification, SoTForSequenceClassification
from sot.saved import class_names as class_names
from sot.saved import folder_config as folder_config
from sot.saved import folder_modality as folder_modality
from sot.saved import trained_config

KINDS: dict[str, Any] = {
    "image": SoTForImageClassification,
    "text": SoTForSequenceClassification,
    "audio": SoTForAudioClassification,
}
PROCESSORS: dict[str, Any] = {"image": AutoImageProcessor, "text": AutoTokenizer, "audio": AutoFeatureExtractor}
PROCESSOR_NAMES = {"image": "image processor", "text": "tokenizer", "audio": "feature extractor"}
PROCESSOR_FILES = {  # objects of JSON, as far as there are any
    "image": ("preprocessor_config.json", "processor_config.json"),
    "text": ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    "audio": ("preprocessor_config.json", "processor_config.json"),
}
BLANK: dict[str, Callable[[Any], Any]] = {  # the least that a processor should read
    "image": lambda pictures: pictures([Image.new("RGB", (8, 8))], return_tensors="pt"),
    "text": lambda texts: texts("a", truncation=True),
    "audio": lambda sounds: sounds([np.zeros(sounds.sampling_rate // 10)], sampling_rate=sounds.sampling_rate),
}
SPECTROGRAMS = {  # settings of a feature extractor that have to be those of the model
    "whisper": {"feature_size": "num_mel_bins"},
    "audio-spectrogram-transformer": {"num_mel_bins": "num_mel_bins", "max_length": "max_length"},
}


# --- what every model folder has ---------------------------------------------------------------------------


def needs_code(folder: Path) -> bool:
    """Whether a model cannot be built without the code in its folder: transformers does not know its type."""
    settings = folder_config(folder)
    return bool(settings.get("auto_map")) and settings.get("model_type") not in CONFIG_MAPPING


def open_processor(name: str, modality: str, trust: bool = False) -> Any:
    """The processor of a name or folder, by what it reads: OSError without one, ValueError names a damaged file."""
    for file in (Path(name) / each for each in PROCESSOR_FILES[modality]):
        if file.is_file():
            read_settings(file)
    try:
        return PROCESSORS[modality].from_pretrained(name, trust_remote_code=trust)
    except Exception as error:  # tokenizers raises no other kind
        raise OSError(f"the {PROCESSOR_NAMES[modality]} in {name} cannot be loaded: {one_line(error)}") from error


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
    """A trained model and its image processor, tokenizer or feature extractor, from a folder."""
    config = load_config(folder)
    show_bars_on_terminals_only()
    kind = KINDS[config.modality]
    with weights_of(folder), _reports_off():
        try:
            model, loading = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True)
        except RuntimeError:
            _check_shapes(folder, kind, config)
            raise
    missing = sorted(loading["missing_keys"])  # transformers draws them anew, and says so in a log only
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ValueError(f"the weights in {folder} are not whole: they lack {shown}")
    return model.eval(), load_processor(folder, config)


@contextmanager
def _reports_off() -> Iterator[None]:
    """Loading without transformers' own tables of what does not fit: what matters of them is one sentence of ours."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_shapes(folder: Path, kind: Any, config: SoTConfig) -> None:
    """Raise ValueError for the first weight whose shape is not that of the model."""
    with torch.device("meta"):
        wanted = {name: list(value.shape) for name, value in kind(config).state_dict().items()}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  it is no dictionary
                shape = weights.get_slice(name).get_shape()
                if wanted.get(name, shape) != shape:
                    said = f"{name} is {shape}, and its config.json asks for {wanted[name]}"
                    raise ValueError(f"the weights in {folder} do not fit: {said}")


def load_config(folder: Path) -> Any:
    """The configuration of a trained model; any other is refused."""
    trained_config(folder)
    try:
        config = SoTConfig.from_pretrained(folder)
    except (OSError, ValueError):
        raise
    except Exception as error:  # of settings that are none transformers raises nearly anything
        raise ValueError(f"{folder / 'config.json'} is damaged: {type(error).__name__}: {one_line(error)}") from error
    named = all(isinstance(name, str) for name in config.id2label.values())
    if not named or sorted(config.id2label) != list(range(config.num_labels)):
        raise ValueError(f"{folder / 'config.json'} is damaged: its id2label does not name all classes in order")
    return config


def load_processor(folder: Path, config: SoTConfig) -> Any:
    """The image processor, tokenizer or feature extractor of a trained model."""
    modality = str(config.modality)
    processor = open_processor(str(folder), modality)
    if modality == "text":
        if not knows_words(processor):
            raise ValueError(f"{folder} has lost its tokenizer: there is no tokenizer.json beside the model")
        processor.model_max_length = trained_length(folder) or processor.model_max_length
    backbone: Any = config.backbone_config
    for name, other in SPECTROGRAMS.get(backbone.model_type, {}).items():
        made, read = getattr(processor, name), getattr(backbone, other)
        if made != read:
            raise ValueError(f"the feature extractor in {folder} has {name}={made}, and the model reads {read}")
    try:
        BLANK[modality](processor)
    except Exception as error:  # settings that do not fit each other, of which every processor says something else
        raise ValueError(f"the {PROCESSOR_NAMES[modality]} in {folder} reads no input: {one_line(error)}") from error
    return processor


def trained_length(folder: Path) -> int | None:
    """Tokens at which training cut texts, if the folder is that of a run."""
    file = folder / "recipe.yaml"
    if not file.is_file():
        return None
    try:
        return int(yaml.safe_load(file.read_text())["max_length"])
    except (yaml.YAMLError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {one_line(error)}") from None
