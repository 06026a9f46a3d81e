"""Poolings against their definitions, with and without masks, and their invariances."""

import pytest
import timm.layers
import torch
from torch import nn

from reference import power_of_svd
from sot.core.head import POOLS, HeadConfig
from sot.core.normalizers import NORMS, SYMMETRIC_ONLY
from sot.core.pooling import AveragePool, CovariancePool, CrossCovariancePool, MaxPool, keep
from sot.pools.attention import AttentionPool, EfficientProbing
from sot.pools.moments import MomentProbing

pytestmark = pytest.mark.usefixtures("threads")
DIM = 16
SMALL = {"heads": 2, "left_dim": 3, "right_dim": 4}
CONFIGS = {name: HeadConfig.from_saved({"pool": name, "norm": None, **SMALL, "reduced_dim": 5}) for name in POOLS}
CONFIGS["gcp of few tokens"] = HeadConfig(pool="gcp", reduced_dim=13)


def build(name):
    return POOLS[CONFIGS[name].pool](DIM, CONFIGS[name]).double().eval()


def tokens(batch=3, length=7):
    return torch.randn(batch, length, DIM, dtype=torch.float64)


def test_cross_covariance_is_the_papers_formula():
    pool = CrossCovariancePool(DIM, heads=2, left_dim=3, right_dim=4, norm="svpn", exponent=0.5).double()
    z = tokens()
    w, r = pool.projection.weight.split([6, 8])
    expected = []
    for sample in z:
        for head in range(2):
            x, y = w[3 * head : 3 * head + 3] @ sample.T, r[4 * head : 4 * head + 4] @ sample.T
            expected.append(power_of_svd(x @ y.T / len(sample), 0.5).flatten())
    assert torch.allclose(pool(z), torch.stack(expected).view(3, -1))
    assert pool.out_features == 24 and pool.projection.bias is None


def test_cross_covariance_subtracts_the_mean_of_each_channel_when_asked():
    pool = CrossCovariancePool(DIM, heads=1, left_dim=3, right_dim=4, norm="none", center=True).double()
    z, mask = tokens(), torch.rand(3, 7) > 0.3
    w, r = pool.projection.weight.split([3, 4])
    for sample, kept, result in zip(z, mask, pool(z, mask)):
        x, y = sample[kept] @ w.T, sample[kept] @ r.T
        expected = (x - x.mean(0)).T @ (y - y.mean(0)) / kept.sum()
        assert torch.allclose(result.view(3, 4), expected)


def test_centring_survives_a_mean_a_hundred_times_the_spread():
    pool = CrossCovariancePool(DIM, heads=1, left_dim=3, right_dim=3, norm="none", center=True)
    z = torch.randn(2, 200, DIM) + 100
    expected = pool.double()(z.double()).detach()
    assert torch.allclose(pool.float()(z).double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_covariance_is_reduction_root_and_upper_triangle():
    pool = CovariancePool(DIM, reduced_dim=5, norm="mpn").double()
    z = tokens()
    reduced = pool.projection(z)
    root = power_of_svd(reduced.mT @ reduced / 7, 0.5)
    rows, columns = torch.triu_indices(5, 5)
    assert torch.allclose(pool(z), root[:, rows, columns])
    assert pool.out_features == 15 and CovariancePool(256).out_features == 1176


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_iterations", [1, 5])
def test_covariance_of_few_tokens_and_its_gradient_are_those_of_the_whole_matrix(num_iterations, given):
    pool = CovariancePool(DIM, reduced_dim=12, num_iterations=num_iterations).to(given)
    nn.init.normal_(pool.projection.bias)
    z, mask = tokens(4).to(given).requires_grad_(), torch.ones(4, 7, dtype=torch.bool)
    mask[1, 4:], mask[2, 1:], mask[3] = False, False, False
    results, seen = [], []
    pool.norm.register_forward_hook(lambda *_: seen.append(1))
    for pool.accelerated in (True, False):  # without, the norm is shown the covariance
        output = torch.stack([pool(z), pool(z, mask)])
        results.append([output, *torch.autograd.grad(output.square().sum(), [z, *pool.parameters()])])
        assert output.dtype == given and len(seen) == (0 if pool.accelerated else 2)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.05}[given]
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max()))


