"""PVT: a pyramid of four transformer stages whose attention reduces keys and values in space (Wang et al., ICCV 2021).

Parameter names and shapes are those of the authors' checkpoints.
"""

# Annotations stay objects here: torch.fx writes them into the code it makes.
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import (
    DropPath,
    LayerNorm,
    Mlp,
    PatchEmbed,
    calculate_drop_path_rates,
    global_pool_nlc,
    to_2tuple,
)
from timm.models import generate_default_cfgs, named_apply
from timm.models.pvt_v2 import Attention
from timm.models.vision_transformer import init_weights_vit_timm
from torch import Tensor, fx, nn

from sot.models.embedding.token_embed import embedding_like
from sot.models.variants import image_cfg, register_variants
from sot.paper.peers.staged import StagedBackbone

__all__ = ["PyramidVisionTransformer"]

STRIDES = (4, 8, 16, 32)


class PyramidBlock(nn.Module):
    """Pre-norm transformer block over attention whose keys and values are of a map `reduction` times smaller."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        reduction: int,
        mlp_ratio: float,
        proj_drop: float,
        attn_drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, reduction, attn_drop=attn_drop, proj_drop=proj_drop)
        self.norm2 = LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: list[int]) -> Tensor:
        """Tokens `(batch, rows · columns, dim)` of a grid of `[rows, columns]`; without reduction any tokens."""
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PyramidVisionTransformer(StagedBackbone):
    """PVT: four stages at strides 4, 8, 16 and 32; a class token joins in the last.

    The image may have another size than `img_size` if its sides are multiples of 32: positions are interpolated.

    Args:
        img_size: Size the position tables are made for.
        embed_dims: Width of the tokens in each stage; `depths`, `num_heads`, `mlp_ratios`, `reductions` likewise.
        global_pool: 'token' (the class token), 'avg' and timm's other poolings of the words, or '' for all tokens.
    """

    NORM = "norm"
    CLASSIFIERS: ClassVar[dict[str, str]] = {"head": "embed_dim"}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # stages are attributes made by number

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dims: tuple[int, ...] = (64, 128, 320, 512),
        depths: tuple[int, ...] = (2, 2, 2, 2),
        num_heads: tuple[int, ...] = (1, 2, 5, 8),
        mlp_ratios: tuple[float, ...] = (8, 8, 4, 4),
        reductions: tuple[int, ...] = (8, 4, 2, 1),
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dims[-1]
        self.num_prefix_tokens = 1
        self.feature_info = []
        height, width = to_2tuple(img_size)
        drop_paths = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        channels = in_chans
        for i, dim in enumerate(embed_dims):
            patch = 4 if i == 0 else 2
            embed = PatchEmbed((height, width), patch, channels, dim, nn.LayerNorm, strict_img_size=False)
            height, width, channels = height // patch, width // patch, dim
            length = height * width + (self.num_prefix_tokens if i == 3 else 0)
            blocks = [
                PyramidBlock(
                    dim, num_heads[i], reductions[i], mlp_ratios[i], proj_drop_rate, attn_drop_rate, drop_paths[i][j]
                )
                for j in range(depths[i])
            ]
            setattr(self, f"patch_embed{i + 1}", embed)
            setattr(self, f"pos_embed{i + 1}", nn.Parameter(torch.zeros(1, length, dim)))
            setattr(self, f"pos_drop{i + 1}", nn.Dropout(pos_drop_rate))
            setattr(self, f"block{i + 1}", nn.ModuleList(blocks))
            self.feature_info.append({"module": f"block{i + 1}", "num_chs": dim, "reduction": STRIDES[i]})
        self.norm = LayerNorm(self.embed_dim, eps=1e-6)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = nn.Linear(self.embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.init_weights()
        self.to(device=device, dtype=dtype)

    def init_weights(self) -> None:
        """Truncated normal of std 0.02 for linear layers, positions and class token."""
        named_apply(init_weights_vit_timm, self)
        for parameter in self.parameters(recurse=False):
            nn.init.trunc_normal_(parameter, std=0.02)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise rates: a stage each, or a block each."""
        blocks = r"^block(\d+)" if coarse else r"^block(\d+)\.(\d+)"
        return {
            "stem": r"^patch_embed1|^pos_embed1",
            "blocks": [(blocks, None), (r"^(?:patch_embed|pos_embed)(\d+)|^cls_token", (0,)), (r"^norm", (99999,))],
        }

    def get_classifier(self) -> nn.Module:
        """The linear layer."""
        return self.head

    def replace_embedding(self, kind: str) -> None:
        """Another embedding in the first stage: the paper's "+ours"."""
        self.register_module("patch_embed1", embedding_like(self.patch_embed1, kind))

    def stages(self, x: Tensor, norm: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Tokens `(batch, 1 + words, dim)` of the last stage, class token first, normalised, and the maps of all."""
        height, width = x.shape[2], x.shape[3]
        maps: list[Tensor] = []
        for i, stride in enumerate(STRIDES, 1):
            embed, positions = getattr(self, f"patch_embed{i}"), getattr(self, f"pos_embed{i}")
            grid = [height // stride, width // stride]
            prefix = self.num_prefix_tokens if i == len(STRIDES) else 0
            x = embed(maps[-1] if maps else x)
            table = fit_positions(positions[:, prefix:], embed.grid_size, grid)
            if prefix:
                x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
                table = torch.cat([positions[:, :prefix], table], dim=1)
            x = getattr(self, f"pos_drop{i}")(x + table)
            for block in getattr(self, f"block{i}"):
                x = self.run_block(block, x, grid)
            maps.append(to_map(x[:, prefix:], grid))
        tokens = self.norm(x)
        if norm:
            maps[-1] = to_map(tokens[:, prefix:], grid)
        return tokens, maps

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens to logits, or to what the linear layer reads."""
        x = self.head_drop(global_pool_nlc(x, self.global_pool, self.num_prefix_tokens))
        return x if pre_logits else self.head(x)


def to_map(tokens: Tensor, grid: list[int]) -> Tensor:
    """Tokens `(batch, rows · columns, dim)` to `(batch, dim, rows, columns)`."""
    return tokens.reshape(tokens.shape[0], grid[0], grid[1], tokens.shape[2]).permute(0, 3, 1, 2).contiguous()


def fit_positions(positions: Tensor, made_for: tuple[int, int], grid: list[int]) -> Tensor:
    """Positions `(1, rows · columns, dim)` interpolated to another grid, bilinearly as the authors do."""
    if made_for[0] == grid[0] and made_for[1] == grid[1]:
        return positions
    table = to_map(positions, [made_for[0], made_for[1]])
    return F.interpolate(table, size=(grid[0], grid[1]), mode="bilinear").flatten(2).transpose(1, 2)


fx.wrap("fit_positions")  # not timm's register_notrace_function: of a forward in another file it reaches nothing here


def resize_positions(state: dict[str, Any], model: PyramidVisionTransformer) -> dict[str, Any]:
    """A checkpoint for another image size: its position tables interpolated to this model's."""
    state = dict(state.get("model", state))
    for i in range(1, 5):
        name = f"pos_embed{i}"
        prefix = int(i == 4)
        side = int((state[name].shape[1] - prefix) ** 0.5)
        grid = list(getattr(model, f"patch_embed{i}").grid_size)
        words = fit_positions(state[name][:, prefix:], (side, side), grid)
        state[name] = torch.cat([state[name][:, :prefix], words], dim=1)
    return state


VARIANTS = {
    "pvt_tiny": {"depths": (2, 2, 2, 2)},  # 13.2 M parameters, 1.9 G multiply-adds
    "pvt_small": {"depths": (3, 4, 6, 3)},  # 24.5 M, 3.8 G
    "pvt_large": {"depths": (3, 8, 27, 3)},  # 61.4 M, 9.8 G
}
default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, image_cfg("patch_embed1.proj", fixed_input_size=False)))
register_variants(PyramidVisionTransformer, VARIANTS, filter_fn=resize_positions, out_indices=(0, 1, 2, 3))
