"""AutoFormer against its definition, its published supernets and the paper's figures."""

import pytest
import timm
import torch
from peer_checks import check_equip, check_figures, check_timm, on_meta, published_shapes, shapes

from sot.paper.peers.autoformer import REACH, RelativePosition, SearchedAttention, slice_supernet

TINY = {"img_size": (32, 48), "embed_dim": 16, "heads": (1, 2), "mlp_ratios": (2, 3.5)}
VARIANTS = ("autoformer_tiny", "autoformer_small", "autoformer_base")


@pytest.mark.parametrize("name", VARIANTS)
def test_searched_models_are_cut_out_of_published_supernets(name):
    published = {key: torch.empty(shape, device="meta") for key, shape in published_shapes(name).items()}
    model = on_meta(name)
    sliced = slice_supernet({"model": published}, model)
    assert {key: tuple(weight.shape) for key, weight in sliced.items()} == shapes(model)
    layers = {int(key.split(".")[1]) for key in published if key.startswith("blocks.")}
    beyond = {f"blocks.{layer}." for layer in layers if layer >= len(model.blocks)}
    unused = {key for key in published if key.replace("patch_embed_super", "patch_embed") not in sliced}
    assert unused == {key for key in published if key.startswith(tuple(beyond))}


@pytest.mark.parametrize(
    ("name", "params", "macs"),
    [
        ("autoformer_tiny", 5.87, 1.3),  # the paper has 5.7 M; its authors' code counts 5.87 M, as we do
        ("autoformer_small", 22.9, 4.83),  # the paper has 5.1 G; its authors' code counts 4.89 G
        ("autoformer_base", 54.0, 11.0),
    ],
)
def test_parameters_and_multiply_adds_are_the_paper_s(name, params, macs):
    check_figures(name, params, macs)


def test_slices_are_the_first_entries_and_interleaved_rows():
    model = timm.create_model("autoformer_tiny", num_classes=3, **TINY)
    wide = timm.create_model(
        "autoformer_tiny", num_classes=3, **{**TINY, "embed_dim": 24, "heads": (2, 3, 3)} | {"mlp_ratios": (4, 4, 4)}
    )
    supernet = {name.replace("patch_embed.", "patch_embed_super."): value for name, value in wide.state_dict().items()}
    sliced = slice_supernet(supernet, model)
    model.load_state_dict(sliced)
    qkv = supernet["blocks.0.attn.qkv.weight"]
    for part in range(3):  # one head of 64: rows 0, 3, 6, … are queries, 1, 4, 7, … keys, 2, 5, 8, … values
        expected = torch.stack([qkv[3 * row + part, :16] for row in range(64)])
        assert torch.equal(sliced["blocks.0.attn.qkv.weight"][64 * part : 64 * part + 64], expected)
    assert torch.equal(sliced["blocks.0.attn.qkv.bias"], supernet["blocks.0.attn.qkv.bias"][: 3 * 64])
    assert torch.equal(sliced["blocks.1.fc2.weight"], supernet["blocks.1.fc2.weight"][:16, :56])
    assert torch.equal(sliced["pos_embed"], supernet["pos_embed"][:, :, :16])
    assert slice_supernet(model.state_dict(), model).keys() == model.state_dict().keys()


def encoding(position, grid, i, j):
    """Of tokens `i` and `j`, by the authors' definition."""
    if i == 0 or j == 0:
        return position.embeddings_table_v[0] + position.embeddings_table_h[0]
    (row, column), (other_row, other_column) = divmod(i - 1, grid[1]), divmod(j - 1, grid[1])
    vertical = max(-REACH, min(REACH, other_row - row)) + REACH + 1
    horizontal = max(-REACH, min(REACH, other_column - column)) + REACH + 1
    return position.embeddings_table_v[vertical] + position.embeddings_table_h[horizontal]


@pytest.mark.parametrize("grid", [(2, 3), (1, 20)])  # the second is wider than the tables reach
def test_relative_positions_are_a_loop_over_pairs(grid):
    torch.manual_seed(0)
    position = RelativePosition(grid).double()
    torch.nn.init.normal_(position.embeddings_table_v)
    torch.nn.init.normal_(position.embeddings_table_h)
    tokens = 1 + grid[0] * grid[1]
    table = torch.stack([torch.stack([encoding(position, grid, i, j) for j in range(tokens)]) for i in range(tokens)])
    query = torch.randn(2, 3, tokens, 64, dtype=torch.float64)
    torch.testing.assert_close(position.scores(query), torch.einsum("bhid,ijd->bhij", query, table))
    attention = torch.rand(2, 3, tokens, tokens, dtype=torch.float64)
    torch.testing.assert_close(position.values(attention), torch.einsum("bhij,ijd->bhid", attention, table))


def test_attention_adds_them_to_keys_and_values():
    torch.manual_seed(0)
    attention = SearchedAttention(8, 2, (2, 2), qkv_bias=True).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    query, key, value = attention.qkv(x)[0].reshape(5, 3, 2, 64).unbind(1)
    out = torch.zeros(5, 2, 64, dtype=torch.float64)
    for head in range(2):
        for i in range(5):
            keys = torch.stack([key[j, head] + encoding(attention.rel_pos_embed_k, (2, 2), i, j) for j in range(5)])
            values = torch.stack([value[j, head] + encoding(attention.rel_pos_embed_v, (2, 2), i, j) for j in range(5)])
            out[i, head] = (keys @ query[i, head] / 8).softmax(0) @ values
    torch.testing.assert_close(attention(x)[0], attention.proj(out.flatten(1)))


def test_timm_api():
    model = check_timm("autoformer_tiny", TINY, (32, 48), 16)
    assert "blocks.0.attn.rel_pos_embed_k.embeddings_table_v" in model.no_weight_decay()
    model.set_input_size((64, 64))
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 16)
    pooled = timm.create_model("autoformer_tiny", **TINY).eval()
    features = pooled.forward_features(torch.randn(1, 3, 32, 48))
    torch.testing.assert_close(pooled.forward_head(features, pre_logits=True), features[:, 1:].mean(1))


def test_refusals():
    with pytest.raises(ValueError, match="heads and mlp_ratios must be as many, got 1 and 2"):
        timm.create_model("autoformer_tiny", heads=(3,), mlp_ratios=(3, 3))
    with pytest.raises(ValueError, match="dynamic_img_size=True is not possible"):
        timm.create_model("autoformer_tiny", dynamic_img_size=True)


@pytest.mark.parametrize("embed", [None, "densenet"])
def test_equip(embed, tmp_path):
    model = check_equip("autoformer_tiny", TINY, (32, 48), tmp_path, embed)
    assert model.layout.has_class_token and model.layout.norm is None
