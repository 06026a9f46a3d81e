"""The fast paths: each against the definition in float64 or the plain operations it replaces, on ugly inputs too."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from reference import FLOAT32, power_of_svd, relative_error, with_spectrum
from sot.core.head import HeadConfig, SecondOrderHead
from sot.core.normalize import fast_singular_value_power_norm, matrix_square_root, singular_value_power_norm
from sot.core.normalizers import NormSettings, build_norm
from sot.ops.matrix_root import root_of_product
from sot.ops.matrix_root.reference import square_root
from sot.ops.matrix_root.torch import PIECE
from sot.ops.svpn.slopes import any_slopes, half_slopes, quarter_slopes
from sot.ops.svpn_fast.reference import power as deflated_power

pytestmark = pytest.mark.usefixtures("threads")
torch.manual_seed(0)  # what follows is drawn while tests are collected: the same in every run
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
@pytest.mark.parametrize("exponent", [0.1, 0.25, 0.3, 0.5, 1.0])
def test_exact_in_float32_is_the_definition(backend, matrix, scale, exponent):
    matrix = matrix * scale
    expected = power_of_svd(matrix.double(), exponent, FLOAT32)
    actual = singular_value_power_norm(matrix, exponent).double()
    assert (actual - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("exponent", [0.1, 0.25, 0.5])
def test_what_rounding_makes_of_zeros_is_not_raised_to_a_power(backend, exponent):
    """A sentence has fewer words than a head has channels: all that float32 adds to its rank is rounding."""
    left, right = torch.randn(50, 5, 32), torch.randn(50, 5, 32)
    expected = power_of_svd(left.double().mT @ right.double(), exponent, 1e-14)
    assert relative_error(singular_value_power_norm(left.mT @ right, exponent), expected) < 2e-6
    double = singular_value_power_norm(left.double().mT @ right.double(), exponent)
    assert relative_error(double, expected) < 1e-12


def test_exact_in_float32_is_closer_than_the_svd_of_float32():
    matrix = torch.randn(200, 14, 30) @ torch.randn(200, 30, 14)
    expected = power_of_svd(matrix.double(), 0.5)
    ours, svd = singular_value_power_norm(matrix), power_of_svd(matrix, 0.5)
    assert relative_error(ours.double(), expected) < min(1e-6, relative_error(svd.double(), expected))


@ugly
@scales
@pytest.mark.parametrize("exponent", [0.25, 0.3, 0.5, 0.9])
def test_exact_gradient_in_float32_is_that_of_float64(backend, matrix, scale, exponent):
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


def test_a_smaller_smoothing_is_followed(backend):
    matrix, grad = with_spectrum(1, 0.1, 1e-3), torch.randn(3, 3, dtype=torch.float64)
    for eps in (1e-7, 1e-12):
        (expected,) = grads(lambda m, eps=eps: singular_value_power_norm(m, 0.5, eps), [matrix], grad)
        (actual,) = grads(lambda m, eps=eps: singular_value_power_norm(m, 0.5, eps), [matrix.float()], grad.float())
        assert relative_error(actual.double(), expected) < 1e-3


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize(("slopes", "exponent"), [(half_slopes, 0.5), (quarter_slopes, 0.25)])
def test_slopes_of_roots_are_the_general_ones(slopes, exponent, eps):
    unit = torch.tensor([[1, 1, 0.5, 0.5 - 1e-9, 1e-3, 1e-6, 0, 0]], dtype=torch.float64)
    for ours, general in zip(slopes(unit, eps), any_slopes(unit, exponent, eps)):
        assert torch.allclose(ours, general, rtol=1e-9, atol=1e-12)


# --- fast: one value, one iteration --------------------------------------------------------------------------


@ugly
@scales
@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_fast_closed_form_is_the_iteration(matrix, scale, exponent):
    matrix, start = matrix * scale, torch.randn(matrix.shape[-1])
    grad = torch.randn(matrix.shape)
    expected = deflated_power(matrix.double(), start.double(), exponent, 1, 1)
    actual = fast_singular_value_power_norm(matrix, start, exponent)
    assert (actual.double() - expected).norm() <= 1e-5 * expected.norm()
    wanted = grads(lambda m, s: deflated_power(m, s, exponent, 1, 1), [matrix.double(), start.double()], grad.double())
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
    assert gradgradcheck(fast_singular_value_power_norm, (matrix, start))
    assert gradgradcheck(lambda f: matrix_square_root(f @ f.mT, 3), factor)


# --- square root by products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_iterations", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 3)])
def test_square_root_and_its_gradient_are_those_of_the_plain_iteration(num_iterations, batch):
    tokens = torch.randn(*batch, 9, 4, dtype=torch.float64)
    spd, grad = tokens.mT @ tokens, torch.randn(*batch, 4, 4, dtype=torch.float64)
    assert torch.allclose(matrix_square_root(spd, num_iterations), square_root(spd, num_iterations))
    (ours,) = grads(lambda m: matrix_square_root(m, num_iterations), [spd], grad)
    (plain,) = grads(lambda m: square_root(m, num_iterations), [spd], grad)
    assert torch.allclose(ours, plain)


@pytest.mark.parametrize("num_iterations", [5, 8, 9, 20])
@pytest.mark.parametrize("rank", [50, 83])
def test_square_root_in_pieces_rounds_as_the_plain_iteration(rank, num_iterations):
    tokens, grad = torch.randn(90, rank, 83, dtype=torch.float64), torch.randn(90, 83, 83, dtype=torch.float64)
    spd = tokens.mT @ tokens
    assert spd.numel() > 2 * PIECE
    plain_root, our_root = (partial(root, num_iterations=num_iterations) for root in (square_root, matrix_square_root))
    exact, plain, ours = (
        (root(matrix), *grads(root, [matrix], grad.to(matrix)))
        for root, matrix in ((plain_root, spd), (plain_root, spd.float()), (our_root, spd.float()))
    )
    for expected, usual, actual in zip(exact, plain, ours):
        assert relative_error(actual, expected) < 2 * relative_error(usual, expected)


@pytest.mark.parametrize("scale", [1e-39, 1e-30, 1e30])
def test_square_root_of_tiny_and_huge_matrices(scale):
    spd = scale * torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    assert torch.allclose(
        matrix_square_root(spd, 8) / scale**0.5, torch.diag(torch.tensor([3.0, 2.0, 1.0])).sqrt(), 1e-3
    )


def test_square_root_of_zero_among_others():
    spd = torch.stack([torch.zeros(3, 3), torch.eye(3)])
    (ours,) = grads(matrix_square_root, [spd], torch.ones(2, 3, 3))
    (plain,) = grads(lambda m: square_root(m, 5), [spd], torch.ones(2, 3, 3))
    assert torch.allclose(ours, plain) and torch.equal(matrix_square_root(spd)[0], torch.zeros(3, 3))


@pytest.mark.parametrize("num_iterations", [1, 2, 5, 20])
@pytest.mark.parametrize("shape", [(1, 6), (2, 3, 4, 6), (2, 6, 6), (2, 9, 6), (0, 3, 6)])
def test_square_root_of_a_product_is_that_of_the_matrix(shape, num_iterations):
    rows = torch.randn(shape, dtype=torch.float64)
    matrix = square_root(rows.mT @ rows, num_iterations)
    assert torch.allclose(root_of_product(rows, num_iterations), matrix, atol=1e-9)
    assert torch.equal(root_of_product(0 * rows, num_iterations), 0 * matrix)


def test_square_root_of_a_product_has_the_gradients_of_its_definition():
    rows = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda r: root_of_product(r, 5), rows) and gradgradcheck(lambda r: root_of_product(r, 3), rows)
    assert torch.equal(
        grads(lambda r: root_of_product(r, 5), [torch.zeros(2, 3, 4)], torch.ones(2, 4, 4))[0], torch.zeros(2, 3, 4)
    )


def test_square_root_of_a_product_rounds_less_than_that_of_a_deficient_matrix():
    rows = torch.randn(8, 5, 48)
    exact = root_of_product(rows.double(), 12)
    usual = relative_error(square_root(rows.mT @ rows, 12), exact)
    assert relative_error(root_of_product(rows, 12), exact) < min(1e-6, usual)
    assert root_of_product(rows.bfloat16(), 5).dtype == torch.bfloat16


# --- what is left of svPN by products, and runtimes without decompositions -------------------------------------


def test_the_norm_by_products_of_older_models_is_svpn_where_singular_values_are_not_small():
    norm = build_norm("svpn_matmul", NormSettings(4, 4))
    for shape in ((4, 4), (6, 4), (4, 6)):
        matrix = with_spectrum(1, 0.5, 0.2, 0.05, rows=shape[0], columns=shape[1])
        assert relative_error(norm(matrix), power_of_svd(matrix, 0.5)) < 1e-6
    with pytest.raises(ValueError, match=r"svpn_matmul has exponent 0.5 only, got 0.3"):
        build_norm("svpn_matmul", NormSettings(4, 4, exponent=0.3))


@pytest.mark.parametrize("norm", ["svpn", "svpn_fast"])
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


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25, 0.0])
def test_on_a_gpu_few_launches_give_the_same(scale, monkeypatch):
    """The formulae that a GPU takes, computed here: lengths in float64, products in place of sums."""
    from sot.ops.svpn_fast import torch as by_torch

    matrix, start, grad = torch.randn(3, 5, 4) * scale, torch.randn(4), torch.randn(3, 5, 4)
    expected, parts = by_torch.power(matrix, start, 0.5)
    slopes = by_torch.pull_back(grad, matrix, start, parts, 0.5)
    monkeypatch.setattr(by_torch, "GPUS", ("cpu",))
    actual, parts = by_torch.power(matrix, start, 0.5)
    assert torch.allclose(actual, expected, rtol=1e-5, atol=0) and actual.dtype == torch.float32
    for one, other in zip(by_torch.pull_back(grad, matrix, start, parts, 0.5), slopes):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