def test_average_and_max_of_the_kept_tokens():
    z, mask = tokens(), torch.rand(3, 7) > 0.4
    mask[:, 0] = True
    for sample, kept, mean, largest in zip(z, mask, AveragePool(DIM)(z, mask), MaxPool(DIM)(z, mask)):
        assert torch.allclose(mean, sample[kept].mean(0)) and torch.equal(largest, sample[kept].amax(0))
    assert torch.allclose(AveragePool(DIM)(z), z.mean(1)) and torch.equal(MaxPool(DIM)(z), z.amax(1))


def test_attention_pool_is_timms_with_the_same_weights():
    theirs = timm.layers.AttentionPoolLatent(DIM, num_heads=4, mlp_ratio=4, norm_layer=nn.LayerNorm).double()
    ours = AttentionPool(DIM, num_heads=4).double()
    ours.load_state_dict(theirs.state_dict())
    z = tokens()
    assert torch.allclose(ours(z), theirs(z), atol=1e-12)


def test_efficient_probing_gives_each_query_its_slice_of_the_values():
    pool = EfficientProbing(DIM, num_queries=4).double()
    z = tokens()
    attention = torch.softmax(torch.einsum("qd,btd->bqt", pool.queries, z) / DIM**0.5, dim=-1)
    values = z @ pool.values.weight.T
    expected = [attention[:, q, None] @ values[:, :, 4 * q : 4 * q + 4] for q in range(4)]
    assert torch.allclose(pool(z), torch.cat(expected, dim=-1)[:, 0])
    assert [EfficientProbing(dim).num_queries for dim in (240, 384, 528, 768)] == [30, 32, 24, 32]


def test_moment_probing_convolves_products_of_neighbouring_heads():
    pool, z = MomentProbing(DIM).double(), tokens(2)
    heads = pool.norm((z @ pool.reduce.weight.T + pool.reduce.bias).view(2, 7, 4, 128)).permute(2, 0, 1, 3)
    heads = heads - heads.mean(2, keepdim=True)
    maps = torch.stack([heads[i].mT @ heads[i + 1] / 7 for i in range(3)], dim=1)
    maps = maps / maps.norm(dim=-1, keepdim=True)
    first, _, second = pool.convolve
    expected = second(torch.nn.functional.gelu(first(maps))).flatten(1)
    assert expected.shape == (2, 3 * 31**2) and torch.allclose(pool(z), expected, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_does_not_matter_wherever_it_is_and_whatever_it_holds(name):
    pool, z = build(name), tokens()
    expected = pool(z)
    for left, right in ((0, 3), (3, 0), (2, 2)):
        padding = [torch.full((3, count, DIM), float("nan"), dtype=z.dtype) for count in (left, right)]
        padded = torch.cat([padding[0], z, padding[1]], dim=1)
        mask = torch.zeros(3, 7 + left + right, dtype=torch.bool)
        mask[:, left : left + 7] = True
        assert torch.allclose(pool(padded, mask), expected, atol=1e-12)
        assert torch.equal(pool(padded, mask.long()), pool(padded, mask))


@pytest.mark.parametrize("name", CONFIGS)
def test_order_of_tokens_and_size_of_batch_do_not_matter(name):
    pool, z = build(name), tokens()
    mask = torch.rand(3, 7) > 0.3
    mask[:, 0] = True
    order = torch.randperm(7)
    assert torch.allclose(pool(z[:, order], mask[:, order]), pool(z, mask), atol=1e-12)
    one_by_one = torch.cat([pool(z[i : i + 1], mask[i : i + 1]) for i in range(3)])
    assert torch.allclose(one_by_one, pool(z, mask), atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_token_and_everything_masked_but_one(name):
    pool, z = build(name), tokens()
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[:, 4] = True
    assert torch.allclose(pool(z, mask), pool(z[:, 4:5]), atol=1e-12)


@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16])
def test_masked_tokens_are_zeros_also_of_a_slice_and_with_nan(given):
    z, mask = torch.randn(3, 8, DIM).to(given), torch.rand(3, 7) > 0.4
    words = z[:, 1:]
    expected = words.masked_fill(~mask.unsqueeze(-1), 0)
    words[~mask] = torch.nan
    kept, count = keep(words, mask)
    assert torch.equal(kept, expected) and torch.equal(count[:, 0], mask.sum(1).clamp_min(1).float())
    assert words[~mask].isnan().all()


