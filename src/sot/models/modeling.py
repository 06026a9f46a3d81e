"""Any backbone with the second-order head, as Hugging Face models: backbone → tokens → classifier."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.configuration_utils import SubConfigSpec
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput

from sot.core.head import HeadConfig, SecondOrderHead, init_linear
from sot.models.embedding import replace_embedding
from sot.models.tokens import FETCH, Layout, Tokens, remove_unused, split, timm_features

POSITIONS = ("first", "last")


class SoTConfig(PreTrainedConfig):
    """Configuration of a backbone with a second-order head.

    Args:
        backbone_config: Configuration of the backbone; of timm models a TimmWrapperConfig.
        head: Fields of HeadConfig.
        layout: Fields of Layout: where an image backbone has its tokens.
        embed: Token embedding in place of the backbone's own (image backbones of timm), or None.
        class_position: Which kept token of a text is its class token: "first" or "last".
        class_pooler: Whether the class token goes through the backbone's own pooler, as BERT's does.
        label_smoothing: Of the cross-entropy.
    """

    model_type = "sot"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "backbone_config": SubConfigSpec(config_class=AutoConfig, model_type="bert")
    }

    backbone_config: dict[str, Any] | PreTrainedConfig | None = None
    head: dict[str, Any] | None = None
    layout: dict[str, Any] | None = None
    embed: str | None = None
    class_position: str = "first"
    class_pooler: bool = False
    label_smoothing: float = 0.0
    tie_word_embeddings: bool = True  # lets transformers save what a backbone shares between its own modules

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.head = HeadConfig.from_dict(self.head or {}).to_dict()
        if self.class_position not in POSITIONS:
            raise ValueError(f"class_position must be one of {', '.join(POSITIONS)}, got {self.class_position!r}")

    @property
    def hidden_size(self) -> int:
        """Width of the tokens."""
        return int(self.layout["dim"]) if self.layout else token_width(self.backbone_config)


def token_width(config: Any) -> int:
    """Width of the last hidden state of a transformers model."""
    sizes = getattr(config, "hidden_sizes", None)
    width = getattr(config, "hidden_size", None) if not sizes else sizes[-1]
    if width is None:
        raise ValueError(f"{type(config).__name__} does not say how wide its tokens are")
    return int(width)


def is_encoder_decoder(config: Any) -> bool:
    """Whether the family is (T5 and its kin): the configuration of its encoder alone says it is not."""
    return bool(type(config).is_encoder_decoder)


def build_backbone(config: Any, pooler: bool) -> PreTrainedModel:
    """The bare model of a configuration, without the pooler that would otherwise sit in it without a gradient."""
    if is_encoder_decoder(config):
        return AutoModelForTextEncoding.from_config(config)
    model_class = MODEL_MAPPING[type(config)]
    has_pooler = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    if pooler and not has_pooler:
        raise ValueError(f"class_pooler needs a backbone with a pooler, {model_class.__name__} has none")
    return AutoModel.from_config(config, **({"add_pooling_layer": pooler} if has_pooler else {}))


def shared_weights(model: nn.Module, prefix: str) -> dict[str, str]:
    """Every further name of a parameter that several modules share (CoaT's do), and its first name."""
    first: dict[nn.Parameter, str] = {}
    names = ((prefix + name, parameter) for name, parameter in model.named_parameters(remove_duplicate=False))
    return {name: first[parameter] for name, parameter in names if first.setdefault(parameter, name) != name}


class SoTPreTrainedModel(PreTrainedModel):
    """What both models share: the composition, the loss, and what transformers wants to know."""

    config_class = SoTConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean over samples: Trainer divides it by accumulation steps itself
    _keep_in_fp32_modules: ClassVar[list[str]] = ["classifier"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    backbone: PreTrainedModel
    classifier: SecondOrderHead

    def __init__(self, config: SoTConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.backbone = build_backbone(config.backbone_config, config.class_pooler)
        self.layout = Layout(**config.layout) if config.layout else None
        timm_model = getattr(self.backbone, "timm_model", None)
        if config.embed is not None:
            replace_embedding(timm_model, config.embed)
        if self.layout is not None:
            remove_unused(self.backbone if timm_model is None else timm_model, self.layout.unused)
        self.classifier = SecondOrderHead(
            config.hidden_size, config.num_labels, HeadConfig.from_dict(config.head or {})
        )
        self.processor: Any = None  # image processor or tokenizer, saved beside the weights
        self._tied_weights_keys = shared_weights(self.backbone, "backbone.")
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init_linear(module)
        for method in ("init_non_persistent_buffers", "reset_parameters"):
            if hasattr(module, method) and not isinstance(module, nn.Linear):
                getattr(module, method)()

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        self.backbone._set_gradient_checkpointing(enable, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module | None:
        """The backbone's."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """The backbone's."""
        self.backbone.set_input_embeddings(value)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As usual, with the image processor or tokenizer beside it."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.processor is not None:
            self.processor.save_pretrained(save_directory)

    def classify(self, tokens: Tokens, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Loss, if there are labels, and logits."""
        dtype = next(self.classifier.parameters()).dtype  # it may be float32 above a backbone in half precision
        class_token = None if tokens.class_token is None else tokens.class_token.to(dtype)
        parts = self.classifier.represent(class_token, tokens.word_tokens.to(dtype), tokens.mask)
        branches = self.classifier.branches(*parts)
        logits = self.classifier.merge(branches)
        return None if labels is None else self.compute_loss(branches, logits, labels), logits

    def compute_loss(self, branches: list[Tensor], logits: Tensor, labels: Tensor) -> Tensor:
        """By `problem_type`; by default cross-entropy, of class indices or of probabilities."""
        problem = self.config.problem_type or ("regression" if self.num_labels == 1 else "single_label_classification")
        if problem == "regression":
            return F.mse_loss(
                logits.squeeze(-1).float(), labels.squeeze(-1).float() if labels.ndim > 1 else labels.float()
            )
        if problem == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        target = labels.to(logits.dtype) if labels.is_floating_point() else labels.view(-1)
        return self.classifier.loss(branches, target, self.config.label_smoothing)


class SoTForImageClassification(SoTPreTrainedModel):
    """An image backbone of timm or transformers with the second-order head."""

    main_input_name = "pixel_values"
    input_modalities = ("image",)

    def tokens(self, pixel_values: Tensor, **kwargs: Any) -> tuple[Tokens, Any]:
        """Tokens of a batch of images, and what else the backbone returned."""
        assert self.layout is not None
        size = (pixel_values.shape[-2], pixel_values.shape[-1])
        timm_model = getattr(self.backbone, "timm_model", None)
        if timm_model is not None and type(timm_model).__name__ in FETCH and not kwargs.get("output_hidden_states"):
            outputs, features = None, timm_features(timm_model, pixel_values.to(self.backbone.dtype))
        else:
            extra = {"do_pooling": False} if timm_model is not None else self._fixed_order(pixel_values)
            outputs = self.backbone(pixel_values, return_dict=True, **extra, **kwargs)
            features = outputs.last_hidden_state
            if timm_model is not None and type(timm_model).__name__ in FETCH:
                features = timm_features(timm_model, pixel_values.to(self.backbone.dtype))
        norm = None
        if self.layout.norm is not None:
            norm = (self.backbone if timm_model is None else timm_model).get_submodule(self.layout.norm)
        return split(features, self.layout, norm, size), outputs

    def _fixed_order(self, pixel_values: Tensor) -> dict[str, Any]:
        """ViT-MAE shuffles its patches by random noise: give it an order instead."""
        if self.config.backbone_config.model_type != "vit_mae":
            return {}
        patch = self.config.backbone_config.patch_size
        count = (pixel_values.shape[-2] // patch) * (pixel_values.shape[-1] // patch)
        return {"noise": torch.arange(count, device=pixel_values.device).expand(pixel_values.shape[0], -1).float()}

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput | tuple[Tensor, ...]:
        """Logits of images `(batch, channels, height, width)`, and the loss if `labels` are given."""
        wanted = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        kwargs |= {name: value for name, value in wanted.items() if value is not None}
        tokens, outputs = self.tokens(pixel_values, **kwargs)
        loss, logits = self.classify(tokens, labels)
        result = ImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=getattr(outputs, "hidden_states", None),
            attentions=getattr(outputs, "attentions", None),
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()


class SoTForSequenceClassification(SoTPreTrainedModel):
    """A text backbone of transformers with the second-order head."""

    main_input_name = "input_ids"

    def tokens(self, hidden: Tensor, pooled: Tensor | None, mask: Tensor | None) -> Tokens:
        """The first or last kept token as class token, the other kept tokens as words, whatever side is padded."""
        if mask is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        mask = mask != 0
        position = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
        rank = position if self.config.class_position == "last" else hidden.shape[1] + 1 - position
        index = (mask * rank).argmax(1, keepdim=True)  # (batch, 1)
        if pooled is None:
            pooled = hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[2])).squeeze(1)
        return Tokens(pooled, hidden, mask & (position - 1 != index))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | tuple[Tensor, ...]:
        """Logits of texts `(batch, length)`, and the loss if `labels` are given."""
        wanted = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        kwargs |= {name: value for name, value in wanted.items() if value is not None}
        kwargs |= {"inputs_embeds": inputs_embeds} if input_ids is None else {"input_ids": input_ids}
        outputs = self.backbone(attention_mask=attention_mask, return_dict=True, **kwargs)
        pooled = outputs.pooler_output if self.config.class_pooler else None
        loss, logits = self.classify(self.tokens(outputs.last_hidden_state, pooled, attention_mask), labels)
        result = SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=getattr(outputs, "hidden_states", None),
            attentions=getattr(outputs, "attentions", None),
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()


AutoConfig.register("sot", SoTConfig)
AutoModelForImageClassification.register(SoTConfig, SoTForImageClassification)
AutoModelForSequenceClassification.register(SoTConfig, SoTForSequenceClassification)
