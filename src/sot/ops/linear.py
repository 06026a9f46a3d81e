"""The operator `sot::linear`: large linear layers of float32 on a CPU by oneDNN.

Torch has it, but takes it for compiled models only; what it takes instead is slower by a half on some processors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sot.ops.library import define
from sot.ops.precision import autocast_off
from sot.ops.registry import Operator, anything

ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch._C._has_mkldnn else None
LEAST = 100_000  # numbers of a weight: for fewer the way there takes longer than the product


def _accepts(rows: Tensor, weight: Tensor) -> bool:
    known = rows.dtype == weight.dtype == torch.float32 and rows.device.type == "cpu" and rows.ndim == 2
    return ONEDNN is not None and known and weight.numel() >= LEAST and weight.is_contiguous()


LINEAR = Operator({"torch": _accepts, "reference": anything})

_multiply = define(
    "linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor",
    lambda rows, weight, bias: ONEDNN(rows, weight, bias, "none", [], ""),
    lambda rows, weight, bias: rows.new_empty(rows.shape[0], weight.shape[0]),
    lambda shape, weight, *rest, **named: 2 * shape[0] * weight[0] * weight[1],
)


class LinearProduct(torch.autograd.Function):
    """`rows @ weightᵀ + bias`, and its gradients as products of the same kind."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = rows.contiguous()
        ctx.save_for_backward(rows, weight)
        result: Tensor = _multiply(rows, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        with autocast_off(grad):
            multiply: Any = F.linear if torch.is_grad_enabled() else _multiply  # a second derivative is wanted
            grad = grad.contiguous()
            d_rows = multiply(grad, weight.mT, None) if of_rows else None
            d_weight = multiply(grad.mT, rows.mT, None) if of_weight else None
            return d_rows, d_weight, grad.sum(0) if of_bias else None


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of `(batch, dim)` and `(out, dim)`."""
    if LINEAR.choose(rows, weight) == "torch":
        return LinearProduct.apply(rows, weight, bias)
    return F.linear(rows, weight, bias)
