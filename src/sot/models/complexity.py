"""Parameters and multiply-adds of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sot.models.accelerate import accelerate

IMAGENET_PICTURES = 1_281_167  # to train on
WEIGHTED_LAYERS = ("aten.convolution", "aten.mm", "aten.addmm")  # convolutions and linear layers


@dataclass(frozen=True)
class Complexity:
    """`layer_macs` counts convolutions and linear layers, as the paper does; `all_macs` adds matrix products."""

    params: int
    layer_macs: int
    all_macs: int


def count_parameters(model: nn.Module) -> int:
    """Parameters, without buffers; the fixed positions of the SoT family are a buffer, as in the paper's counts."""
    return sum(parameter.numel() for parameter in model.parameters())


class Logits(nn.Module):
    """A classifier of transformers as one that takes pixels and returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=pixels).logits
        return logits


def measure_complexity(model: nn.Module, input_size: tuple[int, int, int]) -> Complexity:
    """Count one image of `input_size` on the meta device, where nothing is computed.

    The model is moved there and no longer accelerated: the counts are those of its layers one by one, as published.
    """
    model = accelerate(model, False).to("meta").eval().requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, *input_size, device="meta"))
    flops = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    layers = sum(flops.get(op, 0) for op in WEIGHTED_LAYERS)
    return Complexity(count_parameters(model), layers // 2, sum(flops.values()) // 2)


@dataclass(frozen=True)
class TrainingCost:
    """What training costs: multiply-adds of an image forward and backward, and bytes in float32."""

    macs: int
    saved_bytes: int  # for an image, from its forward to its backward pass
    state_bytes: int  # weights, their average and gradients, two moments of Adam


def storage_address(tensor: Tensor) -> int:
    """What tells the memory of one tensor from that of another, on the meta device too."""
    return tensor.untyped_storage()._cdata


def saved_bytes(function: Callable[[], Tensor], known: Iterable[Tensor] = ()) -> int:
    """Bytes of the different storages that the backward pass of `function()` needs, other than those of `known`."""
    held = {storage_address(tensor) for tensor in known}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if storage_address(tensor) not in held:
            saved[storage_address(tensor)] = tensor.detach()  # keeps the storage: its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del output
    return total


def measure_training(model: nn.Module, input_size: tuple[int, int, int]) -> TrainingCost:
    """Count on the meta device, where nothing is computed, what `sot train` does on an accelerator.

    The model is moved there and accelerated. What is saved for two images less what is saved for one leaves the
    weights out.
    """
    model = accelerate(model).to("meta").train().requires_grad_(True)

    def run(batch: int) -> Tensor:
        return model(torch.empty(batch, *input_size, device="meta"))

    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(run(1).sum())
    saved = saved_bytes(lambda: run(2)) - saved_bytes(lambda: run(1))
    state = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return TrainingCost(counter.get_total_flops() // 2, saved, 5 * state)
