"""Batch norms in training by hand: their statistics, maps in pieces that stay in a CPU's cache, and pooled norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sot.ops.library import define

CELLS_IN_CACHE = 1024  # of a thread, times up to 208 channels
MAP_IN_CACHE = 112 * 112  # of a thread, times 32 channels


class Affine(NamedTuple):
    """Channel by channel, `rate · x + offset`: a batch norm once its statistics are known."""

    rate: Tensor
    offset: Tensor

    @classmethod
    def of_batch(cls, statistics: Tensor, eps: float) -> Affine:
        """What a norm does before its own scale and shift to a batch of this mean and variance."""
        mean, variance = statistics.unbind()
        rate = torch.rsqrt(variance + eps)
        return cls(rate, -mean * rate)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.offset, x, self.rate)

    def then(self, rate: Tensor, offset: Tensor) -> Affine:
        """Both in one."""
        return Affine(rate * self.rate, rate * self.offset + offset)


def in_pieces(*maps: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Maps `(batch, H, W, channels)` as rows of cells, a cacheful at a time."""
    at_once = CELLS_IN_CACHE * torch.get_num_threads()
    return zip(*(torch.split(each.flatten(0, 2), at_once) for each in maps))


def image_by_image(*maps: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Maps `(batch, H, W, channels)`, as many images at a time as stay in cache."""
    _, height, width, _ = maps[0].shape
    at_once = max(1, MAP_IN_CACHE * torch.get_num_threads() // (height * width))
    return zip(*(torch.split(each, at_once) for each in maps))


def channels_first(x: Tensor) -> Tensor:
    """A view `(batch, channels, H, W)`, as convolutions name the axes."""
    return x.permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    """A view `(batch, H, W, channels)`, in the order of memory."""
    return x.permute(0, 2, 3, 1)


def mean_and_variance(x: Tensor) -> Tensor:
    """Of every channel `(2, channels)`, without a correction."""
    return torch.stack(torch.batch_norm_update_stats(channels_first(x), None, None, 0.0))


def trains_as_usual(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether the norm scales, shifts, and tracks batches of more than one cell with a fixed momentum."""
    tracks = norm.training and norm.track_running_stats and norm.momentum is not None
    return type(norm) is nn.BatchNorm2d and tracks and norm.affine and x[:, 0].numel() > 1


@torch.no_grad()
def track(norm: Any, statistics: Tensor, cells: int) -> None:
    """Let mean and variance of a batch of so many cells take part in the running ones of the batch norm."""
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(statistics[0], norm.momentum)
    norm.running_var.lerp_(statistics[1] * (cells / (cells - 1)), norm.momentum)


def _compute(x: Tensor, scale: Tensor, shift: Tensor, eps: float, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    statistics = mean_and_variance(x)
    normalized = Affine.of_batch(statistics, eps)(channels_last(F.avg_pool2d(channels_first(x), stride)))
    return torch.addcmul(shift, normalized, scale), normalized.flatten(1, 2), statistics


def _fake(x: Tensor, scale: Tensor, shift: Tensor, eps: float, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, height, width, channels = x.shape
    pooled = x.new_empty(batch, height // stride, width // stride, channels)
    return pooled, pooled.flatten(1, 2).clone(), x.new_empty(2, channels)


def _compute_gradients(
    grad: Tensor, rows: Tensor, scale: Tensor, flat: Tensor, statistics: Tensor, eps: float, stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    affine, normalized = Affine.of_batch(statistics, eps), flat.view(grad.shape)
    maps = torch.unflatten(rows, 1, (stride * grad.shape[1], stride * grad.shape[2]))
    grad_shift, grad_scale = grad.sum((0, 1, 2)), (grad * normalized).sum((0, 1, 2))
    slope = scale * affine.rate
    share = -slope / maps[..., 0].numel()
    through_statistics = affine.then(share * grad_scale, share * grad_shift)
    grad_x = maps.new_empty(maps.shape)
    for images, grad_output, target in image_by_image(maps, grad * (slope / stride**2), grad_x):
        torch.addcmul(through_statistics.offset, images, through_statistics.rate, out=target)
        windows = torch.unflatten(torch.unflatten(target, 2, (-1, stride)), 1, (-1, stride))
        windows += grad_output[:, :, None, :, None]
    return grad_x.flatten(1, 2), grad_scale, grad_shift


_norm = define(
    "pooled_norm(Tensor x, Tensor scale, Tensor shift, float eps, int stride) -> (Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    lambda *shapes, **kwargs: 0,  # as torch counts norms
)
_gradients = define(
    "pooled_norm_backward(Tensor grad, Tensor rows, Tensor scale, Tensor normalized, Tensor statistics, float eps,"
    " int stride) -> (Tensor, Tensor, Tensor)",
    _compute_gradients,
    lambda grad, rows, scale, *rest: (rows.new_empty(rows.shape), *(scale.new_empty(scale.shape) for _ in "ab")),
    lambda *shapes, **kwargs: 0,
)


class PooledNormFunction(torch.autograd.Function):
    """Average pooling of a batch norm: statistics of all cells, everything else on the few pooled ones.

    Gives the result, and mean and variance for the norm.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, stride: int, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        maps = channels_last(x)  # kept with cells in one row: compilers copy what has four dimensions and another order
        out, normalized, statistics = _norm(maps, scale, shift, eps, stride)
        ctx.save_for_backward(maps.flatten(1, 2), scale, normalized, statistics)
        ctx.settings, ctx.grid = (eps, stride), x.shape[2:]
        ctx.mark_non_differentiable(statistics)
        return channels_first(out), statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_statistics: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_scale, of_shift = _gradients(channels_last(grad), *ctx.saved_tensors, *ctx.settings)
        return channels_first(torch.unflatten(of_x, 1, ctx.grid)), None, None, of_scale, of_shift
