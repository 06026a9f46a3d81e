"""Products by oneDNN: those of torch, and out of the way where somebody else has to see or change the layer."""

import pytest
import torch
import torch.nn.functional as F

from reference import graph_of, relative_error
from sot.core import products
from sot.core.products import Linear


def test_onednn_can_be_switched_off(monkeypatch):
    rows, weight = torch.randn(7, 20), torch.randn(9, 20)
    expected = rows @ weight.mT
    assert torch.allclose(products.times_transposed(rows, weight), expected, atol=1e-5)
    monkeypatch.setattr(products, "_ONEDNN", None)
    out = torch.empty(7, 9)
    assert products.times_transposed(rows, weight, out=out) is out and torch.equal(out, expected)


@pytest.fixture(autouse=True)
def _any_weight_is_large(monkeypatch):
    monkeypatch.setattr(products, "LARGE_WEIGHT", 0)


def test_small_weights_are_left_to_torch(monkeypatch):
    layer, rows = layer_and_rows()
    monkeypatch.setattr(products, "LARGE_WEIGHT", layer.weight.numel() + 1)
    assert not is_ours(layer(rows))
    monkeypatch.setattr(products, "LARGE_WEIGHT", layer.weight.numel())
    assert is_ours(layer(rows))


def layer_and_rows(bias=True):
    return Linear(20, 7, bias=bias), torch.randn(9, 20)


def is_ours(result):
    return "_LinearBackward" in graph_of(result)


def grads(function, inputs, grad):
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    result = function(*inputs)
    return [result.detach(), *torch.autograd.grad(result, inputs, grad)]


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_the_definition(bias, onednn, monkeypatch):
    if not onednn:
        monkeypatch.setattr(products, "_ONEDNN", None)
    layer, rows = layer_and_rows(bias)
    grad, inputs = torch.randn(9, 7), [rows, *layer.parameters()]

    def ours(rows, weight, bias=None):
        return products._Linear.apply(rows, weight, bias)

    assert is_ours(layer(rows))
    exact = grads(F.linear, [tensor.double() for tensor in inputs], grad.double())
    for one, other in zip(grads(ours, inputs, grad), exact):
        assert relative_error(one, other) < 1e-6
    grad = torch.randn(7, 9).mT  # gradients come in any layout
    for one, other in zip(grads(ours, inputs, grad), grads(F.linear, inputs, grad)):
        assert relative_error(one, other) < 1e-6


def test_only_what_is_wanted_has_a_gradient():
    layer, rows = layer_and_rows()
    layer.weight.requires_grad_(False)
    layer(rows).sum().backward()
    assert layer.weight.grad is None and torch.equal(layer.bias.grad, torch.full((7,), 9.0)) and rows.grad is None


def test_second_derivatives_are_those_of_the_definition():
    layer, rows = layer_and_rows()

    def second(function):
        given = rows.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(given).pow(3).sum(), given, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [given, layer.weight])

    for one, other in zip(second(layer), second(lambda given: F.linear(given, layer.weight, layer.bias))):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("rows", [torch.ones(2, 9, 20), torch.ones(20, 9).mT, torch.ones(9, 20).double()])
def test_other_rows_go_the_usual_way(rows):
    layer = Linear(20, 7).to(rows.dtype)
    result = layer(rows)
    assert not is_ours(result) and torch.equal(result, F.linear(rows, layer.weight, layer.bias))


def test_autocast_halves_it_as_any_linear_layer():
    layer, rows = layer_and_rows()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(rows).dtype == torch.bfloat16


def test_scripts_and_per_sample_gradients():
    layer, rows = layer_and_rows()
    assert torch.allclose(torch.jit.script(layer)(rows), layer(rows), atol=1e-5)
    parameters = dict(layer.named_parameters())

    def loss(values, row):
        return torch.func.functional_call(layer, values, row.unsqueeze(0)).square().sum()

    batched = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, rows)
    expected = torch.autograd.grad(layer(rows[2:3]).square().sum(), layer.weight)[0]
    assert torch.allclose(batched["weight"][2], expected, atol=1e-5)
