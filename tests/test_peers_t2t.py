"""T2T-ViT and tokens-to-token against their definitions, published weights and the paper's figures."""

import pytest
import timm
import torch
import torch.nn.functional as F
from peer_checks import check_equip, check_timm, on_meta
from published import published_weights
from timm.models import load_checkpoint

from sot import HeadConfig
from sot.models.complexity import measure_complexity
from sot.models.embedding.tokens_to_token import TokensToToken, TokenTransformer, performer_attention

TINY = {"img_size": 64, "embed_dim": 16, "depth": 2, "num_heads": 2, "token_dim": 4}
# params in M and MACs in G that T2T-ViT's authors publish; the paper's MACs are older, see docs/peers.md
FIGURES = {
    "t2t_vit_7": (4.3, 1.1),
    "t2t_vit_10": (5.9, 1.5),
    "t2t_vit_12": (6.9, 1.8),
    "t2t_vit_14": (21.5, 4.8),
    "t2t_vit_19": (39.2, 8.5),
    "t2t_vit_24": (64.1, 13.8),
    "t2t_vit_t_14": (21.5, 6.1),
    "t2t_vit_t_19": (39.2, 9.8),
    "t2t_vit_t_24": (64.1, 15.0),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("name", FIGURES)
def test_published_weights_fit_and_counts_are_the_authors(name):
    model = on_meta(name)
    model.load_state_dict(published_weights(name), strict=True)
    count = measure_complexity(model, (3, 224, 224))
    assert count.params / 1e6 == pytest.approx(FIGURES[name][0], rel=0.01, abs=0.07)  # rounded, with fixed positions
    assert count.all_macs / 1e9 == pytest.approx(FIGURES[name][1], rel=0.011, abs=0.05)


def test_a_missing_weight_is_named():
    weights = {key: value for key, value in published_weights("t2t_vit_7").items() if "project.bias" not in key}
    with pytest.raises(RuntimeError, match=r"patch_embed\.proj\.project\.bias"):
        on_meta("t2t_vit_7").load_state_dict(weights)


@pytest.mark.parametrize("embed", ["t2t", "t2t_transformer"])
def test_family_with_tokens_to_token_has_the_papers_counts(embed):
    count = measure_complexity(on_meta("sot_7", embed=embed, head=HeadConfig(fusion="class")), (3, 112, 112))
    assert count.params / 1e6 == pytest.approx(4.25, abs=0.006) and count.layer_macs / 1e9 == pytest.approx(
        0.81, abs=5e-3
    )


def soft_split(maps, size, stride, padding):
    """Windows of `size`×`size` cells, each a token: its channels, for each its rows, for each its columns."""
    batch, channels, height, width = maps.shape
    tokens = []
    for top in range(-padding, height + padding - size + 1, stride):
        for left in range(-padding, width + padding - size + 1, stride):
            token = torch.zeros(batch, channels, size, size, dtype=maps.dtype)
            for row in range(size):
                for column in range(size):
                    y, x = top + row, left + column
                    if 0 <= y < height and 0 <= x < width:
                        token[:, :, row, column] = maps[:, :, y, x]
            tokens.append(token.flatten(1))
    return torch.stack(tokens, 1)


@pytest.mark.parametrize("reduction, strides", [(16, (2, 2)), (8, (2, 1)), (4, (1, 1))])
def test_soft_splits_are_overlapping_windows(reduction, strides):
    network = TokensToToken(2, 5, reduction, token_dim=4).double().eval()
    image = normal(2, 2, 32, 48)
    tokens = network.attention1(soft_split(image, 7, 4, 2))
    tokens = network.attention2(soft_split(tokens.mT.reshape(2, 4, 8, 12), 3, strides[0], 1))
    maps = tokens.mT.reshape(2, 4, 8 // strides[0], 12 // strides[0])
    expected = network.project(soft_split(maps, 3, strides[1], 1)).mT.reshape(2, 5, 32 // reduction, 48 // reduction)
    torch.testing.assert_close(network(image), expected)


def test_performer_weighs_values_by_products_of_features():
    query, key, value, directions = normal(2, 5, 4), normal(2, 5, 4), normal(2, 5, 3), normal(6, 4)
    result = performer_attention(query, key, value, directions)
    for sample in range(2):
        for i in range(5):
            weights = torch.zeros(5, dtype=torch.float64)
            for j in range(5):
                for w in directions:
                    left = torch.exp(w @ query[sample, i] - query[sample, i] @ query[sample, i] / 2)
                    right = torch.exp(w @ key[sample, j] - key[sample, j] @ key[sample, j] / 2)
                    weights[j] += left * right / 6
            torch.testing.assert_close(result[sample, i], weights @ value[sample] / (weights.sum() + 1e-8))


def test_performer_is_softmax_attention_in_the_limit_of_many_directions():
    query, key, value = normal(1, 6, 4) / 2, normal(1, 6, 4) / 2, normal(1, 6, 3)
    softmax = (query @ key.mT).softmax(-1) @ value

    def error(count):
        return (performer_attention(query, key, value, normal(count, 4)) - softmax).square().mean().sqrt().item()

    few, many = [sum(error(count) for _ in range(8)) / 8 for count in (1_000, 100_000)]
    assert many < 8e-3 and 5 < few / many < 20  # by the square root of a hundred, for a mean


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_performer_computes_in_float32(dtype):
    query, key, value, directions = [
        x.to(dtype) for x in (normal(1, 9, 8), normal(1, 9, 8), normal(1, 9, 8), normal(4, 8))
    ]
    result = performer_attention(query, key, value, directions)
    exact = performer_attention(query.double(), key.double(), value.double(), directions.double())
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = performer_attention(query.float(), key.float(), value.float(), directions.float())
    torch.testing.assert_close(mixed.double(), exact, rtol=1e-4, atol=1e-5)


def test_transformer_module_is_softmax_attention_with_its_values_as_shortcut():
    module = TokenTransformer(10, 4).double()
    x = normal(2, 7, 10)
    query, key, value = F.linear(module.norm1(x), module.attn.qkv.weight).split(4, dim=-1)
    attended = (query @ key.mT / 10**0.5).softmax(-1) @ value
    middle = value + F.linear(attended, module.attn.proj.weight, module.attn.proj.bias)
    torch.testing.assert_close(module(x), middle + module.mlp(module.norm2(middle)))


@pytest.mark.parametrize("tokens", ["performer", "transformer"])
def test_timm_api(tokens):
    model = check_timm("t2t_vit_14" if tokens == "performer" else "t2t_vit_t_14", TINY, (64, 64), 16)
    tokens, maps = model.forward_intermediates(torch.randn(1, 3, 64, 64))
    assert tokens.shape == (1, 17, 16) and [tuple(part.shape) for part in maps] == [(1, 16, 4, 4)] * 2
    with pytest.raises(ValueError, match="unknown tokens 'conv'; accepted: performer, transformer"):
        timm.create_model("t2t_vit_7", tokens="conv")


def test_fixed_parts_are_saved_and_not_trained():
    model = timm.create_model("t2t_vit_7", **TINY)
    fixed = {"pos_embed", "patch_embed.proj.attention1.w", "patch_embed.proj.attention2.w"}
    assert fixed == set(model.state_dict()) - set(dict(model.named_parameters()))
    rows = model.patch_embed.proj.attention1.w
    torch.testing.assert_close(rows @ rows.mT, 2 * torch.eye(2))  # orthogonal, √m long
    angle = torch.tensor(5 / 10000 ** (6 / 16))
    torch.testing.assert_close(model.pos_embed[0, 5, 6:8], torch.stack([angle.sin(), angle.cos()]))
    assert 0.01 < timm.create_model("t2t_vit_7").cls_token.std() < 0.03


def test_other_image_sizes():
    model = timm.create_model("t2t_vit_7", num_classes=3, in_chans=1, **TINY).eval()
    image = torch.randn(2, 1, 96, 64)
    dynamic = timm.create_model("t2t_vit_7", num_classes=3, in_chans=1, dynamic_img_size=True, **TINY).eval()
    dynamic.load_state_dict(model.state_dict())
    model.set_input_size((96, 64))
    assert model.pos_embed.shape == (1, 1 + 6 * 4, 16) and not isinstance(model.pos_embed, torch.nn.Parameter)
    torch.testing.assert_close(model(image), dynamic(image))


def test_a_published_file_loads_at_any_size(tmp_path):
    source = timm.create_model("t2t_vit_7", num_classes=3, **TINY).eval()
    theirs = {name.replace("patch_embed.proj.", "tokens_to_token."): w for name, w in source.state_dict().items()}
    assert "tokens_to_token.attention1.kqv.weight" in theirs
    averaged = {f"module.{name}": weight for name, weight in theirs.items()}
    torch.save({"state_dict": {}, "state_dict_ema": averaged}, tmp_path / "t2t.pth.tar")
    model = timm.create_model("t2t_vit_7", num_classes=3, checkpoint_path=str(tmp_path / "t2t.pth.tar"), **TINY).eval()
    image = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(image), source(image))
    larger = timm.create_model("t2t_vit_7", num_classes=3, **{**TINY, "img_size": 96}).eval()
    load_checkpoint(larger, str(tmp_path / "t2t.pth.tar"))
    source.set_input_size((96, 96))
    image = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(larger(image), source(image))


@pytest.mark.parametrize("name, embed", [("t2t_vit_14", None), ("t2t_vit_14", "densenet"), ("t2t_vit_t_14", None)])
def test_equip(name, embed, tmp_path):
    settings = {key: TINY[key] for key in TINY}
    model = check_equip(name, settings, (64, 64), tmp_path, embed=embed)
    layout = model.layout
    assert layout.has_class_token and layout.num_prefix_tokens == 1 and layout.dim == 16
    assert model.backbone.timm_model.patch_embed.kind == (embed or ("t2t_transformer" if "_t_" in name else "t2t"))


def test_other_models_take_tokens_to_token(tmp_path):
    settings = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = check_equip("deit_tiny_patch16_224", settings, (32, 32), tmp_path, embed="t2t")
    assert model.backbone.timm_model.patch_embed.grid_size == (2, 2)


def test_exports():
    model, image = timm.create_model("t2t_vit_7", num_classes=3, **TINY).eval(), torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(torch.export.export(model, (image,)).module()(image), model(image))
