"""T2T-ViT: a narrow, deep transformer over tokens-to-token (Yuan et al., ICCV 2021, arXiv:2101.11986).

Weights of github.com/yitu-opensource/T2T-ViT load as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from timm.models import generate_default_cfgs, register_model

from sot.models.embedding.token_embed import TokenEmbed
from sot.models.variants import build_variant, image_cfg
from sot.models.vision import sinusoid_positions
from sot.paper.peers.published import PublishedTransformer

EMBEDS = {"performer": "t2t", "transformer": "t2t_transformer"}


class TokensToTokenTransformer(PublishedTransformer):
    """T2T-ViT.

    Args:
        tokens: Attention inside tokens-to-token: performer or transformer.
        token_dim: Its width.
        **kwargs: As timm's VisionTransformer.
    """

    RENAMED: ClassVar[dict[str, str | None]] = {r"tokens_to_token\.": "patch_embed.proj."}

    def __init__(self, tokens: str = "performer", token_dim: int = 64, **kwargs: Any) -> None:
        if tokens not in EMBEDS:
            raise ValueError(f"unknown tokens {tokens!r}; accepted: {', '.join(EMBEDS)}")
        embed = partial(TokenEmbed, EMBEDS[tokens], network={"token_dim": token_dim})
        super().__init__(pos_embed="none", embed_layer=embed, **kwargs)
        del self.pos_embed  # None: a buffer takes its name, fixed but saved, as published
        length = self.patch_embed.num_patches + self.num_prefix_tokens
        self.register_buffer("pos_embed", sinusoid_positions(length, self.embed_dim).to(self.cls_token))

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Another image size, with the positions resampled."""
        old_grid = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        self.pos_embed = self.fit_positions(self.get_buffer("pos_embed"), old_grid)


SIZES: dict[str, dict[str, Any]] = {
    "7": {"embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0},
    "10": {"embed_dim": 256, "depth": 10, "num_heads": 4, "mlp_ratio": 2.0},
    "12": {"embed_dim": 256, "depth": 12, "num_heads": 4, "mlp_ratio": 2.0},
    "14": {"embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0},
    "19": {"embed_dim": 448, "depth": 19, "num_heads": 7, "mlp_ratio": 3.0},
    "24": {"embed_dim": 512, "depth": 24, "num_heads": 8, "mlp_ratio": 3.0},
}
SIZES |= {f"t_{size}": {**SIZES[size], "tokens": "transformer"} for size in ("14", "19", "24")}

FIRST_LAYERS = {"performer": "patch_embed.proj.attention1.kqv", "transformer": "patch_embed.proj.attention1.attn.qkv"}

default_cfgs = generate_default_cfgs(
    {f"t2t_vit_{size}": image_cfg(FIRST_LAYERS[SIZES[size].get("tokens", "performer")], crop_pct=0.9) for size in SIZES}
)


def _create(size: str, pretrained: bool, kwargs: dict[str, Any]) -> TokensToTokenTransformer:
    return build_variant(TokensToTokenTransformer, f"t2t_vit_{size}", pretrained, SIZES[size], kwargs)


@register_model
def t2t_vit_7(pretrained: bool = False, **kwargs: Any) -> TokensToTokenTransformer:
    """T2T-ViT-7: 4.3 M parameters."""
    return _create("7", pretrained, kwargs)


@register_model
def t2t_vit_10(pretrained: bool = False, **kwargs: Any) -> TokensToTokenTransformer:
    """T2T-ViT-10: 5.8 M parameters."""
    return _create("10", pretrained, kwargs)


@register_model
def t2t_vit_12(pretrained: bool = False, **kwargs: Any) -> TokensToTokenTransformer:
    """T2T-ViT-12: 6.9 M parameters."""
    return _create("12", pretrained, kwargs)


@register_model
def t2t_vit_14(pretrained: bool = False, **kwargs: Any) -> TokensToTokenTransformer:
    """T2T-ViT-14: 21.5 M parameters."""
    return _create("14", pretrained, kwargs)


@register_model
def t2t_vit_19(pretrained: bool = False, **kwargs: Any) -> TokensToTokenTransformer:
    """T2T-ViT-19: 39.1 M parameters."""
    return _create("19", pretrained, kwargs)


@register_model
def t2t_vit_24(pretrained: bool = False, **kwargs: Any) -> TokensToTokenTransformer:
    """T2T-ViT-24: 64.1 M parameters."""
    return _create("24", pretrained, kwargs)


@register_model
def t2t_vit_t_14(pretrained: bool = False, **kwargs: Any) -> TokensToTokenTransformer:
    """T2T-ViT-14 with softmax attention inside tokens-to-token."""
    return _create("t_14", pretrained, kwargs)


@register_model
def t2t_vit_t_19(pretrained: bool = False, **kwargs: Any) -> TokensToTokenTransformer:
    """T2T-ViT-19 with softmax attention inside tokens-to-token."""
    return _create("t_19", pretrained, kwargs)


@register_model
def t2t_vit_t_24(pretrained: bool = False, **kwargs: Any) -> TokensToTokenTransformer:
    """T2T-ViT-24 with softmax attention inside tokens-to-token."""
    return _create("t_24", pretrained, kwargs)
