"""PS-ViT: a transformer whose first layers sample its tokens (Yue et al., ICCV 2021, arXiv:2108.01684).

Weights of github.com/yuexy/PS-ViT load as they are. What is dropped of them is not lost: points are computed from the
grid, and the position layer, which all layers share, is stored once.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from timm.models import generate_default_cfgs

from sot.models.embedding.progressive_sampling import share_layers
from sot.models.embedding.token_embed import TokenEmbed
from sot.models.variants import image_cfg, register_variants
from sot.paper.peers.published import PublishedTransformer


class ProgressiveSamplingTransformer(PublishedTransformer):
    """PS-ViT.

    Args:
        patch_size: Of the regular grid that the points start from; it need not divide the image.
        depth: All layers, those that sample among them.
        iterations: How many sample.
        stem_width: Channels between the two bottlenecks of the stem.
        **kwargs: As timm's VisionTransformer.
    """

    RENAMED: ClassVar[dict[str, str | None]] = {
        r"point_coord$": None,
        r"ps_layers\.\d+\.position_layer\.": None,
        r"trans_layers\.": "blocks.",
        r"(?=(stem|pos_layer|ps_layers)\.)": "patch_embed.proj.",
    }

    def __init__(self, iterations: int = 4, stem_width: int = 256, **kwargs: Any) -> None:
        embed = partial(TokenEmbed, "ps", network={"stem_width": stem_width})
        super().__init__(pos_embed="none", embed_layer=embed, **kwargs)
        share_layers(self, iterations)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups for layer decay: the layers that sample come before the others."""
        return {
            "stem": r"^cls_token|reg_token|patch_embed\.proj\.(?:stem|pos_layer)",
            "sampling": r"^patch_embed\.proj\.ps_layers\.(\d+)",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


BASE = {"stem_width": 256, "embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0}  # 21.3 M parameters
TINY = {"stem_width": 192, "embed_dim": 192, "depth": 12, "num_heads": 3, "mlp_ratio": 3.0}  # 4.8 M
VARIANTS: dict[str, dict[str, Any]] = {  # named after the side of their grid of points at 224 px
    "ps_vit_ti_14": {"patch_size": 16, **TINY},
    "ps_vit_b_10": {"patch_size": 22, **BASE},
    "ps_vit_b_14": {"patch_size": 16, **BASE},
    "ps_vit_b_18": {"patch_size": 12, **BASE},
}
default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, image_cfg("patch_embed.proj.stem.0", crop_pct=0.9)))
register_variants(ProgressiveSamplingTransformer, VARIANTS)
