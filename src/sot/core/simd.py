"""svPN of many small float32 matrices on a CPU, eight abreast in SIMD lanes: the way to the kernels, if numba is there.

Blocks are `(groups, ..., LANES)`: the eight matrices of a group side by side, rows and columns padded to even numbers.
`power` is through eigenvectors, `product_power` by matrix products.
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

MAX_COLUMNS = 64  # more of them outgrow the caches
FEW_COLUMNS = 32  # up to which even a single matrix, with seven lanes idle, is faster than by LAPACK
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


def is_possible(matrix: Tensor, name: str = "simd_kernels") -> bool:
    """Whether a batch `(batch, m >= n, n)` that torch would compute here and now can be given to the kernels."""
    plain = type(matrix) is Tensor and matrix.dtype == torch.float32 and matrix.device.type == "cpu"
    watched = torch._C._len_torch_dispatch_stack() > 0  # whoever counts or fakes operations would not see ours
    columns = matrix.shape[2]
    pays = columns <= FEW_COLUMNS or (columns <= MAX_COLUMNS and len(matrix) >= 4)
    return plain and pays and not watched and kernels(name) is not None


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
    module = kernels()
    assert module is not None
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


def pull_back(grad: Tensor, kept: Blocks, slopes: Blocks | None, roots: Blocks | None, factors: Blocks) -> Tensor:
    """`scale · (U (A∘T + B∘Tᵀ) + (GV - UT) diag(ratio)) Vᵀ`, `T = UᵀGV`, where A and B are the slopes or made of roots.

    `kept` has U and V, `factors` ratio and scale.
    """
    module = kernels()
    assert module is not None
    nothing, out = grad.new_empty(0, 1), torch.empty_like(grad)
    blocks = [_arrays(*given) for given in (kept, slopes or (nothing,) * 2, roots or (nothing,) * 3, factors)]
    source, target = grad.numpy(), out.numpy()
    _on_threads(lambda part: module.pull_back(source, *blocks, target, part), len(kept[0]))
    return out


def _of_steps(steps: tuple[Steps, Steps]) -> tuple[Any, ...]:
    return tuple(torch.tensor(each, dtype=torch.float64).numpy() for each in steps)


def product_power(matrix: Tensor, steps: tuple[Steps, Steps]) -> Tensor:
    """`P H^½` by the quintic steps to the polar factor P and to the root of H = PᵀQ."""
    module = kernels("simd_products")
    assert module is not None
    numbers, out = _of_steps(steps), torch.empty_like(matrix)
    source, target = matrix.numpy(), out.numpy()
    _on_threads(lambda part: module.power(source, numbers, target, part), -(-len(matrix) // module.LANES))
    return out


def product_pull_back(grad: Tensor, kept: Blocks, steps: tuple[Steps, Steps]) -> Tensor:
    """The gradient of `product_power` from the U, λ and V that `power` keeps."""
    module = kernels("simd_products_gradient")
    assert module is not None
    numbers, blocks, out = _of_steps(steps), _arrays(*kept), torch.empty_like(grad)
    source, target = grad.numpy(), out.numpy()
    _on_threads(lambda part: module.pull_back(source, blocks, numbers, target, part), len(kept[0]))
    return out
