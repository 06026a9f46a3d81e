"""Roots by matrix products only: the square root of a covariance, and svPN with exponent ½."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sot.core import simd
from sot.core.checks import check_matrix, check_positive
from sot.core.precision import at_least_float32, autocast_off, is_eager
from sot.core.spectral import LEFT_EPS

# --- square root of a covariance ----------------------------------------------------------------------------


def _trace(spd: Tensor) -> Tensor:
    trace = spd.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return torch.where(trace == 0, torch.ones_like(trace), trace)  # a zero matrix stays zero


def _newton_schulz(spd: Tensor, num_iterations: int) -> Tensor:
    spd = (spd + spd.mT) / 2
    trace = _trace(spd)
    identity = torch.eye(spd.shape[-1], dtype=spd.dtype, device=spd.device)
    root, inverse = spd / trace, identity
    for _ in range(num_iterations):
        step = 1.5 * identity - 0.5 * (inverse @ root)
        root, inverse = root @ step, step @ inverse
    return root * trace.sqrt()


def _differentiable(spd: Tensor, grad: Tensor, num_iterations: int) -> Tensor:
    """The gradient of `_newton_schulz` as something that has one itself."""
    return torch.autograd.grad(_newton_schulz(spd, num_iterations), spd, grad, create_graph=True)[0]


PIECE = 2**18  # numbers of a tensor that passes the iteration at once on a CPU, so that it stays in the cache
FEW = 8  # more iterations, and the rounding that transposed factors add, half as much again by each, would be seen


def _left(matrix: Tensor, num_iterations: int) -> Tensor:
    """A symmetric factor on the left: products AᵀB are the fastest."""
    return matrix.mT if num_iterations <= FEW else matrix


def _symmetric(matrix: Tensor, divisor: Tensor) -> Tensor:
    """The symmetric part, divided, with zeros up to a multiple of four, which products are faster for."""
    result = (matrix + matrix.mT).div_(2 * divisor)
    missing = -matrix.shape[-1] % 4
    return nn.functional.pad(result, (0, missing, 0, missing)) if missing else result


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Of each two matrices, `(batch, 1, 1)`."""
    return torch.bmm(left.flatten(1)[:, None], right.flatten(1)[:, :, None])


def _derivative(
    left: Tensor, d_left: Tensor, right: Tensor, d_right: Tensor, num_iterations: int, scale: float = 1.0
) -> Tensor:
    """That of the product of two, from their own, times `scale`."""
    first = torch.baddbmm(right, _left(d_left, num_iterations), right, beta=0, alpha=scale)
    return first.baddbmm_(_left(left, num_iterations), d_right, alpha=scale)


class _SquareRoot(torch.autograd.Function):
    """`_newton_schulz` on `(batch, n, n)`: no product with the identity, sums inside the products, none wasted.

    Everything is a polynomial of one symmetric matrix, so symmetric, and the gradient is the derivative of that
    polynomial in the direction of the incoming one, symmetric too. Hence any factor may be transposed.
    """

    @staticmethod
    def forward(ctx: Any, spd: Tensor, num_iterations: int) -> Tensor:
        size = spd.shape[-1]
        trace = spd.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        alive = trace != 0
        trace = torch.where(alive, trace, torch.ones_like(trace))
        root = _symmetric(spd, trace)
        bias = 1.5 * torch.eye(root.shape[-1], dtype=spd.dtype, device=spd.device)
        step = torch.add(bias, root, alpha=-0.5)
        roots, steps = [root], [step]
        inverses: list[Tensor] = []
        for k in range(1, num_iterations):
            root = torch.bmm(_left(root, num_iterations), step)
            inverses.append(step if k == 1 else torch.bmm(_left(step, num_iterations), inverses[-1]))
            step = torch.baddbmm(bias, _left(inverses[-1], num_iterations), root, alpha=-0.5)
            roots.append(root)
            steps.append(step)
        root = torch.bmm(_left(root, num_iterations), step)
        ctx.save_for_backward(spd, trace, alive, root, *roots, *inverses, *steps)
        ctx.num_iterations = num_iterations
        return root[:, :size, :size] * trace.sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spd, trace, alive, result, *states = ctx.saved_tensors
        count, size = ctx.num_iterations, spd.shape[-1]
        roots, inverses, steps = states[:count], states[count : 2 * count - 1], states[2 * count - 1 :]
        with autocast_off(grad):
            if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the definition
                return _differentiable(spd, grad, count), None
            d_root = _symmetric(grad, trace.rsqrt())
            d_trace = 0.5 * _inner(d_root, result)
            d_step = d_inverse = -0.5 * d_root
            half = torch.baddbmm(d_root, _left(d_root, count), roots[0], beta=0.75, alpha=-0.5)
            d_root = half + half.mT
            for k, (root, inverse, step) in enumerate(zip(roots[1:], inverses, steps[1:])):
                if k > 0:
                    d_inverse = _derivative(steps[k], d_step, inverses[k - 1], d_inverse, count)
                d_step = _derivative(inverse, d_inverse, root, d_root, count, -0.5)
                d_root = _derivative(root, d_root, step, d_step, count)
            d_trace = torch.where(alive, d_trace - _inner(d_root, roots[0]), 0)
            d_spd = d_root[:, :size, :size] / trace
            d_spd.diagonal(dim1=-2, dim2=-1).add_((d_trace / trace)[..., 0])
        return d_spd, None


