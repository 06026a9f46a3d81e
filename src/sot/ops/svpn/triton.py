"""svPN and its gradient of float32 on a GPU by Triton: two launches forward, one backward, no wait for the host.

Its parts are those of the backend `torch`, but uᵢ is zero where λᵢ is rounding. All is computed in float32: singular
values below 1e-5 λ₁ have few digits, and matrices whose rows and columns are both graded lose them sooner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sot.ops.svpn.slopes import relative, slopes
from sot.ops.svpn.torch import Parts, part_shapes

MAX_COLUMNS = 64  # two of them in each of a warp's lanes
MAX_ROWS = 64  # all of a column are in registers
ROOTS = {0.5: 1, 0.25: 2}  # the exponents that square roots make
WARP = 32  # matrices for so many lanes; in the 64 of AMD two lanes share the rows of a column
AMD = torch.version.hip is not None
LAUNCHES = (2, 1)  # forward and backward, besides what torch computes of exponents without ROOTS
DEVICE = "cuda"  # AMD's are called so too
OLDEST = (7, 5)  # compute capability of NVIDIA's GPUs that every Triton from 3.3 on compiles for


def accepts(matrix: Tensor, exponent: float, symmetric: bool) -> bool:
    """Whether the kernels can take a batch `(batch, m >= n, n)`."""
    known = matrix.dtype == torch.float32 and matrix.device.type == DEVICE and not symmetric
    fits = 0 < matrix.shape[2] <= MAX_COLUMNS and matrix.shape[1] <= MAX_ROWS
    return known and fits and _compiles_for(matrix.device)


@torch.compiler.assume_constant_result
def _compiles_for(device: torch.device) -> bool:
    """Whether Triton knows the GPU; where there is none, tensors are fake."""
    if AMD or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= OLDEST


def power(matrix: Tensor, exponent: float) -> tuple[Tensor, Parts]:
    """`U diag(λ^α) Vᵀ` of `(batch, m >= n, n)`, and its parts."""
    from sot.ops.svpn import triton_jacobi, triton_products

    matrix = matrix.contiguous()
    batch, rows, columns = matrix.shape
    out = torch.empty_like(matrix)
    left, values, right = (matrix.new_empty(shape) for shape in part_shapes(matrix))
    if batch:
        jacobi, products = decomposition_settings(rows, columns), product_settings(rows, columns)
        with torch.cuda.device_of(matrix):  # type: ignore[no-untyped-call]
            grid = ((batch + jacobi["GROUPS"] - 1) // jacobi["GROUPS"],)
            triton_jacobi.decompose[grid](matrix, left, values, right, batch, **jacobi)
            powers = values if exponent in ROOTS else values.pow(exponent)
            roots = ROOTS.get(exponent, 0)
            triton_products.combine[(batch,)](left, powers, right, out, ROOTS=roots, **products)
    return out, (left, values, right)


def pull_back(grad: Tensor, parts: Parts, exponent: float, eps: float) -> Tensor:
    """The gradient of `power`; of exponents other than ½ and ¼ torch computes the slopes."""
    from sot.ops.svpn import triton_products

    grad = grad.contiguous()
    batch, rows, columns = grad.shape
    out = torch.empty_like(grad)
    if batch:
        given = (grad,) * 4  # not read
        if exponent not in ROOTS:
            unit, ratio, scale = relative(parts[1], exponent, eps)
            given = (*slopes(unit, exponent, eps), ratio, scale)
        settings = product_settings(rows, columns)
        with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
            triton_products.pull_back[(batch,)](
                grad, *parts, *(part.contiguous() for part in given), out, eps, ROOTS=ROOTS.get(exponent, 0), **settings
            )
    return out


def decomposition_settings(rows: int, columns: int, amd: bool = AMD) -> dict[str, int]:
    """Sizes for `decompose`: one warp for as many matrices as have a lane for each two columns."""
    lanes = _power_of_two((columns + 1) // 2)
    chunk = 16 if columns <= 16 else 8  # other sizes compile for longer, or leave the registers
    sizes = {"M": rows, "N": columns, "LANES": lanes, "GROUPS": WARP // lanes, "R": chunk}
    return {**sizes, **_options(1, all_registers=not amd)}


def product_settings(rows: int, columns: int, amd: bool = AMD) -> dict[str, int]:
    """Sizes for `combine` and `pull_back`: blocks of 16 rows of one matrix."""
    width = max(16, _power_of_two(columns))
    sizes = {"M": rows, "N": columns, "BLOCK": 16, "WIDTH": width}
    threads = {16: 32, 32: 128, 64: 256}[width]  # fewer leave the registers
    return {**sizes, **_options(max(1, threads // (64 if amd else 32)), all_registers=width == 32 and not amd)}


def _options(num_warps: int, all_registers: bool) -> dict[str, int]:
    """For the compiler; NVIDIA's may leave registers free, and spill, unless it is told that all may be used."""
    return {"num_warps": num_warps, "enable_fp_fusion": True, **({"maxnreg": 255} if all_registers else {})}


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
