"""svPN, exact and fast, and the other normalisations, against their definitions and on ugly inputs."""

import pytest
import torch
from torch.autograd import gradcheck

from reference import corollary_1, deflation, power_of_svd, relative_error, with_spectrum
from sot.core.normalize import (
    ZERO_SCALE,
    element_power_norm,
    fast_singular_value_power_norm,
    matrix_power_norm,
    matrix_square_root,
    singular_value_power_norm,
)
from sot.core.normalizers import NORMS, NormSettings, RowLayerNorm, build_norm
from sot.core.pooling import CrossCovariancePool
from sot.ops import use

pytestmark = pytest.mark.usefixtures("threads")
torch.manual_seed(0)  # what follows is drawn while tests are collected: the same in every run
SHAPES = [(5, 5), (7, 4), (4, 7), (1, 3), (3, 1), (1, 1)]
EXPONENTS = [0.3, 0.5, 0.7, 1.0]


def gradient(function, matrix, grad=None):
    matrix = matrix.clone().requires_grad_()
    output = function(matrix)
    return torch.autograd.grad(output, matrix, torch.randn_like(output) if grad is None else grad)[0]


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_is_the_power_of_the_svd(shape, exponent):
    matrix = torch.randn(2, 3, *shape, dtype=torch.float64)
    expected = power_of_svd(matrix, exponent)
    assert torch.allclose(singular_value_power_norm(matrix, exponent), expected, atol=1e-12)
    assert relative_error(singular_value_power_norm(matrix.float(), exponent).double(), expected) < 1e-5


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_gradient_on_random_matrices(shape, exponent):
    matrix = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda m: singular_value_power_norm(m, exponent), matrix)


@pytest.mark.parametrize("exponent", [0.3, 0.5, 0.7])
@pytest.mark.parametrize(
    "spectrum", [(1, 1, 1, 1), (2, 2, 1, 1), (1, 1, 0.5, 0.5), (1 + 1e-6, 1, 0.5, 0.5 - 1e-9), (1, 1e-2, 1e-2, 1e-2)]
)
@pytest.mark.parametrize("extra", [(None, None), (6, None), (None, 6)])
def test_exact_gradient_on_repeated_singular_values(spectrum, extra, exponent):
    matrix = with_spectrum(*spectrum, rows=extra[0], columns=extra[1]).requires_grad_()
    assert gradcheck(lambda m: singular_value_power_norm(m, exponent), matrix)


