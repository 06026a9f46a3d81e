"""What holds for every norm, pooling and head, whatever they are given: generated inputs instead of chosen ones."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sot.core.head import HeadConfig, SecondOrderHead
from sot.core.normalizers import NORMS, SYMMETRIC_ONLY, NormSettings, build_norm
from sot.core.packed import Packed
from sot.core.pooling import AveragePool, CovariancePool, CrossCovariancePool, MaxPool
from sot.ops import use
from sot.pools.attention import AttentionPool, EfficientProbing

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LOOSE = {torch.float32: 2e-3, torch.float64: 1e-6, torch.bfloat16: 0.1, torch.float16: 2e-2}
SEED = torch.default_generator.manual_seed  # torch.manual_seed keeps the stack of every call for devices not yet used
FILLS = ("random", "zero", "one value", "one row", "one number")
CROSS = [name for name in NORMS if name not in SYMMETRIC_ONLY]
POOLS = {
    "gap": lambda dim, center: AveragePool(dim),
    "max": lambda dim, center: MaxPool(dim),
    "attn": lambda dim, center: AttentionPool(dim, num_heads=2),
    "ep": lambda dim, center: EfficientProbing(dim, num_queries=2),
    **{f"mgcrp {n}": lambda d, c, n=n: CrossCovariancePool(d, 2, 3, 4, n, 0.5, center=c) for n in CROSS},
    **{f"gcp {n}": lambda d, c, n=n: CovariancePool(d, 5, n, center=c) for n in NORMS},
}


# --- what is generated ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrices:
    """A batch of matrices, and the norm for them."""

    norm: str
    batch: int
    rows: int
    columns: int
    exponent: float
    fill: str
    scale: float
    dtype: torch.dtype
    seed: int

    def draw(self):
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.rows, self.columns)
        values = filled(torch.randn(shape, generator=generator, dtype=torch.float64), self.fill) * self.scale
        values = values @ values.mT / self.scale if self.norm in SYMMETRIC_ONLY and self.scale else values
        most = torch.finfo(self.dtype).max / 100
        return (values * (most / values.abs().amax().clamp_min(most))).to(self.dtype)

    def build(self):
        SEED(self.seed)
        columns = self.rows if self.norm in SYMMETRIC_ONLY else self.columns
        exponent = 0.5 if self.norm == "svpn_matmul" else self.exponent
        return build_norm(self.norm, NormSettings(self.rows, columns, exponent))


def filled(values, fill):
    """Random numbers, or fewer of them."""
    kinds = {
        "zero": lambda: values * 0,
        "one value": lambda: values[..., :1, :1].expand_as(values),
        "one row": lambda: values[..., :1, :].expand_as(values),
        "one number": lambda: (
            values * (torch.arange(values.shape[-1]) == 0) * (torch.arange(values.shape[-2]) == 0)[:, None]
        ),
    }
    return kinds.get(fill, lambda: values)().clone()


sizes, seeds = st.integers(1, 9), st.integers(0, 2**31 - 1)
matrices = st.builds(
    Matrices,
    norm=st.sampled_from(sorted(NORMS)),
    batch=st.integers(1, 4),
    rows=sizes,
    columns=sizes,
    exponent=st.sampled_from((0.25, 0.5, 0.75)),
    fill=st.sampled_from(FILLS),
    scale=st.sampled_from((1e-30, 1e-12, 1e-3, 1.0, 1e3, 1e12, 1e30)),
    dtype=st.sampled_from(DTYPES),
    seed=seeds,
)


@dataclass(frozen=True)
class Words:
    """A batch of tokens with a mask of any integers, and the pooling for them."""

    pool: str
    batch: int
    tokens: int
    center: bool
    fill: str
    scale: float
    dtype: torch.dtype
    kept: float
    accelerated: bool
    seed: int
    dim: int = 6

    def draw(self):
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.tokens, self.dim)
        words = filled(torch.randn(shape, generator=generator, dtype=torch.float64), self.fill) * self.scale
        keeps = torch.rand(shape[:2], generator=generator) < self.kept
        numbers = torch.randint(1, 9, shape[:2], generator=generator) * (
            1 - 2 * torch.randint(0, 2, shape[:2], generator=generator)
        )
        return words.to(self.dtype), keeps, keeps * numbers

    def build(self):
        SEED(self.seed)
        pool = POOLS[self.pool](self.dim, self.center).to(self.dtype)
        pool.accelerated = self.accelerated
        return pool


words = st.builds(
    Words,
    pool=st.sampled_from(sorted(POOLS)),
    batch=st.integers(1, 4),
    tokens=st.integers(1, 12),
    center=st.booleans(),
    fill=st.sampled_from(FILLS),
    scale=st.sampled_from((1e-6, 1e-2, 1.0, 1e2)),
    dtype=st.sampled_from(DTYPES),
    kept=st.sampled_from((0.0, 0.3, 0.8, 1.0)),
    accelerated=st.booleans(),
    seed=seeds,
)
plain_words = words.filter(lambda case: case.fill == "random" and case.scale in (1e-2, 1.0))


def close(actual, expected, dtype, what):
    """Whether both agree, as far as the type and a root of what rounding leaves of zeros allow."""
    scale = expected.double().abs().amax().clamp_min(1e-4)
    error = float((actual.double() - expected.double()).abs().amax() / scale) if expected.numel() else 0.0
    assert error <= LOOSE[dtype], f"{what}: {error:.2g}"


# --- norms ---------------------------------------------------------------------------------------------------


def norms_make_no_nan(case):
    """Finite in, finite out, forwards and backwards, of the type that was given; gradients end where float16 does."""
    matrix = case.draw().requires_grad_()
    result = case.build()(matrix)
    assert result.dtype == case.dtype and result.shape == matrix.shape and result.isfinite().all()
    (gradient,) = torch.autograd.grad(result.double().sum(), matrix)
    if case.dtype == torch.float16:  # beside a singular value of zero a power is as steep as 1e6
        wide = case.draw().float().requires_grad_()
        (steep,) = torch.autograd.grad(case.build()(wide).double().sum(), wide)
        assert torch.equal(gradient.isinf(), steep.half().isinf())
        gradient = torch.where(gradient.isinf(), steep, gradient)
    assert gradient.isfinite().all()


def a_nan_poisons_its_matrix_only(case):
    matrix, norm = case.draw(), case.build()
    poisoned = torch.cat([matrix, matrix[:1]])
    poisoned[-1, -1, -1] = float("nan")
    result, expected = norm(poisoned), norm(matrix)
    assert result[-1].isnan().any() and result[:-1].isfinite().all()
    close(result[:-1], expected, case.dtype, "neighbours of a NaN")


def norms_take_any_batch_shape(case):
    matrix, norm = case.draw(), case.build()
    expected = torch.stack([norm(each) for each in matrix])
    close(norm(matrix), expected, case.dtype, "batch")
    close(norm(matrix[:, None, None])[:, 0, 0], expected, case.dtype, "more dimensions")
    if case.dtype == torch.float32:
        close(torch.vmap(norm)(matrix), expected, case.dtype, "vmap")


def norms_on_meta_have_the_shape(case):
    matrix, norm = case.draw(), case.build().to("meta")
    result = norm(matrix.to("meta"))
    assert result.is_meta and (result.shape, result.dtype) == (matrix.shape, matrix.dtype)


def norms_compute_in_float32_under_autocast(case):
    matrix, norm = case.draw().float(), case.build()
    with torch.autocast("cpu", torch.bfloat16):
        result = norm(matrix)
    close(result, norm(matrix), torch.float32, "autocast")


def kernels_are_the_definition(case):
    matrix, norm = case.draw(), case.build()
    with use("reference"):
        expected = norm(matrix)
    for backend in ("auto", "torch"):
        with use(backend):
            close(norm(matrix), expected, case.dtype, backend)


# --- poolings ------------------------------------------------------------------------------------------------


def poolings_make_no_nan(case):
    tokens, _, mask = case.draw()
    tokens.requires_grad_()
    result = case.build()(tokens, mask)
    assert result.dtype == case.dtype and result.isfinite().all()
    (gradient,) = torch.autograd.grad(result.double().sum(), tokens)
    assert gradient.isfinite().all() and not gradient[mask == 0].any()


def masks_mean_kept_or_not(case):
    """Whatever the integer; and what is masked may be anything."""
    tokens, keeps, mask = case.draw()
    pool = case.build()
    expected = pool(tokens, keeps)
    assert torch.equal(pool(tokens, mask), expected)
    junk = torch.where(keeps[..., None], tokens, torch.tensor(float("nan"), dtype=tokens.dtype))
    assert torch.equal(pool(junk, mask), expected)


def padding_never_matters(case):
    tokens, keeps, mask = case.draw()
    pool = case.build()
    pad = torch.full_like(tokens[:, :2], float("inf"))
    none = torch.zeros_like(mask[:, :2])
    expected = pool(tokens, mask)
    close(pool(torch.cat([tokens, pad], 1), torch.cat([mask, none], 1)), expected, case.dtype, "padding behind")
    close(pool(torch.cat([pad, tokens], 1), torch.cat([none, mask], 1)), expected, case.dtype, "padding before")
    if keeps.all():
        close(pool(tokens), expected, case.dtype, "no mask")


def a_nan_poisons_its_sample_only(case):
    tokens, _, _ = case.draw()
    pool = case.build()
    poisoned = torch.cat([tokens, tokens[:1]])
    poisoned[-1, -1] = float("nan")
    result = pool(poisoned)
    assert result[-1].isnan().any() and result[:-1].isfinite().all()
    close(result[:-1], pool(tokens), case.dtype, "neighbours of a NaN")


def poolings_on_meta_have_the_shape(case):
    tokens, _, mask = case.draw()
    pool = case.build()
    result = pool.to("meta")(tokens.to("meta"), mask.to("meta"))
    assert result.is_meta and (result.shape, result.dtype) == ((case.batch, pool.out_features), case.dtype)


def poolings_are_their_definition(case):
    tokens, _, mask = case.draw()
    pool = case.build()
    with use("reference"):
        expected = pool(tokens, mask)
    close(pool(tokens, mask), expected, case.dtype, "kernels")


# --- heads ---------------------------------------------------------------------------------------------------

HEADS = [
    {"fusion": fusion, "pool": pool, "heads": 2, "left_dim": 3, "right_dim": 3}
    if pool == "mgcrp"
    else {"fusion": fusion, "pool": pool, "reduced_dim": 4}
    if pool == "gcp"
    else {"fusion": fusion, "pool": pool}
    for fusion in ("sum", "concat", "word", "late", "aggr_all")
    for pool in ("mgcrp", "gcp", "gap", "max")
]
heads = st.tuples(st.sampled_from(HEADS), words.filter(lambda case: case.dtype == torch.float32))


def heads_hold_what_poolings_do(drawn):
    """Padding, packing, autocast, a NaN, and the meta device, for logits."""
    config, case = drawn
    tokens, keeps, mask = case.draw()
    SEED(case.seed)
    head = SecondOrderHead(case.dim, 3, HeadConfig(**config)).eval()
    first = tokens[:, 0]
    class_token = None if config["fusion"] == "word" else first
    expected = head(class_token, tokens, mask)
    assert expected.isfinite().all()
    junk = torch.where(keeps[..., None], tokens, torch.tensor(float("nan")))
    assert torch.equal(head(class_token, junk, keeps), expected)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), keeps.sum(1).cumsum(0)])
    close(head(class_token, Packed(tokens[keeps], starts)), expected, torch.float32, "packed")
    poisoned = tokens.clone()
    poisoned[0] = float("nan")
    spoilt = head(class_token, poisoned, torch.ones_like(mask))
    assert spoilt[0].isnan().any() and spoilt[1:].isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert head(class_token, tokens, mask).isfinite().all()
    on_meta = None if class_token is None else class_token.to("meta")
    assert head.to("meta")(on_meta, tokens.to("meta"), mask.to("meta")).shape == expected.shape


# --- how often -----------------------------------------------------------------------------------------------

tame = matrices.filter(lambda case: case.fill == "random" and case.scale in (1e-3, 1.0, 1e3))
GIVEN = {
    norms_make_no_nan: matrices,
    a_nan_poisons_its_matrix_only: matrices,
    norms_take_any_batch_shape: tame,
    norms_on_meta_have_the_shape: matrices,
    norms_compute_in_float32_under_autocast: tame,
    kernels_are_the_definition: tame,
    poolings_make_no_nan: words,
    masks_mean_kept_or_not: words,
    padding_never_matters: plain_words,
    a_nan_poisons_its_sample_only: words,
    poolings_on_meta_have_the_shape: words,
    poolings_are_their_definition: plain_words,
    heads_hold_what_poolings_do: heads,
}
SHORT, LONG = 25, 10_000  # of each


@pytest.mark.parametrize("examples", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", GIVEN, ids=lambda check: check.__name__)
def test_generated(check, examples):
    profile = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,  # the same examples in every run
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    profile(given(GIVEN[check])(check))()
