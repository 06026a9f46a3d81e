"""The SoT family: a timm VisionTransformer with a convolutional token embedding and a second-order head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from timm.layers import LayerNorm, register_notrace_module
from timm.models import generate_default_cfgs
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sot.core.head import HeadConfig, SecondOrderHead
from sot.core.head_config import check_head_settings
from sot.models.embedding.progressive_sampling import share_layers
from sot.models.embedding.token_embed import TokenEmbed, choose_reduction
from sot.models.variants import image_cfg, register_variants

__all__ = ["SecondOrderTransformer", "sinusoid_positions"]

register_notrace_module(SecondOrderHead)

FIXED = ("class_token", "reg_tokens", "pos_embed", "qkv_bias", "norm_layer", "embed_layer")  # of the paper
NO_HEAD = HeadConfig(fusion="class")  # without classes: the class token itself, no parameters
TIMM_POOLS: dict[str | None, HeadConfig] = {  # what timm calls global_pool, as heads
    "token": NO_HEAD,
    "avg": HeadConfig(fusion="word", pool="gap"),
    "max": HeadConfig(fusion="word", pool="max"),
}


def sinusoid_positions(length: int, dim: int) -> Tensor:
    """Fixed positions `(1, length, dim)`: `sin` in even channels, `cos` in odd, of `position / 10000^(2⌊j/2⌋/dim)`."""
    channel = torch.arange(dim, dtype=torch.float64)
    rate = torch.pow(10000.0, -2 * torch.floor(channel / 2) / dim)
    angle = torch.arange(length, dtype=torch.float64).unsqueeze(1) * rate
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float().unsqueeze(0)


class SecondOrderTransformer(VisionTransformer):
    """SoT: token embedding, class token, fixed sinusoid positions, pre-norm blocks, second-order head.

    Args:
        embed: Token embedding: densenet, resnet, inception, nonlocal or naive; t2t or t2t_transformer; or ps, with
            which the first four layers (or all but one, if that is less) sample the tokens.
        head: HeadConfig, or a dictionary of its fields, in which unset ones are those of `HeadConfig.paper()`.
        patch_size: How many times the embedding reduces the image; None keeps about 14×14 tokens.
        num_classes: With 0 and no `head`, the model returns its class token and has no head at all;
            `reset_classifier(0)` keeps the pooling and returns the representation.
        global_pool: None for `head`, '' for all tokens, or timm's 'token', 'avg', 'max' in place of a head.
        drop_rate: Dropout of the pooled words, if not that of `head`.
        **kwargs: As timm's VisionTransformer.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | None = None,
        num_classes: int = 1000,
        global_pool: str | None = None,
        embed: str = "densenet",
        head: HeadConfig | Mapping[str, Any] | None = None,
        default_head: HeadConfig | None = None,
        drop_rate: float | None = None,
        **kwargs: Any,
    ) -> None:
        fixed = [name for name in FIXED if name in kwargs]
        if fixed:
            raise ValueError(f"{', '.join(fixed)} cannot be chosen: the family has one of its own")
        super().__init__(
            img_size=img_size,
            patch_size=choose_reduction(img_size) if patch_size is None else patch_size,
            num_classes=0,
            qkv_bias=False,
            pos_embed="none",
            norm_layer=partial(LayerNorm, eps=1e-5),
            embed_layer=partial(TokenEmbed, embed),
            **kwargs,
        )
        if embed == "ps":
            share_layers(self)
        del self.pos_embed  # None: a buffer takes its name
        self.register_buffer("pos_embed", None, persistent=False)
        self.init_non_persistent_buffers()
        given = head if head is None or isinstance(head, HeadConfig) else HeadConfig.paper(**check_head_settings(head))
        self.head_config = given or default_head or HeadConfig.paper()
        if drop_rate is not None:
            self.head_config = replace(self.head_config, dropout=drop_rate)
        if num_classes == 0 and given is None and global_pool is None:
            global_pool = "token"
        self.head = self._new_head(num_classes, global_pool)

    def init_non_persistent_buffers(self) -> None:
        """Compute the positions; loaders that build on the meta device call this again."""
        length = self.patch_embed.num_patches + self.num_prefix_tokens
        self.pos_embed = sinusoid_positions(length, self.embed_dim).to(self.cls_token)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """timm's initialisation, and the class token drawn as wide as the other weights."""
        super().init_weights(mode, needs_reset)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def _new_head(self, num_classes: int, global_pool: str | None) -> SecondOrderHead:
        accepted = {None: self.head_config, "": NO_HEAD, **TIMM_POOLS}
        if global_pool not in accepted:
            names = ", ".join(map(str, TIMM_POOLS))
            raise ValueError(f"unknown global_pool {global_pool!r}; accepted: '', {names}, or None for the head")
        head = SecondOrderHead(self.embed_dim, num_classes, accepted[global_pool])
        self.num_classes = num_classes
        self.global_pool = self.head_config.pool if global_pool is None else global_pool
        self.head_hidden_size = head.num_features
        return head.to(self.cls_token).train(self.training)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New linear layers over the same pooling, or a new head where there was none or `global_pool` asks for one."""
        if global_pool is None and self.head.config == self.head_config:
            self.num_classes = num_classes
            self.head.reset(num_classes)
        else:
            self.head = self._new_head(num_classes, global_pool)

    def no_weight_decay(self) -> set[str]:
        """Besides timm's: the learned start vector and scale of the normalisation."""
        return super().no_weight_decay() | {"head.pool.norm.start", "head.pool.norm.log_scale"}

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Another image size, with the positions computed anew."""
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        self.init_non_persistent_buffers()

    def _pos_embed(self, x: Tensor) -> Tensor:
        x = x.flatten(1, -2)  # (batch, cells, dim): with a dynamic image size the embedding keeps its grid
        prefix = [self.cls_token.expand(x.shape[0], -1, -1)]
        if self.reg_token is not None:
            prefix.append(self.reg_token.expand(x.shape[0], -1, -1))
        prefix.append(x)
        x = torch.cat(prefix, dim=1)
        positions = self.pos_embed
        if self.dynamic_img_size:
            positions = sinusoid_positions(x.shape[1], x.shape[2]).to(x)
        return self.pos_drop(x + positions)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens to logits, or to the representation before the linear layers."""
        if self.global_pool == "":
            return x
        return self.head(x[:, 0], x[:, self.num_prefix_tokens :], pre_logits=pre_logits)


def _cfg(size: int = 224) -> dict[str, Any]:
    return image_cfg(
        "patch_embed.proj.stem.0",
        input_size=(3, size, size),
        classifier=("head.class_linear", "head.word_linear"),
        license="apache-2.0",
    )


VARIANTS: dict[str, dict[str, Any]] = {
    # 112 px, for the paper's ablations
    "sot_7": {"img_size": 112, "embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2},
    # 8.0 M parameters, 2.5 G multiply-adds
    "sot_tiny": {"embed_dim": 240, "depth": 12, "num_heads": 4, "mlp_ratio": 2.5},
    # 27.0 M, 5.8 G
    "sot_small": {
        **{"embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.5},
        "default_head": HeadConfig.paper(left_dim=24, right_dim=24, dropout=0.5),
    },
    # 76.8 M, 14.5 G
    "sot_base": {
        **{"embed_dim": 528, "depth": 24, "num_heads": 8, "mlp_ratio": 3},
        "default_head": HeadConfig.paper(left_dim=38, right_dim=38, dropout=0.7),
    },
}
default_cfgs = generate_default_cfgs({name: _cfg(VARIANTS[name].get("img_size", 224)) for name in VARIANTS})
register_variants(SecondOrderTransformer, VARIANTS)
