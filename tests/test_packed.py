"""Tokens without padding: every pooling gives what it gives of padded ones, and so do its gradients."""

import pytest
import torch

from reference import relative_error
from sot.core.head import POOLS, HeadConfig
from sot.core.packed import Packed
from sot.ops import use
from sot.ops.cross_covariance import cross_covariance, takes_packed

pytestmark = pytest.mark.usefixtures("backend", "threads")

COUNTS = [5, 0, 1, 12, 3, 4]  # fewer than a tile of the kernels, none, and what is left over of tiles
DIM = 32


def packed(counts=COUNTS, dim=DIM, dtype=torch.float32):
    starts = torch.tensor([0, *counts]).cumsum(0)
    return Packed(torch.randn(int(starts[-1]), dim, dtype=dtype), starts)


def test_padding_is_put_behind_each_sample():
    tokens, starts = given = packed([2, 0, 3])
    padded, mask = given.padded()
    assert padded.shape == (3, 3, DIM) and mask.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert torch.equal(padded[mask], tokens) and (padded[~mask] == 0).all()
    assert given.counts.tolist() == [[2], [1], [3]] and starts.tolist() == [0, 2, 2, 5]


@pytest.mark.parametrize("counts", [[4, 4], [1], []])
def test_samples_of_one_length_need_no_mask_and_no_copy(counts):
    given = packed(counts)
    padded, mask = given.padded()
    assert mask is None and padded.shape == (len(counts), counts[0] if counts else 1, DIM)
    assert padded.data_ptr() == given.tokens.data_ptr()


def test_samples_without_tokens_have_one_that_is_masked():
    padded, mask = packed([0, 0]).padded()
    assert padded.shape == (2, 1, DIM) and not mask.any()


def is_close(one, other, tolerance):
    """Also where both are zero, or would be without rounding, as of one token that is centred."""
    return (one - other).norm() <= tolerance * other.norm() + 1e-5


SIZES = {"heads": 2, "left_dim": 9, "right_dim": 11, "reduced_dim": 8}
CONFIGS = {name: HeadConfig.from_saved({"pool": name, "norm": None, **SIZES}) for name in POOLS}
CONFIGS |= {"few": HeadConfig(pool="gcp", reduced_dim=16), "gcp centred": HeadConfig(pool="gcp", center=True)}
CONFIGS |= {"exact": HeadConfig(norm="svpn", exponent=0.25), "centred": HeadConfig.paper(center=True)}


@pytest.mark.parametrize("counts", [COUNTS, [1, 1, 1], [7, 7], [2, 1]])
@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_pooling_gives_what_it_gives_of_padded_tokens(name, accelerated, counts):
    pool = POOLS[CONFIGS[name].pool](DIM, CONFIGS[name])
    pool.accelerated = accelerated
    one, starts = packed(counts)
    other = one.clone()
    inputs = [one.requires_grad_(), other.requires_grad_()]
    results = [pool(Packed(one, starts)), pool(*Packed(other, starts).padded())]
    assert results[0].shape == (len(counts), pool.out_features)
    assert is_close(*results, 1e-5)
    grad = torch.randn_like(results[0])
    ours, plain = (
        torch.autograd.grad(result, [tokens, *pool.parameters()], grad, allow_unused=True)
        for result, tokens in zip(results, inputs)
    )
    for a, b in zip(ours, plain):
        assert (a is None and b is None) or is_close(a, b, 1e-3)  # slopes of small singular values are steep


@pytest.mark.parametrize("counts", [COUNTS, [300, 2], [256, 257]])
@pytest.mark.parametrize("shape", [(6, 14, 14), (1, 8, 24), (2, 9, 31)])
def test_kernels_make_the_covariance_and_its_gradients(counts, shape, backend):
    heads, m, n = shape
    given, weight = packed(counts), torch.randn(heads * (m + n), DIM)
    assert takes_packed(given.tokens.unsqueeze(0), weight, heads, m) == (backend == "numba")
    if backend == "torch":
        return
    grad = torch.randn(len(counts), heads, m, n)

    def by_definition(tokens, weight):
        samples = []
        for first, end in zip(given.starts, given.starts[1:]):
            x, y = (tokens[first:end] @ weight.mT).split([heads * m, heads * n], 1)
            x, y = x.unflatten(1, (heads, m)), y.unflatten(1, (heads, n))
            samples.append(torch.einsum("thi,thj->hij", x, y) / max(1, end - first))
        return torch.stack(samples)

    exact = [tensor.double().requires_grad_() for tensor in (given.tokens, weight)]
    expected = by_definition(*exact)
    slopes = torch.autograd.grad(expected, exact, grad.double())
    inputs = given.tokens.requires_grad_(), weight.requires_grad_()
    result = cross_covariance(inputs[0].unsqueeze(0), weight, heads, m, starts=given.starts)
    result = result / given.counts[:, :, None, None]
    assert relative_error(result, expected) < 1e-6
    for one, other in zip(torch.autograd.grad(result, inputs, grad), slopes):
        assert relative_error(one, other) < 1e-6


def test_what_kernels_cannot_take_is_padded():
    weight, tokens = torch.randn(2 * 28, DIM), packed().tokens.unsqueeze(0)
    with use("auto"):
        for other in (tokens.double(), tokens[:, :3], tokens.bfloat16()):
            assert not takes_packed(other, weight.to(other.dtype), 2, 14)
        assert not takes_packed(tokens, weight, 2, 7)


def test_a_second_derivative_of_packed_tokens_is_refused_in_a_sentence(backend):
    given, weight = packed(), torch.randn(2 * 28, DIM, requires_grad=True)
    if takes_packed(given.tokens.unsqueeze(0), weight, 2, 14):
        value = cross_covariance(given.tokens.unsqueeze(0), weight, 2, 14, starts=given.starts)
        with pytest.raises(NotImplementedError, match="packed tokens have a first derivative only"):
            torch.autograd.grad(value.sum(), weight, create_graph=True)


def test_a_bad_number_stays_in_its_sample():
    pool, given = POOLS["mgcrp"](DIM, HeadConfig(norm="svpn")), packed()
    clean = pool(given)
    given.tokens[given.starts[3] + 2] = float("nan")
    result = pool(given)
    others = torch.arange(len(COUNTS)) != 3
    assert result[3].isnan().all() and torch.equal(result[others], clean[others])
