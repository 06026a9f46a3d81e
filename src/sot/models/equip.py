"""`equip`: one line gives any timm or Hugging Face transformer the second-order head."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedModel, TimmWrapperConfig

from sot.core.checks import is_number
from sot.core.head import HeadConfig
from sot.errors import NoClassTokenError
from sot.models.audio import SoTForAudioClassification, audio_layout, with_mask
from sot.models.configuration import SoTConfig
from sot.models.embedding.token_embed import TokenEmbed
from sot.models.folder import KINDS, folder_config
from sot.models.from_timm import check_twin, is_timm, open_timm, timm_layout, timm_processor, with_depth
from sot.models.from_transformers import (
    backbone_modality,
    copy_config,
    ensure_padding,
    find_class_position,
    load_transformers,
    transformers_layout,
)
from sot.models.layout import Layout
from sot.models.modeling import SoTForImageClassification, SoTForSequenceClassification, SoTPreTrainedModel

logger = logging.getLogger("sot")
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")

Equipped = SoTForImageClassification | SoTForSequenceClassification | SoTForAudioClassification


def equip(
    model: str | Path | nn.Module,
    num_classes: int | None = None,
    head: HeadConfig | Mapping[str, Any] | None = None,
    pretrained: bool = True,
    *,
    labels: Sequence[str] | None = None,
    embed: str | None = None,
    depth: int | None = None,
    class_position: str | None = None,
    class_pooler: bool = False,
    label_smoothing: float = 0.0,
    problem_type: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Equipped:
    """Return a Hugging Face model: the backbone of `model`, with its weights, and a new second-order head.

    Args:
        model: A timm model or name, a Hugging Face model or hub name, or a folder. It is copied, never edited.
        num_classes: Number of classes; by default that of `labels`, or of the model or folder. 1 means regression.
        head: HeadConfig, or a dictionary of its fields; without a class token `fusion` becomes "word".
        pretrained: Whether a name loads pretrained weights.
        labels: Names of the classes.
        embed: Token embedding in place of the model's own ("densenet", ...): ViT, DeiT, Swin and most peers.
        depth: Keep the first `depth` layers: earlier layers can hold what the last have lost.
        class_position: "first" or "last" kept token of a text is the class token; by default as its family has it.
        class_pooler: Send the class token of a text through the backbone's own pooler.
        label_smoothing: Of the cross-entropy.
        problem_type: As in transformers: regression, single_label_classification, multi_label_classification.
        model_args: Arguments a timm model is (or was) built with beside its name.
        trust_remote_code: Allow a Hugging Face folder or hub name to run its own code.
    """
    _check_loss(label_smoothing, problem_type)
    if isinstance(model, SoTPreTrainedModel):
        raise ValueError("this model has a second-order head already: equip its backbone, model.backbone, for another")
    names = _label_names(num_classes, labels, model)
    problem_type = problem_type or ("regression" if len(names) == 1 else None)  # as transformers has it, but at once
    settings: dict[str, Any] = {"label_smoothing": label_smoothing, "problem_type": problem_type}
    settings |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    config = head if isinstance(head, HeadConfig) else HeadConfig.from_dict(head or {})
    if is_timm(model):
        return _equip_timm(model, config, settings, embed, depth, pretrained, dict(model_args or {}))
    source, processor = load_transformers(model, pretrained, class_pooler, trust_remote_code)
    if embed is not None:
        raise ValueError(f"embed={embed!r} replaces the embedding of timm models only, got {type(source).__name__}")
    if model_args:
        raise ValueError(f"model_args={dict(model_args)} are for timm models only, got {type(source).__name__}")
    if backbone_modality(source) == "text":
        class_position = class_position or find_class_position(source.config)
        settings |= {"class_pooler": class_pooler, "class_position": class_position}
    return _equip_transformers(source, processor, config, settings, depth)


# --- what the user gave ------------------------------------------------------------------------------------


def _check_loss(label_smoothing: float, problem_type: str | None) -> None:
    if not is_number(label_smoothing) or not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing!r}")
    if problem_type is not None and problem_type not in PROBLEMS:
        raise ValueError(f"unknown problem_type {problem_type!r}; accepted: {', '.join(PROBLEMS)}")


def _count(num_classes: Any) -> int:
    try:
        count = 0 if isinstance(num_classes, bool) else operator.index(num_classes)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"num_classes must be an integer >= 1, got {num_classes!r}")
    return count


def _label_names(num_classes: int | None, labels: Sequence[str] | None, model: Any) -> list[str]:
    if num_classes is None and labels is None:
        old = _old_labels(model)
        count = getattr(model, "num_classes", None)
        if old is None and not count:
            raise ValueError("num_classes is needed: how many classes shall the head tell apart?")
        labels = list(old.values()) if old else [f"LABEL_{i}" for i in range(int(count or 0))]
    if num_classes is not None:
        num_classes = _count(num_classes)
    if labels is None:
        labels = [f"LABEL_{i}" for i in range(num_classes or 0)]
    names = [] if isinstance(labels, str | Mapping | set | frozenset) else [str(label) for label in labels]
    if not names:
        raise ValueError(f"labels must be a list of at least one name, got {labels!r}")
    if num_classes is not None and len(names) != num_classes:
        raise ValueError(f"num_classes is {num_classes}, but there are {len(names)} labels")
    if len(set(names)) != len(names):
        raise ValueError(f"labels must differ, got {names}")
    return names


def _old_labels(model: Any) -> dict[Any, str] | None:
    """Label names of a classifier, given as a model or as its folder."""
    if isinstance(model, str | Path):
        saved = folder_config(Path(model)) if Path(model).is_dir() else {}
        if saved.get("id2label"):
            return {key: saved["id2label"][key] for key in sorted(saved["id2label"], key=int)}
        names = saved.get("label_names") or [f"LABEL_{i}" for i in range(saved.get("num_classes") or 0)]  # of timm's
        return dict(enumerate(names)) or None
    return getattr(getattr(model, "config", None), "id2label", None)


# --- timm --------------------------------------------------------------------------------------------------


def _equip_timm(
    model: Any,
    head: HeadConfig,
    settings: dict[str, Any],
    embed: str | None,
    depth: int | None,
    pretrained: bool,
    model_args: dict[str, Any],
) -> SoTForImageClassification:
    source, model_args, recovered = open_timm(model, pretrained, model_args)
    architecture = source.pretrained_cfg["architecture"]
    if depth is not None:
        if recovered:
            _check_recovered(source, model_args)
        model_args, recovered = with_depth(source, model_args, depth), False
    backbone = TimmWrapperConfig(architecture=architecture, model_args=model_args, do_pooling=False)
    layout = timm_layout(architecture, model_args, embed)
    equipped: SoTForImageClassification = _build("image", backbone, head, layout, {**settings, "embed": embed})
    body = equipped.backbone.timm_model
    _copy_weights(source, body, skip=_embedding(body) if embed else ())
    if recovered and embed is None:
        check_twin(source, body)
    equipped.processor = timm_processor(source, model_args)
    return equipped


def _check_recovered(source: Any, model_args: dict[str, Any]) -> None:
    """Raise ValueError unless a model built with these arguments computes the same."""
    whole = timm.create_model(source.pretrained_cfg["architecture"], num_classes=0, **model_args)
    _copy_weights(source, whole)
    check_twin(source, whole)


def _embedding(model: nn.Module) -> tuple[str, ...]:
    """What the names of weights begin with in an embedding that was replaced."""
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, TokenEmbed))


# --- transformers ------------------------------------------------------------------------------------------


def _equip_transformers(
    source: PreTrainedModel, processor: Any, head: HeadConfig, settings: dict[str, Any], depth: int | None
) -> Equipped:
    config, modality = copy_config(source.config, depth), backbone_modality(source)
    layout: Layout | None = None
    if modality == "image":
        layout = transformers_layout(config)
    elif modality == "audio":
        layout, processor = audio_layout(source), with_mask(processor)
    elif type(config) not in MODEL_MAPPING:
        raise ValueError(f"{type(source).__name__} is not a text model that AutoModel can build")
    equipped = _build(modality, config, head, layout, settings)
    _copy_weights(source, equipped.backbone)
    equipped.processor = processor
    if modality == "text":
        if processor is not None:
            ensure_padding(equipped, processor)
        equipped.config.pad_token_id = config.pad_token_id
    return equipped


# --- shared ------------------------------------------------------------------------------------------------


def _build(modality: str, backbone: Any, head: HeadConfig, layout: Layout | None, settings: dict[str, Any]) -> Any:
    """The model of a backbone's configuration, with new weights."""
    fitted = head if layout is None else _fit_head(head, layout)
    parts: dict[str, Any] = {"head": fitted.to_dict(), "layout": layout and layout.to_dict()}
    return KINDS[modality](SoTConfig(backbone_config=backbone, modality=modality, **parts, **settings))


def _fit_head(head: HeadConfig, layout: Layout) -> HeadConfig:
    if not layout.has_class_token and head.fusion != "word":
        if head.fusion == "class":
            raise NoClassTokenError("fusion 'class' needs a class token, and this backbone has none; accepted: word")
        logger.warning("The backbone has no class token: fusion %r becomes 'word'.", head.fusion)
        head = replace(head, fusion="word")
    return replace(head, pre_norm=layout.needs_norm) if head.pre_norm is None else head


def _copy_weights(source: nn.Module, target: nn.Module, skip: tuple[str, ...] = ()) -> None:
    """Weights of the source into the target, all of them but those whose name begins with `skip`; and its type."""
    weights = source.state_dict()
    wanted = [name for name in target.state_dict() if not name.startswith(skip)]
    missing = [name for name in wanted if name not in weights]
    if missing:
        raise ValueError(
            f"{type(source).__name__} lacks {len(missing)} weights of its own backbone, first {missing[0]}"
        )
    target.load_state_dict({name: weights[name] for name in wanted}, strict=False)
    floating = next((p for p in source.parameters() if p.is_floating_point()), None)
    if floating is not None:
        target.to(dtype=floating.dtype)