class _CompiledRoot(torch.autograd.Function):
    """`_SquareRoot` by a kernel that passes through the iteration again for the gradient: it keeps the matrix alone."""

    @staticmethod
    def forward(ctx: Any, spd: Tensor, num_iterations: int) -> Tensor:
        ctx.save_for_backward(spd)
        ctx.num_iterations = num_iterations
        return simd.square_root(spd.detach(), num_iterations)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (spd,) = ctx.saved_tensors
        with autocast_off(grad):
            if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the definition
                return _differentiable(spd, grad, ctx.num_iterations), None
            return simd.pull_back_root(spd.detach(), grad, ctx.num_iterations), None


def _eager_root(flat: Tensor, num_iterations: int) -> Tensor:
    if simd.can_take_root(flat):
        return _CompiledRoot.apply(flat, num_iterations)
    count = -(-flat.numel() // PIECE)
    if flat.device.type != "cpu" or count <= 1:
        return _SquareRoot.apply(flat, num_iterations)
    return torch.cat([_SquareRoot.apply(piece, num_iterations) for piece in torch.tensor_split(flat, count)])


def matrix_square_root(spd: Tensor, num_iterations: int = 5) -> Tensor:
    """iSQRT: square root of symmetric positive semi-definite `(..., n, n)` by coupled Newton-Schulz iteration.

    Divided by the trace before, multiplied by its root after: plain batched products, approximate for few iterations.
    Of a matrix that is not symmetric its symmetric part is taken.
    """
    full = at_least_float32(spd)
    if torch.jit.is_scripting():
        result = _newton_schulz(full, num_iterations)
    else:
        check_matrix(spd, square=True)
        check_positive(num_iterations=num_iterations)
        with autocast_off(full):
            if is_eager():
                result = _eager_root(full.reshape(-1, *full.shape[-2:]), num_iterations).view(full.shape)
            else:
                result = _newton_schulz(full, num_iterations)
    return result.to(spd.dtype)


def square_root_of_product(rows: Tensor, num_iterations: int = 5) -> Tensor:
    """`matrix_square_root` of `RᵀR (..., n, n)` for R `(..., tokens, n)`: cheaper, and closer, for fewer tokens than n.

    The iteration comes to `C q(C)` with a polynomial q, and `RᵀR q(RᵀR) = Rᵀ q(RRᵀ) R` asks it of the smaller product.
    """
    full = at_least_float32(rows)
    with autocast_off(full):
        gram = full @ full.mT
        trace = _trace(gram)
        bias = 1.5 * torch.eye(gram.shape[-1], dtype=full.dtype, device=full.device)
        root = gram / trace
        inverse = step = torch.add(bias, root, alpha=-0.5)
        for _ in range(num_iterations - 1):
            root = root @ step
            step = torch.add(bias, inverse @ root, alpha=-0.5)
            inverse = step @ inverse
        result = full.mT @ (inverse / trace.sqrt() @ full)
    return result.to(rows.dtype)


# --- svPN of exponent ½ -------------------------------------------------------------------------------------

# Odd quintics (a, b, c): x ↦ ax + bx³ + cx⁵, each the best approximation of 1 on the image of the one before,
# from [0.004, 1] for singular values and from [0.06, 1] for the roots of eigenvalues. Below, the sign falls short of 1.
POLAR_STEPS = (
    (8.340982, -24.59737, 18.22303),
    (3.977995, -2.965435, 0.5642721),
    (3.327478, -2.495237, 0.5108134),
    (2.308564, -1.675994, 0.4195739),
    (1.892113, -1.268886, 0.3768936),
    (1.874873, -1.249744, 0.374871),
)
ROOT_STEPS = (
    (6.484369, -17.30368, 12.43398),
    (2.413681, -1.7686, 0.4296406),
    (1.905256, -1.283222, 0.3783374),
    (1.874709, -1.249409, 0.3747),
)


def _polar_power(matrix: Tensor) -> Tensor:
    """`P H^½` of `(batch, m >= n, n)` from the polar factor P and H = PᵀQ: 33 products, no decomposition."""
    largest = matrix.detach().abs().amax((-2, -1), keepdim=True)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)  # a zero matrix stays zero
    scaled = matrix / largest
    gram = torch.bmm(scaled.mT, scaled)
    total = gram.square().sum((-2, -1), keepdim=True)
    bound = torch.where(total == 0, torch.ones_like(total), total).sqrt()  # ‖QᵀQ‖ >= λ₁², and close to it
    gram, scaled = gram / bound, scaled / bound.sqrt()

    polar = scaled
    for k, (a, b, c) in enumerate(POLAR_STEPS):
        if k > 0:
            gram = torch.bmm(polar.mT, polar)
        polar = torch.baddbmm(polar, polar, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)

    root = torch.bmm(polar.mT, scaled)
    root = (root + root.mT) / 2
    identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    inverse = identity
    for k, (a, b, c) in enumerate(ROOT_STEPS):
        product = root if k == 0 else torch.bmm(inverse, root)
        step = torch.baddbmm(product, product, product, beta=b, alpha=c)
        root = torch.baddbmm(root, root, step, beta=a)
        if k == 0:
            inverse = step + a * identity
        elif k + 1 < len(ROOT_STEPS):
            inverse = torch.baddbmm(inverse, step, inverse, beta=a)
    return torch.bmm(polar, root) * (largest * bound.sqrt()).sqrt()


