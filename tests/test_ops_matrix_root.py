"""Square roots of covariances by every backend: against the iteration in float64, on ugly inputs too."""

import pytest
import torch

from reference import relative_error
from sot.bench.timing import thread_count
from sot.core.normalize import matrix_square_root
from sot.ops import use
from sot.ops.matrix_root.operator import MATRIX_ROOT
from sot.ops.matrix_root.reference import square_root

pytestmark = pytest.mark.usefixtures("backend", "threads")


def covariances(count, size, rank=None):
    tokens = torch.randn(count, rank or 2 * size, size)
    return tokens.mT @ tokens / tokens.shape[1]


def value_and_gradient(root, spd, num_iterations, grad):
    spd = spd.detach().clone().requires_grad_()
    result = root(spd, num_iterations)
    return result.detach(), torch.autograd.grad(result, spd, grad)[0]


def is_the_iteration_in_float64(spd, num_iterations=5, tolerance=2e-6):
    grad = torch.randn_like(spd)
    ours = value_and_gradient(matrix_square_root, spd, num_iterations, grad)
    exact = value_and_gradient(square_root, spd.double(), num_iterations, grad.double())
    return all((one - other).norm() <= tolerance * other.norm() for one, other in zip(ours, exact))


@pytest.mark.parametrize("num_iterations", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("size", [3, 17, 24, 25, 48, 51, 64, 66])
def test_value_and_gradient_are_those_of_float64(size, num_iterations):
    spd = covariances(5, size)
    assert is_the_iteration_in_float64(spd, num_iterations)


torch.manual_seed(0)  # what follows is drawn while tests are collected: the same in every run
UGLY = {
    "zero": torch.zeros(2, 20, 20),
    "identity": torch.eye(20).expand(2, 20, 20),
    "ones": torch.ones(2, 30, 30),
    "rank three": covariances(4, 48, 3),
    "one zero among others": torch.stack([torch.zeros(20, 20), covariances(1, 20)[0]]),
    "not symmetric": covariances(3, 24) + 0.1 * torch.randn(3, 24, 24),
    "transposed": (covariances(3, 24) + 0.1 * torch.randn(3, 24, 24)).mT,
    "ill-conditioned": torch.diag(torch.logspace(0, -7, 20))[None],
    "huge": 1e30 * covariances(3, 24),
    "tiny": 1e-30 * covariances(3, 24),
    "one matrix": covariances(1, 48),
    "two batches": covariances(6, 24).view(2, 3, 24, 24),
}


@pytest.mark.parametrize("spd", UGLY.values(), ids=UGLY.keys())
def test_ugly_matrices(spd):
    assert is_the_iteration_in_float64(spd)
    assert matrix_square_root(spd).shape == spd.shape


def test_denormal_numbers_are_divided_by_their_trace_in_float64():
    spd = 1e-40 * torch.eye(20)[None]
    assert relative_error(matrix_square_root(spd, 9), spd.double().sqrt()) < 1e-3


def test_a_bad_number_stays_in_its_matrix():
    spd, grad = covariances(5, 24), torch.randn(5, 24, 24)
    clean = value_and_gradient(matrix_square_root, spd, 5, grad)
    spd[2, 3, 4] = float("nan")
    others = torch.arange(5) != 2
    for result, expected in zip(value_and_gradient(matrix_square_root, spd, 5, grad), clean):
        assert result[2].isnan().any() and torch.equal(result[others], expected[others])


def test_threads_change_nothing_but_rounding():
    spd, grad = covariances(23, 24), torch.randn(23, 24, 24)
    expected = value_and_gradient(matrix_square_root, spd, 5, grad)
    for threads in (1, 2, 3):
        with thread_count(threads):
            for one, other in zip(value_and_gradient(matrix_square_root, spd, 5, grad), expected):
                assert torch.allclose(one, other, atol=1e-6, rtol=1e-5)


def test_second_derivatives_are_those_of_the_definition():
    spd, direction = covariances(2, 20), torch.randn(2, 20, 20)

    def second(root, matrix, along):
        matrix = matrix.clone().requires_grad_()
        (first,) = torch.autograd.grad(root(matrix, 3).square().sum(), matrix, create_graph=True)
        return torch.autograd.grad((first * along).sum(), matrix)[0]

    exact = second(square_root, spd.double(), direction.double())
    assert relative_error(second(matrix_square_root, spd, direction), exact) < 1e-5


def test_half_precision_is_computed_in_float32():
    spd = covariances(4, 24)
    half = matrix_square_root(spd.bfloat16())
    assert half.dtype == torch.bfloat16 and relative_error(half.float(), matrix_square_root(spd)) < 1e-2


def test_the_kernels_are_chosen_for_float32_on_a_cpu_of_17_to_64_columns():
    pytest.importorskip("numba")
    with use("auto"):
        chosen = {size: MATRIX_ROOT.choose(torch.randn(1, size, size)) for size in (16, 17, 64, 65)}
        assert chosen == {16: "torch", 17: "numba", 64: "numba", 65: "torch"}
        assert MATRIX_ROOT.choose(torch.randn(1, 24, 24).double()) == "torch"
