"""Batch norms in training by hand: their statistics, maps in pieces that stay in a CPU's cache, and pooled norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CELLS_IN_CACHE = 1024  # of a thread, times up to 208 channels
MAP_IN_CACHE = 112 * 112  # of a thread, times 32 channels


class Affine(NamedTuple):
    """Channel by channel, `rate · x + offset`: a batch norm once its statistics are known."""

    rate: Tensor
    offset: Tensor

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


def mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of every channel, without a correction."""
    return torch.batch_norm_update_stats(channels_first(x), None, None, 0.0)


def trains_as_usual(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether the norm scales, shifts, and tracks batches of more than one cell with a fixed momentum."""
    tracks = norm.training and norm.track_running_stats and norm.momentum is not None
    return type(norm) is nn.BatchNorm2d and tracks and norm.affine and x[:, 0].numel() > 1


def norm_of_batch(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, cells: int) -> Affine:
    """What the norm does to this batch before its own scale and shift; its running statistics take part in it."""
    assert norm.num_batches_tracked is not None and norm.running_mean is not None and norm.running_var is not None
    assert norm.momentum is not None
    norm.num_batches_tracked += 1
    norm.running_mean.lerp_(mean, norm.momentum)
    norm.running_var.lerp_(variance * (cells / (cells - 1)), norm.momentum)
    rate = torch.rsqrt(variance + norm.eps)
    return Affine(rate, -mean * rate)


class PooledNormFunction(torch.autograd.Function):
    """Average pooling of a batch norm: statistics of all cells, everything else on the few pooled ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: nn.BatchNorm2d, stride: int, scale: Tensor, shift: Tensor) -> Tensor:
        maps = channels_last(x)
        mean, variance = mean_and_variance(maps)
        affine = norm_of_batch(norm, mean, variance, maps[..., 0].numel())
        normalized = affine(channels_last(F.avg_pool2d(x, stride)))
        ctx.save_for_backward(x, normalized, scale, *affine)
        ctx.stride = stride
        return channels_first(torch.addcmul(shift, normalized, scale))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, normalized, scale, rate, offset = ctx.saved_tensors
        maps, grad = channels_last(x), channels_last(grad)
        grad_shift, grad_scale = grad.sum((0, 1, 2)), (grad * normalized).sum((0, 1, 2))
        slope = scale * rate
        share = -slope / maps[..., 0].numel()
        through_statistics = Affine(rate, offset).then(share * grad_scale, share * grad_shift)
        grad_x = torch.empty_like(maps)
        pooled = grad * (slope / ctx.stride**2)
        for images, grad_output, target in image_by_image(maps, pooled, grad_x):
            torch.addcmul(through_statistics.offset, images, through_statistics.rate, out=target)
            windows = torch.unflatten(torch.unflatten(target, 2, (-1, ctx.stride)), 1, (-1, ctx.stride))
            windows += grad_output[:, :, None, :, None]
        return channels_first(grad_x), None, None, grad_scale, grad_shift
