"""Projection and cross-covariance by every backend, with one thread and with two, against the plain operations."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

from reference import relative_error
from sot.bench.timing import thread_count
from sot.core.pooling import CrossCovariancePool
from sot.ops import use
from sot.ops.cross_covariance import cross_covariance, numba
from sot.ops.cross_covariance import torch as by_torch
from sot.ops.cross_covariance.operator import CROSS_COVARIANCE
from sot.ops.cross_covariance.reference import project as plain_covariance

pytestmark = pytest.mark.usefixtures("backend", "threads")


def set_piece(monkeypatch, tokens):
    for module in (numba, by_torch):
        monkeypatch.setattr(module, "TOKENS_AT_A_TIME", tokens)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("batch, at_a_time", [(0, 100), (1, 100), (5, 1), (5, 14), (5, 100)])
@pytest.mark.parametrize("frozen", ["nothing", "tokens", "weight"])
def test_pieces_make_the_covariance_and_its_gradients(batch, at_a_time, center, frozen, monkeypatch):
    set_piece(monkeypatch, at_a_time)
    tokens = torch.randn(batch, 8, 6, dtype=torch.float64)[:, 1:]  # a slice, as from a backbone
    weight = torch.randn(14, 6, dtype=torch.float64)
    assert torch.allclose(
        cross_covariance(tokens, weight, 2, 3, center), plain_covariance(tokens, weight, 2, 3, center)
    )
    inputs = [tokens.requires_grad_(frozen != "tokens"), weight.requires_grad_(frozen != "weight")]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    grad = torch.randn(batch, 2, 3, 4, dtype=torch.float64)
    ours = torch.autograd.grad(cross_covariance(*inputs, 2, 3, center), wanted, grad)
    plain = torch.autograd.grad(plain_covariance(*inputs, 2, 3, center), wanted, grad)
    for one, other in zip(ours, plain):
        assert torch.allclose(one, other)


def test_second_derivatives_are_those_of_the_definition():
    tokens = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda t, w: cross_covariance(t, w, 2, 3, True), (tokens, weight))
    assert gradgradcheck(lambda w: cross_covariance(tokens.detach(), w, 2, 3), (weight,))


# --- float32 ------------------------------------------------------------------------------------------------

SHAPES = [  # tokens, heads, m, n: whole tiles, and what is left over of them
    (196, 6, 14, 14),
    (4, 1, 8, 8),
    (5, 2, 9, 31),
    (7, 3, 33, 16),
    (50, 2, 24, 38),
]
shapes = pytest.mark.parametrize("tokens, heads, m, n", SHAPES)


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
    ours = value_and_gradients(lambda t, w: cross_covariance(t, w, heads, m, center), tokens, weight, grad)
    exact = [tensor.double() for tensor in (tokens, weight, grad)]
    plain = value_and_gradients(lambda t, w: plain_covariance(t, w, heads, m, center), *exact)
    summed = value_and_gradients(lambda t, w: plain_covariance(t, w, heads, m, False), *(each.abs() for each in exact))
    return all((one - other).norm() <= 1e-6 * size.norm() for one, other, size in zip(ours, plain, summed))


@shapes
@pytest.mark.parametrize("dim", [20, 24, 53])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", UGLY_TOKENS)
def test_float32_is_the_definition(kind, center, dim, tokens, heads, m, n):
    words = UGLY_TOKENS[kind](torch.randn(3, tokens + 1, dim))[:, 1:]
    assert is_the_definition(words, torch.randn(heads * (m + n), dim), heads, m, center)


@pytest.mark.parametrize("dim", [24, 25, 47, 48, 72, 100])
@pytest.mark.parametrize("tokens, width", [(4, 24), (5, 28), (7, 44), (16, 168)])
def test_tokens_are_multiplied_where_they_lie(tokens, width, dim):
    pytest.importorskip("numba")
    words, weight = torch.randn(3, tokens + 2, dim)[:, 1:-1], torch.randn(width, dim)
    _, projected = numba.project(words, weight, None, 1, 8, False)
    assert relative_error(projected, words.double() @ weight.mT.double()) < 1e-6
    grad = torch.randn(3, 1, 8, width - 8)
    back, _ = numba.pull_back_to_tokens(words, weight, None, projected, grad, True, False)
    pulled = by_torch.pull_back(projected.double(), grad.double())
    assert relative_error(back, pulled @ weight.double()) < 1e-6


def test_no_samples_give_no_matrices_and_no_gradient():
    tokens, weight = torch.randn(0, 9, 24)[:, 1:].requires_grad_(), torch.randn(28, 24, requires_grad=True)
    result = cross_covariance(tokens, weight, 1, 14)
    d_tokens, d_weight = torch.autograd.grad(result.sum(), [tokens, weight])
    assert result.shape == (0, 1, 14, 14) and d_tokens.shape == (0, 8, 24) and not d_weight.any()


@pytest.mark.parametrize(
    "tokens", [torch.randn(2, 24, 5).mT, torch.randn(2, 5, 48)[:, :, ::2], torch.randn(2, 3, 24)],
    ids=["columns", "every other", "few"],
)  # fmt: skip
def test_tokens_that_are_not_in_rows_or_few(tokens):
    assert is_the_definition(tokens, torch.randn(28, 24), 1, 14)


@pytest.mark.parametrize("tokens, m, n", [(3, 14, 14), (196, 7, 14), (196, 14, 7)])
def test_less_than_a_tile(tokens, m, n):
    assert is_the_definition(torch.randn(2, tokens, 20), torch.randn(2 * (m + n), 20), 2, m)


def test_the_kernels_are_chosen_by_type_and_size_whatever_the_threads():
    pytest.importorskip("numba")
    tokens, weight = torch.randn(2, 5, 24), torch.randn(56, 24)
    with use("auto"):
        assert CROSS_COVARIANCE.choose(tokens.double(), weight.double(), 2, 14) == "torch"
        assert CROSS_COVARIANCE.choose(tokens, weight, 2, 7) == "torch"
        assert CROSS_COVARIANCE.choose(tokens, weight, 2, 14) == "numba"
        assert CROSS_COVARIANCE.choose(tokens[:, :3], weight, 2, 14) == "torch"
        assert CROSS_COVARIANCE.choose(tokens[..., :20], weight[:, :20], 2, 14) == "torch"


def test_a_bad_number_stays_in_its_sample():
    tokens, weight = torch.randn(9, 6, 20), torch.randn(2 * 28, 20)
    clean = cross_covariance(tokens, weight, 2, 14)
    tokens[4, 3, 2] = float("nan")
    result = cross_covariance(tokens, weight, 2, 14)
    others = torch.arange(9) != 4
    assert result[4].isnan().all() and torch.allclose(result[others], clean[others])


def test_threads_change_nothing_but_rounding(monkeypatch):
    set_piece(monkeypatch, 60)
    tokens, weight = torch.randn(23, 6, 20), torch.randn(2 * 28, 20)
    for threads in (1, 2, 3):
        with thread_count(threads):
            assert is_the_definition(tokens, weight, 2, 14)


def test_threads_may_change_between_forward_and_backward(monkeypatch):
    set_piece(monkeypatch, 60)
    tokens, weight = torch.randn(23, 6, 20, requires_grad=True), torch.randn(2 * 28, 20)
    (expected,) = torch.autograd.grad(cross_covariance(tokens, weight, 2, 14).square().sum(), tokens)
    loss = cross_covariance(tokens, weight, 2, 14).square().sum()
    with thread_count(2):
        (result,) = torch.autograd.grad(loss, tokens)
    assert relative_error(result, expected) < 1e-6


def test_who_counts_operations_sees_them():
    tokens, weight = torch.randn(3, 6, 20), torch.randn(2 * 28, 20)
    with FlopCounterMode(display=False) as counter:
        cross_covariance(tokens, weight, 2, 14)
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
def test_the_projection_is_called(name):
    pool = CrossCovariancePool(16, heads=2, left_dim=4, right_dim=4, norm="none")
    tokens = torch.randn(3, 7, 16)
    pool.projection, weight = touched(name)
    expected = 4 * plain_covariance(tokens, weight, 2, 4, False) / 7
    assert torch.allclose(pool(tokens), expected.flatten(1), atol=1e-5)


@pytest.mark.parametrize("center", [False, True])
def test_an_accelerated_pool_gives_the_same_without_calling_its_projection(center):
    pool, tokens = CrossCovariancePool(32, norm="none", center=center), torch.randn(3, 7, 32)
    expected = pool(tokens)
    calls = []
    pool.projection.register_forward_hook(lambda *_: calls.append(1))
    pool.accelerated = True
    assert torch.allclose(pool(tokens), expected, atol=1e-5) and not calls
    pool.projection = touched("subclass")[0]
    assert type(pool.projection) is Doubled and not pool.can_skip(pool.projection, tokens)


def test_autocast_halves_the_projection_as_it_does_any_linear_layer():
    pool, tokens = CrossCovariancePool(16, norm="none"), torch.randn(2, 7, 16)
    pool.accelerated = True
    assert pool.can_skip(pool.projection, tokens) and not pool.can_skip(pool.projection, tokens.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert not pool.can_skip(pool.projection, tokens)


def test_per_sample_gradients_and_forward_derivatives_by_torch_func():
    pool = CrossCovariancePool(8, heads=2, left_dim=3, right_dim=3, norm="svpn_fast").double()
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
