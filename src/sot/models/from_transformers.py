"""What `equip` has to know of a transformers model: how to load it, its depth, where its tokens are, its padding."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)

from sot.files import weights_of
from sot.models.configuration import SoTConfig, check_depth, is_encoder_decoder
from sot.models.folder import knows_words, needs_code, open_processor
from sot.models.layout import CLASS_TOKENS, Layout, find_layout
from sot.models.modeling import SoTForSequenceClassification, SoTPreTrainedModel, build_backbone, whisper_encoder

logger = logging.getLogger("sot")


def load_transformers(model: Any, pretrained: bool, pooler: bool, trust: bool) -> tuple[PreTrainedModel, Any]:
    """The bare backbone of a model, name or folder, and its processor or tokenizer where there is one."""
    if isinstance(model, PreTrainedModel):
        bare = isinstance(model, MODEL_MAPPING.get(type(model.config), ())) or is_encoder_decoder(model.config)
        inner = _encoder(model if bare else getattr(model, model.base_model_prefix, model))
        return inner, _processor(model.name_or_path, inner, trust)
    if isinstance(model, nn.Module):
        raise ValueError(
            f"{type(model).__name__} is neither of timm nor of transformers: use SecondOrderHead on its tokens"
        )
    name = str(model)
    if Path(name).is_dir() and needs_code(Path(name)) and not trust:
        raise ValueError(f"{name} brings code of its own: pass trust_remote_code=True to run it")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        accepted = "a timm name (see timm.list_models()), a Hugging Face hub name, or a folder with config.json"
        offline = isinstance(error.__cause__, LocalEntryNotFoundError)
        also = "; the hub cannot be reached" if offline else ""
        raise ValueError(f"unknown model {name!r}; accepted: {accepted}{also}") from error
    if isinstance(config, SoTConfig):
        raise ValueError(f"{name} has a second-order head already: load it with AutoModelFor….from_pretrained")
    if pretrained:
        with weights_of(name):
            source = _encoder(_loader(config).from_pretrained(name, trust_remote_code=trust))
    else:
        source = build_backbone(config, pooler)
    if hasattr(source, "text_model") and hasattr(source, "vision_model"):
        raise ValueError(f"{type(source).__name__} reads texts and images: equip its text_model or its vision_model")
    return source, _processor(name, source, trust)


def _loader(config: PreTrainedConfig) -> Any:
    """What loads the weights of a configuration; those of Whisper's encoder alone have other names than all of it."""
    if config.model_type == "whisper":
        return whisper_encoder() if config.architectures == ["WhisperEncoder"] else AutoModel
    return AutoModelForTextEncoding if is_encoder_decoder(config) else AutoModel


def _encoder(model: PreTrainedModel) -> PreTrainedModel:
    """The encoder of Whisper, any other model as it is."""
    if model.config.model_type != "whisper":
        return model
    return next(part for part in model.modules() if isinstance(part, whisper_encoder()))


def _processor(name: str, source: PreTrainedModel, trust: bool) -> Any:
    """The image processor, tokenizer or feature extractor of a name or folder, if it has one."""
    modality = backbone_modality(source)
    try:
        found = open_processor(name, modality, trust) if name else None
    except OSError:
        return None
    return found if found is None or modality != "text" or knows_words(found) else None


def backbone_modality(source: PreTrainedModel) -> str:
    """What a model of transformers reads."""
    kinds = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}
    return kinds.get(source.main_input_name, "text")


def copy_config(config: PreTrainedConfig, depth: int | None) -> Any:
    """A copy of a backbone's configuration, with its first `depth` layers if that is given; none hides patches."""
    copied = type(config).from_dict(config.to_dict())
    if copied.model_type == "vit_mae":
        copied.mask_ratio = 0.0
    if depth is None:
        return copied
    layers = getattr(copied, "num_hidden_layers", None)
    alike = isinstance(layers, int) and not hasattr(copied, "hidden_sizes")
    check_depth(depth, layers if alike else None, type(config).__name__)
    if getattr(copied, "layer_types", None):  # where layers differ, of which kind each is
        copied.layer_types = copied.layer_types[:depth]
    copied.num_hidden_layers = depth
    return copied


def transformers_layout(config: Any) -> Layout:
    """Where an image model of transformers has its tokens, found on the meta device."""
    with torch.device("meta"):
        model = build_backbone(config, pooler=False).eval()
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    shape = (2, getattr(config, "num_channels", 3), height, width)
    pixels = torch.zeros(shape, dtype=model.dtype, device="meta")
    prefix = [name.split(".")[-1] for name, _ in model.named_parameters()]
    if "detection_tokens" in prefix:
        raise ValueError(f"{type(model).__name__} has no word tokens to pool: its detection tokens are among them")
    num_prefix = sum(name in prefix for name in (*CLASS_TOKENS, "distillation_token"))
    if "register_tokens" in prefix:
        num_prefix += config.num_register_tokens
    found = find_layout(model, lambda: model(pixels).last_hidden_state, None, num_prefix)
    mean_pooled = getattr(config, "use_mean_pooling", False) and found.norm is None  # BEiT: norm after its own pooling
    return replace(found, needs_norm=mean_pooled)


def ensure_padding(model: SoTForSequenceClassification, tokenizer: Any) -> None:
    """Give a tokenizer without a padding token one, and the model an embedding for it; said aloud, done once."""
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        logger.warning("The tokenizer had no padding token: added %r as number %d.", "<pad>", tokenizer.pad_token_id)
    tokenizer.padding_side = "right"  # some backbones count the padding before a text among its positions
    if len(tokenizer) > model.backbone.get_input_embeddings().num_embeddings:
        model.backbone.resize_token_embeddings(len(tokenizer))
        model.config.backbone_config = model.backbone.config
    model.config.pad_token_id = model.backbone.config.pad_token_id = tokenizer.pad_token_id


def check_length(model: SoTPreTrainedModel, max_length: int, pairs: bool) -> None:
    """Refuse to cut texts where no word is left, or where there are no positions for all tokens."""
    least = 1 + int(model.processor.num_special_tokens_to_add(pair=pairs))  # below, tokenizers cut nothing at all
    most = position_limit(model.backbone)
    if max_length < least or (most is not None and max_length > most):
        accepted = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"max_length must be {accepted} tokens for this model, got {max_length}")


def check_pairs(config: SoTConfig, pairs: bool) -> None:
    """Refuse single texts for a model that was trained on pairs of them, and pairs for one of single texts."""
    if config.text_pairs not in (None, pairs):
        kinds = {True: "pairs of texts", False: "single texts"}
        raise ValueError(f"this model was trained on {kinds[not pairs]}, and it was given {kinds[pairs]}")


def position_limit(backbone: nn.Module) -> int | None:
    """How many tokens the table of positions is for; None where positions are relative or rotary."""
    declared = getattr(backbone.config, "max_position_embeddings", None)
    limits = []
    for name, module in backbone.named_modules():
        last = name.rpartition(".")[2]
        if declared and isinstance(module, nn.Embedding) and ("position" in last or last == "wpe"):
            first = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            if module.num_embeddings >= declared:  # smaller ones are for pictures
                limits.append(min(declared, module.num_embeddings - first))  # BART has more than it declares
    return min(limits, default=None)


def find_class_position(config: PreTrainedConfig) -> str:
    """Encoders trained on masked words begin with their class token; in decoders only the last token has seen all."""
    return "first" if type(config) in MODEL_FOR_MASKED_LM_MAPPING else "last"
