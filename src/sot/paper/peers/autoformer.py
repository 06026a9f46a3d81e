"""AutoFormer: vision transformers found by search, each layer with heads and MLP of its own (Chen et al., ICCV 2021).

Relative positions on keys and values are the sum of a vertical and a horizontal encoding. The authors publish
supernets; `slice_supernet` cuts the searched models out of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, DropPath, LayerNorm, maybe_add_mask, resolve_self_attn_mask, to_2tuple
from timm.models import generate_default_cfgs
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from sot.models.variants import image_cfg, register_variants

__all__ = ["SearchedVisionTransformer", "slice_supernet"]

HEAD_DIM = 64
REACH = 14  # rows or columns that an encoding tells apart; farther ones count as these
SUPERNET_EMBED = "patch_embed_super."


class RelativePosition(nn.Module):
    """Encodings of vertical and horizontal offsets between words; entry 0 of both is for pairs with the class token."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.embeddings_table_v = nn.Parameter(torch.empty(2 * REACH + 2, HEAD_DIM))
        self.embeddings_table_h = nn.Parameter(torch.empty(2 * REACH + 2, HEAD_DIM))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal of std 0.02."""
        nn.init.trunc_normal_(self.embeddings_table_v, std=0.02)
        nn.init.trunc_normal_(self.embeddings_table_h, std=0.02)

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Encodings between rows `(rows, rows, dim)`, between columns `(columns, columns, dim)`, and with the class."""
        rows = self.embeddings_table_v[offset_index(self.grid[0], self.embeddings_table_v.device)]
        columns = self.embeddings_table_h[offset_index(self.grid[1], self.embeddings_table_h.device)]
        return rows, columns, self.embeddings_table_v[0] + self.embeddings_table_h[0]

    def scores(self, query: Tensor) -> Tensor:
        """`query[i] · encoding[i, j]` of `(batch, heads, tokens, dim)`, as `(batch, heads, tokens, tokens)`.

        A word's encodings are its row's plus its column's, so that it meets `rows + columns` of them instead of all.
        """
        rows, columns, of_class = self.tables()
        batch, heads, tokens, dim = query.shape
        words = query[:, :, 1:].reshape(batch, heads, self.grid[0], self.grid[1], dim)
        vertical = torch.einsum("bhrcd,rkd->bhrck", words, rows)
        horizontal = torch.einsum("bhrcd,ckd->bhrck", words, columns)
        between = (vertical.unsqueeze(-1) + horizontal.unsqueeze(-2)).flatten(4).flatten(2, 3)  # between words
        with_class = query @ of_class.unsqueeze(-1)  # (batch, heads, tokens, 1)
        below = torch.cat([with_class[:, :, 1:], between], dim=-1)
        return torch.cat([with_class[:, :, :1].expand(-1, -1, -1, tokens), below], dim=2)

    def values(self, attention: Tensor) -> Tensor:
        """`Σⱼ attention[i, j] · encoding[i, j]`, as `(batch, heads, tokens, dim)`."""
        rows, columns, of_class = self.tables()
        batch, heads, _, _ = attention.shape
        words = attention[:, :, 1:, 1:].reshape(batch, heads, self.grid[0], self.grid[1], self.grid[0], self.grid[1])
        between = torch.einsum("bhrck,rkd->bhrcd", words.sum(-1), rows)
        between = (between + torch.einsum("bhrck,ckd->bhrcd", words.sum(-2), columns)).flatten(2, 3)
        below = between + attention[:, :, 1:, :1] * of_class
        return torch.cat([attention[:, :, :1].sum(-1, keepdim=True) * of_class, below], dim=2)


def offset_index(size: int, device: torch.device) -> Tensor:
    """Table entry of each pair of rows (or columns), `1 + reach + clamp(other - own)`: 0 is for the class token."""
    position = torch.arange(size, device=device)
    return (position - position[:, None]).clamp(-REACH, REACH) + REACH + 1


class SearchedAttention(Attention):
    """timm's attention, of heads 64 wide whatever the tokens are, with relative positions on keys and values."""

    def __init__(self, dim: int, num_heads: int, grid: tuple[int, int], **kwargs: Any) -> None:
        super().__init__(dim, num_heads, attn_head_dim=HEAD_DIM, **kwargs)
        self.rel_pos_embed_k = RelativePosition(grid)
        self.rel_pos_embed_v = RelativePosition(grid)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        query = query * self.scale
        scores = query @ key.transpose(-2, -1) + self.rel_pos_embed_k.scores(query)
        scores = maybe_add_mask(scores, resolve_self_attn_mask(tokens, scores, attn_mask, is_causal))
        attention = self.attn_drop(scores.softmax(-1))
        out = attention @ value + self.rel_pos_embed_v.values(attention)
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, self.attn_dim)))


