"""Configuration of a backbone with a second-order head, as transformers saves it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from sot.core.head import HeadConfig
from sot.saved import FORMER_TYPES, MODEL_TYPE, is_own_type, modality_of

POSITIONS = ("first", "last")
BACKBONE_SETTINGS = {  # read from and written to the backbone's configuration, which alone has them
    "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "max_position_embeddings", "image_size", "patch_size", "num_channels",
}  # fmt: skip


class SoTConfig(PreTrainedConfig):
    """Configuration of a backbone with a second-order head.

    Args:
        backbone_config: Configuration of the backbone; of timm models a TimmWrapperConfig.
        head: Fields of HeadConfig; a null norm is that of version 0.1.0.
        modality: What it reads: "image", "text" or "audio"; where it is not said, images if there is a layout.
        layout: Fields of Layout: where a backbone of images or sounds has its tokens.
        embed: Token embedding in place of the backbone's own (image backbones of timm), or None.
        class_position: Which kept token of a text is its class token: "first" or "last".
        class_pooler: Whether the class token goes through the backbone's own pooler, as BERT's does.
        label_smoothing: Of the cross-entropy.
        text_pairs: Whether it was trained on pairs of texts; None if that is not known.
        thresholds: Of a multi-label model, the probability from which on a sample has each class; None is a half.
        max_seconds: Of a sound; what is longer is cut. None is the window of the backbone, or ten seconds.
    """

    model_type = MODEL_TYPE
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "backbone_config": SubConfigSpec(config_class=AutoConfig, model_type="bert")
    }

    backbone_config: dict[str, Any] | PreTrainedConfig | None = None
    head: dict[str, Any] | None = None
    modality: str | None = None
    layout: dict[str, Any] | None = None
    embed: str | None = None
    class_position: str = "first"
    class_pooler: bool = False
    label_smoothing: float = 0.0
    text_pairs: bool | None = None
    thresholds: list[float] | None = None
    max_seconds: float | None = None
    tie_word_embeddings: bool = True  # lets transformers save what a backbone shares between its own modules

    def __post_init__(self, **kwargs: Any) -> None:
        import sot.models.auto_model  # noqa: F401  tells the Auto classes what they build of this

        kwargs.pop("model_type", None)  # a former one, from a folder saved before
        super().__post_init__(**kwargs)
        self.head = HeadConfig.from_saved(self.head or {}).to_dict()
        self.modality = modality_of({"modality": self.modality, "layout": self.layout})
        if self.class_position not in POSITIONS:
            raise ValueError(f"class_position must be one of {', '.join(POSITIONS)}, got {self.class_position!r}")
        if self.head["fusion"] == "late" and self.problem != "single_label_classification":
            raise ValueError(f"fusion 'late' adds softmax scores of classes, it cannot do {self.problem}")
        if self.thresholds is not None and len(self.thresholds) != self.num_labels:
            raise ValueError(f"thresholds must be one for each of {self.num_labels} classes, got {self.thresholds!r}")

    @property
    def problem(self) -> str:
        """The `problem_type`, or what transformers takes where there is none."""
        return self.problem_type or ("regression" if self.num_labels == 1 else "single_label_classification")

    @property
    def has_class_token(self) -> bool:
        """Whether the backbone has a class token; a text always has one of its own."""
        return bool(self.layout.get("has_class_token")) if self.layout else True

    @property
    def hidden_size(self) -> int:
        """Width of the tokens."""
        return int(self.layout["dim"]) if self.layout else token_width(self.backbone_config)

    def __getattr__(self, name: str) -> Any:
        if name not in BACKBONE_SETTINGS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__.get("backbone_config"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        backbone = self.__dict__.get("backbone_config")
        if name in BACKBONE_SETTINGS and hasattr(backbone, name):
            return setattr(backbone, name, value)
        if name == "output_attentions" and value:
            self._attn_implementation = "eager"  # the only one that has them
        super().__setattr__(name, value)

    @classmethod
    def get_config_dict(cls, name: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As usual; that of a bare backbone becomes what `equip` makes of it, with a new head."""
        settings, kwargs = super().get_config_dict(name, **kwargs)
        if not is_own_type(settings.get("model_type", MODEL_TYPE)):
            settings = equipped_settings(settings, name)
        return {**settings, "model_type": MODEL_TYPE}, kwargs


def token_width(config: Any) -> int:
    """Width of the last hidden state of a transformers model."""
    widths = getattr(config, "hidden_sizes", None) or [getattr(config, "hidden_size", None)]
    if widths[-1] is None:
        raise ValueError(f"{type(config).__name__} does not say how wide its tokens are")
    return int(widths[-1])


def is_encoder_decoder(config: Any) -> bool:
    """Whether the family is (T5 and its kin): the configuration of its encoder alone says it is not."""
    return bool(type(config).is_encoder_decoder)


def check_depth(depth: int, layers: int | None, name: str) -> None:
    """Refuse a depth that a backbone of this name and so many equal layers (None: no such) cannot have."""
    if layers is None:
        raise ValueError(f"depth needs a backbone of equal layers, {name} has none such")
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= layers:
        raise ValueError(f"depth must be an integer from 1 to {layers}, the layers of this backbone, got {depth!r}")


def equipped_settings(settings: dict[str, Any], name: Any) -> dict[str, Any]:
    """Configuration of a bare backbone with the default head; other checkpoints name their weights otherwise."""
    from sot.models.equip import equip  # which imports this module
    from sot.models.modeling import build_backbone

    with torch.device("meta"):
        model = build_backbone(AutoConfig.for_model(**settings), pooler=False)
        if type(model).__name__ not in (settings.get("architectures") or []):
            raise ValueError(f"{name} is no bare backbone: give it a second-order head by sot.equip")
        equipped = equip(model, 2).config.to_dict()
    return {key: value for key, value in equipped.items() if key not in ("id2label", "label2id")}


AutoConfig.register(MODEL_TYPE, SoTConfig)
for former in FORMER_TYPES:
    CONFIG_MAPPING.register(former, SoTConfig)  # AutoConfig registers a configuration under its own type alone
