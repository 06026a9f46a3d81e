"""Large matrix products on a CPU by the fastest library that torch has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sot.core.precision import autocast_off, is_eager, is_observed

# oneDNN's product of dense float32 matrices, as torch.compile calls it; what torch itself calls is slower by a tenth
_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch._C._has_mkldnn else None

LARGE_WEIGHT = 500_000  # numbers; for fewer torch's own product and gradient are faster


def times_transposed(rows: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`rows @ weightᵀ` without a gradient; the rows are contiguous, and so is the weight or its transpose."""
    if _ONEDNN is None or not torch.backends.mkldnn.enabled or rows.dtype != torch.float32 or is_observed():
        return torch.mm(rows, weight.mT, out=out)
    product: Tensor = _ONEDNN(rows, weight, None, "none", [], "")
    return product if out is None else out.copy_(product)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        product = times_transposed(rows, weight)
        return product if bias is None else product.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        with autocast_off(grad):
            again = torch.is_grad_enabled()  # a second derivative is wanted
            d_rows = None
            if of_rows:
                d_rows = grad @ weight if again else times_transposed(grad.contiguous(), weight.mT)
            return d_rows, grad.mT @ rows if of_weight else None, grad.sum(0) if of_bias else None


class Linear(nn.Linear):
    """`nn.Linear` that multiplies float32 on a CPU by oneDNN where the weight is large."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # noqa: SIM102  alone, for the compiler of TorchScript to skip what follows
            if self.weight.numel() >= LARGE_WEIGHT and is_eager() and self._is_plain(input):
                return _Linear.apply(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)

    @torch.jit.unused
    def _is_plain(self, input: Tensor) -> bool:
        """Whether nobody has put something else in place of the weight or the rows."""
        usual = type(self.weight) is nn.Parameter and type(input) in (Tensor, nn.Parameter) and input.ndim == 2
        same = self.weight.dtype == input.dtype == torch.float32 and input.is_contiguous()
        return usual and same and input.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
