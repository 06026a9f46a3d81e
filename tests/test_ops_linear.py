"""Large linear layers of an accelerated head: the same as torch's, and only where they were asked for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sot
from reference import relative_error
from sot.core.head import HeadConfig, SecondOrderHead
from sot.ops import use
from sot.ops.linear import LINEAR, ONEDNN, linear

pytestmark = [pytest.mark.usefixtures("threads"), pytest.mark.skipif(ONEDNN is None, reason="torch without oneDNN")]


def value_and_gradients(function, rows, weight, bias, frozen=None):
    inputs = {"rows": rows, "weight": weight, "bias": bias}
    inputs = {name: tensor.detach().requires_grad_(name != frozen) for name, tensor in inputs.items()}
    result = function(*inputs.values())
    wanted = [tensor for tensor in inputs.values() if tensor.requires_grad]
    return [result.detach(), *torch.autograd.grad(result.sum(), wanted)]  # the gradient of a sum has no strides


@pytest.mark.parametrize("frozen", [None, "rows", "weight", "bias"])
@pytest.mark.parametrize("lie", ["side by side", "apart", "in columns"])
def test_value_and_gradients_are_the_definition(lie, frozen):
    rows = {"apart": torch.randn(9, 3, 400)[:, 1], "in columns": torch.randn(400, 9).mT}.get(lie, torch.randn(9, 400))
    weight, bias = torch.randn(300, 400), torch.randn(300)
    assert LINEAR.choose(rows, weight) == "torch"
    ours = value_and_gradients(linear, rows, weight, bias, frozen)
    exact = value_and_gradients(F.linear, rows.double(), weight.double(), bias.double(), frozen)
    for one, other in zip(ours, exact):
        assert relative_error(one, other) < 1e-6


def test_without_bias_or_rows():
    rows, weight = torch.randn(0, 400), torch.randn(300, 400)
    assert linear(rows, weight, None).shape == (0, 300)
    assert relative_error(linear(weight, weight, None), weight.double() @ weight.double().mT) < 1e-6


def test_a_second_derivative_is_right():
    def slope(function):
        rows = torch.linspace(-1, 1, 4 * 400).sin().view(4, 400).requires_grad_()
        weight = (torch.linspace(-9, 9, 300 * 400).sin() / 400).view(300, 400).requires_grad_()
        (first,) = torch.autograd.grad(function(rows, weight, None).sin().sum(), rows, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [rows, weight])

    for ours, expected in zip(slope(linear), slope(F.linear)):
        assert relative_error(ours, expected) < 1e-4


def test_the_choice_is_by_type_and_size():
    rows, weight = torch.randn(2, 400), torch.randn(300, 400)
    assert LINEAR.choose(rows.double(), weight.double()) == "reference"
    assert LINEAR.choose(rows, weight[:100]) == "reference"
    assert LINEAR.choose(rows[:, ::2], torch.randn(600, 400)[:, ::2]) == "reference"
    assert LINEAR.choose(rows.to("meta"), weight.to("meta")) == "reference"
    with use("reference"):
        assert LINEAR.choose(rows, weight) == "reference"


@pytest.mark.parametrize("fusion", ["sum", "late", "concat", "class", "word"])
def test_an_accelerated_head_gives_the_same_without_calling_its_linear_layers(fusion):
    head = SecondOrderHead(128, 1000, HeadConfig(fusion=fusion)).eval()
    inputs = torch.randn(3, 128), torch.randn(3, 30, 128)
    expected = head(*inputs)
    layers, calls = [layer for layer in (head.class_linear, head.word_linear) if type(layer) is nn.Linear], []
    sot.accelerate(head)
    for layer in layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    assert torch.allclose(head(*inputs), expected, atol=1e-5) and not calls
    sot.accelerate(head, False)
    assert torch.equal(head(*inputs), expected) and len(calls) == len(layers)


def test_hooks_and_autocast_keep_the_layers():
    head, calls = SecondOrderHead(128, 1000), []
    inputs = torch.randn(3, 128), torch.randn(3, 30, 128)
    sot.accelerate(head)
    with torch.autocast("cpu", torch.bfloat16):
        assert head(*inputs).dtype == torch.bfloat16
    head.word_linear.register_forward_hook(lambda *_: calls.append(1))
    sot.accelerate(head)
    head(*inputs)
    assert calls
