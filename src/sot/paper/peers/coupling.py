"""Conformer's layer: a bottleneck and a transformer block, coupled both ways."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

BOTTLENECK = 4  # a bottleneck is that many times narrower than its block
batch_norm = partial(nn.BatchNorm2d, eps=1e-6)


class Bottleneck(nn.Module):
    """ResNet bottleneck that takes in and gives out its narrow map beside its wide one."""

    def __init__(self, channels: int, out_channels: int, stride: int = 1, project: bool = False) -> None:
        super().__init__()
        width = out_channels // BOTTLENECK
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), batch_norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), batch_norm(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out_channels, 1, bias=False), batch_norm(out_channels)
        self.residual_conv: nn.Module = nn.Identity()
        self.residual_bn: nn.Module = nn.Identity()
        if project:
            self.residual_conv = nn.Conv2d(channels, out_channels, 1, stride, bias=False)
            self.residual_bn = batch_norm(out_channels)

    def forward(self, x: Tensor, narrow: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map to `(map, narrow map)`; a given `narrow` map is added before the 3×3 convolution."""
        shortcut = self.residual_bn(self.residual_conv(x))
        x = F.relu(self.bn1(self.conv1(x)))
        if narrow is not None:
            x = x + narrow
        inner = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(inner)) + shortcut), inner


class MapToTokens(nn.Module):
    """Coupling of the convolution branch into the tokens: 1×1 convolution, average pooling, LayerNorm, GELU."""

    def __init__(self, channels: int, dim: int, stride: int) -> None:
        super().__init__()
        self.conv_project = nn.Conv2d(channels, dim, 1)
        self.sample_pooling = nn.AvgPool2d(stride, stride)
        self.ln = LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, channels, H, W)` to `(batch, H · W / stride², dim)`."""
        return F.gelu(self.ln(self.sample_pooling(self.conv_project(x)).flatten(2).transpose(1, 2)))


class TokensToMap(nn.Module):
    """Coupling of the words into the convolution branch: 1×1 convolution, BatchNorm, ReLU, nearest upsampling."""

    def __init__(self, dim: int, channels: int) -> None:
        super().__init__()
        self.conv_project = nn.Conv2d(dim, channels, 1)
        self.bn = batch_norm(channels)

    def forward(self, words: Tensor, grid: list[int], size: list[int]) -> Tensor:
        """`(batch, rows · columns, dim)` to `(batch, channels, H, W)` for `grid` [rows, columns], `size` [H, W]."""
        x = words.transpose(1, 2).reshape(words.shape[0], words.shape[2], grid[0], grid[1])
        return F.interpolate(F.relu(self.bn(self.conv_project(x))), size=(size[0], size[1]))


class CoupledBlock(nn.Module):
    """A layer of both branches: each reads what the other has made of the layer before."""

    def __init__(
        self,
        channels: int,
        out_channels: int,
        token_stride: int,
        stride: int,
        is_last: bool,
        transformer: Block,
        dim: int,
    ) -> None:
        super().__init__()
        width = out_channels // BOTTLENECK
        self.token_stride = token_stride
        self.cnn_block = Bottleneck(channels, out_channels, stride, project=stride > 1)
        self.fusion_block = Bottleneck(out_channels, out_channels, 2 if is_last else 1, project=is_last)
        self.squeeze_block = MapToTokens(width, dim, token_stride)
        self.expand_block = TokensToMap(dim, width)
        self.trans_block = transformer

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, narrow = self.cnn_block(x)
        words = self.squeeze_block(narrow)
        tokens = self.trans_block(tokens + torch.cat([tokens[:, :1], words], dim=1))
        size = [narrow.shape[2], narrow.shape[3]]
        grid = [size[0] // self.token_stride, size[1] // self.token_stride]
        x, _ = self.fusion_block(x, self.expand_block(tokens[:, 1:], grid, size))
        return x, tokens
