"""Which words, and which pairs of them, carry the evidence of second-order pooling, and its singular values.

The words enter the pooled matrix one by one, `Q = Σᵢ Cᵢ` with `Cᵢ = xᵢyᵢᵀ/q`; without normalisation they would add up
to the logit one by one, too. The normalisation makes them depend on each other. All of ours that keep a size, `f(tQ) =
t^α f(Q)`, have by Euler's theorem an exact decomposition of the words' part f of the logit (see docs/explain.md):

    eᵢ = Df[Cᵢ] / α,   Σᵢ eᵢ = f,   and for α < 1   Eᵢⱼ = D²f[Cᵢ, Cⱼ] / (α (α-1)),   Σⱼ Eᵢⱼ = eᵢ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sot.core.head import SecondOrderHead
from sot.core.normalize import matrix_power_norm, singular_value_power_norm
from sot.core.normalizers import MatrixPowerNorm, SingularValuePowerNorm
from sot.core.pooling import AveragePool, CovariancePool, CrossCovariancePool, Pool, keep
from sot.models.tokens import Tokens
from sot.ops.cross_covariance.reference import split_heads

MAX_WORDS = 1024  # more have no table of pairs: it takes their number squared
STEP = 1e-4  # by which the weight of one word is changed, in float64
EXACT = 1e-9  # smoothing of the slope of svPN here, where nothing is trained by it
AT_A_TIME = 64

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """Evidence for one class: `words` sum to the words' part of the logit, and each row of `pairs` to its word.

    `pairs` is symmetric, diagonal where the words do not depend on each other, and None for more than 1024 words. Its
    order is that of the word tokens; `class_token` is that token's own where it is pooled with the words, else 0.
    `residual` is what rounding leaves between the sum and the logit's part.
    """

    words: Array
    pairs: Array | None
    class_token: float
    degree: float
    residual: float

    def strongest(self, count: int = 12) -> list[tuple[int, int, float]]:
        """The pairs of different words with the most evidence, for or against, as indices and value."""
        if self.pairs is None:
            return []
        rows, columns = np.triu_indices(len(self.pairs), 1)
        values = 2 * self.pairs[rows, columns]  # both orders of the pair
        chosen = np.argsort(-np.abs(values), kind="stable")[:count]
        return [(int(rows[k]), int(columns[k]), float(values[k])) for k in chosen if values[k] != 0]


@dataclass(frozen=True)
class Spectrum:
    """Singular values `(heads, values)` of each head, largest first."""

    before: Array
    after: Array


def degree_of(head: SecondOrderHead) -> float:
    """α of `f(tQ) = t^α f(Q)`, or ValueError for a pooling that has none."""
    pool: Any = head.pool
    if isinstance(pool, AveragePool):
        return 1.0
    if not isinstance(pool, CrossCovariancePool | CovariancePool):
        name = "a head that reads no words" if pool is None else f"pool {head.config.pool}"
        raise ValueError(f"evidence of words is defined for mgcrp, gcp and gap, not for {name}")
    norm = str(head.config.norm)
    known = {"none": 1.0, "scale": 1.0, "isqrt": 0.5, "svpn_matmul": 0.5}
    if norm in ("epn", "ln"):
        raise ValueError(f"evidence of words needs a norm that keeps a size, {norm} has none; accepted: svpn, none, …")
    return known.get(norm, head.config.exponent)


@torch.no_grad()
def factors(pool: Pool, words: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """X `(words, heads, m)` and Y `(words, heads, n)` of one sample in float64 with `Q = Σᵢ xᵢyᵢᵀ`: the 1/q is in Y."""
    words, count = keep(words[:1], None if mask is None else mask[:1])
    if isinstance(pool, CrossCovariancePool):
        by_head = split_heads(pool.projection(words).double(), pool.heads, pool.left_dim)
        left, right = (x.transpose(1, 2) for x in by_head)
    else:
        assert isinstance(pool, CovariancePool)
        reduced, _ = keep(pool.projection(words), mask)
        left = right = reduced.unsqueeze(2).double()
    if pool.center:
        kept = torch.ones_like(left[..., :1, :1]) if mask is None else (mask[:1] != 0).double()[:, :, None, None]
        left, right = (x - kept * x.sum(1, keepdim=True) / count.double() for x in (left, right))
    return left[0], right[0] / count.double().item()


def exact_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """A normalisation in float64 with its true slope; training smooths that of small singular values."""
    if isinstance(norm, SingularValuePowerNorm):
        return partial(singular_value_power_norm, exponent=norm.exponent, eps=EXACT)
    if isinstance(norm, MatrixPowerNorm):
        return partial(matrix_power_norm, exponent=norm.exponent, eps=EXACT)
    double: Callable[[Tensor], Tensor] = copy.deepcopy(norm).double()
    return double


def _weights(head: SecondOrderHead, target: int) -> Tensor:
    weight = head.word_linear.weight
    assert isinstance(weight, Tensor)
    return weight[target, -head.word_features :].detach().double()


def _matrix_weights(pool: Any, weights: Tensor) -> Tensor:
    """The linear layer as a matrix `(heads, m, n)` that the normalised matrices are multiplied with."""
    if isinstance(pool, CrossCovariancePool):
        return weights.view(pool.heads, pool.left_dim, pool.right_dim)
    matrix = weights.new_zeros(1, pool.reduced_dim, pool.reduced_dim)
    upper = torch.triu_indices(pool.reduced_dim, pool.reduced_dim, device=weights.device)
    matrix[0, upper[0], upper[1]] = weights
    return matrix


def pair_evidence(head: SecondOrderHead, tokens: Tokens, target: int) -> Evidence:
    """Evidence of the words of one sample, and of their pairs, for class `target`, as the head reads them."""
    degree = degree_of(head)
    with torch.inference_mode(False):
        words, mask, lead = pooled_tokens(head, tokens)
        pool: Any = head.pool
        everything, size = _weights(head, target), pool.out_features
        weights, beside = everything[:size], everything[size:]
        if isinstance(pool, AveragePool):
            value, single, pairs = _mean_evidence(words, mask, weights)
        else:
            value, single, pairs = _second_order_evidence(pool, words, mask, weights, degree)
        if head.average is not None:
            mean_value, mean_single, mean_pairs = _mean_evidence(words, mask, beside)
            value, single = value + mean_value, single + mean_single
            pairs = None if pairs is None or mean_pairs is None else pairs + mean_pairs
    table = None if pairs is None else pairs[lead:, lead:].cpu().numpy()
    residual = float(value - single.sum())
    return Evidence(single[lead:].cpu().numpy(), table, float(single[:lead].sum()), degree, residual)


def _mean_evidence(words: Tensor, mask: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of an average every word has its share, and pairs have none."""
    kept, count = keep(words[:1], None if mask is None else mask[:1])
    single = kept[0].double() @ weights / count.double().item()
    return single.sum(), single, torch.diag(single)


