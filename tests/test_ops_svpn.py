"""Exact svPN by every backend: against the definition in float64, on ugly inputs too."""

import pytest
import torch

import reference
from reference import FLOAT32, gradient_of_smooth_power, power_of_svd, relative_error, with_spectrum
from sot.bench.timing import thread_count
from sot.core.normalize import singular_value_power_norm
from sot.ops import use
from sot.ops.svpn import reference as definition
from sot.ops.svpn.operator import SVPN

pytestmark = pytest.mark.usefixtures("backend", "threads")


def gradient(matrix, grad, exponent=0.5):
    matrix = matrix.clone().requires_grad_()
    return torch.autograd.grad(singular_value_power_norm(matrix, exponent), matrix, grad)[0]


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
    result, expected = singular_value_power_norm(matrix, exponent), power_of_svd(matrix.double(), exponent, FLOAT32)
    assert result.shape == matrix.shape
    values = torch.linalg.svdvals(matrix.double())
    share = values / values[..., :1]
    half_known = ((share > FLOAT32 / 2) & (share < 10 * FLOAT32)).any()  # the square of it is near float64's rounding
    denormal = matrix.abs().max() < torch.finfo(torch.float32).tiny  # its singular values have few digits in float32
    tolerance = (2.0**-24) ** exponent if half_known else 1e-4 if denormal else 1e-6
    assert (result - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("exponent", [0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", UGLY)
def test_gradient_is_that_of_float64(name, exponent):
    matrix = UGLY[name]
    grad = torch.randn(matrix.shape)
    tolerance = 3e-3 if name == "scaled rows" else 3e-4  # uᵢ of λᵢ near 1e-7 λ₁ is half known
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


@pytest.mark.parametrize("exponent", [0.25, 0.3, 0.5, 0.9])
def test_value_and_gradient_are_those_of_the_definition(exponent):
    matrix, grad = with_spectrum(3, 2, 1, 0.5, 0.3, rows=7), torch.randn(7, 5).double()
    expected = gradient_of_smooth_power(matrix, grad, exponent, 1e-5)
    assert relative_error(gradient(matrix.float(), grad.float(), exponent), expected) < 1e-5
    assert relative_error(gradient(matrix, grad, exponent), expected) < 1e-11
    assert (
        relative_error(singular_value_power_norm(matrix.float(), exponent), definition.power(matrix, exponent)) < 1e-6
    )


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17])
def test_any_number_of_matrices_none_of_which_feels_the_others(count, backend):
    matrix, grad = torch.randn(count, 6, 5), torch.randn(count, 6, 5)
    power, slope = singular_value_power_norm(matrix), gradient(matrix, grad)
    assert power.shape == slope.shape == matrix.shape
    for k in range(count):
        alone, alone_slope = singular_value_power_norm(matrix[k]), gradient(matrix[k], grad[k])
        if backend == "numba":
            assert torch.equal(power[k], alone) and torch.equal(slope[k], alone_slope)
        assert torch.allclose(power[k], alone, atol=1e-5) and torch.allclose(slope[k], alone_slope, atol=1e-4)


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


def test_threads_change_no_bit(backend):
    matrix, grad = torch.randn(130, 6, 6), torch.randn(130, 6, 6)
    results = []
    for count in (1, 2, 3):
        with thread_count(count):
            results.append(torch.stack([singular_value_power_norm(matrix), gradient(matrix, grad)]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_low_precision_is_computed_in_float32():
    matrix = torch.randn(4, 6, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        result = singular_value_power_norm(matrix)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, singular_value_power_norm(matrix.float()).bfloat16())


@pytest.mark.parametrize("constant", [True, False])
def test_a_second_derivative_is_refused_in_a_sentence(constant):
    matrix = torch.randn(3, 3, requires_grad=True)
    value = singular_value_power_norm(matrix)
    (first,) = torch.autograd.grad(value.sum() if constant else value.square().sum(), matrix, create_graph=True)
    with pytest.raises(NotImplementedError, match="exact svPN has a first derivative only"):
        first.sum().backward()


def test_torch_func_takes_its_gradient_and_maps_it():
    matrix = torch.randn(3, 2, 5, 4, dtype=torch.float64)

    def loss(sample):
        return singular_value_power_norm(sample, 0.25).sin().sum()

    expected = torch.stack([gradient(one, singular_value_power_norm(one, 0.25).cos(), 0.25) for one in matrix])
    assert torch.allclose(torch.func.grad(loss)(matrix), expected)
    assert torch.allclose(torch.func.vmap(torch.func.grad(loss))(matrix), expected)
    mapped = torch.func.vmap(lambda sample: singular_value_power_norm(sample, 0.25), in_dims=1)(matrix)
    assert torch.allclose(mapped.transpose(0, 1), singular_value_power_norm(matrix, 0.25))
    with pytest.raises(NotImplementedError, match="first derivative only"):
        torch.func.grad(lambda sample: torch.func.grad(loss)(sample).sum())(matrix)


@pytest.mark.parametrize("exponent", [0.25, 0.3])
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_does_without(strict, exponent):
    class Norm(torch.nn.Module):
        def forward(self, matrix):
            return singular_value_power_norm(matrix, exponent)

    matrix = torch.randn(3, 5, 4)
    program = torch.export.export(Norm(), (matrix,), strict=strict)
    assert not any("sot" in str(node.target) for node in program.graph.nodes)
    assert relative_error(program.module()(matrix), singular_value_power_norm(matrix, exponent)) < 1e-6


def test_the_kernels_are_chosen_for_float32_on_a_cpu_up_to_64_columns():
    pytest.importorskip("numba")
    with use("auto"):
        assert SVPN.choose(torch.randn(2, 64, 64), 0.5, False) == "numba"
        assert SVPN.choose(torch.randn(2, 65, 65), 0.5, False) == "torch"
        assert SVPN.choose(torch.randn(2, 4, 4).double(), 0.5, False) == "torch"
        assert SVPN.choose(torch.randn(2, 4, 4), 0.5, True) == "torch"
        assert SVPN.choose(torch.randn(2, 4, 4, device="meta"), 0.5, False) == "torch"


def test_a_kernel_without_a_folder_to_keep_it():
    numba = pytest.importorskip("numba")
    from sot.ops._numba.lanes import kernel

    space = {}
    exec("def twice(number): return 2 * number", space)  # from no file, so beside no file
    assert kernel(numba.float64(numba.float64))(space["twice"])(1.5) == 3
