"""Progressive sampling: tokens read off a feature map at points that move with every layer (Yue et al., ICCV 2021).

Parameter names are those of the published weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from sot.models.embedding.bottleneck import ResidualBottleneck
from sot.ops.precision import at_least_float32


def sample(features: Tensor, points: Tensor) -> Tensor:
    """Features `(batch, dim, H, W)` at `points (batch, n, 2)`, rows and columns in cells: `(batch, n, dim)`.

    Bilinear between the four cells around a point; beyond the border all is zero.
    """
    size = torch.tensor([features.shape[3], features.shape[2]], device=points.device)
    grid = (2 * points.flip(-1) + 1) / size - 1  # columns first, -1 and 1 at the outer edges of the map
    sampled = F.grid_sample(at_least_float32(features), grid.unsqueeze(1), align_corners=False)  # (batch, dim, 1, n)
    return sampled.squeeze(2).mT.to(features.dtype)


def regular_points(rows: int, columns: int, height: int, width: int) -> Tensor:
    """Centres of equal patches of a map, row by row: `(1, rows · columns, 2)` in cells."""
    down = (torch.arange(rows) + 0.5) * (height / rows)
    right = (torch.arange(columns) + 0.5) * (width / columns)
    return torch.stack(torch.meshgrid(down, right, indexing="ij"), dim=-1).flatten(0, 1).unsqueeze(0)


class SamplingLayer(nn.Module):
    """A transformer block over the sampled tokens that says where to sample next, unless it is the last."""

    def __init__(self, block: nn.Module, dim: int, is_last: bool) -> None:
        super().__init__()
        self.transformer_layer = block
        self.is_last = is_last
        self.offset_layer = nn.Identity() if is_last else nn.Linear(dim, 2)

    def forward(self, tokens: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.transformer_layer(tokens)
        if not self.is_last:
            points = points.detach() + self.offset_layer(tokens)
        return tokens, points


@register_notrace_module
class ProgressiveSampling(nn.Module):
    """Image `(batch, in_chans, H, W)` to features `(batch, dim, H // reduction, W // reduction)`.

    A convolutional stem makes a map of a quarter of the image. Tokens start from a regular grid of points; every layer
    adds what is found at the points and where they are, attends, and moves the points. The layers are the first of the
    transformer: `share_layers` brings them.
    """

    def __init__(self, in_chans: int, dim: int, reduction: int, stem_width: int = 192) -> None:
        super().__init__()
        self.reduction = reduction
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
            ResidualBottleneck(64, 64, stem_width),
            ResidualBottleneck(stem_width, 64, dim),
        )
        self.pos_layer = nn.Linear(2, dim)
        self.ps_layers = nn.ModuleList()

    def init_weights(self) -> None:
        """Points start where they are."""
        for layer in self.ps_layers:
            for parameter in layer.get_submodule("offset_layer").parameters():
                nn.init.zeros_(parameter)

    def forward(self, image: Tensor) -> Tensor:
        rows, columns = image.shape[2] // self.reduction, image.shape[3] // self.reduction
        features = self.stem(image)
        height, width = features.shape[2], features.shape[3]
        points = regular_points(rows, columns, height, width).to(at_least_float32(features))
        points = points.expand(image.shape[0], -1, -1)
        size = torch.tensor([height, width], device=image.device)
        tokens = torch.zeros_like(points[:, :, :1]).to(features.dtype)
        for layer in self.ps_layers:
            positions = self.pos_layer((points.detach() / size).to(features.dtype))
            tokens, points = layer(sample(features, points) + positions + tokens, points)
        return tokens.mT.reshape(image.shape[0], tokens.shape[2], rows, columns)


def share_layers(model: Any, iterations: int = 4) -> None:
    """Let the first `iterations` layers of a timm VisionTransformer sample its tokens; at least one layer does not."""
    sampling, blocks = model.patch_embed.proj, list(model.blocks)
    iterations = min(iterations, len(blocks) - 1)
    if iterations < 1:
        raise ValueError(f"progressive sampling needs a depth of at least 2, got {len(blocks)}")
    layers = [SamplingLayer(blocks[i], model.embed_dim, i == iterations - 1) for i in range(iterations)]
    sampling.ps_layers = nn.ModuleList(layers).to(sampling.pos_layer.weight)
    sampling.init_weights()
    model.blocks = nn.Sequential(*blocks[iterations:])
    model.feature_info = model.feature_info[: len(model.blocks)]