def pooled_tokens(head: SecondOrderHead, tokens: Tokens) -> tuple[Tensor, Tensor | None, int]:
    """What the pooling reads, its mask, and how many of it come before the words."""
    words, mask = head.norm(tokens.word_tokens.detach()), tokens.mask
    if head.fusion != "aggr_all":
        return words, mask, 0
    assert tokens.class_token is not None
    words = torch.cat([head.norm(tokens.class_token.detach()).unsqueeze(1), words], dim=1)
    return words, None if mask is None else torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1), 1


def _second_order_evidence(
    pool: Any, words: Tensor, mask: Tensor | None, weights: Tensor, degree: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    left, right = factors(pool, words, mask)
    norm, readout = exact_norm(pool.norm), _matrix_weights(pool, weights)

    def slopes(matrices: Tensor) -> tuple[Tensor, Tensor]:
        """f and Df[Cⱼ] for all words, at each of some pooled matrices `(batch, heads, m, n)`."""
        matrices = matrices.detach().requires_grad_()
        with torch.enable_grad():
            value = (norm(matrices) * readout).sum((1, 2, 3))
            (slope,) = torch.autograd.grad(value.sum(), matrices)
        return value.detach(), torch.einsum("bhmn,jhm,jhn->bj", slope, left, right)

    with torch.no_grad():
        pooled = torch.einsum("jhm,jhn->hmn", left, right)
        value, first = slopes(pooled.unsqueeze(0))
        single = first[0] / degree
        if degree == 1:
            return value[0], single, torch.diag(single)
        if len(left) > MAX_WORDS:
            return value[0], single, None
        rows = []
        for start in range(0, len(left), AT_A_TIME):
            piece = slice(start, start + AT_A_TIME)
            change = STEP * torch.einsum("jhm,jhn->jhmn", left[piece], right[piece])
            rows.append((slopes(pooled + change)[1] - slopes(pooled - change)[1]) / (2 * STEP))
        second = torch.cat(rows) / (degree * (degree - 1))
    return value[0], single, (second + second.mT) / 2


@torch.no_grad()
def singular_spectrum(head: SecondOrderHead, tokens: Tokens) -> Spectrum:
    """The spectrum of each head's (cross-)covariance of one sample, and what the normalisation makes of it."""
    pool: Any = head.pool
    if not isinstance(pool, CrossCovariancePool | CovariancePool):
        raise ValueError(f"a spectrum needs second-order pooling (mgcrp or gcp), the head has {head.config.pool}")
    words, mask, _ = pooled_tokens(head, tokens)
    left, right = factors(pool, words, mask)
    pooled = torch.einsum("jhm,jhn->hmn", left, right)
    normalized = exact_norm(pool.norm)(pooled.unsqueeze(0))[0]
    return Spectrum(*(torch.linalg.svdvals(matrix).cpu().numpy() for matrix in (pooled, normalized)))
