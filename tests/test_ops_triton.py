"""Exact svPN by Triton: in its interpreter against the definition in float64."""

import os
import subprocess
import sys

import pytest
import torch

from reference import FLOAT32, power_of_svd, relative_error, with_spectrum
from sot.core.normalize import singular_value_power_norm
from sot.ops import registry, use
from sot.ops.svpn.operator import SVPN

pytest.importorskip("triton")
EPS = 1e-5

IN_THE_INTERPRETER = """
import sys, torch
from sot.ops.svpn.operator import TransformedPower
torch.set_num_threads(1)
results = {}
for name, (matrix, grad, exponent) in torch.load(sys.argv[1]).items():
    out, *parts = TransformedPower.apply(matrix.requires_grad_(), exponent, 1e-5, False, "triton")
    results[name] = [out.detach(), torch.autograd.grad(out, matrix, grad)[0], *parts]
operators, matrix = torch.ops.sot, torch.linspace(-3, 3, 70).view(2, 7, 5).sin()
for exponent in (0.25, 0.3):
    for keep in (True, False):
        torch.library.opcheck(operators.svpn, (matrix, exponent, False, keep, "triton"))
    out, *parts = operators.svpn(matrix, exponent, False, True, "triton")
    torch.library.opcheck(operators.svpn_backward, (out, *parts, exponent, 1e-5, False, "triton"))
torch.save(results, sys.argv[2])
"""


def spectra(rows, columns):
    """Matrices of this size, stacked: several are computed by one warp."""
    random = torch.randn(rows, columns)
    steep = with_spectrum(*torch.logspace(0, -4, columns).tolist(), rows=rows).float()
    levels = torch.linspace(3, 1, columns).round().tolist()
    return {
        "random": random,
        "identity": torch.eye(rows, columns),
        "ones": torch.ones(rows, columns),
        "zeros": torch.zeros(rows, columns),
        "repeated": with_spectrum(*levels, rows=rows).float(),
        "deficient": torch.randn(rows, 3) @ torch.randn(3, columns),
        "condition 1e4": steep,
        "tiny": random * 1e-30,
        "small": steep * 1e-20,
        "large": random * 1e15,
        "huge": random * 1e30,
    }


torch.manual_seed(0)  # what follows is drawn while tests are collected: the same in every run
SIZES = {"square": spectra(14, 14), "odd": spectra(5, 5), "tall": spectra(9, 6)}
NAMES = list(SIZES["square"])
CASES = [(size, exponent) for size in SIZES for exponent in (0.25, 0.3, 0.5) if exponent != 0.3 or size == "odd"]
TOLERANCES = {  # of value and gradient
    "identity": (1e-6, 1e-6),
    "ones": (1e-6, 1e-6),
    "deficient": (3e-6, 2e-5),
    "condition 1e4": (2e-5, 2e-4),
    "small": (2e-5, 2e-4),
}


