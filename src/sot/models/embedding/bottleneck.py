"""ResNet's bottleneck, for stems and token embeddings."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class ResidualBottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolution; the shortcut is projected unless shape and stride leave it as it is."""

    def __init__(
        self,
        channels: int,
        width: int,
        out_channels: int,
        stride: int = 1,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out_channels, 1, bias=False), norm(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or channels != out_channels:
            projection = nn.Conv2d(channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        return self.relu(out + self.downsample(x))