class _LaneProducts(torch.autograd.Function):
    """`_polar_power` of float32 on a CPU by compiled kernels; its gradient through eigenvectors, which costs less."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(matrix)
        return simd.product_power(matrix, (POLAR_STEPS, ROOT_STEPS))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (matrix,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the products
            with autocast_off(grad):
                return torch.autograd.grad(_polar_power(matrix), matrix, grad, create_graph=True)[0]
        kept = simd.power(matrix.detach(), 0.5, LEFT_EPS, keep=True)[1]
        return simd.product_pull_back(grad.detach(), kept, (POLAR_STEPS, ROOT_STEPS))


def product_singular_value_power_norm(matrix: Tensor) -> Tensor:
    """svPN of exponent ½, `Σ λᵢ^½ uᵢ vᵢᵀ`, by matrix products only: for accelerators, and for ONNX, which has no SVD.

    Singular values above 0.004 of the largest come out to rounding; those below it too small, zero staying zero.
    """
    if not torch.jit.is_scripting():
        check_matrix(matrix)
    full = at_least_float32(matrix)
    wide = full.shape[-2] < full.shape[-1]
    tall = full.mT if wide else full
    flat = tall.reshape(-1, tall.shape[-2], tall.shape[-1])
    if torch.jit.is_scripting():
        result = _polar_power(flat)
    else:
        with autocast_off(full):
            lanes = is_eager() and simd.is_possible(flat, "simd_products")
            result = _LaneProducts.apply(flat) if lanes else _polar_power(flat)
    result = result.view(tall.shape)
    return (result.mT if wide else result).to(matrix.dtype)