class SearchedBlock(nn.Module):
    """Pre-norm transformer block, with the authors' names."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        grid: tuple[int, int],
        qkv_bias: bool,
        proj_drop: float,
        attn_drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.attn_layer_norm = LayerNorm(dim, eps=1e-5)
        self.attn = SearchedAttention(dim, num_heads, grid, qkv_bias=qkv_bias, attn_drop=attn_drop, proj_drop=proj_drop)
        self.ffn_layer_norm = LayerNorm(dim, eps=1e-5)
        self.fc1 = nn.Linear(dim, int(dim * mlp_ratio))
        self.fc2 = nn.Linear(int(dim * mlp_ratio), dim)
        self.drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x = x + self.drop_path(self.attn(self.attn_layer_norm(x), attn_mask=attn_mask, is_causal=is_causal))
        hidden = self.drop(F.gelu(self.fc1(self.ffn_layer_norm(x))))
        return x + self.drop_path(self.drop(self.fc2(hidden)))


class SearchedVisionTransformer(VisionTransformer):
    """AutoFormer.

    Args:
        heads: Attention heads of each layer; there are as many layers.
        mlp_ratios: Width of each layer's MLP over that of the tokens.
        img_size: `set_input_size` changes it later; images of changing size (`dynamic_img_size`) are not taken.
        global_pool: The authors' models average the words after the last norm.
        **kwargs: As timm's VisionTransformer.
    """

    def __init__(
        self,
        heads: tuple[int, ...],
        mlp_ratios: tuple[float, ...],
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        global_pool: str = "avg",
        dynamic_img_size: bool = False,
        **kwargs: Any,
    ) -> None:
        if len(heads) != len(mlp_ratios):
            raise ValueError(f"heads and mlp_ratios must be as many, got {len(heads)} and {len(mlp_ratios)}")
        if dynamic_img_size:
            raise ValueError("dynamic_img_size=True is not possible: relative positions are made for one grid of words")
        rows, columns = (size // patch for size, patch in zip(to_2tuple(img_size), to_2tuple(patch_size)))

        def block(dim: int, depth: int, qkv_bias: bool, drop_path: float, **settings: Any) -> SearchedBlock:
            drops = {name: settings[name] for name in ("proj_drop", "attn_drop")}
            shape = (dim, heads[depth], mlp_ratios[depth], (rows, columns))
            built = SearchedBlock(*shape, qkv_bias=qkv_bias, drop_path=drop_path, **drops)
            return built.to(device=settings.get("device"), dtype=settings.get("dtype"))

        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            global_pool=global_pool,
            fc_norm=False,
            depth=len(heads),
            norm_layer=partial(LayerNorm, eps=1e-5),
            block_fn=block,
            **kwargs,
        )

    def no_weight_decay(self) -> set[str]:
        """Besides timm's: the relative positions."""
        tables = {name for name, _ in self.named_parameters() if "rel_pos_embed" in name}
        return super().no_weight_decay() | tables

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Another image size: absolute positions interpolated, relative ones read for the new grid."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for module in self.modules():
            if isinstance(module, RelativePosition):
                module.grid = self.patch_embed.grid_size


def slice_supernet(state: Mapping[str, Any], model: SearchedVisionTransformer) -> dict[str, Tensor]:
    """A published supernet cut to `model`, in timm's names; a checkpoint that is in those already is left as it is."""
    state = dict(state.get("model", state))
    if f"{SUPERNET_EMBED}proj.weight" in state:
        state = {name.replace(SUPERNET_EMBED, "patch_embed."): weight for name, weight in state.items()}
        state = {name: cut(name, state[name], own.shape) for name, own in model.state_dict().items()}
    return checkpoint_filter_fn(state, model)


def cut(name: str, weight: Tensor, shape: torch.Size) -> Tensor:
    """The first entries of a weight along each axis; q, k and v are every third row of theirs.

    As many classes and positions as there are: timm fits those to the model.
    """
    if name == "head.bias":
        return weight
    if name in ("head.weight", "pos_embed"):
        return weight[..., : shape[-1]]
    if name.endswith("attn.qkv.weight"):
        weight = torch.cat([weight[start : shape[0] : 3] for start in range(3)])
    return weight[tuple(slice(size) for size in shape)]


SEARCHED: dict[str, dict[str, Any]] = {  # what the authors' search found
    "autoformer_tiny": {  # 5.8 M parameters, 1.3 G multiply-adds
        "embed_dim": 192,
        "heads": (3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 3, 3),
        "mlp_ratios": (3.5, 3.5, 3, 3.5, 3, 3, 4, 4, 3.5, 4, 3.5, 4, 3.5),
    },
    "autoformer_small": {  # 22.9 M, 5.1 G
        "embed_dim": 384,
        "heads": (6, 6, 5, 7, 5, 5, 5, 6, 6, 7, 7, 6, 7),
        "mlp_ratios": (3, 3.5, 3, 3.5, 4, 4, 4, 4, 4, 4, 4, 3.5, 4),
    },
    "autoformer_base": {  # 53.7 M, 11 G
        "embed_dim": 576,
        "heads": (9, 9, 9, 9, 9, 10, 9, 9, 10, 9, 10, 9, 9, 10),
        "mlp_ratios": (3.5, 3.5, 4, 3.5, 4, 3.5, 3.5, 3, 4, 4, 3, 4, 3, 3.5),
    },
}
default_cfgs = generate_default_cfgs(dict.fromkeys(SEARCHED, image_cfg("patch_embed.proj")))
register_variants(SearchedVisionTransformer, SEARCHED, filter_fn=slice_supernet)