@pytest.mark.parametrize("name", CONFIGS)
def test_everything_masked_is_finite_forwards_and_backwards(name):
    pool, z = build(name), tokens().requires_grad_()
    output = pool(z, torch.zeros(3, 7, dtype=torch.bool))
    output.sum().backward()
    assert output.isfinite().all() and torch.equal(z.grad, torch.zeros_like(z))
    assert all(p.grad is None or p.grad.isfinite().all() for p in pool.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_masked_tokens_get_no_gradient_and_kept_ones_do(name):
    pool, z = build(name), tokens().requires_grad_()
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 3:] = False
    pool(z, mask).square().sum().backward()
    assert torch.equal(z.grad[1, 3:], torch.zeros(4, DIM, dtype=z.dtype)) and z.grad[1, :3].abs().sum() > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_not_a_number_stays_in_its_sample(name):
    pool, z = build(name), tokens()
    expected = pool(z)
    for poison in (float("nan"), float("inf")):
        poisoned = z.clone()
        poisoned[1, 2, 3] = poison
        result = pool(poisoned)
        assert not result[1].isfinite().all() and torch.equal(result[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_type_and_stays_close(name, dtype):
    pool, z = build(name), tokens()
    expected = pool.float()(z.float())
    result = pool.to(dtype)(z.to(dtype))
    assert result.dtype == dtype and torch.allclose(result.float(), expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("name", [name for name in NORMS if name not in SYMMETRIC_ONLY])
def test_every_norm_under_autocast_keeps_the_matrix_in_float32(name):
    pool = CrossCovariancePool(DIM, heads=2, left_dim=3, right_dim=3, norm=name, exponent=0.5)
    seen = []
    pool.norm.register_forward_hook(lambda module, args, output: seen.extend([args[0].dtype, output.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        result = pool(tokens().float())
    result.sum().backward()
    assert seen == [torch.float32, torch.float32]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in pool.parameters())


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: CrossCovariancePool(DIM)(torch.randn(2, 5, DIM + 1)),
            r"shape \(batch, tokens >= 1, 16\), got \(2, 5, 17\)",
        ),
        (lambda: CrossCovariancePool(DIM)(torch.randn(2, 0, DIM)), r"got \(2, 0, 16\)"),
        (lambda: CrossCovariancePool(DIM)(torch.randn(2, DIM)), r"got \(2, 16\)"),
        (lambda: AveragePool(DIM)(torch.randn(2, 5, DIM), torch.ones(2, 4).bool()), r"mask must have shape \(2, 5\)"),
        (lambda: AveragePool(DIM)(torch.randn(2, 5, DIM), torch.zeros(2, 5)), "boolean or integer.*got torch.float32"),
        (lambda: CrossCovariancePool(DIM, heads=0), "heads must be an integer >= 1, got 0"),
        (lambda: CrossCovariancePool(DIM, left_dim=2.5), "left_dim must be an integer >= 1, got 2.5"),
        (lambda: CrossCovariancePool(DIM, norm="isqrt"), "cross-covariance accepts: svpn, svpn_fast, svpn_matmul, epn"),
        (lambda: CrossCovariancePool(DIM, norm="sqrt"), "unknown norm 'sqrt'"),
        (lambda: CrossCovariancePool(DIM, exponent=0), "exponent"),
        (lambda: CrossCovariancePool(DIM, num_values=15), r"min\(left_dim, right_dim\) = 14, got 15"),
        (lambda: CovariancePool(DIM, reduced_dim=0), "reduced_dim"),
        (lambda: AttentionPool(DIM, num_heads=5), "divide the token width 16, got 5"),
        (lambda: EfficientProbing(DIM, num_queries=32), "divide the token width 16, got 32"),
        (lambda: AveragePool(0), "dim must be"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "pool", [AttentionPool(12, num_heads=3), EfficientProbing(12, num_queries=4)], ids=["attn", "ep"]
)
def test_unprojected_attention_is_attention(pool):
    pool = pool.double()
    for parameter in pool.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:], mask[2] = False, False
    results = []
    calls = []
    layer = pool.kv if isinstance(pool, AttentionPool) else pool.values
    layer.register_forward_hook(lambda *_: calls.append(1))
    for pool.accelerated in (True, False):  # without, every token passes through the layer
        output = torch.stack([pool(tokens), pool(tokens, mask)])
        results.append([output, *torch.autograd.grad(output.square().sum(), [tokens, *pool.parameters()])])
        assert len(calls) == (0 if pool.accelerated else 2)
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-9)
