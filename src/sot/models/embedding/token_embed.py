"""Token embeddings: small convolutional networks from an image to a grid of word tokens (section 3.1, table S-1).

Those of the paper are a stem that halves the image, stages that halve it further, and a 1×1 convolution to the width of
the tokens. Parameter names inside the stages are those of torchvision's DenseNet and ResNet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, register_notrace_module, to_2tuple
from timm.models.pit import ConvEmbedding
from torch import Tensor, nn

from sot.models.accelerate import computes_by_hand
from sot.models.embedding.bottleneck import ResidualBottleneck
from sot.models.embedding.dense import dense_stages
from sot.models.embedding.progressive_sampling import ProgressiveSampling
from sot.models.embedding.stem import StemFunction, images_at_once
from sot.models.embedding.tokens_to_token import TokensToToken

STEM_WIDTH = 64


class ConvNormAct(nn.Sequential):
    """Convolution without bias, BN, ReLU."""

    def __init__(self, channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=1e-3)
        self.relu = nn.ReLU(inplace=True)


class Inception(nn.Module):
    """Four branches of 32, 64, 16 and 16 channels side by side."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.branch0 = ConvNormAct(channels, 32, 1, stride)
        self.branch1 = nn.Sequential(ConvNormAct(channels, 32, 1), ConvNormAct(32, 64, 3, stride))
        self.branch2 = nn.Sequential(ConvNormAct(channels, 16, 1), ConvNormAct(16, 16, 5, stride))
        self.branch3 = nn.Sequential(nn.MaxPool2d(3, stride, padding=1), ConvNormAct(channels, 16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch0(x), self.branch1(x), self.branch2(x), self.branch3(x)], dim=1)


class NonLocal(nn.Module):
    """Self-attention over all cells of the map, added to a projected shortcut; starts as the shortcut alone."""

    def __init__(self, channels: int, inner: int, out_channels: int) -> None:
        super().__init__()
        self.theta = nn.Sequential(nn.Conv2d(channels, inner, 1), nn.BatchNorm2d(inner))
        self.phi = nn.Sequential(nn.Conv2d(channels, inner, 1), nn.BatchNorm2d(inner))
        self.g = nn.Sequential(nn.Conv2d(channels, inner, 1), nn.BatchNorm2d(inner))
        self.W = nn.Conv2d(inner, out_channels, 1)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out_channels, 1), nn.BatchNorm2d(out_channels))
        self.bn_norm = nn.BatchNorm2d(out_channels)
        nn.init.zeros_(self.W.weight)
        nn.init.zeros_(self.W.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        query = self.theta(x).flatten(2).mT  # (batch, cells, inner)
        key, value = self.phi(x).flatten(2), self.g(x).flatten(2)
        attended = value @ (query @ key).softmax(-1).mT  # (batch, inner, cells)
        attended = attended.unflatten(2, (x.shape[2], x.shape[3]))
        return self.bn_norm(self.W(attended) + self.shortcut(x))


def residual_stages(strides: tuple[int, int, int]) -> tuple[nn.Sequential, int]:
    """Three bottlenecks to 256 channels."""
    norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01)
    widths = zip((STEM_WIDTH, 256, 256), strides)
    return nn.Sequential(*(ResidualBottleneck(width, 64, 256, stride, norm) for width, stride in widths)), 256


def inception_stages(strides: tuple[int, int, int]) -> tuple[nn.Sequential, int]:
    """Three Inception blocks to 128 channels."""
    return nn.Sequential(*map(Inception, (STEM_WIDTH, 128, 128), strides)), 128


