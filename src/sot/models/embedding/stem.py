"""The stem of every convolutional embedding, 3×3 convolution and 3×3/2 max pooling, and its training by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sot.models.embedding.norm_training import channels_first, channels_last
from sot.ops.library import define

KERNEL, STRIDE, PADDING = [3, 3], [2, 2], [1, 1]  # of the pooling
PIXELS_IN_CACHE = 224 * 224  # of a thread: the widest maps of such an image take 13 MB


def images_at_once(image: Tensor) -> int:
    """How many images of `(batch, channels, H, W)` a CPU should take at a time for their maps to stay in its cache."""
    return max(1, torch.get_num_threads() * PIXELS_IN_CACHE // (image.shape[2] * image.shape[3]))


def patches(image: Tensor) -> Tensor:
    """All 3×3 neighbourhoods of a channels-last image as rows `(batch · H · W, 9 · channels)`."""
    batch, channels, height, width = image.shape
    padded = F.pad(image.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))  # (batch, H + 2, W + 2, channels)
    whole, row, column, _ = padded.stride()
    # three neighbours in a row are next to each other in memory
    windows = padded.as_strided((batch, height, width, 3, 3 * channels), (whole, row, column, row, 1))
    return windows.reshape(batch * height * width, 9 * channels)


def _compute(image: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    out, places = _fake(image, weight, bias)
    at_once = images_at_once(channels_first(image))
    for piece, result, kept in zip(*(torch.split(each, at_once) for each in (image, out, places))):
        convolved = F.conv2d(channels_first(piece), weight, padding=1)
        pooled, place = F.max_pool2d_with_indices(convolved, KERNEL, STRIDE, PADDING)
        torch.add(channels_last(pooled), bias, out=result)
        kept.copy_(channels_last(place).flatten(1, 2))
    return out, places


def _fake(image: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    shape = image.shape[0], (image.shape[1] + 1) // 2, (image.shape[2] + 1) // 2, weight.shape[0]
    places = image.new_empty(shape[0], shape[1] * shape[2], shape[3], dtype=torch.int32)
    return image.new_empty(shape), places


def _flops(image: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(image[:3]) * math.prod(weight)


_stem = define("stem(Tensor image, Tensor weight, Tensor bias) -> (Tensor, Tensor)", _compute, _fake, _flops)


def _compute_gradients(
    image: Tensor, weight: Tensor, places: Tensor, grad: Tensor, of_image: bool
) -> tuple[Tensor, Tensor]:
    channels, in_channels = weight.shape[:2]
    image, grad, places = channels_first(image), channels_first(grad), places.view(grad.shape)
    matrix = weight.new_zeros(9 * in_channels, channels)
    grad_image = channels_first(
        channels_last(image).new_empty(channels_last(image).shape if of_image else (0, 0, 0, 0))
    )
    at_once = images_at_once(image)
    targets = torch.split(grad_image, at_once)
    pieces = zip(*(torch.split(each, at_once) for each in (image, grad, places)))
    for index, (piece, grad_output, place) in enumerate(pieces):
        convolved = grad.new_empty((len(piece), *piece.shape[2:], channels)).permute(0, 3, 1, 2)  # for its shape
        grad_convolved = torch.ops.aten.max_pool2d_with_indices_backward(
            grad_output, convolved, KERNEL, STRIDE, PADDING, [1, 1], False, channels_first(place.long())
        )
        matrix.addmm_(patches(piece).t(), channels_last(grad_convolved).reshape(-1, channels))
        if of_image:
            targets[index].copy_(F.conv_transpose2d(grad_convolved, weight, padding=1))
    return channels_last(grad_image), matrix.view(3, 3, in_channels, channels).permute(3, 2, 0, 1).contiguous()


def _fake_gradients(image: Tensor, weight: Tensor, places: Tensor, grad: Tensor, of_image: bool) -> Any:
    return image.new_empty(image.shape if of_image else (0, 0, 0, 0)), weight.new_empty(weight.shape)


_gradients = define(
    "stem_backward(Tensor image, Tensor weight, Tensor places, Tensor grad, bool of_image) -> (Tensor, Tensor)",
    _compute_gradients,
    _fake_gradients,
    lambda image, weight, places, grad, of_image, **kwargs: (1 + of_image) * _flops(image, weight),
)


class StemFunction(torch.autograd.Function):
    """Convolution and pooling, image by image, keeping where each maximum was and no map at full resolution.

    The bias waits for the pooling, as it moves no maximum.
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = channels_last(image)
        out, places = _stem(rows, weight, bias)
        ctx.save_for_backward(rows, weight, places)
        return channels_first(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_image = ctx.needs_input_grad[0]
        grad_image, grad_weight = _gradients(*ctx.saved_tensors, channels_last(grad), of_image)
        return channels_first(grad_image) if of_image else None, grad_weight, grad.sum((0, 2, 3))