def jobs():
    """Everything that the interpreter computes: matrices, the gradient of the result, the exponent."""
    given = {(size, exponent): (torch.stack(list(SIZES[size].values())), exponent) for size, exponent in CASES}
    given["large", 0.25] = torch.randn(1, 38, 38), 0.25
    given["large", 0.5] = torch.randn(1, 35, 33), 0.5
    square = given["square", 0.25][0]
    for index in (0, 6):
        given["alone", index] = square[index : index + 1].clone(), 0.25
    for bad in ("nan", "inf"):
        poisoned = square.clone()
        poisoned[1, 4, 0] = poisoned[5, 13, 13] = float(bad)
        given["bad", bad] = poisoned, 0.25
    given["column", 0.5] = torch.randn(3, 7, 1), 0.5
    given["none", 0.5] = torch.randn(0, 6, 5), 0.5
    given["strided", 0.5] = torch.randn(2, 6, 6).mT, 0.5
    grads = {shape: torch.randn(shape) for shape in sorted({tuple(matrix.shape[1:]) for matrix, _ in given.values()})}
    return {
        name: (matrix, grads[tuple(matrix.shape[1:])].expand_as(matrix), exponent)
        for name, (matrix, exponent) in given.items()
    }


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """For each job what it was given, and result, gradient and parts by the kernels in Triton's interpreter."""
    folder = tmp_path_factory.mktemp("triton")
    torch.manual_seed(0)
    given = jobs()
    torch.save(given, folder / "given.pt")
    command = [sys.executable, "-c", IN_THE_INTERPRETER, folder / "given.pt", folder / "results.pt"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when triton is imported
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    results = torch.load(folder / "results.pt")
    return {name: (*given[name][:2], *results[name]) for name in given}


def gradient(matrix, grad, exponent):
    matrix = matrix.double().requires_grad_()
    with use("torch"):
        return torch.autograd.grad(singular_value_power_norm(matrix, exponent, eps=EPS), matrix, grad.double())[0]


@pytest.mark.parametrize(("size", "exponent"), CASES)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_those_of_float64(name, size, exponent, interpreted):
    matrix, grad, power, slope, *_ = (part[NAMES.index(name)] for part in interpreted[size, exponent])
    if name == "zeros":
        assert (power == 0).all() and (slope == 0).all()
        return
    of_value, of_gradient = TOLERANCES.get(name, (3e-6, 5e-6))
    assert relative_error(power, power_of_svd(matrix.double(), exponent, FLOAT32)) < of_value
    assert relative_error(slope, gradient(matrix, grad, exponent)) < of_gradient


@pytest.mark.parametrize("job", [("large", 0.25), ("large", 0.5), ("column", 0.5), ("strided", 0.5)], ids=str)
def test_other_sizes(job, interpreted):
    matrix, grad, power, slope, *_ = interpreted[job]
    assert relative_error(power, power_of_svd(matrix.double(), job[1])) < 6e-6
    assert relative_error(slope, gradient(matrix, grad, job[1])) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_parts_are_falling_singular_values_and_their_vectors(size, interpreted):
    matrix, *_, left, values, right = interpreted[size, 0.5]
    largest = values[:, :1]
    assert (values.diff(dim=1) <= 1e-6 * largest).all()
    assert (values - torch.linalg.svdvals(matrix.double()) <= 1e-5 * largest).all()
    assert torch.allclose(right @ right.mT, torch.eye(right.shape[1]), atol=1e-5)
    restored = (left * values.unsqueeze(1)) @ right
    assert ((restored - matrix).flatten(1).norm(dim=1) <= 1e-5 * matrix.flatten(1).norm(dim=1)).all()
    dead = (values <= 4e-7 * largest).unsqueeze(1).expand_as(left)
    assert (left[dead] == 0).all()


def test_no_matrices_make_none(interpreted):
    assert [tuple(part.shape) for part in interpreted["none", 0.5][2:]] == [(0, 6, 5)] * 3 + [(0, 5), (0, 5, 5)]


@pytest.mark.parametrize("index", [0, 6])
def test_no_matrix_feels_its_neighbours(index, interpreted):
    for alone, among in zip(interpreted["alone", index][2:], interpreted["square", 0.25][2:]):
        assert torch.equal(alone[0], among[index])


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_only_matrices_that_are_not_finite_become_nan(bad, interpreted):
    fine = torch.tensor([index not in (1, 5) for index in range(len(NAMES))])
    for result, expected in zip(interpreted["bad", bad][2:4], interpreted["square", 0.25][2:4]):
        assert torch.equal(result[fine], expected[fine]) and result[~fine].isnan().all()


class OnGPU:
    """What the choice of a backend reads of a matrix on a GPU."""

    dtype, device = torch.float32, torch.device("cuda", 0)

    def __init__(self, *shape):
        self.shape = shape


def test_the_kernels_are_chosen_for_float32_on_a_gpu_up_to_64_rows():
    assert SVPN.choose(OnGPU(2, 64, 64), 0.5, False) == "triton"
    assert SVPN.choose(OnGPU(2, 14, 14), 0.3, False) == "triton"
    assert SVPN.choose(OnGPU(2, 65, 14), 0.5, False) == "torch"
    assert SVPN.choose(OnGPU(2, 65, 65), 0.5, False) == "host"
    assert SVPN.choose(OnGPU(2, 6, 0), 0.5, False) == "torch"
    assert SVPN.choose(OnGPU(2, 6, 6), 0.5, True) == "torch"
    double = OnGPU(2, 6, 6)
    double.dtype = torch.float64
    assert SVPN.choose(double, 0.5, False) == "torch"
    with use("triton"):
        assert SVPN.choose(torch.randn(2, 6, 6), 0.5, False) != "triton"


def test_triton_is_asked_for_only_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(registry, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="the backend is 'triton', which is not installed: pip install triton"):
        use("triton")


def test_triton_is_not_imported_before_it_is_used():
    code = """
import sys, torch.utils.flop_counter
before = "triton" in sys.modules  # by torch itself
import sot.ops.svpn.triton
sys.exit("triton" in sys.modules and not before or "sot.ops.svpn.triton_jacobi" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
