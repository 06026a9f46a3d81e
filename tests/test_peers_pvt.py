"""PVT against its definition, its published weights and the paper's figures."""

import pytest
import timm
import torch
from peer_checks import check_equip, check_figures, check_timm, on_meta, published_shapes, shapes

import sot
from sot.paper.peers.pvt import PyramidBlock, fit_positions

TINY = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 2, 1, 1), "img_size": 64}
FIGURES = {"pvt_tiny": (13.2, 1.9), "pvt_small": (24.5, 3.8), "pvt_large": (61.4, 9.8)}


@pytest.mark.parametrize("name", FIGURES)
def test_weights_are_named_and_shaped_as_published(name):
    assert shapes(on_meta(name)) == published_shapes(name)


@pytest.mark.parametrize("name", FIGURES)
def test_parameters_and_multiply_adds_are_the_paper_s(name):
    check_figures(name, *FIGURES[name])


@pytest.mark.parametrize("fused", [True, False])
def test_spatial_reduction_is_attention_over_strided_patches(fused):
    torch.manual_seed(0)
    block = PyramidBlock(6, num_heads=2, reduction=2, mlp_ratio=1, proj_drop=0, attn_drop=0, drop_path=0).double()
    attention = block.attn
    attention.fused_attn = fused
    torch.nn.init.normal_(attention.norm.weight)
    x = torch.randn(1, 4 * 6, 6, dtype=torch.float64)  # 4 rows of 6 columns
    cells = x.reshape(4, 6, 6)
    reduced = []
    for row in range(0, 4, 2):
        for column in range(0, 6, 2):
            patch = cells[row : row + 2, column : column + 2]  # (2, 2, dim)
            reduced.append(torch.einsum("oiyx,yxi->o", attention.sr.weight, patch) + attention.sr.bias)
    source = torch.nn.functional.layer_norm(torch.stack(reduced), (6,), attention.norm.weight, attention.norm.bias)
    query = x[0] @ attention.q.weight.T + attention.q.bias
    key, value = (source @ attention.kv.weight.T + attention.kv.bias).split(6, dim=1)
    heads = []
    for part in (slice(0, 3), slice(3, 6)):
        weights = (query[:, part] @ key[:, part].T / 3**0.5).softmax(-1)
        heads.append(weights @ value[:, part])
    expected = torch.cat(heads, 1) @ attention.proj.weight.T + attention.proj.bias
    torch.testing.assert_close(attention(x, [4, 6])[0], expected)


def test_timm_api():
    model = check_timm("pvt_tiny", TINY, (64, 64), 32)
    features, maps = model.forward_intermediates(torch.randn(1, 3, 64, 64))
    assert features.shape == (1, 1 + 4, 32)
    assert [tuple(part.shape[1:]) for part in maps] == [(8, 16, 16), (16, 8, 8), (24, 4, 4), (32, 2, 2)]
    only = timm.create_model("pvt_tiny", features_only=True, out_indices=(1, 3), **TINY)
    assert [part.shape[1] for part in only(torch.randn(1, 3, 64, 64))] == [16, 32]


def test_positions_fit_images_and_checkpoints_of_another_size(tmp_path):
    model = timm.create_model("pvt_tiny", num_classes=4, **TINY).eval()
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 4)
    table = torch.arange(4.0).reshape(1, 4, 1)  # 2×2
    assert torch.equal(fit_positions(table, (2, 2), [2, 2]), table)
    assert fit_positions(table, (2, 2), [4, 2]).flatten()[[0, 1, -2, -1]].tolist() == [0, 1, 2, 3]
    torch.save({"model": model.state_dict()}, tmp_path / "pvt.pth")
    larger = timm.create_model(
        "pvt_tiny",
        pretrained=True,
        num_classes=4,
        pretrained_cfg_overlay={"file": str(tmp_path / "pvt.pth"), "num_classes": 4},
        **{**TINY, "img_size": 128},
    ).eval()
    image = torch.randn(1, 3, 128, 128)
    torch.testing.assert_close(larger(image), model(image))


@pytest.mark.parametrize("embed", [None, "densenet"])
def test_equip(embed, tmp_path):
    model = check_equip("pvt_tiny", TINY, (64, 64), tmp_path, embed)
    assert model.layout.has_class_token and model.layout.num_prefix_tokens == 1
    source = timm.create_model("pvt_tiny", num_classes=3, **TINY)
    kept = sot.equip(source, model_args=TINY, embed=embed).body.state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in source.state_dict().items() if "block" in name)
