"""PS-ViT and progressive sampling against their definitions, published weights and the paper's figures."""

import pytest
import timm
import torch
from peer_checks import check_equip, check_timm, on_meta
from published import published_weights
from timm.optim import param_groups_layer_decay

import sot
from sot import HeadConfig
from sot.models.complexity import measure_complexity
from sot.models.embedding.progressive_sampling import regular_points, sample

TINY = {"img_size": 64, "embed_dim": 16, "stem_width": 8, "depth": 6, "num_heads": 2}
FIGURES = {  # params in M and MACs in G of the paper
    "ps_vit_ti_14": (4.8, 1.6),
    "ps_vit_b_10": (21.3, 3.1),
    "ps_vit_b_14": (21.3, 5.4),
    "ps_vit_b_18": (21.3, 8.8),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def moving(model):
    """Offsets start at zero: draw them, so that points move."""
    for layer in model.patch_embed.proj.ps_layers[:-1]:
        torch.nn.init.normal_(layer.offset_layer.weight, std=0.5)
        torch.nn.init.normal_(layer.offset_layer.bias)
    return model


@pytest.mark.parametrize("name", FIGURES)
def test_published_weights_fit_and_counts_are_the_papers(name):
    model = on_meta(name)
    model.load_state_dict(published_weights(name), strict=True)
    count = measure_complexity(model, (3, 224, 224))
    assert count.params / 1e6 == pytest.approx(FIGURES[name][0], rel=0.01)
    assert count.all_macs / 1e9 == pytest.approx(FIGURES[name][1], rel=0.03)
    points = int(name.rpartition("_")[2])
    assert model.patch_embed.grid_size == (points, points)


def test_family_with_progressive_sampling_has_the_papers_counts():
    model = on_meta("sot_7", embed="ps", head=HeadConfig(fusion="class"))
    count = measure_complexity(model, (3, 112, 112))
    assert count.params / 1e6 == pytest.approx(4.13, rel=0.01)
    assert count.layer_macs / 1e9 == pytest.approx(0.90, rel=0.01)
    assert len(model.blocks) == 3 and len(model.patch_embed.proj.ps_layers) == 4
    with pytest.raises(ValueError, match="depth of at least 2, got 1"):
        timm.create_model("sot_7", embed="ps", depth=1)


def interpolate(features, row, column):
    """Bilinear between four cells by explicit indexing; a cell beyond the border is zero."""
    channels, height, width = features.shape
    result = torch.zeros(channels, dtype=features.dtype)
    top, left = int(torch.floor(row)), int(torch.floor(column))
    for y in (top, top + 1):
        for x in (left, left + 1):
            if 0 <= y < height and 0 <= x < width:
                result = result + (1 - (row - y).abs()) * (1 - (column - x).abs()) * features[:, y, x]
    return result


def test_sampling_is_bilinear_interpolation():
    features = torch.randn(2, 3, 5, 7, dtype=torch.float64, requires_grad=True)
    points = torch.rand(2, 40, 2, dtype=torch.float64) * torch.tensor([8.0, 10.0]) - 1.5  # some beyond the border
    points[0, :3] = torch.tensor([[0.0, 0.0], [4.0, 6.0], [2.0, 3.5]])
    points.requires_grad_()
    result = sample(features, points)
    expected = torch.stack(
        [torch.stack([interpolate(f, *point) for point in own]) for f, own in zip(features, points, strict=True)]
    )
    torch.testing.assert_close(result, expected)
    weights = torch.randn_like(result)
    inside = points[:, 3:].detach()
    assert (inside < 0).any() and (inside > 4).any()
    actual = torch.autograd.grad((result * weights)[:, 3:].sum(), (features, points))
    wanted = torch.autograd.grad((expected * weights)[:, 3:].sum(), (features, points))
    for a, e in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, e)


def test_points_start_at_the_centres_of_patches_row_by_row():
    points = regular_points(2, 3, 8, 12)
    assert points.tolist() == [[[2, 2], [2, 6], [2, 10], [6, 2], [6, 6], [6, 10]]]
    assert regular_points(10, 10, 56, 56)[0, 11].tolist() == pytest.approx([8.4, 8.4])


