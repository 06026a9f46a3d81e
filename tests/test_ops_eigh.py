"""The eigensolver in lanes: each step against its scalar version, the whole against LAPACK."""

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")

from eigh_scalar import find_block, sweep_block

from sot.ops._numba import eigh
from sot.ops._numba.lanes import LANES, fill, routine, store

TOLERANCE = 1e-12


@routine
def step(diagonal, beside, n, turns, found):
    """One search and one sweep over the whole window; what was found goes to `found`."""
    first, end, g = eigh.find_blocks(diagonal, beside, 0, n, fill(1e-12))
    store(found, 0, first)
    store(found, LANES, end)
    eigh.sweep(diagonal, beside, turns, (0, n - 1), first, end, g)


def spectra(n):
    """Tridiagonal matrices: random, split into blocks at several places, diagonal, and nearly so."""
    draw = np.random.default_rng(0)
    diagonal, beside = draw.standard_normal((LANES, n)), draw.standard_normal((LANES, n))
    beside[:, -1] = 0
    beside[1, 2] = beside[2, 0] = beside[2, 4] = beside[3, n - 2] = 0
    beside[4] = 0
    beside[5, : n // 2] = 0
    beside[6] *= 1e-13
    return diagonal, beside


@pytest.mark.parametrize("n", [6, 7, 14])
def test_a_step_in_lanes_is_that_of_each_matrix(n):
    diagonal, beside = spectra(n)
    lanes = [np.ascontiguousarray(values.T).reshape(-1) for values in (diagonal, beside)]
    found = np.zeros(2 * LANES)
    step(*lanes, n, np.zeros(2 * n * LANES), found)
    for lane in range(LANES):
        d, e = diagonal[lane].tolist(), beside[lane].tolist()
        block = find_block(d, e, TOLERANCE)
        expected = (n, -1) if block is None else block[:2]
        assert (found[lane], found[LANES + lane]) == expected
        if block is not None:
            sweep_block(d, e, *block)
        np.testing.assert_allclose(lanes[0][lane::LANES], d, atol=1e-12)
        np.testing.assert_allclose(lanes[1][lane : (n - 1) * LANES : LANES], e[: n - 1], atol=1e-12)


def test_scalar_steps_end_at_the_eigenvalues():
    d, e = (values[0].tolist() for values in spectra(9))
    expected = np.linalg.eigvalsh(np.diag(d) + np.diag(e[:-1], 1) + np.diag(e[:-1], -1))
    for _ in range(100):
        block = find_block(d, e, TOLERANCE)
        if block is None:
            break
        sweep_block(d, e, *block)
    np.testing.assert_allclose(sorted(d), expected, atol=1e-11)
    assert torch.tensor(e).abs().max() <= TOLERANCE
