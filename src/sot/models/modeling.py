"""Any backbone with the second-order head, as Hugging Face models: backbone → tokens → classifier."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_MAPPING,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedModel,
)
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from sot.core.head import HeadConfig, SecondOrderHead, init_linear
from sot.models.branched import build_head
from sot.models.card import upload, write_card
from sot.models.configuration import SoTConfig, is_encoder_decoder
from sot.models.embedding.token_embed import replace_embedding
from sot.models.layout import Layout, apply_layout
from sot.models.tokens import FETCH, Tokens, split_branches, split_text, timm_features
from sot.models.variants import ensure_registered

EXTRAS = ("hidden_states", "attentions")  # what a backbone returns beside its tokens, if it is asked for it


def build_backbone(config: Any, pooler: bool) -> PreTrainedModel:
    """The bare model of a configuration, without the pooler that would otherwise sit in it without a gradient."""
    if config.model_type == "whisper":
        return whisper_encoder()._from_config(config)
    if is_encoder_decoder(config):
        return AutoModelForTextEncoding.from_config(config, trust_remote_code=False)
    architecture = getattr(config, "architecture", None)
    ensure_registered(str(architecture))
    if architecture is not None and not timm.is_model(architecture):  # timm would look for some names on the hub
        raise ValueError(f"timm has no model {architecture!r}")
    model_class = MODEL_MAPPING[type(config)]
    has_pooler = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    if pooler and not has_pooler:
        raise ValueError(f"class_pooler needs a backbone with a pooler, {model_class.__name__} has none")
    options = {"add_pooling_layer": pooler} if has_pooler else {}
    return AutoModel.from_config(config, trust_remote_code=False, **options)


def whisper_encoder() -> Any:
    """The class of Whisper's encoder, which no Auto class builds by itself."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder


def labels_of(model: PreTrainedModel) -> list[str]:
    """The classes of a model in order."""
    return [str(model.config.id2label[index]) for index in range(model.num_labels)]


def is_multi_label(config: Any) -> bool:
    """Whether a sample may have several classes, or none."""
    return bool(config.problem == "multi_label_classification")


def shared_weights(model: nn.Module, prefix: str) -> dict[str, str]:
    """Every further name of a parameter that several modules share (CoaT's do), and its first name."""
    first: dict[nn.Parameter, str] = {}
    names = ((prefix + name, parameter) for name, parameter in model.named_parameters(remove_duplicate=False))
    return {name: first[parameter] for name, parameter in names if first.setdefault(parameter, name) != name}


def counts_padding(backbone: nn.Module) -> bool:
    """Whether positions in a table are counted from the first column, padding or not, unless they are passed.

    RoBERTa and its kin count from their padding token, others from the mask, and rotary or relative ones do not care.
    """
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return False
    tables = [module for name, module in backbone.named_modules() if "position" in name or name.endswith("wpe")]
    return any(type(table) is nn.Embedding and table.padding_idx is None for table in tables)


