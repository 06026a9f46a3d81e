"""T2T-ViT: a narrow, deep transformer over tokens-to-token (Yuan et al., ICCV 2021, arXiv:2101.11986).

Weights of github.com/yitu-opensource/T2T-ViT load as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from timm.models import generate_default_cfgs

from sot.models.embedding.token_embed import TokenEmbed
from sot.models.variants import image_cfg, register_variants
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


PERFORMERS: dict[str, dict[str, Any]] = {
    "t2t_vit_7": {"embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0},  # 4.3 M parameters
    "t2t_vit_10": {"embed_dim": 256, "depth": 10, "num_heads": 4, "mlp_ratio": 2.0},  # 5.8 M
    "t2t_vit_12": {"embed_dim": 256, "depth": 12, "num_heads": 4, "mlp_ratio": 2.0},  # 6.9 M
    "t2t_vit_14": {"embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0},  # 21.5 M
    "t2t_vit_19": {"embed_dim": 448, "depth": 19, "num_heads": 7, "mlp_ratio": 3.0},  # 39.1 M
    "t2t_vit_24": {"embed_dim": 512, "depth": 24, "num_heads": 8, "mlp_ratio": 3.0},  # 64.1 M
}
TRANSFORMERS = {  # softmax attention inside tokens-to-token
    f"t2t_vit_t_{size}": {**PERFORMERS[f"t2t_vit_{size}"], "tokens": "transformer"} for size in (14, 19, 24)
}
default_cfgs = generate_default_cfgs(
    dict.fromkeys(PERFORMERS, image_cfg("patch_embed.proj.attention1.kqv", crop_pct=0.9))
    | dict.fromkeys(TRANSFORMERS, image_cfg("patch_embed.proj.attention1.attn.qkv", crop_pct=0.9))
)
register_variants(TokensToTokenTransformer, PERFORMERS | TRANSFORMERS)
