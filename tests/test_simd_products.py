"""svPN by matrix products in compiled kernels, eight matrices abreast: against float64, and torch's products."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import reference
from reference import graph_of, power_of_svd, relative_error, with_spectrum, without_kernels
from sot.core import newton_schulz
from sot.core.newton_schulz import _polar_power, product_singular_value_power_norm

pytest.importorskip("numba")


def by_torch(matrix):
    """The products as torch runs them, whatever is installed."""
    wide = matrix.shape[-2] < matrix.shape[-1]
    tall = matrix.mT if wide else matrix
    result = _polar_power(tall.reshape(-1, *tall.shape[-2:])).view(tall.shape)
    return result.mT if wide else result


def gradient(function, matrix, grad):
    matrix = matrix.clone().requires_grad_()
    return torch.autograd.grad(function(matrix), matrix, grad)[0]


def uses_kernels(matrix):
    names = graph_of(product_singular_value_power_norm(matrix.clone().requires_grad_()))
    return any("LaneProducts" in name for name in names)


SHAPES = [(14, 14), (24, 24), (38, 38), (9, 5), (5, 9), (40, 3), (3, 41), (2, 2), (4, 1), (1, 6), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_power_is_that_of_the_svd_in_float64(shape):
    values = torch.linspace(1, 0.02, min(shape)).tolist()
    matrix = torch.stack([with_spectrum(*values, rows=shape[0], columns=shape[1]) for _ in range(11)]).float()
    result = product_singular_value_power_norm(matrix)
    assert uses_kernels(matrix) and result.shape == matrix.shape
    assert relative_error(result, power_of_svd(matrix.double(), 0.5)) < 1e-6


torch.manual_seed(0)  # what follows is drawn while tests are collected: the same in every run
UGLY = reference.UGLY | {
    "rank one": torch.randn(20, 24, 1) @ torch.randn(20, 1, 24),
    "deficient": torch.randn(20, 14, 3) @ torch.randn(20, 3, 14),
    "below what is resolved": with_spectrum(1, 0.5, 0.1, 0.003, 0.002, 0.001).float(),
    "huge": torch.randn(9, 10, 10) * 1e30,
    "tiny": torch.randn(9, 10, 10) * 1e-30,
}
ugly = pytest.mark.parametrize("matrix", UGLY.values(), ids=UGLY.keys())


@ugly
def test_products_are_those_of_float64(matrix):
    assert uses_kernels(matrix)
    result, expected = product_singular_value_power_norm(matrix), by_torch(matrix.double())
    assert result.shape == matrix.shape
    assert (result - expected).norm() <= 1e-5 * expected.norm()
    assert (result - by_torch(matrix)).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("name", UGLY)
def test_gradient_is_that_of_the_products_in_float64(name):
    matrix = UGLY[name]
    grad = torch.randn(matrix.shape)
    tolerance = 2e-4 if name == "scaled rows" else 1e-5  # uᵢ of λᵢ below 1e-7 λ₁ is left out
    result = gradient(product_singular_value_power_norm, matrix, grad)
    expected = gradient(by_torch, matrix.double(), grad.double())
    assert (result - expected).norm() <= tolerance * expected.norm()


def test_gradient_without_kernels_is_the_same(monkeypatch):
    matrix, grad = torch.randn(3, 5, 9, 7), torch.randn(3, 5, 9, 7)
    value, slope = product_singular_value_power_norm(matrix), gradient(product_singular_value_power_norm, matrix, grad)
    without_kernels(monkeypatch)
    assert not uses_kernels(matrix)
    assert relative_error(value, product_singular_value_power_norm(matrix)) < 1e-5
    assert relative_error(slope, gradient(product_singular_value_power_norm, matrix, grad)) < 1e-4


@pytest.mark.parametrize("scale", [1e-41, 1e37])
def test_ends_of_float32(scale):
    matrix = torch.randn(4, 4) * scale
    expected = power_of_svd(matrix.double(), 0.5)
    assert relative_error(product_singular_value_power_norm(matrix).double(), expected) < 1e-4


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17])
@pytest.mark.parametrize("shape", [(6, 5), (4, 4)])
def test_any_number_of_matrices_none_of_which_feels_the_others(count, shape):
    matrix, grad = torch.randn(count, *shape), torch.randn(count, *shape)
    power, slope = product_singular_value_power_norm(matrix), gradient(product_singular_value_power_norm, matrix, grad)
    assert power.shape == slope.shape == matrix.shape
    for k in range(count):
        assert torch.equal(power[k], product_singular_value_power_norm(matrix[k]))
        assert torch.equal(slope[k], gradient(product_singular_value_power_norm, matrix[k], grad[k]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(5, 5), (6, 4), (4, 6), (1, 3)])
def test_only_matrices_that_are_not_finite_become_nan(bad, shape):
    matrix, grad = torch.randn(10, *shape), torch.randn(10, *shape)
    power, slope = product_singular_value_power_norm(matrix), gradient(product_singular_value_power_norm, matrix, grad)
    matrix[3, 0, 2] = matrix[9, -1, 0] = bad
    fine = torch.arange(10).remainder(6) != 3
    results = product_singular_value_power_norm(matrix), gradient(product_singular_value_power_norm, matrix, grad)
    for result, expected in zip(results, (power, slope)):
        assert torch.equal(result[fine], expected[fine]) and result[~fine].isnan().all()
    assert by_torch(matrix)[~fine].isnan().all()  # as torch has it


def test_strided_matrices_and_gradients():
    matrix = torch.randn(2, 7, 3, 6).transpose(1, 2)[..., ::2]  # (2, 3, 7, 3)
    one = torch.ones(()).expand(matrix.shape)
    for strided in (matrix, matrix.mT, matrix.permute(2, 3, 0, 1), matrix[:1].expand(4, 3, 7, 3)):
        plain = strided.contiguous()
        assert torch.equal(product_singular_value_power_norm(strided), product_singular_value_power_norm(plain))
    result = gradient(product_singular_value_power_norm, matrix, one)
    assert torch.equal(result, gradient(product_singular_value_power_norm, matrix.contiguous(), one.contiguous()))


def test_an_incoming_gradient_that_has_one_itself():
    matrix, grad = torch.randn(3, 4, 4), torch.randn(3, 4, 4)
    expected = gradient(product_singular_value_power_norm, matrix, grad)
    assert torch.equal(gradient(product_singular_value_power_norm, matrix, grad.requires_grad_()), expected)


def test_threads_change_no_bit():
    matrix, grad, threads = torch.randn(130, 6, 6), torch.randn(130, 6, 6), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            slope = gradient(product_singular_value_power_norm, matrix, grad)
            results.append(torch.stack([product_singular_value_power_norm(matrix), slope]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_float32(dtype):
    matrix = torch.randn(4, 6, 6).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        result = product_singular_value_power_norm(matrix)
    assert uses_kernels(matrix) and result.dtype == dtype
    assert torch.equal(result, product_singular_value_power_norm(matrix.float()).to(dtype))


def test_float64_goes_through_torch():
    matrix = torch.stack([with_spectrum(1, 0.5, 0.2), with_spectrum(1, 1, 0.5)]).requires_grad_()
    assert not uses_kernels(matrix)
    assert gradcheck(product_singular_value_power_norm, matrix)


def test_second_derivative_is_that_of_the_products():
    matrix, one, other = torch.stack([with_spectrum(1, 0.5, 0.2), with_spectrum(1, 1, 0.5)]), *torch.randn(2, 2, 3, 3)
    assert gradgradcheck(product_singular_value_power_norm, matrix.clone().requires_grad_())

    def second(function, dtype):
        start = matrix.to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(function(start), start, one.to(dtype), create_graph=True)
        return torch.autograd.grad(first, start, other.to(dtype))[0]

    assert uses_kernels(matrix.float())
    ours, plain = second(product_singular_value_power_norm, torch.float32), second(by_torch, torch.float64)
    assert relative_error(ours, plain) < 1e-3


def test_second_derivative_under_autocast():
    matrix = torch.eye(3).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        (first,) = torch.autograd.grad(product_singular_value_power_norm(matrix).sum(), matrix, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), matrix)
    assert second.isfinite().all()


def test_functional_transforms_do_without():
    matrix = torch.randn(3, 5, 4)
    expected = product_singular_value_power_norm(matrix)
    assert relative_error(torch.func.vmap(product_singular_value_power_norm)(matrix), expected) < 1e-5


def test_a_forward_alone_asks_for_no_eigenvectors(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("eigenvectors")

    monkeypatch.setattr(newton_schulz.simd, "power", refuse)
    with torch.no_grad():
        product_singular_value_power_norm(torch.randn(3, 4, 4, requires_grad=True))
    with pytest.raises(AssertionError, match="eigenvectors"):
        gradient(product_singular_value_power_norm, torch.randn(3, 4, 4), torch.randn(3, 4, 4))
