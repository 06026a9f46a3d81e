"""The classification head: class token and pooled word tokens, fused (section 3.2 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sot.core.checks import check_positive
from sot.core.choices import POOLS as POOLS
from sot.core.head_config import HeadConfig as HeadConfig
from sot.core.packed import Packed
from sot.core.pooling import AveragePool, CovariancePool, CrossCovariancePool, MaxPool
from sot.ops.linear import linear
from sot.ops.precision import is_autocast
from sot.plugins import built_by


def _norm_settings(config: HeadConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("norm", "exponent", "num_values", "num_iterations", "center")}


POOLS.update(
    {
        "mgcrp": lambda dim, c: CrossCovariancePool(dim, c.heads, c.left_dim, c.right_dim, **_norm_settings(c)),
        "gcp": lambda dim, c: CovariancePool(dim, c.reduced_dim, **_norm_settings(c)),
        "gap": lambda dim, c: AveragePool(dim),
        "max": lambda dim, c: MaxPool(dim),
        "attn": built_by("sot.pools.attention:AttentionPool"),
        "ep": built_by("sot.pools.attention:EfficientProbing", "num_queries"),
        "mhc3": built_by("sot.pools.moments:MomentProbing"),
    }
)


class SecondOrderHead(nn.Module):
    """Class token `(batch, dim)` and word tokens `(batch, tokens, dim)` to logits `(batch, num_classes)`.

    With `num_classes` 0, or `pre_logits=True`, the output is the representation that the linear layers read,
    `num_features` wide: the class token first, then the pooled words. A part the fusion does not use may be None.
    Words without padding may come as `Packed`. With `with_branches=True` the output is `(logits, branches)`: the logits
    of each of `num_branches` classifiers, as `loss` takes them. `accelerated`, which `sot.accelerate` sets, allows it
    not to call its linear layers where it knows a faster product.
    """

    accelerated = False

    def __init__(self, dim: int, num_classes: int, config: HeadConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__()
        check_positive(dim=dim)
        self.config = config if isinstance(config, HeadConfig) else HeadConfig.from_dict(config or {})
        self.dim, self.fusion = dim, self.config.fusion
        self.pool = None if self.fusion == "class" else POOLS.find(self.config.pool)(dim, self.config)
        self.average = AveragePool(dim) if self.config.average else None
        self.word_features = sum(0 if pool is None else pool.out_features for pool in (self.pool, self.average))
        self.norm = nn.LayerNorm(dim) if self.config.pre_norm else nn.Identity()
        self.widen: nn.Module = nn.Identity()
        self.class_features = 0 if self.fusion in ("word", "aggr_all") else self.config.class_width or dim
        if self.config.class_width is not None:
            self.widen = nn.Linear(dim, self.config.class_width)
        self.num_features = self.class_features + self.word_features
        self.dropout = nn.Dropout(self.config.dropout)
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", None, persistent=False)  # of the loss, where classes are to be balanced
        self.reset(num_classes)
        self.apply(init_linear)

    def reset(self, num_classes: int) -> None:
        """Replace the linear layers by new ones for `num_classes`, of the same device, type and mode."""
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 0:
            raise ValueError(f"num_classes must be an integer >= 0, got {num_classes!r}")
        old = next(self.parameters(), torch.empty(0))
        self.num_classes = num_classes
        self.class_linear: nn.Module = nn.Identity()
        self.word_linear: nn.Module = nn.Identity()
        if num_classes > 0 and self.fusion in ("sum", "late", "class"):
            self.class_linear = nn.Linear(self.class_features, num_classes).to(old)
        if num_classes > 0 and self.fusion != "class":
            features = self.num_features if self.fusion == "concat" else self.word_features
            self.word_linear = nn.Linear(features, num_classes).to(old)
        for layer in (self.class_linear, self.word_linear):
            init_linear(layer)
            layer.train(self.training)

    @property
    def num_branches(self) -> int:
        """Number of classifiers that are trained: two for late fusion, one for the others."""
        return 2 if self.fusion == "late" else 1

    def forward(
        self,
        class_token: Tensor | None,
        word_tokens: Tensor | Packed | None,
        mask: Tensor | None = None,
        pre_logits: bool = False,
        with_branches: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        class_part, word_part = self.represent(class_token, word_tokens, mask)
        if pre_logits or self.num_classes == 0:
            return torch.cat([class_part, word_part], dim=1)
        branches = self.branches(class_part, word_part)
        logits = self.merge(branches)
        return (logits, branches) if with_branches else logits

    def represent(
        self, class_token: Tensor | None, word_tokens: Tensor | Packed | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the linear layers read: `(batch, class_features)` and `(batch, word_features)`, either may be 0 wide."""
        self._check(class_token, word_tokens)
        if class_token is not None:
            class_token = self.norm(class_token)
        if self.pool is None:
            assert class_token is not None
            return self.widen(class_token), class_token[:, :0]
        assert word_tokens is not None
        word_part = self.dropout(self._pooled(class_token, word_tokens, mask))
        if self.class_features == 0:
            return word_part[:, :0], word_part
        assert class_token is not None
        return class_token, word_part

    def _pooled(self, class_token: Tensor | None, word_tokens: Tensor | Packed, mask: Tensor | None) -> Tensor:
        """The words, with the class token in front of them for `aggr_all`, as one vector; behind it their mean."""
        assert self.pool is not None
        if isinstance(word_tokens, Packed):
            words: Any = Packed(self.norm(word_tokens.tokens), word_tokens.starts)
        else:
            words = self.norm(word_tokens)
        if self.fusion == "aggr_all":
            assert class_token is not None
            if isinstance(words, Packed):
                words, mask = words.padded()
            words = torch.cat([class_token.unsqueeze(1), words], dim=1)
            if mask is not None:
                mask = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
        pooled: Tensor = self.pool(words, mask)
        return pooled if self.average is None else torch.cat([pooled, self.average(words, mask)], dim=1)

    def branches(self, class_part: Tensor, word_part: Tensor) -> list[Tensor]:
        """Logits of each classifier: two for late fusion, one for the others."""
        if self.fusion == "late":
            return [self._classify(self.class_linear, class_part), self._classify(self.word_linear, word_part)]
        if self.fusion == "sum":
            return [self._classify(self.class_linear, class_part) + self._classify(self.word_linear, word_part)]
        if self.fusion == "class":
            return [self._classify(self.class_linear, class_part)]
        return [self._classify(self.word_linear, torch.cat([class_part, word_part], dim=1))]

    def _classify(self, layer: nn.Module, rows: Tensor) -> Tensor:
        if self.accelerated and type(layer) is nn.Linear and not is_autocast(rows):
            return linear(rows, layer.weight, layer.bias)
        logits: Tensor = layer(rows)
        return logits

    def merge(self, branches: list[Tensor]) -> Tensor:
        """The logits themselves, or for two branches the log of their mean probability, so that softmax is right."""
        if len(branches) == 1:
            return branches[0]
        log_probabilities = torch.stack([branch.log_softmax(-1) for branch in branches])
        return log_probabilities.logsumexp(0) - math.log(len(branches))

    def loss(self, branches: list[Tensor], target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Sum of the cross-entropies of the branches; `target` holds class indices or probabilities."""
        how: dict[str, Any] = {"weight": self.class_weights, "label_smoothing": label_smoothing}
        losses = [F.cross_entropy(branch, target, **how) for branch in branches]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _check(self, class_token: Tensor | None, word_tokens: Tensor | Packed | None) -> None:
        if self.fusion != "word":
            if class_token is None:
                raise ValueError(f"fusion {self.fusion!r} needs a class token, got None; without one use 'word'")
            if class_token.ndim != 2 or class_token.shape[1] != self.dim:
                raise ValueError(f"class token must have shape (batch, {self.dim}), got {tuple(class_token.shape)}")
        if self.fusion != "class" and word_tokens is None:
            raise ValueError(f"fusion {self.fusion!r} needs word tokens, got None; without them use 'class'")
        if class_token is None or word_tokens is None:
            return
        samples = len(word_tokens.starts) - 1 if isinstance(word_tokens, Packed) else word_tokens.shape[0]
        if class_token.shape[0] != samples:
            batches = f"{class_token.shape[0]} and {samples}"
            raise ValueError(f"class token and word tokens must have the same batch size, got {batches}")


def init_linear(module: nn.Module) -> None:
    """The paper's initialisation: truncated normal of std 0.02, no bias."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
