"""A copy of a model for inference alone, with its batch norms folded into convolutions."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from timm.layers import BatchNormAct2d, Conv2dSame, is_notrace_module
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sot.models.embedding.dense import DenseBlock, DenseLayer, Transition

Model = TypeVar("Model", bound=nn.Module)
FOLDABLE = (nn.Conv2d, Conv2dSame)  # not their subclasses, which may compute another weight from the one they hold


def optimize_for_inference(model: Model) -> Model:
    """Return a copy of any model in eval mode with equal logits and fewer steps to them.

    A batch norm after a convolution, where nothing else reads what is between them, becomes part of it. So does each
    batch norm of a dense block, although a ReLU follows it. The copy has other parameters than the model, without
    gradients: save and train the model, not the copy.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize_for_inference takes a torch module, got {type(model).__name__}")
    result = copy.deepcopy(model).eval().requires_grad_(False)
    fold_dense(result)
    uses = Counter(id(module) for _, module in result.named_modules(remove_duplicate=False))
    fold_convolutions(result, {module for module in result.modules() if uses[id(module)] > 1})
    return result


def affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Rate and offset of every channel in float64: what a batch norm is in eval mode."""
    assert norm.running_mean is not None and norm.running_var is not None
    rate = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
    return rate, norm.bias.double() - norm.running_mean.double() * rate


def convolution_of_affine(conv: nn.Conv2d, rate: Tensor, offset: Tensor) -> nn.Conv2d:
    """The 1×1 convolution of `rate · x + offset`, as a convolution of `x`."""
    matrix = conv.weight.double().flatten(1)  # (out, in)
    result = nn.Conv2d(conv.in_channels, conv.out_channels, 1).to(conv.weight).eval().requires_grad_(False)
    result.weight.copy_((matrix * rate).view_as(result.weight))
    assert result.bias is not None
    result.bias.copy_(matrix @ offset if conv.bias is None else matrix @ offset + conv.bias.double())
    return result


class FoldedDenseLayer(nn.Module):
    """A dense layer without batch norms.

    With `a` and `b` the rate and offset of the first, `relu(a·x + b)` is `a·max(x, -b/a) + b` if `a > 0` and
    `a·min(x, -b/a) + b` if `a < 0`: x between two bounds, then something linear for the convolution to take over.
    """

    def __init__(self, layer: DenseLayer) -> None:
        super().__init__()
        rate, offset = affine(layer.norm1)
        bound = (-offset / rate).to(layer.norm1.weight)
        varies = bound.isfinite()  # a rate of zero leaves relu(b), whatever x is
        infinity = torch.full_like(bound, torch.inf)
        self.low = nn.Buffer(torch.where(varies & (rate > 0), bound, -infinity).view(1, -1, 1, 1))
        self.high = nn.Buffer(torch.where(varies & (rate < 0), bound, infinity).view(1, -1, 1, 1))
        conv1 = convolution_of_affine(layer.conv1, rate.where(varies, 0), offset.where(varies, offset.relu()))
        self.conv1 = fuse_conv_bn_eval(conv1, layer.norm2)
        self.conv2 = layer.conv2

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(self.conv1(x.clamp(self.low, self.high)).relu_())
        return torch.cat([x, new], dim=1)


def fold_dense(model: nn.Module) -> None:
    """Dense blocks and transitions of the model, replaced by what they are in eval mode."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, DenseBlock):
                layers = (layer for layer in child if isinstance(layer, DenseLayer))
                setattr(parent, name, nn.Sequential(*map(FoldedDenseLayer, layers)))
            elif isinstance(child, Transition):
                setattr(parent, name, nn.Sequential(child.pool, convolution_of_affine(child.conv, *affine(child.norm))))


class Tracer(fx.Tracer):
    """Records calls of modules, without a look into batch norms and what timm says cannot be traced."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is recorded as one call."""
        return isinstance(m, nn.BatchNorm2d) or is_notrace_module(m) or super().is_leaf_module(m, module_qualified_name)


def fold_convolutions(module: nn.Module, shared: set[nn.Module]) -> None:
    """Batch norms that follow a convolution, in every part of the module whose forward can be traced."""
    try:
        graph = Tracer().trace(module)
    except Exception:  # tracing runs foreign code on stand-ins for tensors: whatever it raises, look at its parts alone
        parts = list(module.children())
    else:
        parts = [module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]
        for conv_name, norm_name in pairs(graph):
            conv: Any = module.get_submodule(conv_name)
            norm: Any = module.get_submodule(norm_name)
            known = type(conv) in FOLDABLE and type(norm) in (nn.BatchNorm2d, BatchNormAct2d)
            if known and norm.running_mean is not None and shared.isdisjoint({conv, norm}):
                module.set_submodule(conv_name, fuse_conv_bn_eval(conv, norm))
                rest = nn.Sequential(norm.drop, norm.act) if isinstance(norm, BatchNormAct2d) else nn.Identity()
                module.set_submodule(norm_name, rest)
    for part in parts:
        if part is not module and any(part.children()):
            fold_convolutions(part, shared)


def pairs(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """Names of modules that are called once, the second on the result of the first, which nothing else reads."""
    calls = Counter(node.target for node in graph.nodes)
    for node in graph.nodes:
        before = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        if len(before.users) == 1 and calls[node.target] == calls[before.target] == 1:
            yield str(before.target), str(node.target)