def non_local_stages(strides: tuple[int, int, int]) -> tuple[nn.Sequential, int]:
    """Two rounds of convolution and non-local block; a third halving, where asked for, is average pooling."""
    layers: list[nn.Module] = []
    for channels, out_channels, stride in ((STEM_WIDTH, 128, strides[0]), (128, 256, strides[1])):
        convolution = nn.Conv2d(channels, 64, 3, stride, 1)
        norm = nn.BatchNorm2d(64, eps=1e-3, momentum=0.01)
        layers += [convolution, norm, nn.ReLU(inplace=True), NonLocal(64, 64, out_channels)]
    if strides[2] > 1:
        layers.append(nn.AvgPool2d(strides[2]))
    return nn.Sequential(*layers), 256


STAGES: dict[str, Callable[[tuple[int, int, int]], tuple[nn.Sequential, int]]] = {
    "densenet": partial(dense_stages, STEM_WIDTH),
    "resnet": residual_stages,
    "inception": inception_stages,
    "nonlocal": non_local_stages,
}
REDUCTIONS = (16, 8, 4)


def choose_reduction(img_size: int | tuple[int, int]) -> int:
    """The coarsest of 16, 8, 4 that leaves at least 14 cells along the shorter side: 16 at 224 px, 8 at 112 px."""
    shorter = min(to_2tuple(img_size))
    return next((r for r in REDUCTIONS if shorter // r >= 14), REDUCTIONS[-1])


@register_notrace_module
class ConvolutionalEmbedding(nn.Module):
    """Image `(batch, in_chans, H, W)` to features `(batch, dim, H / reduction, W / reduction)`.

    Maps are kept channels-last whatever the layout of the image. Accelerated on a CPU, large batches pass in pieces
    whose maps stay in its cache: all the way in eval mode; through the stem in training, as batch norms see all images,
    and where compiled, as the graph of every piece would be compiled.
    """

    accelerated = False

    def __init__(self, kind: str, in_chans: int, dim: int, reduction: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_chans, STEM_WIDTH, 3, padding=1), nn.MaxPool2d(3, 2, padding=1))
        strides = (2, 2 if reduction >= 8 else 1, 2 if reduction >= 16 else 1)
        self.stages, channels = STAGES[kind](strides)
        self.out = nn.Conv2d(channels, dim, 1)

    def forward(self, image: Tensor) -> Tensor:
        image = image.contiguous(memory_format=torch.channels_last)
        if not (self.accelerated and computes_by_hand(image)):
            return self.out(self.stages(self.stem(image)))
        if torch.compiler.is_compiling() or any(module.training for module in self.modules()):
            return self.out(self.stages(StemFunction.apply(image, self.stem[0].weight, self.stem[0].bias)))
        pieces = torch.split(image, images_at_once(image))
        return torch.cat([self.out(self.stages(self.stem(piece))) for piece in pieces])


NETWORKS: dict[str, Callable[..., nn.Module]] = {  # of input channels, width, reduction and settings of their own
    **{kind: partial(ConvolutionalEmbedding, kind) for kind in STAGES},
    "t2t": TokensToToken,
    "t2t_transformer": partial(TokensToToken, attention="transformer"),
    "ps": ProgressiveSampling,
}
EMBEDDINGS = (*STAGES, "naive", *(kind for kind in NETWORKS if kind not in STAGES))


class TokenEmbed(PatchEmbed):
    """timm's PatchEmbed with a network in place of its projection: fits wherever timm takes one.

    `network` has settings of the kind's own. Progressive sampling takes any number of points; the others cut the image
    into whole patches.
    """

    def __init__(
        self,
        kind: str,
        img_size: Any,
        patch_size: Any,
        in_chans: int,
        embed_dim: int,
        network: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kind not in EMBEDDINGS:
            raise ValueError(f"unknown embed {kind!r}; accepted: {', '.join(EMBEDDINGS)}")
        super().__init__(img_size, patch_size, in_chans, embed_dim, **kwargs)
        self.kind, self.in_chans, self.embed_dim = kind, in_chans, embed_dim
        self._check_size()
        if kind != "naive":
            if len(set(self.patch_size)) > 1:
                raise ValueError(f"patch_size must be square for {kind}, got {self.patch_size}")
            if kind != "ps" and self.patch_size[0] not in REDUCTIONS:
                accepted = ", ".join(map(str, REDUCTIONS))
                raise ValueError(f"patch_size must be one of {accepted} for {kind}, got {self.patch_size[0]}")
            device, dtype = kwargs.get("device"), kwargs.get("dtype")
            built = NETWORKS[kind](in_chans, embed_dim, self.patch_size[0], **(network or {}))
            self.proj = built.to(device=device, dtype=dtype)

    def _check_size(self) -> None:
        if self.img_size is None or not self.strict_img_size:
            return
        whole = self.kind != "ps"
        if any(size < patch or (whole and size % patch) for size, patch in zip(self.img_size, self.patch_size)):
            reduction = "×".join(map(str, self.patch_size))
            raise ValueError(f"img_size must be a multiple of the reduction {reduction}, got {self.img_size}")

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Another image size; the reduction of a convolutional embedding is fixed once it is built."""
        if patch_size is not None and self.kind != "naive" and to_2tuple(patch_size) != self.patch_size:
            raise ValueError(f"patch_size of {self.kind} is fixed at {self.patch_size[0]}, got {patch_size}")
        super().set_input_size(img_size, patch_size)
        self._check_size()


class ResampledEmbed(TokenEmbed):
    """Makes a map of the cells that a model has positions for: PiT's patches overlap, 27×27 of them at 224 px."""

    def __init__(self, kind: str, cells: tuple[int, int], *sizes: Any, **kwargs: Any) -> None:
        super().__init__(kind, *sizes, output_fmt="NCHW", **kwargs)
        self.cells = cells

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(super().forward(x), size=self.cells, mode="bilinear")


def replace_embedding(model: Any, kind: str) -> None:
    """Put another embedding where a timm model has its patch embedding: the paper's "+ours" rows.

    A model whose embedding has another place has a method `replace_embedding(kind)` of its own (PVT, Conformer).
    """
    if hasattr(model, "replace_embedding"):
        model.replace_embedding(kind)
        return
    old = getattr(model, "patch_embed", None)
    if isinstance(old, ConvEmbedding):
        _refuse_sampling(kind)
        conv, weight = old.conv, old.conv.weight
        nearest = min(REDUCTIONS, key=lambda reduction: abs(reduction - conv.stride[0]))  # its patches overlap
        sizes = (old.img_size, nearest, conv.in_channels, conv.out_channels)
        model.patch_embed = ResampledEmbed(kind, old.grid_size, *sizes, device=weight.device, dtype=weight.dtype)
        return
    if not isinstance(old, PatchEmbed) or old.img_size is None:
        raise ValueError(
            f"embed={kind!r} replaces the patch embedding of ViT, DeiT, T2T-ViT, Swin; {type(model).__name__} has none"
        )
    model.patch_embed = embedding_like(old, kind)


def _refuse_sampling(kind: str, old: str | None = None) -> None:
    if "ps" in (kind, old):
        raise ValueError(
            f"embed={kind!r} is not possible here: progressive sampling holds the first layers of its transformer"
        )


def embedding_like(old: PatchEmbed, kind: str) -> TokenEmbed:
    """An embedding of another kind with the sizes and the norm of `old`, on its device."""
    _refuse_sampling(kind, getattr(old, "kind", None))
    weight = next(old.proj.parameters())
    new = TokenEmbed(
        kind,
        old.img_size,
        old.patch_size,
        old.in_chans if isinstance(old, TokenEmbed) else old.proj.in_channels,
        old.embed_dim if isinstance(old, TokenEmbed) else old.proj.out_channels,
        output_fmt=None if old.flatten else str(old.output_fmt.value),
        strict_img_size=old.strict_img_size,
        device=weight.device,
        dtype=weight.dtype,
    )
    new.norm = old.norm
    return new
