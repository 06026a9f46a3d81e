"""One input through a model with everything an explanation looks at: tokens, attention maps, word embeddings."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sot.models.modeling import SoTForImageClassification, SoTForSequenceClassification, SoTPreTrainedModel
from sot.models.tokens import Tokens

_ONE_AT_A_TIME = threading.RLock()  # hooks and switches below belong to the model, which a server shares


@dataclass
class TokenReading:
    """Tokens of one input as the head reads them, and how they came about."""

    tokens: Tokens
    num_prefix: int  # tokens before the first word of an image; none of a text, whose words are all of its tokens
    class_index: int | None  # which token is the class token
    attentions: list[Tensor]  # (batch, heads, queries, keys) of each layer, if asked for
    inputs: Tensor  # pixels, or the embeddings of the text's tokens


def check_model(model: Any) -> None:
    """Raise ValueError unless the model has a second-order head on a backbone of ours."""
    if not isinstance(model, SoTPreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} cannot be explained; accepted: a model that sot.equip or sot train made"
        )


@contextmanager
def explaining(model: nn.Module) -> Iterator[None]:
    """Gradients of activations but not of weights, no dropout; afterwards the model is as it was. One at a time."""
    with _ONE_AT_A_TIME:
        modes = [(module, module.training) for module in model.modules()]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.eval()
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
            for module, mode in modes:
                module.training = mode


def read_image(model: SoTForImageClassification, pixels: Tensor, attentions: bool = False) -> TokenReading:
    """The tokens of images `(batch, channels, height, width)`, in the type of the head."""
    assert model.layout is not None
    pixels = pixels.to(model.device).detach().clone().requires_grad_()
    of_timm = model.body is not model.backbone
    switch: AbstractContextManager[list[Tensor]] = explicit_attention(model) if attentions else nullcontext([])
    with switch as maps:
        tokens = model.tokens(pixels, output_attentions=True if attentions and not of_timm else None)
    found = maps if of_timm else list(getattr(tokens.outputs, "attentions", None) or [])
    prefix = model.layout.num_prefix_tokens
    return TokenReading(_as_head(model, tokens), prefix, 0 if model.layout.has_class_token else None, found, pixels)


def read_text(
    model: SoTForSequenceClassification, encoded: Mapping[str, Tensor], attentions: bool = False
) -> TokenReading:
    """The tokens of one text, whose embeddings are leaves of the graph."""
    embeddings: list[Tensor] = []

    def make_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    inputs: dict[str, Any] = {name: value.to(model.device) for name, value in encoded.items()}
    handle = model.get_input_embeddings().register_forward_hook(make_leaf)
    try:
        with explicit_attention(model) if attentions else nullcontext():
            tokens = model.tokens(**inputs, output_attentions=attentions or None)
    finally:
        handle.remove()
    index = tokens.word_tokens.shape[1] - 1 if model.config.class_position == "last" else 0
    found = list(getattr(tokens.outputs, "attentions", None) or [])
    return TokenReading(_as_head(model, tokens), 0, index, found, embeddings[0])


def _as_head(model: Any, tokens: Tokens) -> Tokens:
    """In the type of the head, which may be float32 above a backbone in half precision."""
    return tokens.to(next(model.classifier.parameters()).dtype)


@contextmanager
def explicit_attention(model: Any) -> Iterator[list[Tensor]]:
    """Attention as softmax and product instead of one fused kernel, which has no map; the maps of timm's backbones."""
    maps: list[Tensor] = []
    if model.body is model.backbone:
        before = model.backbone.config._attn_implementation
        model.backbone.set_attn_implementation("eager")
        try:
            yield maps
        finally:
            model.backbone.set_attn_implementation(before)
        return
    fused = [(module, module.fused_attn) for module in model.body.modules() if hasattr(module, "fused_attn")]
    drops = [module.attn_drop for module, _ in fused if isinstance(getattr(module, "attn_drop", None), nn.Module)]
    hooks = [drop.register_forward_hook(lambda module, args, output: maps.append(output)) for drop in drops]
    try:
        for module, _ in fused:
            module.fused_attn = False
        yield maps
    finally:
        for module, was in fused:
            module.fused_attn = was
        for hook in hooks:
            hook.remove()
