"""Explanations against their definitions: branches, maps, relevance, evidence of words and pairs, spectrum."""

import numpy as np
import pytest
import timm
import torch
from transformers import ViTConfig, ViTModel

from sot.core.head import HeadConfig, SecondOrderHead
from sot.explain import (
    BOTH,
    CLASS,
    METHODS,
    WORDS,
    activation_maps,
    branch_contributions,
    explaining,
    pair_evidence,
    read_image,
    relevance_maps,
    singular_spectrum,
    split_logits,
    token_relevance,
)
from sot.explain.cam import last_attention
from sot.explain.evidence import factors
from sot.models.equip import equip
from sot.models.tokens import Tokens

HEAD = {"heads": 2, "left_dim": 4, "right_dim": 4}
HOMOGENEOUS = ["svpn", "svpn_fast", "svpn_matmul", "none", "scale"]


def make_head(**settings):
    config = HeadConfig.from_saved({"heads": 3, "left_dim": 4, "right_dim": 6, "reduced_dim": 5, **settings})
    head = SecondOrderHead(16, 4, config).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return head


def make_tokens(words=20, mask=None):
    return Tokens(torch.randn(1, 16), torch.randn(1, words, 16), mask)


def make_vit(**head):
    size = {"img_size": (32, 48), "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    model = equip("vit_tiny_patch16_224", 3, {**HEAD, **head}, pretrained=False, model_args=size).eval()
    with torch.no_grad():  # trained heads are larger than fresh ones
        for parameter in model.classifier.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


# --- branches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", ["sum", "concat", "late", "aggr_all", "class", "word"])
def test_branches_add_up_to_the_logits_of_the_head(fusion):
    head, tokens = make_head(fusion=fusion), make_tokens()
    found = branch_contributions(head, tokens)
    logits = head(tokens.class_token, tokens.word_tokens)[0].detach().double().numpy()
    assert found.logits == pytest.approx(logits, abs=1e-5)
    assert found.exact == (fusion != "late")
    if found.exact:
        assert found.class_part + found.word_part + found.bias == pytest.approx(logits, abs=1e-5)
    if fusion in ("class", "word"):
        assert not (found.word_part if fusion == "class" else found.class_part).any()


def test_a_branch_votes_as_its_own_linear_layer():
    head, tokens = make_head(fusion="sum"), make_tokens()
    branches = split_logits(head, tokens)
    class_features, word_features = head.represent(tokens.class_token, tokens.word_tokens)
    assert torch.allclose(branches.votes(CLASS), head.class_linear(class_features))
    assert torch.allclose(branches.votes(WORDS), head.word_linear(word_features))


# --- evidence of words and pairs ---------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["mgcrp", "gcp", "gap"])
def test_evidence_of_words_has_the_average_beside_the_pooling(pool):
    head, tokens = make_head(pool=pool, average=True), make_tokens()
    evidence, part = pair_evidence(head, tokens, 2), branch_contributions(head, tokens).word_part[2]
    assert evidence.words.sum() == pytest.approx(part, rel=1e-4, abs=1e-4)
    assert evidence.pairs.sum(1) == pytest.approx(evidence.words, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(
    ("pool", "norm"), [*(("mgcrp", norm) for norm in HOMOGENEOUS), ("gcp", "isqrt"), ("gcp", "mpn"), ("gap", None)]
)
def test_pairs_sum_to_words_and_words_to_the_part_of_the_logit(pool, norm, center):
    if pool == "gap" and center:
        return
    head = make_head(pool=pool, norm=norm, center=center, exponent=0.3 if norm in ("svpn", "svpn_fast", "mpn") else 0.5)
    tokens = make_tokens()
    evidence, part = pair_evidence(head, tokens, 2), branch_contributions(head, tokens).word_part[2]
    assert evidence.words.sum() == pytest.approx(part, rel=1e-4, abs=1e-4)
    assert evidence.residual == pytest.approx(0, abs=1e-6)
    assert evidence.pairs.sum(1) == pytest.approx(evidence.words, rel=1e-4, abs=1e-6)
    assert evidence.pairs == pytest.approx(evidence.pairs.T)


def test_words_without_normalisation_do_not_depend_on_each_other():
    evidence = pair_evidence(make_head(norm="none"), make_tokens(), 0)
    assert np.array_equal(evidence.pairs, np.diag(evidence.words)) and evidence.strongest() == []


def test_words_in_different_directions_do_not_pair():
    """xᵢ and yᵢ along the axis i: Q is diagonal, svPN takes each value to α by itself, and no two words meet."""
    head = make_head(norm="svpn", heads=1, left_dim=4, right_dim=4, fusion="word", exponent=0.5)
    sizes = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with torch.no_grad():
        head.pool.projection.weight.copy_(torch.cat([torch.eye(4, 16), torch.eye(4, 16)]))
    tokens = Tokens(None, (torch.eye(4, 16) * sizes[:, None])[None])
    evidence = pair_evidence(head, tokens, 1)
    weights = head.word_linear.weight[1].detach().view(4, 4).diagonal().numpy()
    expected = weights * (sizes.numpy() ** 2 / 4) ** 0.5
    assert evidence.words == pytest.approx(expected, rel=1e-5)
    assert evidence.pairs == pytest.approx(np.diag(expected), abs=1e-5)


@pytest.mark.parametrize("settings", [{"norm": "svpn_fast"}, {"norm": "svpn_fast", "num_values": 2}])
def test_pairs_are_the_second_derivative_by_the_weights_of_the_words(settings):
    head, tokens = make_head(**settings), make_tokens(6)
    left, right = factors(head.pool, tokens.word_tokens, None)
    norm, weights = head.pool.norm.double(), head.word_linear.weight[1].detach().double()

    def part(weight):
        return norm(torch.einsum("j,jhm,jhn->hmn", weight, left, right)[None]).flatten() @ weights

    hessian = torch.autograd.functional.hessian(part, torch.ones(6, dtype=torch.float64))
    head.pool.norm.float()
    assert pair_evidence(head, tokens, 1).pairs == pytest.approx((hessian / (0.5 * -0.5)).numpy(), rel=1e-3, abs=1e-5)


def test_masked_words_have_no_evidence_and_change_nothing():
    head, few = make_head(), make_tokens(5)
    mask = torch.tensor([[True] * 5 + [False] * 3])
    padded = Tokens(few.class_token, torch.cat([few.word_tokens, torch.randn(1, 3, 16)], dim=1), mask)
    short, long = pair_evidence(head, few, 0), pair_evidence(head, padded, 0)
    assert long.words[:5] == pytest.approx(short.words, abs=1e-6) and not long.words[5:].any()
    assert long.pairs[:5, :5] == pytest.approx(short.pairs, abs=1e-6) and not long.pairs[5:].any()


def test_the_class_token_pooled_with_the_words_has_evidence_of_its_own():
    head, tokens = make_head(fusion="aggr_all"), make_tokens()
    evidence, part = pair_evidence(head, tokens, 1), branch_contributions(head, tokens).word_part[1]
    assert len(evidence.words) == 20 and evidence.class_token != 0
    assert evidence.words.sum() + evidence.class_token == pytest.approx(part, rel=1e-4)


@pytest.mark.parametrize("settings", [{"norm": "epn"}, {"norm": "ln"}, {"pool": "max"}, {"fusion": "class"}])
def test_evidence_says_where_it_is_not_defined(settings):
    with pytest.raises(ValueError, match="evidence of words"):
        pair_evidence(make_head(**settings), make_tokens(), 0)


def test_spectrum_is_that_of_the_definition():
    head, tokens = make_head(norm="svpn", exponent=0.4), make_tokens()
    spectrum = singular_spectrum(head, tokens)
    projected = head.pool.projection(tokens.word_tokens)[0].detach().double()
    left, right = projected[:, :12].view(20, 3, 4), projected[:, 12:].view(20, 3, 6)
    for number in range(3):
        values = torch.linalg.svdvals(left[:, number].T @ right[:, number] / 20).numpy()
        assert spectrum.before[number] == pytest.approx(values)
        assert spectrum.after[number] == pytest.approx(values**0.4)


# --- maps --------------------------------------------------------------------------------------------------


def one_patch_model(patch):
    """One block whose class token attends to a single patch: its place in the table of positions is the key."""
    size = {"img_size": (32, 48), "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 1}
    model = equip("vit_tiny_patch16_224", 3, {**HEAD, "fusion": "class"}, pretrained=False, model_args=size).eval()
    body = model.body
    with torch.no_grad():
        model.classifier.class_linear.weight.normal_()
        model.classifier.class_linear.weight[1] = -model.classifier.class_linear.weight[0]  # one of them is for it
        body.patch_embed.proj.weight[0] = 0
        body.cls_token[..., 0] = 0
        body.pos_embed.zero_()
        body.pos_embed[0, 1 + patch, 0] = 3
        attention = body.blocks[0].attn
        attention.qkv.weight[:64] = 0
        attention.qkv.bias.zero_()
        attention.qkv.bias[0] = 300
        attention.qkv.weight[32, 0] = 1
        attention.qkv.weight[64:].normal_()
        attention.proj.weight.normal_()
    return model


@pytest.mark.parametrize("patch", [0, 9, 23])
@pytest.mark.parametrize("method", ["gradcam", "hirescam", "elementwise", "relevance"])
def test_a_model_that_reads_one_patch_has_its_map_there(patch, method):
    model, pixels = one_patch_model(patch), torch.randn(1, 3, 32, 48)
    other = pixels.clone()
    other[..., 8 * (patch // 6) : 8 * (patch // 6) + 8, 8 * (patch % 6) : 8 * (patch % 6) + 8] += 1
    logits = model(pixels).logits
    changed = model(torch.where(other == pixels, pixels + 1, pixels)).logits  # every patch but this one
    assert torch.allclose(logits, changed, atol=1e-4) and not torch.allclose(logits, model(other).logits, atol=1e-2)
    shown = 0
    for target in range(3):
        maps = relevance_maps(model, pixels, target)[0] if method == "relevance" else None
        found = (maps or activation_maps(model, pixels, target, method))[BOTH]
        assert found.shape == (4, 6)
        if method == "gradcam":  # the mean of the slopes is that of this patch over 24, wherever it is applied
            exact = activation_maps(model, pixels, target, "hirescam")[BOTH].ravel()[patch]
            assert found.ravel()[patch] == pytest.approx(exact / 24, rel=1e-3)
            shown += 1
        elif np.abs(found).max() > 0:  # relevance and elementwise know no evidence against a class
            assert np.abs(found).argmax() == patch
            assert np.delete(np.abs(found).ravel(), patch).max() < 1e-3 * np.abs(found).max()
            shown += 1
    assert shown >= 1


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_convnext"])
def test_hirescam_through_the_words_is_their_evidence(name):
    """Two ways to the same: gradient times token is 2α eᵢ, for xᵢ and yᵢ are each linear in the token."""
    model = make_vit() if "vit" in name else equip(name, 3, HEAD, pretrained=False).eval()
    pixels = torch.randn(1, 3, 32, 48)
    found = activation_maps(model, pixels, 1, "hirescam")
    with torch.no_grad():
        tokens = read_image(model, pixels).tokens
    evidence = pair_evidence(model.classifier, tokens, 1)
    words, slope = found.get(WORDS, found[BOTH]), 2 * model.classifier.config.exponent
    tolerance = 1e-4 * np.abs(evidence.words).max()
    assert words.ravel() == pytest.approx(slope * evidence.words, rel=1e-3, abs=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_maps_on_the_grid_of_words(method):
    model, pixels = make_vit(), torch.randn(1, 3, 32, 48)
    maps = activation_maps(model, pixels, 0, method)
    assert list(maps) == [CLASS, WORDS, BOTH]
    assert all(m.shape == (4, 6) and np.isfinite(m).all() and m.any() for m in maps.values())
    assert maps[CLASS] + maps[WORDS] == pytest.approx(maps[BOTH], rel=1e-4, abs=1e-6)
    again = activation_maps(model, pixels, 0, method)
    assert all(np.array_equal(maps[part], again[part]) for part in maps)


def test_relevance_of_the_class_token_is_that_of_chefer_et_al():
    model, pixels = make_vit(), torch.randn(1, 3, 32, 48)
    maps: list[torch.Tensor] = []
    for block in model.body.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, output: maps.append(output))
    tokens = model.tokens(pixels)
    model.classifier.class_linear(tokens.class_token)[0, 2].backward(inputs=maps)
    relevance = torch.eye(25)
    for attention in maps:
        flow = (attention.grad * attention)[0].clamp_min(0).mean(0)
        relevance = relevance + flow @ relevance
    found = relevance_maps(model, pixels, 2)[0][CLASS]
    assert found.ravel() == pytest.approx(relevance[0, 1:].detach().numpy(), rel=1e-4, abs=1e-7)


def test_relevance_of_words_that_never_mix_is_their_share():
    model = make_vit(fusion="word")
    with torch.no_grad():
        for block in model.body.blocks:
            block.attn.proj.weight.zero_()
    pixels = torch.randn(1, 3, 32, 48)
    with explaining(model):
        reading = read_image(model, pixels, attentions=True)
        relevance = token_relevance(model.classifier, reading, BOTH, 1).cpu().numpy()[1:]
        evidence = np.maximum(pair_evidence(model.classifier, reading.tokens, 1).words, 0)
    assert relevance == pytest.approx(evidence / evidence.sum(), rel=1e-3, abs=1e-6)


def test_explaining_leaves_the_model_as_it_was():
    model, pixels = make_vit().train(), torch.randn(1, 3, 32, 48)
    model.body.patch_embed.proj.weight.requires_grad_(False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    fused = [block.attn.fused_attn for block in model.body.blocks]
    with torch.inference_mode():
        activation_maps(model, pixels, 0)
        relevance_maps(model, pixels, 0)
    with pytest.raises(IndexError):
        relevance_maps(model, pixels, 7)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training
    assert [block.attn.fused_attn for block in model.body.blocks] == fused
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- families ----------------------------------------------------------------------------------------------

SMALL_SWIN = {"img_size": 64, "window_size": 2, "depths": (1, 1), "embed_dim": 16, "num_heads": (1, 2)}
FAMILIES = {  # model, side of its pictures, its grid, whether relevance is available
    "sot_7": (lambda: ("sot_7", {"img_size": 32, "depth": 2, "embed": "naive"}), 32, (8, 8), True),
    "deit_tiny_distilled_patch16_224": (lambda: (None, {"img_size": 64, "depth": 2}), 64, (4, 4), True),
    "swin_tiny_patch4_window7_224": (lambda: (None, SMALL_SWIN), 64, (8, 8), False),
    "pvt_v2_b0": (lambda: (None, {"depths": (1, 1, 1, 2)}), 64, (2, 2), True),
    "test_convnext": (lambda: (None, {}), 160, (5, 5), False),
    "test_resnet": (lambda: (None, {}), 160, (5, 5), False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_timm(name):
    make, side, grid, relevant = FAMILIES[name]
    model = equip(name, 3, HEAD, pretrained=False, model_args=make()[1]).eval()
    check_family(model, side, grid, relevant)


def test_a_vit_of_hugging_face():
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = equip(ViTModel(ViTConfig(image_size=48, patch_size=8, **size)), 3, HEAD).eval()
    before = model.backbone.config._attn_implementation
    check_family(model, 48, (6, 6), True)
    assert model.backbone.config._attn_implementation == before


def check_family(model, side, grid, relevant):
    pixels = torch.randn(1, 3, side, side)
    before = model(pixels).logits
    parts = [CLASS, WORDS, BOTH] if model.layout.has_class_token else [BOTH]
    maps = activation_maps(model, pixels, 1, "hirescam")
    assert list(maps) == parts and all(m.shape == grid and m.any() for m in maps.values())
    if relevant:
        found, _ = relevance_maps(model, pixels, 1)
        assert list(found) == parts and all(m.shape == grid and (m >= 0).all() and m.any() for m in found.values())
    else:
        with pytest.raises(ValueError, match=r"relevance is not available .* accepted: gradcam"):
            relevance_maps(model, pixels, 1)
    assert torch.equal(model(pixels).logits, before)


def test_the_class_token_is_looked_at_through_its_last_attention():
    model, cait = make_vit(), equip("cait_xxs24_224", 3, HEAD, False, model_args={"img_size": 64, "depth": 1})
    for each, name, size in ((model, "blocks.1.attn", (32, 48)), (cait.eval(), "blocks_token_only.1.attn", (64, 64))):
        with explaining(each):
            assert last_attention(each, torch.randn(1, 3, *size)) is each.body.get_submodule(name)


def test_pvt_says_through_which_layers_relevance_went():
    model = equip("pvt_v2_b0", 3, HEAD, pretrained=False, model_args={"depths": (1, 1, 1, 2)}).eval()
    assert (
        relevance_maps(model, torch.randn(1, 3, 64, 64), 0)[1] == "relevance through the last 2 of 5 attention layers"
    )


def test_half_precision_below_a_head_in_full():
    model = make_vit()
    model.backbone.to(torch.bfloat16)
    for maps in (
        activation_maps(model, torch.randn(1, 3, 32, 48), 0),
        relevance_maps(model, torch.randn(1, 3, 32, 48), 0)[0],
    ):
        assert all(np.isfinite(m).all() for m in maps.values())


def test_an_unknown_method_names_those_that_are():
    with pytest.raises(ValueError, match=r"unknown method 'cam'; accepted: gradcam, gradcam\+\+"):
        activation_maps(make_vit(), torch.randn(1, 3, 32, 48), 0, "cam")


def test_timm_still_has_the_switch_that_relevance_uses():
    attention = timm.create_model("vit_tiny_patch16_224", depth=1).blocks[0].attn
    assert hasattr(attention, "fused_attn") and hasattr(attention, "attn_drop")
