"""Poolings by attention, the baselines of today: timm's `map`, and efficient probing."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sot.core.checks import check_positive
from sot.core.pooling import Pool


def attention_mask(mask: Tensor) -> Tensor:
    """`(batch, 1, 1, tokens)` mask for attention in which a sample with nothing to attend to attends to all of it."""
    kept = mask != 0
    return (kept | ~kept.any(1, keepdim=True))[:, None, None, :]


class AttentionPool(Pool):
    """Attention with one learned query, then an MLP: timm's `map` pooling, with the same parameter names.

    It has eight heads, or as many of them as divide the width.
    """

    def __init__(self, dim: int, num_heads: int | None = None) -> None:
        super().__init__(dim)
        num_heads = math.gcd(dim, 8) if num_heads is None else num_heads
        check_positive(num_heads=num_heads)
        if dim % num_heads:
            raise ValueError(f"num_heads must divide the token width {dim}, got {num_heads}")
        self.num_heads = num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        layers = {"fc1": nn.Linear(dim, 4 * dim), "act": nn.GELU(), "fc2": nn.Linear(4 * dim, dim)}
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the query anew."""
        nn.init.trunc_normal_(self.latent, std=self.dim**-0.5)

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        attend = self._attend_unprojected if self.can_skip(self.kv, tokens) else self._attend
        pooled = self.proj(attend(tokens, mask))
        return pooled + self.mlp(self.norm(pooled))

    def _attend(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        query = self.q(self.latent).expand(tokens.shape[0], -1, -1)
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (batch, heads, 1, dim / heads)
        keys_values = self.kv(tokens).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            query, keys_values[0], keys_values[1], attn_mask=None if mask is None else attention_mask(mask)
        )
        return attended.transpose(1, 2).flatten(2)[:, 0]

    def _attend_unprojected(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """The same with qᵀ(Kx) = (Kᵀq)ᵀx and Σ aVx = V Σ ax: with one query no token has to be projected."""
        keys, values = self.kv.weight.view(2, self.num_heads, -1, self.dim)  # each (heads, dim / heads, dim)
        query = self.q(self.latent).view(self.num_heads, 1, -1)
        directions = (query @ keys).squeeze(1) * query.shape[-1] ** -0.5  # the bias of keys is the same for all tokens
        scores = directions @ tokens.mT  # (batch, heads, tokens)
        if mask is not None:
            scores = scores.masked_fill(~attention_mask(mask)[:, 0], -float("inf"))
        means = scores.softmax(-1) @ tokens  # (batch, heads, dim)
        return torch.einsum("bhd,hed->bhe", means, values).flatten(1) + self.kv.bias[self.dim :]


class EfficientProbing(Pool):
    """Multi-query attention without key projection (Psomas et al., ICLR 2026).

    Each learned query attends to the tokens themselves and collects its own slice of the value channels.
    """

    def __init__(self, dim: int, num_queries: int | None = None) -> None:
        super().__init__(dim)
        if num_queries is None:
            num_queries = max(count for count in range(1, 33) if dim % count == 0)
        check_positive(num_queries=num_queries)
        if dim % num_queries:
            raise ValueError(f"num_queries must divide the token width {dim}, got {num_queries}")
        self.num_queries = num_queries
        self.queries = nn.Parameter(torch.empty(num_queries, dim))
        self.values = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the queries anew."""
        nn.init.normal_(self.queries, std=0.02)

    def pool(self, tokens: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
        scores = self.queries.to(tokens.dtype) @ tokens.mT * self.dim**-0.5  # (batch, queries, tokens)
        if mask is not None:
            scores = scores.masked_fill(~attention_mask(mask)[:, 0], -float("inf"))
        if self.can_skip(self.values, tokens):  # Σ aVx = V Σ ax: project the means, not the tokens
            weights = self.values.weight.view(self.num_queries, -1, self.dim)
            return torch.einsum("bqd,qed->bqe", scores.softmax(-1) @ tokens, weights).flatten(1)
        values = self.values(tokens).unflatten(-1, (self.num_queries, -1))  # (batch, tokens, queries, dim / queries)
        return torch.einsum("bqt,btqd->bqd", scores.softmax(-1), values.to(scores.dtype)).flatten(1)
