"""The iteration of float32 on a CPU by compiled kernels, one matrix after another in the cache.

The gradient passes through it again: only the matrix is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sot.ops._numba.threads import array, on_threads

FEWEST, MOST = 17, 64  # columns; fewer are padded too much for tiles of 4 × 24, more outgrow the caches


def accepts(spd: Tensor) -> bool:
    """Whether the kernels can take covariances `(..., n, n)`, and pay."""
    return spd.dtype == torch.float32 and spd.device.type == "cpu" and FEWEST <= spd.shape[-1] <= MOST


def square_root(spd: Tensor, num_iterations: int) -> Tensor:
    """The root of `(batch, n, n)`."""
    from sot.ops.matrix_root import numba_kernels

    out = spd.new_empty(spd.shape)
    source, target = array(spd), array(out)
    on_threads(lambda part: numba_kernels.square_root(source, num_iterations, target, part), len(spd))
    return out


def pull_back(spd: Tensor, grad: Tensor, num_iterations: int) -> Tensor:
    """The gradient of `square_root`."""
    from sot.ops.matrix_root import numba_kernels

    out = spd.new_empty(spd.shape)
    source, given, target = array(spd), array(grad), array(out)
    on_threads(lambda part: numba_kernels.pull_back(source, given, num_iterations, target, part), len(spd))
    return out