def test_exact_gradient_on_the_identity_itself():
    eye = torch.eye(4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(singular_value_power_norm, eye)


@pytest.mark.parametrize("gap", [1e-3, 1e-5, 1e-6, 1e-7])
def test_exact_gradient_in_float32_is_as_good_as_its_decomposition(gap):
    matrix, grad = with_spectrum(1, 1 - gap, 0.5, 0.2), torch.randn(4, 4, dtype=torch.float64)
    exact = gradient(singular_value_power_norm, matrix, grad)
    assert relative_error(gradient(singular_value_power_norm, matrix.float(), grad.float()).double(), exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize(
    "matrix",
    [torch.zeros(4, 4), torch.ones(14, 14), torch.ones(5, 9), torch.ones(9, 5), torch.eye(6, 6)[:, :3] * 1e-12],
)
def test_exact_gradient_is_bounded_on_deficient_matrices(matrix, exponent, dtype):
    matrix, grad = matrix.to(dtype), torch.randn(matrix.shape, dtype=dtype)
    result = gradient(lambda m: singular_value_power_norm(m, exponent), matrix, grad)
    largest = torch.linalg.matrix_norm(matrix, 2)
    bound = 1.01 * (1e-5 * largest) ** (exponent - 1) * grad.norm() if largest > 0 else 0
    assert result.isfinite().all() and result.norm() <= bound


def test_exact_gradient_of_a_low_rank_product_trains_down():
    """A sentence of 3 words and 14×14 heads: descent on svPN of a rank 3 matrix has to converge, in float32."""
    words = torch.randn(3, 14).mul(0.3).requires_grad_()
    target = singular_value_power_norm(torch.randn(14, 3) @ torch.randn(3, 14))
    optimizer = torch.optim.Adam([words], lr=0.02)
    losses = []
    for _ in range(200):
        loss = (singular_value_power_norm(words.mT @ words.roll(1, 1)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0] and words.isfinite().all()


def test_exact_refuses_a_second_derivative():
    matrix = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(singular_value_power_norm(matrix).square().sum(), matrix, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        first.sum().backward()


def test_proposition_1_cross_covariance_is_maximised_by_singular_vectors():
    """Maximise uᵀXYᵀv by alternating steps under orthogonality to the earlier vectors: the k-th maximum is λₖ."""
    x, y = torch.randn(5, 40, dtype=torch.float64), torch.randn(4, 40, dtype=torch.float64)
    matrix = x @ y.mT
    outside_u, outside_v = torch.eye(5, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    for k in range(4):
        v = outside_v @ torch.randn(4, dtype=torch.float64)
        for _ in range(2000):
            u = torch.nn.functional.normalize(outside_u @ (matrix @ v), dim=0)
            v = torch.nn.functional.normalize(outside_v @ (matrix.mT @ u), dim=0)
        random_u = torch.nn.functional.normalize(outside_u @ torch.randn(5, 2000, dtype=torch.float64), dim=0)
        random_v = torch.nn.functional.normalize(outside_v @ torch.randn(4, 2000, dtype=torch.float64), dim=0)
        assert torch.isclose(u @ matrix @ v, values[k], rtol=1e-8)
        assert (random_u * (matrix @ random_v)).sum(0).max() <= values[k] * (1 + 1e-12)
        assert abs(u @ left[:, k]) > 1 - 1e-6 and abs(v @ right[k]) > 1 - 1e-6
        outside_u, outside_v = outside_u - torch.outer(u, u), outside_v - torch.outer(v, v)


@pytest.mark.parametrize("shape", [(4, 4), (6, 4)])
def test_corollary_1_where_it_is_right(shape):
    matrix, grad = torch.randn(*shape, dtype=torch.float64), torch.randn(*shape, dtype=torch.float64)
    assert relative_error(corollary_1(matrix, grad, 0.5), gradient(singular_value_power_norm, matrix, grad)) < 1e-6


@pytest.mark.parametrize("matrix", [torch.randn(4, 6), torch.eye(4), torch.diag(torch.tensor([2.0, 2, 1, 1]))])
def test_corollary_1_where_it_is_wrong(matrix):
    matrix, grad = matrix.double(), torch.randn(matrix.shape, dtype=torch.float64)
    ours = matrix.clone().requires_grad_()
    assert gradcheck(singular_value_power_norm, ours)
    assert relative_error(corollary_1(matrix, grad, 0.5), gradient(singular_value_power_norm, matrix, grad)) > 0.05


def test_corollary_1_transposed_is_right_on_wide_matrices():
    matrix, grad = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    ours = gradient(singular_value_power_norm, matrix, grad)
    assert relative_error(corollary_1(matrix.mT, grad.mT, 0.5).mT, ours) < 1e-6


# (values, iterations) without (>1, 1): there the definition divides zero by zero
@pytest.mark.parametrize("num_values, num_iterations", [(1, 1), (1, 3), (2, 2), (3, 2), (2, 5)])
@pytest.mark.parametrize("shape", [(5, 5), (6, 4), (4, 6)])
@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_fast_is_iteration_and_deflation(shape, num_values, num_iterations, exponent):
    matrix, start = torch.randn(3, *shape, dtype=torch.float64), torch.randn(shape[1], dtype=torch.float64)
    actual = fast_singular_value_power_norm(matrix, start, exponent, num_values, num_iterations)
    expected = [deflation(one, [start] * num_values, exponent, num_iterations) for one in matrix]
    assert torch.allclose(actual, torch.stack(expected), atol=1e-9)


def test_fast_with_one_iteration_starts_further_values_elsewhere():
    matrix, start = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    expected = deflation(matrix, [start, start.roll(1), start.roll(2)], 0.5, 1)
    assert torch.allclose(fast_singular_value_power_norm(matrix, start, 0.5, 3, 1), expected, atol=1e-12)


def test_fast_with_enough_values_and_iterations_is_exact():
    matrix, start = with_spectrum(4, 2, 1, 0.5), torch.randn(4, dtype=torch.float64)
    actual = fast_singular_value_power_norm(matrix, start, 0.5, 4, 60)
    assert relative_error(actual, singular_value_power_norm(matrix)) < 1e-9


@pytest.mark.parametrize("num_values, num_iterations", [(1, 1), (1, 4), (2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("shape", [(5, 5), (6, 4), (4, 6)])
def test_fast_gradients_to_matrix_and_start(shape, num_values, num_iterations):
    matrix = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    start = torch.randn(shape[1], dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda m, s: fast_singular_value_power_norm(m, s, 0.5, num_values, num_iterations), (matrix, start)
    )


@pytest.mark.parametrize("shape", [(14, 14), (24, 20), (18, 26)])  # torch multiplies small batches and others apart
def test_fast_is_its_definition_at_the_sizes_of_models(shape):
    matrix = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    start, grad = torch.randn(shape[1], dtype=torch.float64, requires_grad=True), torch.randn_like(matrix)
    results = []
    for backend in ("torch", "reference"):
        with use(backend):
            output = fast_singular_value_power_norm(matrix, start)
            results.append((output, *torch.autograd.grad(output, (matrix, start), grad)))
    assert all(torch.allclose(ours, definition, atol=1e-9) for ours, definition in zip(*results))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_values, num_iterations", [(1, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("start", [torch.randn(4), torch.ones(4), torch.zeros(4)], ids=["random", "ones", "zeros"])
@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(4, 4),
        torch.ones(4, 4),
        torch.outer(torch.randn(4), torch.randn(4)),
        torch.eye(4),
        torch.eye(4, 4) * 1e-30,
    ],
    ids=["zero", "ones", "rank one", "identity", "tiny"],
)
def test_fast_is_safe_on_deficient_matrices(matrix, start, num_values, num_iterations, dtype):
    matrix = matrix.to(dtype).requires_grad_()
    start = start.to(dtype).requires_grad_()
    output = fast_singular_value_power_norm(matrix, start, 0.5, num_values, num_iterations)
    grads = torch.autograd.grad(output, (matrix, start), torch.randn_like(output))
    bound = 100 * max(1.0, float(torch.linalg.matrix_norm(matrix.detach(), 2).clamp_min(1e-32)) ** -0.5)
    assert output.isfinite().all()
    assert all(grad.isfinite().all() and grad.norm() < bound for grad in grads)


@pytest.mark.parametrize("share", [1e-2, 1e-3, 1e-4])
def test_fast_takes_no_rounding_for_a_second_value_where_the_start_is_almost_orthogonal(share):
    rows, columns, aside = torch.linalg.qr(torch.randn(3, 6, 6))[0][:, :, 0]
    aside = torch.nn.functional.normalize(aside - (aside @ columns) * columns, dim=0)
    matrix, start = torch.outer(rows, columns).requires_grad_(), (aside + share * columns).requires_grad_()
    output = fast_singular_value_power_norm(matrix, start, 0.5, 2, 1)
    assert torch.allclose(output, matrix, atol=1e-3)  # of one singular value, and that is one
    grads = torch.autograd.grad(output, (matrix, start), torch.randn_like(output))
    assert all(grad.norm() < 100 for grad in grads)


def covariance(rank=6, dim=5):
    tokens = torch.randn(2, rank, dim, dtype=torch.float64)
    return tokens.mT @ tokens / rank


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_matrix_power_is_the_power_of_the_eigenvalues(exponent):
    spd = covariance()
    assert torch.allclose(matrix_power_norm(spd, exponent), power_of_svd(spd, exponent), atol=1e-12)
    factor = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda f: matrix_power_norm(f @ f.mT + f.mT @ f, exponent), factor)


@pytest.mark.parametrize("function", [matrix_power_norm, matrix_square_root])
def test_matrix_root_of_the_identity_and_its_gradient(function):
    eye = torch.eye(4, dtype=torch.float64)
    assert torch.allclose(function(eye), eye, atol=2e-2)  # five Newton-Schulz steps are within 2 %
    assert gradcheck(lambda m: function(m + m.mT), (eye / 2).requires_grad_())


@pytest.mark.parametrize("function", [matrix_power_norm, matrix_square_root])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_matrix_root_is_bounded_on_deficient_covariances(function, dtype, rank):
    spd = torch.zeros(6, 6, dtype=dtype) if rank == 0 else covariance(rank, 6)[0].to(dtype)
    result = gradient(function, spd)
    assert function(spd).isfinite().all() and result.isfinite().all() and result.norm() < 1e6


@pytest.mark.parametrize("function", [matrix_power_norm, matrix_square_root])
def test_matrix_root_of_rounding_is_a_number(function):
    """A blank picture, centred, has a covariance of rank 1, which LAPACK's float32 does not always solve."""
    signs = torch.randint(-1, 2, (2000, 48, 1), generator=torch.Generator().manual_seed(0)).float()
    spd = signs @ signs.mT * 10 ** torch.linspace(-38, 30, 2000)[:, None, None]
    wanted = function(spd.double())
    assert torch.allclose(function(spd).double(), wanted, rtol=1e-3, atol=1e-25)


def test_square_root_converges_and_needs_no_loop_over_the_batch():
    spd = covariance(40)
    exact = power_of_svd(spd, 0.5)
    errors = [relative_error(matrix_square_root(spd, steps), exact) for steps in (3, 5, 8, 20)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-13
    factor = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda f: matrix_square_root(f @ f.mT), factor)


def test_element_power_is_signed_and_of_unit_length():
    matrix = torch.randn(3, 4, 5, dtype=torch.float64)
    expected = matrix.sign() * matrix.abs().sqrt()
    expected = expected / expected.flatten(1).norm(dim=1)[:, None, None]
    assert torch.allclose(element_power_norm(matrix), expected, atol=1e-6)
    assert gradcheck(element_power_norm, matrix.requires_grad_())
    assert gradient(element_power_norm, torch.zeros(2, 3, 3)).isfinite().all()


FUNCTIONS = {
    "exact": singular_value_power_norm,
    "fast": lambda m: fast_singular_value_power_norm(m, torch.ones(m.shape[-1])),
    "fast, two values": lambda m: fast_singular_value_power_norm(m, torch.arange(1.0, m.shape[-1] + 1), 0.5, 2, 2),
    "power": matrix_power_norm,
    "root": matrix_square_root,
    "element": element_power_norm,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_computed_in_float32_and_returned_as_it_came(function, dtype, autocast):
    matrix = covariance(9, 4).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = function(matrix)
        in_float32 = function(matrix.float())
        grad = gradient(lambda m: function(m).float(), matrix, torch.ones_like(in_float32))
    assert result.dtype == dtype and in_float32.dtype == torch.float32
    assert torch.equal(result, function(matrix.float()).to(dtype))
    assert torch.equal(in_float32, function(matrix.float()))
    assert grad.dtype == dtype and grad.isfinite().all()


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_not_a_number_stays_in_its_sample(function, poison):
    clean = covariance(9, 4).float()
    poisoned = clean.clone()
    poisoned[0, 1, 2] = poison
    result, grad = function(poisoned), gradient(function, poisoned, torch.ones_like(clean))
    assert result[0].isnan().any() and torch.equal(result[1], function(clean)[1])
    assert torch.equal(grad[1], gradient(function, clean, torch.ones_like(clean))[1])


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_any_batch_shape(function):
    matrix = covariance(9, 4).float()
    assert torch.allclose(function(matrix[0]), function(matrix)[0], atol=1e-6)
    assert torch.allclose(function(matrix.view(1, 2, 1, 4, 4)).view_as(matrix), function(matrix), atol=1e-6)
    assert function(matrix[:0]).shape == (0, 4, 4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: singular_value_power_norm(torch.randn(3, 3), 0), r"exponent must be in \(0, 1\], got 0"),
        (lambda: singular_value_power_norm(torch.randn(3, 3), 1.5), "got 1.5"),
        (lambda: singular_value_power_norm(torch.randn(3)), r"got torch.float32 of shape \(3,\)"),
        (lambda: singular_value_power_norm(torch.ones(3, 3, dtype=torch.long)), "got torch.int64"),
        (lambda: fast_singular_value_power_norm(torch.randn(3, 4), torch.randn(3)), r"shape \(4,\), got \(3,\)"),
        (lambda: fast_singular_value_power_norm(torch.randn(3, 4), torch.randn(4), num_values=4), "at most 3"),
        (lambda: fast_singular_value_power_norm(torch.randn(3, 4), torch.randn(4), num_values=0), "num_values"),
        (lambda: fast_singular_value_power_norm(torch.randn(3, 4), torch.randn(4), num_iterations=0), "num_iterations"),
        (lambda: matrix_power_norm(torch.randn(3, 4)), "square"),
        (lambda: matrix_square_root(torch.randn(3, 4)), "square"),
        (lambda: matrix_square_root(torch.eye(3), num_iterations=-1), "got -1"),
        (lambda: build_norm("svd", NormSettings(3, 3)), "unknown norm 'svd'; accepted: svpn, svpn_fast"),
        (lambda: build_norm("svpn_fast", NormSettings(3, 2, num_values=3)), "num_values must be at most"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_registry_has_the_papers_names_and_every_module_trains():
    assert list(NORMS) == ["svpn", "svpn_fast", "svpn_matmul", "mpn", "isqrt", "epn", "ln", "scale", "none"]
    spd = covariance(9, 4).float().unsqueeze(1)
    for name in NORMS:
        module = build_norm(name, NormSettings(4, 4))
        output = module(spd.requires_grad_())
        output.square().sum().backward()
        assert output.shape == spd.shape and spd.grad.isfinite().all()
        assert all(parameter.grad is not None for parameter in module.parameters())
        assert module.to(torch.bfloat16)(spd).dtype == torch.float32


def test_layer_norm_and_learned_scale_follow_their_formulae():
    matrix = torch.randn(2, 3, 4, 5)
    rows = (matrix - matrix.mean(-1, keepdim=True)) / matrix.var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
    assert torch.allclose(build_norm("ln", NormSettings(4, 5))(matrix), rows, atol=1e-5)
    assert torch.allclose(build_norm("scale", NormSettings(4, 5))(matrix), matrix / 5**0.5)
    assert torch.equal(build_norm("none", NormSettings(4, 5))(matrix), matrix)


def test_element_power_of_rounding_fades_and_its_gradient_is_bounded():
    tokens = torch.ones(1, 196, 32) * torch.randn(32)  # a blank picture
    pool = CrossCovariancePool(32, norm="epn", exponent=0.5, center=True)
    assert pool(tokens).abs().max() < 1e-6
    for scale in (0.0, 1e-30, 1e-14, 1e-5, 1.0, 1e20, 1e30):
        matrix = torch.randn(2, 14, 14) * scale
        assert gradient(element_power_norm, matrix).abs().max() < 1e-6**-0.5 / ZERO_SCALE
    assert gradient(element_power_norm, torch.zeros(2, 3, 3)).abs().max() == 0
    assert gradient(element_power_norm, torch.randn(2, 14, 14) * 1e-14).abs().max() < 1


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e20, 1e30])
def test_element_power_and_layer_norm_do_not_depend_on_the_scale(scale):
    matrix = torch.randn(2, 5, 7)
    wide = matrix.double() * scale
    powered = wide.sign() * wide.abs().sqrt()
    expected = powered / powered.flatten(1).norm(dim=1)[:, None, None]
    assert torch.allclose(element_power_norm(matrix * scale).double(), expected, atol=2e-4)
    if scale >= 1:
        rows = (wide - wide.mean(-1, keepdim=True)) / wide.std(-1, unbiased=False, keepdim=True)
        assert torch.allclose(RowLayerNorm(7)(matrix * scale).double(), rows, atol=1e-4)
