"""svPN and its gradient from singular values and vectors in Triton: small matrix products, one matrix at a time.

Products are of float32 in full (`ieee`): the default would round their factors to TF32.
"""

# mypy: ignore-errors
# The functions are read by Triton's compiler: no value in them has a type of Python.

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754943508222875e-38)  # a largest singular value up to this has no direction to shrink along


@triton.jit
def load_tile(pointer, matrix, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of one matrix of a batch, with zeros outside of it."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    at = matrix * (ROWS * COLUMNS) + rows[:, None] * COLUMNS + columns[None, :]
    return tl.load(pointer + at, mask=mask, other=0.0)


@triton.jit
def store_tile(pointer, matrix, rows, columns, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `load_tile`."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    at = matrix * (ROWS * COLUMNS) + rows[:, None] * COLUMNS + columns[None, :]
    tl.store(pointer + at, tile, mask=mask)


@triton.jit
def combine(u_ptr, values_ptr, v_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
            WIDTH: tl.constexpr, ROOTS: tl.constexpr):  # fmt: skip
    """U diag(p) Vᵀ of one matrix; p is λ after so many square roots."""
    matrix = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    powers = tl.load(values_ptr + matrix * N + columns, mask=columns < N, other=0.0)
    for _ in tl.static_range(ROOTS):
        powers = tl.sqrt_rn(powers)
    right = load_tile(v_ptr, matrix, columns, columns, N, N)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        left = load_tile(u_ptr, matrix, rows, columns, M, N) * powers[None, :]
        store_tile(out_ptr, matrix, rows, columns, tl.dot(left, right, input_precision="ieee"), M, N)


@triton.jit
def slopes(unit, eps, ROOTS: tl.constexpr):
    """A, B and g(λ) as `sot.ops.svpn.slopes` has them, for α = ½ (one root) and ¼ (two roots)."""
    root = tl.sqrt_rn(tl.sqrt_rn(unit * unit + eps * eps))
    if ROOTS == 1:
        ratio = tl.div_rn(1.0, root)
    else:
        root = tl.sqrt_rn(root)
        ratio = tl.div_rn(1.0, root * root * root)
    s, t = root[:, None], root[None, :]
    small = (eps * ratio)[:, None] * (eps * ratio)[None, :]
    share = (unit * ratio)[:, None] * (unit * ratio)[None, :]
    both, squares = s * t, s * s + t * t
    if ROOTS == 1:
        inverse = tl.div_rn(1.0, squares * (s + t))
        same, swapped = (squares + both + small) * inverse, -share * inverse
    else:
        fourths = squares * squares - 2.0 * both * both
        inverse = tl.div_rn(1.0, (s + t) * squares * fourths)
        cubic = squares + both
        same, swapped = (fourths + both * cubic + small * cubic) * inverse, -share * cubic * inverse
    return same, swapped, ratio


@triton.jit
def relative(values, ROOTS: tl.constexpr):
    """λ/λ₁, and λ₁^(α-1) for α = ½ (one root) and ¼ (two roots), which is zero for a matrix of zeros."""
    largest = tl.max(values, axis=0)
    alive = largest > TINY
    largest = tl.where(alive, largest, 1.0)
    root = tl.sqrt_rn(largest)
    if ROOTS == 2:
        root = root * tl.sqrt_rn(root)
    return values / largest, tl.where(alive, tl.div_rn(1.0, root), 0.0)


@triton.jit
def pull_back(g_ptr, u_ptr, values_ptr, v_ptr, same_ptr, swapped_ptr, ratio_ptr, scale_ptr, out_ptr, eps,
              M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
              ROOTS: tl.constexpr):  # fmt: skip
    """The gradient `(U (A∘T + B∘Tᵀ - T diag ρ) + GV diag ρ) Vᵀ`, `T = UᵀGV`, of one matrix.

    With no roots A, B, ρ and the scale of G are given. GV is made twice: all of its rows at once do not fit.
    """
    matrix = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    values = tl.load(values_ptr + matrix * N + columns, mask=columns < N, other=0.0)
    if ROOTS == 0:
        scale = tl.load(scale_ptr + matrix)
        ratio = tl.load(ratio_ptr + matrix * N + columns, mask=columns < N, other=0.0)
        same = load_tile(same_ptr, matrix, columns, columns, N, N)
        swapped = load_tile(swapped_ptr, matrix, columns, columns, N, N)
    else:
        unit, scale = relative(values, ROOTS)
        same, swapped, ratio = slopes(unit, eps, ROOTS)
    scale += tl.sum(values * 0.0, axis=0)  # the largest of NaN and zeros is zero
    right = load_tile(v_ptr, matrix, columns, columns, N, N)  # Vᵀ
    inner = tl.zeros([WIDTH, WIDTH], tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        grad = load_tile(g_ptr, matrix, rows, columns, M, N) * scale
        mapped = tl.dot(grad, tl.trans(right), input_precision="ieee")
        left = load_tile(u_ptr, matrix, rows, columns, M, N)
        inner = tl.dot(tl.trans(left), mapped, acc=inner, input_precision="ieee")
    middle = (same - ratio[None, :]) * inner + swapped * tl.trans(inner)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        grad = load_tile(g_ptr, matrix, rows, columns, M, N) * scale
        mapped = tl.dot(grad, tl.trans(right), input_precision="ieee")
        left = load_tile(u_ptr, matrix, rows, columns, M, N)
        result = tl.dot(left, middle, acc=mapped * ratio[None, :], input_precision="ieee")
        store_tile(out_ptr, matrix, rows, columns, tl.dot(result, right, input_precision="ieee"), M, N)
