"""iRPE against its formulae, its published weights and the paper's figures."""

import itertools
import math

import pytest
import timm
import torch
from peer_checks import check_equip, check_figures, check_timm, on_meta, published_shapes, shapes

import sot
from sot import HeadConfig
from sot.models.complexity import measure_complexity
from sot.paper.peers.irpe import NUM_BUCKETS, RelativeAttention, piecewise_index, product_buckets

TINY = {"img_size": (32, 48), "embed_dim": 16, "depth": 2, "num_heads": 2}
VARIANTS = ("irpe_k_tiny", "irpe_qkv_small", "irpe_k_base")


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_named_and_shaped_as_published(name):
    assert shapes(on_meta(name)) == published_shapes(name)


@pytest.mark.parametrize(
    ("name", "params", "macs"),
    # the paper rounds iRPE-K-T up to 6.0 M: DeiT-T has 5.717 M, and 12 tables of 64×50 are 0.038 M
    [("irpe_k_tiny", 5.756, 1.3), ("irpe_qkv_small", 22.0, 4.9), ("irpe_k_base", 87.0, 17.7)],
)
def test_parameters_and_multiply_adds_are_the_paper_s(name, params, macs):
    check_figures(name, params, macs)


def test_equipped_figures_are_the_paper_s():
    with torch.device("meta"):
        model = sot.equip("irpe_k_tiny", 1000, HeadConfig(), pretrained=False, embed="densenet")
    found = measure_complexity(model, (3, 224, 224))
    positions = model.body.pos_embed.numel()  # the paper leaves them out
    assert abs((found.params - positions) / 7.0e6 - 1) < 0.01 and abs(found.layer_macs / 2.3e9 - 1) < 0.03


def index(x, alpha, beta, gamma):
    """The authors' equation, one number at a time."""
    if abs(x) <= alpha:
        return round(x)
    distance = alpha + math.log(abs(x) / alpha) / math.log(gamma / alpha) * (beta - alpha)
    return int(math.copysign(min(round(distance), beta), x))


@pytest.mark.parametrize("ratio", [1.9, 3.0, 0.7])
def test_piecewise_index_is_its_formula(ratio):
    settings = (ratio, 2 * ratio, 8 * ratio)
    offsets = range(-60, 61)
    found = piecewise_index(torch.tensor(offsets), *settings)
    assert found.tolist() == [index(x, *settings) for x in offsets]


def test_buckets_tell_rows_and_columns_apart():
    rows, columns = 5, 9
    found = product_buckets((rows, columns))
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    for i, (row, column) in enumerate(cells):
        for j, (other_row, other_column) in enumerate(cells):
            vertical = index(row - other_row, 1.9, 3.8, 15.2) + 3
            horizontal = index(column - other_column, 1.9, 3.8, 15.2) + 3
            assert found[1 + i, 1 + j] == vertical * 7 + horizontal
    assert (found[0] == 49).all() and (found[:, 0] == 49).all() and NUM_BUCKETS == 50


@pytest.mark.parametrize("on", ["k", "q", "v", "qkv"])
def test_attention_is_an_explicit_sum_over_pairs(on):
    torch.manual_seed(0)
    attention = RelativeAttention(8, num_heads=2, qkv_bias=True)
    attention.encode(on, (2, 3))
    attention = attention.double()
    tables = {name: torch.zeros(NUM_BUCKETS, 4, dtype=torch.float64) for name in "qkv"}
    for name in on:
        weight = torch.nn.init.normal_(getattr(attention, f"rpe_{name}").lookup_table_weight)
        tables[name] = weight[0] if name == "v" else weight[0].T  # (buckets, head_dim)
    x, buckets = torch.randn(1, 7, 8, dtype=torch.float64), product_buckets((2, 3))
    query, key, value = attention.qkv(x)[0].reshape(7, 3, 2, 4).unbind(1)  # (tokens, heads, head_dim)
    out = torch.zeros(7, 2, 4, dtype=torch.float64)
    for head in range(2):
        scores = torch.zeros(7, 7, dtype=torch.float64)
        for i, j in itertools.product(range(7), repeat=2):
            scores[i, j] = query[i, head] @ (key[j, head] + tables["k"][buckets[i, j]])
            scores[i, j] += key[j, head] @ tables["q"][buckets[j, i]]
        weights = (scores / 4**0.5).softmax(-1)
        for i, j in itertools.product(range(7), repeat=2):
            out[i, head] += weights[i, j] * (value[j, head] + tables["v"][buckets[i, j]])
    torch.testing.assert_close(attention(x)[0], attention.proj(out.flatten(1)))


def test_timm_api():
    model = check_timm("irpe_qkv_small", TINY, (32, 48), 16)
    model.set_input_size((64, 64))
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 16)
    assert torch.equal(model.blocks[0].attn.rpe_k.buckets, product_buckets((4, 4)))


def test_without_encodings_it_is_deit():
    settings = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    deit = timm.create_model("deit_tiny_patch16_224", **settings).eval()
    model = timm.create_model("irpe_qkv_small", **settings).eval()  # encodings begin as zeros
    model.load_state_dict(deit.state_dict(), strict=False)
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(image), deit(image))


def test_refusals():
    with pytest.raises(ValueError, match="rpe_on must be some of the letters of 'qkv', got 'x'"):
        timm.create_model("irpe_k_tiny", rpe_on="x")
    with pytest.raises(ValueError, match="dynamic_img_size=True is not possible"):
        timm.create_model("irpe_k_tiny", dynamic_img_size=True)


@pytest.mark.parametrize(
    ("name", "embed"), [("irpe_k_tiny", None), ("irpe_k_tiny", "densenet"), ("irpe_qkv_small", None)]
)
def test_equip(name, embed, tmp_path):
    model = check_equip(name, TINY, (32, 48), tmp_path, embed)
    assert model.layout.has_class_token