def test_layers_sample_attend_and_move():
    model = moving(timm.create_model("ps_vit_b_14", **{**TINY, "img_size": (64, 96)})).double().eval()
    network, image = model.patch_embed.proj, torch.randn(2, 3, 64, 96, dtype=torch.float64)
    features = network.stem(image)
    points, tokens = regular_points(4, 6, 16, 24).double().expand(2, -1, -1), 0
    for index, layer in enumerate(network.ps_layers):
        found = torch.stack([torch.stack([interpolate(f, *p) for p in own]) for f, own in zip(features, points)])
        where = points / torch.tensor([16.0, 24.0]).double()
        tokens = layer.transformer_layer(found + network.pos_layer(where) + tokens)
        if index < 3:
            points = points + layer.offset_layer(tokens)
    assert (points - regular_points(4, 6, 16, 24)).abs().max() > 1
    torch.testing.assert_close(network(image), tokens.mT.reshape(2, 16, 4, 6))


def test_offsets_start_at_zero_and_are_trained():
    model = timm.create_model("ps_vit_b_14", num_classes=3, **TINY)
    model.init_weights()
    layers = model.patch_embed.proj.ps_layers
    assert all(not layer.offset_layer.weight.any() for layer in layers[:-1])
    assert not list(layers[-1].offset_layer.parameters())
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert all(layer.offset_layer.weight.grad.any() for layer in layers[:-1])


def test_timm_api():
    model = check_timm("ps_vit_ti_14", TINY, (64, 64), 16)
    tokens, maps = model.forward_intermediates(torch.randn(1, 3, 64, 64))
    assert tokens.shape == (1, 17, 16) and [tuple(part.shape) for part in maps] == [(1, 16, 4, 4)] * 2
    model = timm.create_model("ps_vit_ti_14", drop_path_rate=0.5, **TINY)
    rates = [layer.transformer_layer.drop_path1 for layer in model.patch_embed.proj.ps_layers]
    rates += [block.drop_path1 for block in model.blocks]
    assert [getattr(rate, "drop_prob", 0) for rate in rates] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_layer_decay_goes_through_the_layers_that_sample():
    model = timm.create_model("ps_vit_ti_14", **TINY)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    scales = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    order = ["patch_embed.proj.stem.0.weight"]
    order += [f"patch_embed.proj.ps_layers.{i}.transformer_layer.attn.qkv.weight" for i in range(4)]
    order += ["blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight", "head.weight"]
    assert [scales[name] for name in order] == [0.5**power for power in range(7, -1, -1)]


def test_other_image_sizes_and_channels():
    model = moving(timm.create_model("ps_vit_b_18", num_classes=3, in_chans=1, **TINY)).eval()
    assert model.patch_embed.grid_size == (5, 5)  # patches of 12 need not divide the image
    image = torch.randn(2, 1, 96, 60)
    dynamic = timm.create_model("ps_vit_b_18", num_classes=3, in_chans=1, dynamic_img_size=True, **TINY).eval()
    dynamic.load_state_dict(model.state_dict())
    model.set_input_size((96, 60))
    assert model.forward_features(image).shape == (2, 1 + 8 * 5, 16)
    torch.testing.assert_close(model(image), dynamic(image))


def test_points_are_exact_in_half_precision():
    model = moving(timm.create_model("ps_vit_ti_14", num_classes=0, **TINY)).eval()
    image = torch.randn(1, 3, 64, 64)
    expected = model.patch_embed(image)
    with torch.autocast("cpu", torch.bfloat16):
        assert (model.patch_embed(image) - expected).abs().mean() < 0.1 * expected.abs().mean()
    assert model.bfloat16()(image.bfloat16()).dtype == torch.bfloat16


def test_equip(tmp_path):
    model = check_equip("ps_vit_b_14", TINY, (64, 64), tmp_path)
    assert model.layout.has_class_token and model.layout.num_prefix_tokens == 1 and model.layout.dim == 16
    with pytest.raises(ValueError, match="holds the first layers of its transformer"):
        sot.equip("ps_vit_b_14", 3, pretrained=False, model_args=TINY, embed="densenet")
    with pytest.raises(ValueError, match="holds the first layers of its transformer"):
        sot.equip("deit_tiny_patch16_224", 3, pretrained=False, embed="ps")
