"""The fast paths: each against the definition in float64 or the plain operations it replaces, on ugly inputs too."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from reference import power_of_svd, relative_error, with_spectrum
from sot.core import covariance as covariance_module
from sot.core.covariance import covariance, is_plain, projected_covariance, split_heads
from sot.core.head import HeadConfig, SecondOrderHead
from sot.core.newton_schulz import POLAR_STEPS, ROOT_STEPS, _newton_schulz
from sot.core.normalize import (
    fast_singular_value_power_norm,
    matrix_square_root,
    product_singular_value_power_norm,
    singular_value_power_norm,
)
from sot.core.pooling import CrossCovariancePool
from sot.core.power_iteration import _deflate
from sot.core.spectral import _root_slopes, _slopes

UGLY = {
    "random": torch.randn(3, 5, 5),
    "tall": torch.randn(3, 7, 4),
    "wide": torch.randn(3, 4, 7),
    "zero": torch.zeros(2, 4, 4),
    "identity": torch.eye(4).expand(2, 4, 4),
    "ones": torch.ones(2, 6, 6),
    "rank two": torch.randn(3, 6, 2) @ torch.randn(3, 2, 6),
    "repeated": with_spectrum(2, 2, 1, 1).float().unsqueeze(0),
    "ill-conditioned": with_spectrum(1, 1e-2, 1e-4, 1e-6).float().unsqueeze(0),
    "one zero among others": torch.stack([torch.zeros(4, 4), torch.randn(4, 4)]),
    "batch of one": torch.randn(1, 5, 5),
    "one by one": torch.randn(3, 1, 1),
}
ugly = pytest.mark.parametrize("matrix", UGLY.values(), ids=UGLY.keys())
scales = pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])


def grads(function, inputs, grad):
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(function(*inputs), inputs, grad)


# --- exact: the Gram matrix in float64 -----------------------------------------------------------------------


@ugly
@scales
@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_exact_in_float32_is_the_definition(matrix, scale, exponent):
    matrix = matrix * scale
    expected = power_of_svd(matrix.double(), exponent)
    actual = singular_value_power_norm(matrix, exponent).double()
    # what float32 cannot hold of the matrix is a singular value of 1e-7 λ₁, whose power is not small
    tolerance = 1e-6 + (0 if exponent == 1 else 1e-8**exponent)
    assert (actual - expected).norm() <= tolerance * expected.norm()


def test_exact_in_float32_is_closer_than_the_svd_of_float32():
    matrix = torch.randn(200, 14, 30) @ torch.randn(200, 30, 14)
    expected = power_of_svd(matrix.double(), 0.5)
    ours, svd = singular_value_power_norm(matrix), power_of_svd(matrix, 0.5)
    assert relative_error(ours.double(), expected) < min(1e-6, relative_error(svd.double(), expected))


@ugly
@scales
@pytest.mark.parametrize("exponent", [0.3, 0.5, 0.9])
def test_exact_gradient_in_float32_is_that_of_float64(matrix, scale, exponent):
    matrix, grad = matrix * scale, torch.randn(matrix.shape)
    (expected,) = grads(lambda m: singular_value_power_norm(m, exponent), [matrix.double()], grad.double())
    (actual,) = grads(lambda m: singular_value_power_norm(m, exponent), [matrix], grad)
    assert actual.isfinite().all() and (actual.double() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize("spectrum", [(1, 0.5, 0.25, 0.1), (2, 2, 1, 1), (1, 1, 1, 1), (1, 0.1, 1e-2, 1e-3)])
@pytest.mark.parametrize("extra", [(None, None), (6, None), (None, 6)])
def test_exact_gradient_in_float32_is_close_where_the_matrix_is_determined(spectrum, extra):
    matrix = with_spectrum(*spectrum, rows=extra[0], columns=extra[1])
    grad = torch.randn(matrix.shape, dtype=torch.float64)
    (expected,) = grads(singular_value_power_norm, [matrix], grad)
    (actual,) = grads(singular_value_power_norm, [matrix.float()], grad.float())
    assert relative_error(actual.double(), expected) < 2e-5


def test_a_smaller_smoothing_than_the_gram_matrix_resolves_goes_through_the_svd():
    matrix, grad = with_spectrum(1, 0.1, 1e-3), torch.randn(3, 3, dtype=torch.float64)
    for eps in (1e-7, 1e-12):
        (expected,) = grads(lambda m, eps=eps: singular_value_power_norm(m, 0.5, eps), [matrix], grad)
        (actual,) = grads(lambda m, eps=eps: singular_value_power_norm(m, 0.5, eps), [matrix.float()], grad.float())
        assert relative_error(actual.double(), expected) < 1e-3


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_slopes_of_the_root_are_the_general_ones(eps):
    unit = torch.tensor([[1, 1, 0.5, 0.5 - 1e-9, 1e-3, 1e-6, 0, 0]], dtype=torch.float64)
    for ours, general in zip(_root_slopes(unit, eps), _slopes(unit, 0.5, eps)):
        assert torch.allclose(ours, general, rtol=1e-9, atol=1e-12)


# --- fast: one value, one iteration --------------------------------------------------------------------------


@ugly
@scales
@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_fast_closed_form_is_the_iteration(matrix, scale, exponent):
    matrix, start = matrix * scale, torch.randn(matrix.shape[-1])
    grad = torch.randn(matrix.shape)
    expected = _deflate(matrix.double(), start.double(), exponent, 1, 1)
    actual = fast_singular_value_power_norm(matrix, start, exponent)
    assert (actual.double() - expected).norm() <= 1e-5 * expected.norm()
    wanted = grads(lambda m, s: _deflate(m, s, exponent, 1, 1), [matrix.double(), start.double()], grad.double())
    ours = grads(lambda m, s: fast_singular_value_power_norm(m, s, exponent), [matrix, start], grad)
    sizes = (scale ** (exponent - 1), scale**exponent)  # of the two gradients, apart from what cancels
    for one, other, size in zip(ours, wanted, sizes):
        assert (one.double() - other).norm() <= 1e-5 * size * matrix.numel() * grad.norm()


def test_fast_of_a_matrix_that_maps_the_start_to_zero():
    matrix, start = torch.tensor([[[1.0, 0], [0, 0]]]), torch.tensor([0.0, 1])
    grad = torch.randn(1, 2, 2)
    d_matrix, d_start = grads(fast_singular_value_power_norm, [matrix, start], grad)
    assert torch.equal(fast_singular_value_power_norm(matrix, start), matrix)
    assert torch.equal(d_matrix, grad) and torch.equal(d_start, torch.zeros(2))


def test_second_derivatives_are_those_of_the_definition():
    matrix = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    start = torch.randn(3, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(fast_singular_value_power_norm, (matrix, start))
    assert gradgradcheck(lambda f: matrix_square_root(f @ f.mT, 3), factor)
    assert gradgradcheck(lambda t, w: projected_covariance(t, w, 2, 3, True), (tokens, weight))
    assert gradgradcheck(lambda w: projected_covariance(tokens.detach(), w, 2, 3), (weight,))


# --- square root by products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_iterations", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 3)])
def test_square_root_and_its_gradient_are_those_of_the_plain_iteration(num_iterations, batch):
    tokens = torch.randn(*batch, 9, 4, dtype=torch.float64)
    spd, grad = tokens.mT @ tokens, torch.randn(*batch, 4, 4, dtype=torch.float64)
    assert torch.allclose(matrix_square_root(spd, num_iterations), _newton_schulz(spd, num_iterations))
    (ours,) = grads(lambda m: matrix_square_root(m, num_iterations), [spd], grad)
    (plain,) = grads(lambda m: _newton_schulz(m, num_iterations), [spd], grad)
    assert torch.allclose(ours, plain)


def test_square_root_of_zero_among_others():
    spd = torch.stack([torch.zeros(3, 3), torch.eye(3)])
    (ours,) = grads(matrix_square_root, [spd], torch.ones(2, 3, 3))
    (plain,) = grads(lambda m: _newton_schulz(m, 5), [spd], torch.ones(2, 3, 3))
    assert torch.allclose(ours, plain) and torch.equal(matrix_square_root(spd)[0], torch.zeros(3, 3))


# --- svPN by products only -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps, lowest", [(POLAR_STEPS, 0.004), (ROOT_STEPS, 0.06)])
def test_quintics_take_all_they_promise_to_one(steps, lowest):
    x = torch.logspace(torch.tensor(lowest).log10(), 0, 10001, dtype=torch.float64)
    for a, b, c in steps:
        x = a * x + b * x**3 + c * x**5
    assert (x - 1).abs().max() < 1e-6


@scales
@pytest.mark.parametrize("shape", [(14, 14), (24, 24), (9, 5), (5, 9), (1, 1), (3, 1)])
def test_products_give_svpn_to_rounding_on_ordinary_matrices(shape, scale):
    values = torch.linspace(1, 0.01, min(shape)).tolist()
    matrix = torch.stack([with_spectrum(*values, rows=shape[0], columns=shape[1]) for _ in range(5)])
    expected = power_of_svd(matrix * scale, 0.5)
    assert relative_error(product_singular_value_power_norm((matrix * scale).float()).double(), expected) < 3e-6
    assert relative_error(product_singular_value_power_norm(matrix * scale), expected) < 1e-6


@ugly
def test_products_are_off_by_less_than_the_root_of_what_they_do_not_resolve(matrix):
    result = product_singular_value_power_norm(matrix).double()
    largest = torch.linalg.matrix_norm(matrix.double(), 2)[:, None, None].clamp_min(1e-30)
    # ‖QᵀQ‖_F is at most √n λ₁², so 0.004 of its root is at most 0.004 n^¼ λ₁
    assert ((result - power_of_svd(matrix.double(), 0.5)) / largest.sqrt()).abs().max() < (0.004 * 7**0.25) ** 0.5
    (grad,) = grads(product_singular_value_power_norm, [matrix], torch.randn(matrix.shape))
    assert grad.isfinite().all()


def test_gradient_of_the_products():
    matrix = torch.stack([with_spectrum(1, 0.5, 0.2, 0.05), with_spectrum(1, 1, 0.5, 0.5)])
    assert gradcheck(product_singular_value_power_norm, matrix.requires_grad_())
    grad = torch.randn_like(matrix)
    (expected,) = grads(singular_value_power_norm, [matrix], grad)
    (actual,) = grads(product_singular_value_power_norm, [matrix], grad)
    assert relative_error(actual, expected) < 1e-4


def test_products_need_the_exponent_one_half():
    with pytest.raises(ValueError, match=r"svpn_matmul has exponent 0.5 only, got 0.3"):
        CrossCovariancePool(16, norm="svpn_matmul", exponent=0.3)


@pytest.mark.parametrize("norm", ["svpn_matmul", "svpn_fast"])
def test_a_head_of_products_runs_in_onnx_at_another_batch_and_length(norm, tmp_path):
    import onnxruntime

    head = SecondOrderHead(16, 3, HeadConfig(heads=2, left_dim=4, right_dim=5, norm=norm)).eval()
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=512)
    axes = ({0: batch}, {0: batch, 1: length})
    file = tmp_path / "head.onnx"
    torch.onnx.export(
        head, (torch.randn(3, 16), torch.randn(3, 9, 16)), file, dynamic_shapes=axes, dynamo=True, verbose=False
    )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    class_token, words = torch.randn(5, 16), torch.randn(5, 12, 16)
    names = [each.name for each in session.get_inputs()]
    (result,) = session.run(None, dict(zip(names, (class_token.numpy(), words.numpy()))))
    assert torch.allclose(torch.from_numpy(result), head(class_token, words), atol=1e-4)


# --- projection and covariance in pieces ---------------------------------------------------------------------


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
