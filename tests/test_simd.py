"""svPN by compiled kernels, eight matrices abreast: against the definition in float64, on ugly inputs too."""

import pytest
import torch

import reference
from reference import FLOAT32, graph_of, power_of_svd, relative_error, with_spectrum, without_kernels
from sot.core import simd
from sot.core.normalize import product_singular_value_power_norm, singular_value_power_norm

numba = pytest.importorskip("numba")
BOTH = pytest.mark.parametrize(
    ("function", "rounding"), [(singular_value_power_norm, 1e-6), (product_singular_value_power_norm, 1e-5)]
)


def gradient(matrix, grad, exponent=0.5):
    matrix = matrix.clone().requires_grad_()
    return torch.autograd.grad(singular_value_power_norm(matrix, exponent), matrix, grad)[0]


def uses_kernels(matrix):
    names = graph_of(singular_value_power_norm(matrix.clone().requires_grad_()))
    assert any("Power" in name for name in names)
    return any("LanePower" in name for name in names)


torch.manual_seed(0)  # what follows is drawn while tests are collected: the same in every run
UGLY = reference.UGLY | {
    "permutation": torch.eye(9)[torch.randperm(9)],
    "deficient": torch.randn(14, 3) @ torch.randn(3, 14),
    "huge": torch.randn(10, 10) * 1e36,
    "tiny": torch.randn(10, 10) * 1e-36,
    "denormal": torch.randn(4, 4) * 1e-41,
    "block diagonal": torch.block_diag(torch.randn(5, 5), torch.zeros(2, 2), torch.randn(6, 6)),
    "triangular": torch.ones(24, 24).triu(),
}


