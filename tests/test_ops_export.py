"""svPN as exporters write it, against the definition."""

import pytest
import torch
from test_normalize_fast import scales, ugly
from torch.autograd import gradcheck

from reference import FLOAT32, power_of_svd, relative_error, with_spectrum
from sot.ops.svpn.export import POLAR_STEPS, ROOT_STEPS, power


def exported_power(matrix, exponent):
    wide = matrix.shape[-2] < matrix.shape[-1]
    return power(matrix.mT, exponent).mT if wide else power(matrix, exponent)


exponents = pytest.mark.parametrize("exponent", [0.5, 0.25])


@pytest.mark.parametrize(("steps", "lowest"), [(POLAR_STEPS, -6), (ROOT_STEPS, -3)])
def test_quintics_take_all_they_promise_to_one(steps, lowest):
    x = torch.logspace(lowest, 0, 10001, dtype=torch.float64)
    for a, b, c in steps:
        x = a * x + b * x**3 + c * x**5
    assert (x - 1).abs().max() < 1e-8


@exponents
@scales
@pytest.mark.parametrize("shape", [(14, 14), (38, 38), (9, 5), (5, 9), (1, 1), (3, 1)])
def test_it_is_svpn_where_spectra_are_as_steep_as_trained_ones(shape, scale, exponent):
    values = torch.logspace(0, -5, min(shape)).tolist()
    matrix = torch.stack([with_spectrum(*values, rows=shape[0], columns=shape[1]) for _ in range(5)]) * scale
    expected = power_of_svd(matrix, exponent)
    assert relative_error(exported_power(matrix, exponent), expected) < 1e-7
    single = matrix.float()
    result = exported_power(single, exponent)
    assert result.dtype == torch.float32
    assert relative_error(result.double(), power_of_svd(single.double(), exponent)) < 1e-6


@exponents
@ugly
def test_it_is_off_by_less_than_the_power_of_what_it_does_not_resolve(matrix, exponent):
    result = exported_power(matrix, exponent).double()
    largest = torch.linalg.matrix_norm(matrix.double(), 2)[:, None, None].clamp_min(1e-30)
    # ‖Q‖_F is at most √n λ₁
    error = (result - power_of_svd(matrix.double(), exponent)) / largest**exponent
    assert error.abs().max() < (1e-6 * 7**0.5) ** exponent


@exponents
def test_what_rounding_makes_of_zeros_vanishes(exponent):
    matrix = torch.randn(50, 32, 5) @ torch.randn(50, 5, 32)
    result = exported_power(matrix, exponent).double()
    assert relative_error(result, power_of_svd(matrix.double(), exponent, FLOAT32)) < 1e-6


@exponents
def test_its_gradient(exponent):
    matrix = torch.stack([with_spectrum(1, 0.5, 0.2, 0.05), with_spectrum(1, 1, 0.5, 0.5)]).requires_grad_()
    assert gradcheck(lambda m: exported_power(m, exponent), matrix)