class SoTPreTrainedModel(PreTrainedModel):
    """What all models share: the composition, the loss, and what transformers wants to know."""

    config_class = SoTConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True  # of the class; an instance does as its backbone
    accepts_loss_kwargs = False  # the loss is a mean over samples: Trainer divides it by accumulation steps itself
    _keep_in_fp32_modules: ClassVar[list[str]] = ["classifier"]  # what quantisers leave alone
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [r"classifier\.\w+"]  # and bfloat16; not in both lists
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    backbone: PreTrainedModel
    classifier: SecondOrderHead

    def __init__(self, config: SoTConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.backbone = build_backbone(config.backbone_config, config.class_pooler)
        self.layout = Layout.from_dict(config.layout) if config.layout else None
        if config.embed is not None:
            replace_embedding(self.body, config.embed)
        if self.layout is not None:
            apply_layout(self.body, self.layout)
        head = HeadConfig(**(config.head or {}))
        self.classifier = build_head(config.hidden_size, config.num_labels, head, self.layout)
        self.processor: Any = None  # image processor or tokenizer, saved beside the weights
        self._tied_weights_keys = shared_weights(self.backbone, "backbone.")
        self.supports_gradient_checkpointing = self.backbone.supports_gradient_checkpointing
        self.post_init()

    @property
    def body(self) -> Any:
        """The backbone itself: of timm's what transformers wraps."""
        return getattr(self.backbone, "timm_model", self.backbone)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            return init_linear(module)
        for method in ("init_non_persistent_buffers", "reset_parameters"):
            getattr(module, method, lambda: None)()

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        self.backbone._set_gradient_checkpointing(enable, *args, **kwargs)
        self.gradient_checkpointing = enable  # what transformers asks for; timm's modules call it otherwise

    def get_input_embeddings(self) -> nn.Module:
        """The backbone's; timm's have none, and peft asks whatever there is for its parameters."""
        return self.backbone.get_input_embeddings() or nn.Identity()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As usual, with the image processor or tokenizer beside it, and a card where there is none.

        Weights keep the names they have here: of some backbones transformers would write those of older files, which
        Trainer, when it resumes, does not know.
        """
        super().save_pretrained(save_directory, *args, **{"save_original_format": False, **kwargs})
        if self.processor is not None:
            self.processor.save_pretrained(save_directory)
        write_card(self.config, save_directory)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Upload all that `save_pretrained` writes, and return its address; a card that is there stays."""
        return upload(self, repo_id, **kwargs)

    def tokens(self, *args: Any, **inputs: Any) -> Tokens:
        """What the head reads of a batch: takes what `forward` takes, but the labels and `return_dict`."""
        raise NotImplementedError

    def with_extras(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the backbone, with what else it shall return: as asked for, or else as configured."""
        names = [f"output_{name}" for name in EXTRAS]
        configured = {name: True for name in names if getattr(self.config, name)}
        return configured | {name: value for name, value in inputs.items() if value is not None or name not in names}

    def respond(self, kind: Any, tokens: Tokens, labels: Tensor | None) -> Any:
        """Loss, logits and what else the backbone returned, as a `kind` of output."""
        return kind(*self.classify(tokens, labels), *(getattr(tokens.outputs, name, None) for name in EXTRAS))

    def classify(self, tokens: Tokens, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Loss, if there are labels, and logits: the sum of those of all branches of the backbone."""
        tokens = tokens.to(next(self.classifier.parameters()).dtype)  # float32 above a backbone in half precision
        inputs = (tokens.class_token, tokens.word_tokens, tokens.mask)
        others = [(branch.class_token, branch.word_tokens) for branch in tokens.branches]
        options: dict[str, Any] = {"others": others} if others else {}
        if labels is None or self.classifier.num_branches == 1:
            logits = self.classifier(*inputs, **options)
            return None if labels is None else self.compute_loss([logits], logits, labels), logits
        logits, branches = self.classifier(*inputs, **options, with_branches=True)
        return self.compute_loss(branches, logits, labels), logits

    def compute_loss(self, branches: list[Tensor], logits: Tensor, labels: Tensor) -> Tensor:
        """By `problem_type`; by default cross-entropy, of class indices or of probabilities, averaged over heads."""
        problem = self.config.problem
        if problem == "regression":
            return F.mse_loss(logits.float(), labels.view_as(logits).float())
        if is_multi_label(self.config):
            smoothing = self.config.label_smoothing  # towards a half: each class is a question of its own
            target = labels.to(logits.dtype) * (1 - smoothing) + smoothing / 2
            return F.binary_cross_entropy_with_logits(logits, target)
        target = labels.to(logits.dtype) if labels.is_floating_point() else labels.view(-1)
        return self.classifier.loss(branches, target, self.config.label_smoothing)


class SoTForImageClassification(SoTPreTrainedModel):
    """An image backbone of timm or transformers with the second-order head."""

    main_input_name = "pixel_values"
    input_modalities = ("image",)

    def tokens(self, pixel_values: Tensor, **kwargs: Any) -> Tokens:
        """What the head reads of images `(batch, channels, height, width)`."""
        if self.config.modality != "image" or self.layout is None:
            kind = {"text": "Sequence", "audio": "Audio"}[str(self.config.modality)]
            raise ValueError(f"this model reads {self.config.modality}s: load it with AutoModelFor{kind}Classification")
        kwargs = self.with_extras(kwargs)
        pixel_values = pixel_values.to(self.backbone.dtype)
        size = (pixel_values.shape[-2], pixel_values.shape[-1])
        fetch = type(self.body).__name__ in FETCH
        outputs: Any = None
        if not fetch or kwargs.get("output_hidden_states"):
            outputs = self.backbone(pixel_values, return_dict=True, **self._fixed(pixel_values), **kwargs)
        features = timm_features(self.body, pixel_values) if fetch else outputs.last_hidden_state
        tokens = split_branches(features, self.layout, self.body, size)
        tokens.outputs = outputs
        return tokens

    def _fixed(self, pixel_values: Tensor) -> dict[str, Any]:
        """timm's pooling is left out; ViT-MAE shuffles its patches by random noise: give it an order instead."""
        if self.config.backbone_config.model_type != "vit_mae":
            return {} if self.body is self.backbone else {"do_pooling": False}
        rows, columns = (side // self.config.patch_size for side in pixel_values.shape[-2:])
        order = torch.arange(rows * columns, device=pixel_values.device).float()
        return {"noise": order.expand(pixel_values.shape[0], -1)}

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> ImageClassifierOutput:
        """Logits of images `(batch, channels, height, width)`, and the loss if `labels` are given."""
        return self.respond(ImageClassifierOutput, self.tokens(pixel_values, **kwargs), labels)


class SoTForSequenceClassification(SoTPreTrainedModel):
    """A text backbone of transformers with the second-order head."""

    main_input_name = "input_ids"

    def __init__(self, config: SoTConfig) -> None:
        super().__init__(config)
        self.counts_padding = counts_padding(self.backbone)

    def positions(self, mask: Tensor) -> Tensor:
        """Positions `(batch, length)` counted from the first kept token."""
        padding = (mask.cumsum(1) == 0).sum(1, keepdim=True)
        return (torch.arange(mask.shape[1], device=mask.device) - padding).clamp(min=0)

    def tokens(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tokens:
        """What the head reads of texts `(batch, length)`."""
        kwargs = self.with_extras(kwargs)
        kwargs |= {"inputs_embeds": inputs_embeds} if input_ids is None else {"input_ids": input_ids}
        kwargs |= {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        if attention_mask is not None:
            attention_mask = (attention_mask != 0).long()  # any other number means kept, to all who read it
            if self.counts_padding:
                kwargs.setdefault("position_ids", self.positions(attention_mask))
        outputs = self.backbone(attention_mask=attention_mask, return_dict=True, **kwargs)
        pooled = outputs.pooler_output if self.config.class_pooler else None
        tokens = split_text(outputs.last_hidden_state, pooled, attention_mask, self.config.class_position)
        tokens.outputs = outputs
        return tokens

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,  # by name: torch.export takes no tensors among the others
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits of texts `(batch, length)`, and the loss if `labels` are given."""
        tokens = self.tokens(input_ids, attention_mask, inputs_embeds, token_type_ids, **kwargs)
        return self.respond(SequenceClassifierOutput, tokens, labels)


AutoModelForImageClassification.register(SoTConfig, SoTForImageClassification)
AutoModelForSequenceClassification.register(SoTConfig, SoTForSequenceClassification)