@pytest.mark.parametrize("exponent", [0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("matrix", UGLY.values(), ids=UGLY.keys())
def test_power_is_that_of_the_svd_in_float64(matrix, exponent):
    assert uses_kernels(matrix)
    result, expected = singular_value_power_norm(matrix, exponent), power_of_svd(matrix.double(), exponent, FLOAT32)
    assert result.shape == matrix.shape and result.is_contiguous()
    values = torch.linalg.svdvals(matrix.double())
    share = values / values[..., :1]
    half_known = ((share > FLOAT32 / 2) & (share < 10 * FLOAT32)).any()  # the square of it is near float64's rounding
    tolerance = (2.0**-24) ** exponent if half_known else 1e-6
    assert (result - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("exponent", [0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", UGLY)
def test_gradient_is_that_of_float64(name, exponent):
    matrix = UGLY[name]
    grad = torch.randn(matrix.shape)
    tolerance = 3e-3 if name == "scaled rows" else 1e-4  # uᵢ of λᵢ near 1e-7 λ₁ is half known
    result, expected = gradient(matrix, grad, exponent), gradient(matrix.double(), grad.double(), exponent)
    if matrix.abs().max() < torch.finfo(torch.float32).tiny:  # nothing, as far as float32 can tell
        assert (result == 0).all()
    else:
        assert (result - expected).norm() <= tolerance * expected.norm()


def test_gradient_is_the_slope_of_the_definition():
    """Central differences of the SVD in float64, along random directions, on values without gaps and with them."""
    matrix = torch.stack([with_spectrum(1, 1, 0.7, 0.7, 0.4), with_spectrum(3, 2, 1, 0.5, 0.3), torch.eye(5).double()])
    for exponent in (0.3, 0.5, 0.8):
        grad, direction, step = torch.randn(3, 5, 5), torch.randn(3, 5, 5).double(), 1e-6
        above, below = (power_of_svd(matrix + sign * step * direction, exponent) for sign in (1, -1))
        slope = ((above - below) / (2 * step) * grad).sum((1, 2))
        assert torch.allclose((gradient(matrix.float(), grad, exponent) * direction).sum((1, 2)), slope, rtol=1e-4)


@pytest.mark.parametrize("shape", [(14, 14), (9, 5), (5, 9)])
def test_agrees_with_torch_operations(shape, monkeypatch):
    matrix, grad = torch.randn(3, 11, *shape), torch.randn(3, 11, *shape)
    power, slope = singular_value_power_norm(matrix), gradient(matrix, grad)
    without_kernels(monkeypatch)
    assert not uses_kernels(matrix)
    assert relative_error(power, singular_value_power_norm(matrix)) < 1e-6
    assert relative_error(slope, gradient(matrix, grad)) < 1e-4


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17])
def test_any_number_of_matrices_none_of_which_feels_the_others(count):
    matrix, grad = torch.randn(count, 6, 5), torch.randn(count, 6, 5)
    power, slope = singular_value_power_norm(matrix), gradient(matrix, grad)
    assert power.shape == slope.shape == matrix.shape
    for k in range(count):
        assert torch.equal(power[k], singular_value_power_norm(matrix[k]))
        assert torch.equal(slope[k], gradient(matrix[k], grad[k]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_only_matrices_that_are_not_finite_become_nan(bad):
    matrix, grad = torch.randn(10, 5, 5), torch.randn(10, 5, 5)
    power, slope = singular_value_power_norm(matrix), gradient(matrix, grad)
    matrix[3, 4, 0] = matrix[9, 1, 1] = bad
    fine = torch.arange(10).remainder(6) != 3
    for result, expected in ((singular_value_power_norm(matrix), power), (gradient(matrix, grad), slope)):
        assert torch.equal(result[fine], expected[fine]) and result[~fine].isnan().all()


def test_strided_matrices_and_gradients():
    matrix = torch.randn(2, 7, 3, 6).transpose(1, 2)[..., ::2]  # (2, 3, 7, 3)
    assert not matrix.is_contiguous()
    assert torch.equal(singular_value_power_norm(matrix), singular_value_power_norm(matrix.contiguous()))
    one = torch.ones(()).expand(matrix.shape)
    assert torch.equal(gradient(matrix, one), gradient(matrix.contiguous(), one.contiguous()))


def test_threads_change_no_bit():
    matrix, grad, threads = torch.randn(130, 6, 6), torch.randn(130, 6, 6), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(torch.stack([singular_value_power_norm(matrix), gradient(matrix, grad)]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_low_precision_is_computed_in_float32():
    matrix = torch.randn(4, 6, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        result = singular_value_power_norm(matrix)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, singular_value_power_norm(matrix.float()).bfloat16())


def test_a_second_derivative_is_refused():
    matrix = torch.randn(3, 3, requires_grad=True)
    (first,) = torch.autograd.grad(singular_value_power_norm(matrix).square().sum(), matrix, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("strict", [True, False])
@BOTH
def test_an_exported_program_does_without(function, rounding, strict):
    class Norm(torch.nn.Module):
        def forward(self, matrix):
            return function(matrix)

    matrix = torch.randn(3, 5, 4)
    program = torch.export.export(Norm(), (matrix,), strict=strict).module()
    assert relative_error(program(matrix), function(matrix)) < rounding


@BOTH
def test_who_counts_operations_sees_them(function, rounding):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function(torch.randn(2, 5, 5))
    assert counter.get_total_flops() > 0


def test_other_types_and_sizes_go_another_way():
    assert not uses_kernels(torch.randn(4, 4, dtype=torch.float64))
    assert not uses_kernels(torch.randn(simd.MAX_COLUMNS, simd.MAX_COLUMNS))
    assert not uses_kernels(torch.randn(4, simd.MAX_COLUMNS + 1, simd.MAX_COLUMNS + 1))


def test_a_kernel_without_a_folder_to_keep_it():
    from sot.core.simd_lanes import kernel

    space = {}
    exec("def twice(number): return 2 * number", space)  # from no file, so beside no file
    assert kernel(numba.float64(numba.float64))(space["twice"])(1.5) == 3
