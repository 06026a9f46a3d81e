"""The stem of every convolutional embedding, 3×3 convolution and 3×3/2 max pooling, and its training by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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


class StemFunction(torch.autograd.Function):
    """Convolution and pooling, image by image, keeping where each maximum was and no map at full resolution.

    The bias waits for the pooling, as it moves no maximum.
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        results, places = [], []
        for piece in torch.split(image, images_at_once(image)):
            convolved = F.conv2d(piece, weight, padding=1)
            pooled, place = F.max_pool2d_with_indices(convolved, KERNEL, STRIDE, PADDING)
            results.append(pooled.add_(bias.view(-1, 1, 1)))
            places.append(place.int())
        ctx.save_for_backward(image, weight, *places)
        return torch.cat(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        image, weight, *places = ctx.saved_tensors
        channels, in_channels = weight.shape[:2]
        matrix = weight.new_zeros(9 * in_channels, channels)
        grad_image = torch.empty_like(image) if ctx.needs_input_grad[0] else image[:0]
        sizes = [len(place) for place in places]
        pieces = zip(torch.split(image, sizes), torch.split(grad, sizes), places)
        for index, (piece, grad_output, place) in enumerate(pieces):
            convolved = grad.new_empty((len(piece), *piece.shape[2:], channels)).permute(0, 3, 1, 2)  # for its shape
            grad_convolved = torch.ops.aten.max_pool2d_with_indices_backward(
                grad_output, convolved, KERNEL, STRIDE, PADDING, [1, 1], False, place.long()
            )
            matrix.addmm_(patches(piece).t(), grad_convolved.permute(0, 2, 3, 1).reshape(-1, channels))
            if ctx.needs_input_grad[0]:
                target = torch.split(grad_image, sizes)[index]
                target.copy_(F.conv_transpose2d(grad_convolved, weight, padding=1))
        grad_weight = matrix.view(3, 3, in_channels, channels).permute(3, 2, 0, 1)
        return grad_image if ctx.needs_input_grad[0] else None, grad_weight, grad.sum((0, 2, 3))
