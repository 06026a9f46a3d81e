"""Dense blocks and the transitions between them: the stages of the paper's DenseNet-like token embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sot.models.accelerate import computes_by_hand
from sot.models.embedding.dense_training import DenseBlockFunction
from sot.models.embedding.norm_training import PooledNormFunction, track, trains_as_usual


class DenseLayer(nn.Module):
    """BN-ReLU-1×1, BN-ReLU-3×3: `growth` new channels from all channels so far."""

    def __init__(self, channels: int, growth: int, bottleneck: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, bottleneck, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck)
        self.conv2 = nn.Conv2d(bottleneck, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(self.relu(self.norm2(self.conv1(self.relu(self.norm1(x))))))
        return torch.cat([x, new], dim=1)


class DenseBlock(nn.Sequential):
    """Six dense layers: channels grow by 16 each."""

    accelerated = False

    def __init__(self, channels: int, num_layers: int = 6, growth: int = 16) -> None:
        super().__init__()
        for index in range(num_layers):
            self.add_module(f"denselayer{index + 1}", DenseLayer(channels + index * growth, growth, 2 * growth))
        self.out_channels = channels + num_layers * growth

    def forward(self, x: Tensor) -> Tensor:
        if self.accelerated and computes_by_hand(x) and all(trains_as_usual(norm, x) for norm, _ in self._halves()):
            return self._train_by_hand(x)
        for layer in self:
            x = layer(x)
        return x

    def _halves(self) -> list[tuple[Any, Any]]:
        """Norm and convolution, twice of each layer."""
        return [half for layer in self for half in ((layer.norm1, layer.conv1), (layer.norm2, layer.conv2))]

    def _train_by_hand(self, x: Tensor) -> Tensor:
        halves = self._halves()
        parameters = [weight for norm, conv in halves for weight in (norm.weight, norm.bias, conv.weight)]
        maps, statistics, *of_hidden = DenseBlockFunction.apply(x, tuple(norm.eps for norm, _ in halves), *parameters)
        for (norm1, _), (norm2, _), hidden in zip(halves[::2], halves[1::2], of_hidden):
            track(norm1, statistics[:, : norm1.num_features], x[:, 0].numel())
            track(norm2, hidden, x[:, 0].numel())
        return maps


class Transition(nn.Sequential):
    """BN, 1×1 convolution, and 2×2 average pooling where the stage halves its input."""

    accelerated = False

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        if self.accelerated:  # pooling is linear: before the convolution it leaves a quarter of the work
            return self.conv(self._pooled_norm(x))
        return self.pool(self.conv(self.norm(x)))

    def _pooled_norm(self, x: Tensor) -> Tensor:
        if not self.norm.training:
            return self.norm(self.pool(x))  # without batch statistics the norm may wait, too
        even = self.stride > 1 and x.shape[2] % self.stride == 0 and x.shape[3] % self.stride == 0
        if even and computes_by_hand(x) and trains_as_usual(self.norm, x):
            norm = self.norm
            pooled, statistics = PooledNormFunction.apply(x, norm.eps, self.stride, norm.weight, norm.bias)
            track(norm, statistics, x[:, 0].numel())
            return pooled
        return self.pool(self.norm(x))


def dense_stages(channels: int, strides: tuple[int, int, int]) -> tuple[nn.Sequential, int]:
    """Three dense blocks, each with its transition to 128 channels."""
    layers: list[nn.Module] = []
    for stride in strides:
        block = DenseBlock(channels)
        layers += [block, Transition(block.out_channels, 128, stride)]
        channels = 128
    return nn.Sequential(*layers), channels
