"""Projection and covariance in pieces of the batch, through torch and through kernels, against the plain operations."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradgradcheck

from reference import relative_error, without_kernels
from sot.bench.timing import thread_count
from sot.core import covariance as covariance_module
from sot.core import products, simd
from sot.core.covariance import covariance, is_plain, projected_covariance, split_heads
from sot.core.pooling import CrossCovariancePool


def plain_covariance(tokens, weight, heads, left_dim, center):
    left, right = split_heads(tokens @ weight.mT, heads, left_dim)
    count = torch.full((tokens.shape[0], 1), float(tokens.shape[1]))
    return covariance(left, right, count, None, center) * tokens.shape[1]


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("batch, at_a_time", [(0, 100), (1, 100), (5, 1), (5, 14), (5, 100)])
@pytest.mark.parametrize("frozen", ["nothing", "tokens", "weight"])
def test_pieces_make_the_covariance_and_its_gradients(batch, at_a_time, center, frozen, monkeypatch):
    monkeypatch.setattr(covariance_module, "TOKENS_AT_A_TIME", at_a_time)
    tokens = torch.randn(batch, 8, 6, dtype=torch.float64)[:, 1:]  # a slice, as from a backbone
    weight = torch.randn(14, 6, dtype=torch.float64)
    assert torch.allclose(
        projected_covariance(tokens, weight, 2, 3, center), plain_covariance(tokens, weight, 2, 3, center)
    )
    inputs = [tokens.requires_grad_(frozen != "tokens"), weight.requires_grad_(frozen != "weight")]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    grad = torch.randn(batch, 2, 3, 4, dtype=torch.float64)
    ours = torch.autograd.grad(projected_covariance(*inputs, 2, 3, center), wanted, grad)
    plain = torch.autograd.grad(plain_covariance(*inputs, 2, 3, center), wanted, grad)
    for one, other in zip(ours, plain):
        assert torch.allclose(one, other)


def test_second_derivatives_are_those_of_the_definition():
    tokens = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda t, w: projected_covariance(t, w, 2, 3, True), (tokens, weight))
    assert gradgradcheck(lambda w: projected_covariance(tokens.detach(), w, 2, 3), (weight,))


# --- float32: kernels, and oneDNN's products -----------------------------------------------------------------

SHAPES = [  # tokens, heads, m, n: whole tiles, and what is left over of them
    (196, 6, 14, 14),
    (4, 1, 8, 8),
    (5, 2, 9, 31),
    (7, 3, 33, 16),
    (50, 2, 24, 38),
]
shapes = pytest.mark.parametrize("tokens, heads, m, n", SHAPES)


@pytest.fixture(autouse=True)
def one_thread():
    """With several, torch does what the kernels do."""
    with thread_count(1):
        yield


UGLY_TOKENS = {
    "random": lambda tokens: tokens,
    "zero": torch.zeros_like,
    "all the same": torch.ones_like,
    "large": lambda tokens: 1e15 * tokens,
    "small": lambda tokens: 1e-15 * tokens,
}


def value_and_gradients(function, tokens, weight, grad):
    tokens, weight = tokens.detach().requires_grad_(), weight.detach().requires_grad_()
    result = function(tokens, weight)
    return [result.detach(), *torch.autograd.grad(result, [tokens, weight], grad)]


def is_the_definition(tokens, weight, heads, m, center=False):
    """Whether value and gradients are those of float64, but for rounding: that of what is summed, signs apart."""
    grad = torch.randn(len(tokens), heads, m, len(weight) // heads - m)
    ours = value_and_gradients(lambda t, w: projected_covariance(t, w, heads, m, center), tokens, weight, grad)
    exact = [tensor.double() for tensor in (tokens, weight, grad)]
    plain = value_and_gradients(lambda t, w: plain_covariance(t, w, heads, m, center), *exact)
    summed = value_and_gradients(lambda t, w: plain_covariance(t, w, heads, m, False), *(each.abs() for each in exact))
    return all((one - other).norm() <= 1e-6 * size.norm() for one, other, size in zip(ours, plain, summed))


@pytest.fixture(params=["kernels", "no numba", "no oneDNN"])
def way(request, monkeypatch):
    if request.param == "no numba":
        without_kernels(monkeypatch)
    if request.param == "no oneDNN":
        monkeypatch.setattr(products, "_ONEDNN", None)
    return request.param


@shapes
@pytest.mark.parametrize("dim", [20, 24, 53])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", UGLY_TOKENS)
def test_float32_is_the_definition(way, kind, center, dim, tokens, heads, m, n):
    words = UGLY_TOKENS[kind](torch.randn(3, tokens + 1, dim))[:, 1:]
    assert is_the_definition(words, torch.randn(heads * (m + n), dim), heads, m, center)


@pytest.mark.parametrize("dim", [24, 25, 47, 48, 72, 100])
@pytest.mark.parametrize("tokens, width", [(4, 24), (5, 28), (7, 44), (16, 168)])
def test_tokens_are_multiplied_where_they_lie(tokens, width, dim):
    words, weight = torch.randn(3, tokens + 2, dim)[:, 1:-1], torch.randn(width, dim)
    assert simd.can_multiply_rows(words, weight)
    exact = words.double() @ weight.mT.double()
    projected = simd.Panels(weight.mT).times(words)
    assert projected.is_contiguous() and relative_error(projected, exact) < 1e-6
    back = torch.full_like(words, float("nan"))
    assert simd.Panels(weight).times(projected, back) is back
    assert relative_error(back, projected.double() @ weight.double()) < 1e-6
    total = simd.SumOfProducts(weight)
    total.add(projected[:2], words[:2])
    total.add(projected[2:], words[2:])
    assert relative_error(total.result(), (projected.double().mT @ words.double()).sum(0)) < 1e-6


def test_tokens_that_are_not_in_rows_or_too_few_are_multiplied_by_torch():
    weight = torch.randn(28, 24)
    assert simd.can_multiply_rows(torch.randn(2, 5, 24), weight)
    for tokens in (torch.randn(2, 24, 5).mT, torch.randn(2, 5, 48)[:, :, ::2], torch.randn(2, 3, 24)):
        assert not simd.can_multiply_rows(tokens, weight)
        assert is_the_definition(tokens, weight, 1, 14)
    assert not simd.can_multiply_rows(torch.randn(2, 5, 24), torch.randn(30, 24))
    assert not simd.can_multiply_rows(torch.randn(2, 5, 24).double(), weight.double())
    tiles = simd.kernels("simd_tiles")
    assert (simd.LANES, simd.TILE_ROWS, simd.TILE_COLUMNS) == (tiles.LANES, tiles.ROWS, tiles.COLUMNS)


@shapes
def test_kernels_are_used_and_agree_with_torch(tokens, heads, m, n, monkeypatch):
    projected, grad = torch.randn(3, tokens, heads * (m + n)), torch.randn(3, heads, m, n)
    assert simd.can_multiply_tokens(projected, heads, m)
    both = covariance_module._cross_products, covariance_module._pull_back
    ours = both[0](projected, heads, m), both[1](projected, grad, torch.empty_like(projected))
    without_kernels(monkeypatch)
    plain = both[0](projected, heads, m), both[1](projected, grad, torch.empty_like(projected))
    for one, other in zip(ours, plain):
        assert relative_error(one, other) < 1e-6


@pytest.mark.parametrize("tokens, m, n", [(3, 14, 14), (196, 7, 14), (196, 14, 7)])
def test_less_than_a_tile_goes_another_way(tokens, m, n):
    assert not simd.can_multiply_tokens(torch.randn(2, tokens, 2 * (m + n)), 2, m)
    assert is_the_definition(torch.randn(2, tokens, 20), torch.randn(2 * (m + n), 20), 2, m)


def test_other_types_and_several_threads_go_another_way():
    projected = torch.randn(2, 9, 56)
    assert simd.can_multiply_tokens(projected, 2, 14)
    assert not simd.can_multiply_tokens(projected.double(), 2, 14)
    assert not simd.can_multiply_tokens(projected.bfloat16(), 2, 14)
    with thread_count(2):
        assert not simd.can_multiply_tokens(projected, 2, 14)


def test_a_bad_number_stays_in_its_sample(way):
    tokens, weight = torch.randn(9, 6, 20), torch.randn(2 * 28, 20)
    clean = projected_covariance(tokens, weight, 2, 14)
    tokens[4, 3, 2] = float("nan")
    result = projected_covariance(tokens, weight, 2, 14)
    others = torch.arange(9) != 4
    assert result[4].isnan().all() and torch.allclose(result[others], clean[others])


def test_threads_change_nothing_but_rounding(way, monkeypatch):
    monkeypatch.setattr(covariance_module, "TOKENS_AT_A_TIME", 60)
    tokens, weight = torch.randn(23, 6, 20), torch.randn(2 * 28, 20)
    for threads in (1, 2, 3):
        with thread_count(threads):
            assert is_the_definition(tokens, weight, 2, 14)


def test_threads_may_change_between_forward_and_backward(monkeypatch):
    monkeypatch.setattr(covariance_module, "TOKENS_AT_A_TIME", 60)
    tokens, weight = torch.randn(23, 6, 20, requires_grad=True), torch.randn(2 * 28, 20)
    (expected,) = torch.autograd.grad(projected_covariance(tokens, weight, 2, 14).square().sum(), tokens)
    loss = projected_covariance(tokens, weight, 2, 14).square().sum()
    with thread_count(2):
        (result,) = torch.autograd.grad(loss, tokens)
    assert relative_error(result, expected) < 1e-6


def test_who_counts_operations_sees_them():
    from torch.utils.flop_counter import FlopCounterMode

    tokens, weight = torch.randn(3, 6, 20), torch.randn(2 * 28, 20)
    with FlopCounterMode(display=False) as counter:
        projected_covariance(tokens, weight, 2, 14)
    assert counter.get_total_flops() == 2 * 3 * 6 * (20 * 56 + 2 * 14 * 14)


# --- where nothing may be cut short --------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, tokens):
        return 2 * super().forward(tokens)


def touched(name):
    linear = nn.Linear(16, 16, bias=False)
    if name == "hook":
        linear.register_forward_hook(lambda module, args, output: 2 * output)
    elif name == "pre-hook":
        linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    elif name == "own forward":
        plain = linear.forward
        linear.forward = lambda tokens: 2 * plain(tokens)
    elif name == "subclass":
        doubled = Doubled(16, 16, bias=False)
        doubled.load_state_dict(linear.state_dict())
        return doubled, linear.weight
    return linear, linear.weight


@pytest.mark.parametrize("name", ["hook", "pre-hook", "own forward", "subclass"])
def test_a_projection_that_others_changed_is_called(name):
    pool = CrossCovariancePool(16, heads=2, left_dim=4, right_dim=4, norm="none")
    tokens = torch.randn(3, 7, 16)
    pool.projection, weight = touched(name)
    assert not is_plain(pool.projection, tokens)
    expected = 4 * plain_covariance(tokens, weight, 2, 4, False) / 7
    assert torch.allclose(pool(tokens), expected.flatten(1), atol=1e-5)


def test_autocast_halves_the_projection_as_it_does_any_linear_layer():
    pool, tokens = CrossCovariancePool(16, norm="none"), torch.randn(2, 7, 16)
    assert is_plain(pool.projection, tokens) and not is_plain(pool.projection, tokens.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_plain(pool.projection, tokens)


def test_per_sample_gradients_and_forward_derivatives_by_torch_func():
    pool = CrossCovariancePool(8, heads=2, left_dim=3, right_dim=3).double()
    tokens, parameters = torch.randn(4, 6, 8, dtype=torch.float64), dict(pool.named_parameters())

    def loss(values, sample):
        return torch.func.functional_call(pool, values, sample.unsqueeze(0)).square().sum()

    batched = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, tokens)
    for i, sample in enumerate(tokens):
        copied = copy.deepcopy(pool)
        loss(dict(copied.named_parameters()), sample).backward()
        for name, parameter in copied.named_parameters():
            assert torch.allclose(batched[name][i], parameter.grad)
    _, slope = torch.func.jvp(pool, (tokens,), (torch.ones_like(tokens),))
    assert slope.isfinite().all()
