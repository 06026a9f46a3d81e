"""The way to the kernels for float32 on a CPU, if numba is there: svPN and roots of small matrices, products of tokens.

svPN has eight matrices abreast in SIMD lanes. Its blocks are `(groups, ..., LANES)`: the eight matrices of a group side
by side, rows and columns padded to even numbers. `power` is through eigenvectors, `product_power` by matrix products.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sot.core.precision import is_observed

MAX_COLUMNS = 64  # more of them outgrow the caches
FEW_COLUMNS = 32  # up to which even a single matrix, with seven lanes idle, is faster than by LAPACK
FEWEST_OF_ROOT = 17  # columns, for a square root; fewer are padded too much
LANES, TILE_ROWS, TILE_COLUMNS = 8, 4, 24  # of products, as `simd_tiles` has them
GROUPS_A_THREAD = 4  # fewer are done before the thread has started

Blocks = tuple[Tensor, ...]
Steps = tuple[tuple[float, float, float], ...]


@functools.cache
def kernels(name: str = "simd_kernels") -> ModuleType | None:
    """The compiled kernels of a module, or nothing without numba (`pip install second-order-transformer[fast]`).

    Compiled for some seconds the first time on a machine, and kept beside the package or in the user's cache.
    """
    try:
        return importlib.import_module(f"sot.core.{name}")
    except ImportError:
        return None


def _loaded(name: str = "simd_kernels") -> ModuleType:
    """The kernels, where it was asked before whether they are there."""
    module = kernels(name)
    assert module is not None
    return module


def is_possible(matrix: Tensor, name: str = "simd_kernels") -> bool:
    """Whether a batch `(batch, m >= n, n)` that torch would compute here and now can be given to the kernels."""
    columns = matrix.shape[2]
    pays = columns <= FEW_COLUMNS or (columns <= MAX_COLUMNS and len(matrix) >= 4)
    return pays and _is_plain(matrix) and kernels(name) is not None


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return plain and not is_observed()


def _even(number: int) -> int:
    return number + number % 2


def _arrays(*blocks: Tensor) -> tuple[Any, ...]:
    return tuple(block.contiguous().flatten(1).numpy() for block in blocks)


def _on_threads(run: Callable[[tuple[int, int]], None], groups: int) -> None:
    """Call with ranges of groups, one for each thread that torch may use: the kernels let go of the interpreter."""
    threads = min(torch.get_num_threads(), groups // GROUPS_A_THREAD)
    if threads < 2:
        run((0, groups))
        return
    bounds = [groups * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, itertools.pairwise(bounds)))


def power(matrix: Tensor, exponent: float, left_eps: float, keep: bool) -> tuple[Tensor, Blocks]:
    """`U diag(λ^α) Vᵀ`, and blocks of U, λ and V to `keep`; uᵢ is zero where λᵢ is below `left_eps` of the largest."""
    module = _loaded()
    rows, columns, lanes = _even(matrix.shape[1]), _even(matrix.shape[2]), module.LANES
    groups, shapes = -(-len(matrix) // lanes), ((rows, columns, lanes), (columns, lanes), (columns, columns, lanes))
    kept = tuple(matrix.new_empty(groups, *shape) for shape in shapes) if keep else ()
    out = torch.empty_like(matrix)
    source, target = matrix.numpy(), out.numpy()

    def run(part: tuple[int, int]) -> None:
        blocks = kept or tuple(matrix.new_empty(1, *shape) for shape in shapes)
        module.power(source, exponent, left_eps, target, _arrays(*blocks), part)

    _on_threads(run, groups)
    return out, kept


def pull_back(
    grad: Tensor, kept: Blocks, exponent: float, eps: float, slopes: Blocks | None = None, factors: Blocks | None = None
) -> Tensor:
    """`scale · (U (A∘T + B∘Tᵀ) + (GV - UT) diag(ratio)) Vᵀ`, `T = UᵀGV`, of the U, λ and V that `power` keeps.

    `slopes` are A and B, `factors` ratio and scale; for the exponents ½ and ¼ all are made here.
    """
    module = _loaded()
    nothing, out = (grad.new_empty(0, 1),) * 2, torch.empty_like(grad)
    blocks = [_arrays(*given) for given in (kept, slopes or nothing, factors or nothing)]
    source, target, groups = grad.numpy(), out.numpy(), len(kept[0])
    _on_threads(lambda part: module.pull_back(source, *blocks, eps, exponent == 0.25, target, part), groups)
    return out


def _of_steps(steps: tuple[Steps, Steps]) -> tuple[Any, ...]:
    return tuple(torch.tensor(each, dtype=torch.float64).numpy() for each in steps)


def product_power(matrix: Tensor, steps: tuple[Steps, Steps]) -> Tensor:
    """`P H^½` by the quintic steps to the polar factor P and to the root of H = PᵀQ."""
    module = _loaded("simd_products")
    numbers, out = _of_steps(steps), torch.empty_like(matrix)
    source, target = matrix.numpy(), out.numpy()
    _on_threads(lambda part: module.power(source, numbers, target, part), -(-len(matrix) // module.LANES))
    return out


def product_pull_back(grad: Tensor, kept: Blocks, steps: tuple[Steps, Steps]) -> Tensor:
    """The gradient of `product_power` from the U, λ and V that `power` keeps."""
    module = _loaded("simd_products_gradient")
    numbers, blocks, out = _of_steps(steps), _arrays(*kept), torch.empty_like(grad)
    source, target = grad.numpy(), out.numpy()
    _on_threads(lambda part: module.pull_back(source, blocks, numbers, target, part), len(kept[0]))
    return out


def can_take_root(spd: Tensor) -> bool:
    """Whether the kernels can take the covariances `(batch, n, n)`, and pay: their tiles are of 4 × 24."""
    pays = FEWEST_OF_ROOT <= spd.shape[2] <= MAX_COLUMNS
    return pays and _is_plain(spd) and kernels("simd_root") is not None


def square_root(spd: Tensor, num_iterations: int) -> Tensor:
    """By coupled Newton-Schulz iteration; of a matrix that is not symmetric its symmetric part is taken."""
    module = _loaded("simd_root")
    out = torch.empty_like(spd)
    source, target = spd.numpy(), out.numpy()
    _on_threads(lambda part: module.square_root(source, num_iterations, target, part), len(spd))
    return out


def pull_back_root(spd: Tensor, grad: Tensor, num_iterations: int) -> Tensor:
    """The gradient of `square_root`."""
    module = _loaded("simd_root")
    out = torch.empty_like(spd)
    source, given, target = spd.numpy(), grad.numpy(), out.numpy()
    _on_threads(lambda part: module.pull_back(source, given, num_iterations, target, part), len(spd))
    return out


def can_multiply_tokens(projected: Tensor, heads: int, left_dim: int) -> bool:
    """Whether the kernels can take projected tokens `(batch, tokens, heads · (m + n))`, and pay.

    Their tiles are of 4 × 8. Threads of ours would wait for those of torch, which go on spinning after a product.
    """
    right_dim = projected.shape[2] // heads - left_dim
    pays = projected.shape[1] >= 4 and min(left_dim, right_dim) >= LANES and torch.get_num_threads() == 1
    return pays and _is_plain(projected) and kernels("simd_covariance") is not None


def can_multiply_packed(tokens: Tensor, weight: Tensor, heads: int, left_dim: int) -> bool:
    """Whether the kernels can take tokens `(tokens, dim)` of all samples, projected by `(heads · (m + n), dim)`."""
    right_dim = weight.shape[0] // heads - left_dim
    return min(left_dim, right_dim) >= LANES and can_multiply_rows(tokens.unsqueeze(0), weight)


def cross_products(projected: Tensor, starts: Tensor, heads: int, left_dim: int) -> Tensor:
    """`XᵀY (batch, heads, m, n)` of projected tokens, a row of which is X of all heads, then Y of all heads.

    The tokens of sample i are from row `starts[i]` on to before row `starts[i + 1]`.
    """
    sizes = (heads, left_dim, projected.shape[-1] // heads - left_dim)
    out = projected.new_empty(len(starts) - 1, *sizes)
    _loaded("simd_covariance").cross_products(_flat(projected), starts.numpy(), sizes, _flat(out))
    return out


def pull_back_products(projected: Tensor, starts: Tensor, grad: Tensor, out: Tensor) -> None:
    """The gradient of the projected tokens from that of `cross_products`."""
    module, sizes = _loaded("simd_covariance"), tuple(grad.shape[1:])
    module.pull_back(_flat(projected), _flat(grad), starts.numpy(), sizes, _flat(out))


def can_multiply_rows(tokens: Tensor, matrix: Tensor) -> bool:
    """Whether the kernels can multiply tokens `(batch, tokens, dim)` by a plain `(width, dim)`: tiles are of 4 × 24."""
    whole = min(*matrix.shape) >= TILE_COLUMNS and matrix.shape[0] % TILE_ROWS == 0 and tokens.shape[1] >= TILE_ROWS
    in_rows = tokens.stride()[1:] == (tokens.shape[2], 1)
    pays = torch.get_num_threads() == 1 and _is_plain(tokens)
    return whole and in_rows and pays and kernels("simd_covariance") is not None


def _whole_tiles(columns: int) -> int:
    return -(-columns // TILE_COLUMNS) * TILE_COLUMNS


class Panels:
    """A matrix `(k, n)`, packed for many products with tokens on its left."""

    def __init__(self, matrix: Tensor) -> None:
        self.shape = matrix.shape
        self.packed = matrix.new_empty(matrix.shape[0] * _whole_tiles(matrix.shape[1])).numpy()
        module = _loaded("simd_covariance")
        module.pack(_storage(matrix), (*matrix.shape, *matrix.stride()), self.packed)

    def times(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """`tokens @ matrix` of `(batch, tokens, k)`, whose samples may lie apart; `out` has to be contiguous."""
        batch, count, width = tokens.shape
        result = tokens.new_empty(batch, count, self.shape[1]) if out is None else out
        module = _loaded("simd_covariance")
        sizes = (batch, count, width, self.shape[1], tokens.stride(0), result.stride(0))
        module.times_panels(_storage(tokens), sizes, self.packed, _flat(result))
        return result


class SumOfProducts:
    """`Σ AᵀB` over samples `(batch, tokens, m)` and `(batch, tokens, n)`, added to piece by piece; 4 divides m."""

    def __init__(self, like: Tensor) -> None:
        self.shape = like.shape
        self.padded = like.new_zeros(like.shape[0], _whole_tiles(like.shape[1]))

    def add(self, left: Tensor, right: Tensor) -> None:
        """The products of some more samples, which may lie apart."""
        module = _loaded("simd_covariance")
        sizes = (*left.shape[:2], *self.shape, left.stride(0), right.stride(0))
        module.add_products(_storage(left), _storage(right), sizes, _flat(self.padded))

    def result(self) -> Tensor:
        """The sum so far."""
        return self.padded[:, : self.shape[1]].contiguous()


def can_scale_rows(rows: Any) -> bool:
    """Whether the kernel can read the array `(rows, width)`: of half precision, contiguous, of whole registers."""
    halves = rows.dtype.str == "<f2" and rows.flags.c_contiguous and rows.shape[1] % LANES == 0
    return halves and kernels("simd_rows") is not None


def scaled_rows(rows: Any, begins: Any, ends: Any, weight: Tensor, bias: Tensor) -> Tensor:
    """Rows `begins[i]` to before `ends[i]` of an array of half precision, for all i, times weight plus bias."""
    out = weight.new_empty(int((ends - begins).sum()), rows.shape[1])
    numbers = weight.detach().numpy(), bias.detach().numpy(), _flat(out)
    _loaded("simd_rows").scale(rows.view("u2").reshape(-1), begins, ends, *numbers)
    return out


def _storage(tensor: Tensor) -> Any:
    """All that lies between the first number and the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.detach().as_strided((last + 1,), (1,)).numpy()


def _flat(tensor: Tensor) -> Any:
    return tensor.flatten().numpy()
