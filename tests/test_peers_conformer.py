"""Conformer against its definition, its published weights and the paper's figures; a head for each of its branches."""

import pytest
import timm
import torch
import torch.nn.functional as F
from peer_checks import HEAD, check_equip, check_figures, check_timm, on_meta, published_shapes, shapes

import sot
from sot import HeadConfig, SecondOrderHead
from sot.models.branched import BranchedHead
from sot.models.complexity import measure_complexity
from sot.paper.peers.coupling import MapToTokens, TokensToMap

TINY = {"embed_dim": 16, "num_heads": 2, "channel_ratio": 0.25}


def test_weights_are_named_and_shaped_as_published():
    assert shapes(on_meta("conformer_ti")) == published_shapes("conformer_ti")


def test_parameters_and_multiply_adds_are_the_paper_s():
    check_figures("conformer_ti", 23.5, 5.2)


def test_equipped_figures_are_the_paper_s():
    head = HeadConfig(left_dim=24, right_dim=24)
    with torch.device("meta"):
        model = sot.equip("conformer_ti", 1000, head, pretrained=False, embed="densenet")
    found = measure_complexity(model, (3, 224, 224))
    assert abs(found.params / 30.6e6 - 1) < 0.01 and abs(found.layer_macs / 6.3e9 - 1) < 0.03


def test_map_to_tokens_is_convolution_mean_norm_and_gelu():
    torch.manual_seed(0)
    unit = MapToTokens(3, 5, stride=2).double()
    torch.nn.init.normal_(unit.ln.weight)
    torch.nn.init.normal_(unit.ln.bias)
    x = torch.randn(1, 3, 4, 6, dtype=torch.float64)
    weight, bias = unit.conv_project.weight[:, :, 0, 0], unit.conv_project.bias
    for row in range(2):
        for column in range(3):
            patch = x[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)  # (channels, 4)
            mean = (weight @ patch + bias[:, None]).mean(1)
            centred = mean - mean.mean()
            normed = centred / (centred.square().mean() + 1e-6).sqrt() * unit.ln.weight + unit.ln.bias
            expected = normed * 0.5 * (1 + torch.erf(normed / 2**0.5))
            torch.testing.assert_close(unit(x)[0, 3 * row + column], expected)


def test_tokens_to_map_is_convolution_norm_and_repetition():
    torch.manual_seed(0)
    unit = TokensToMap(5, 3).double().eval()
    for tensor in (unit.bn.weight, unit.bn.bias, unit.bn.running_mean):
        torch.nn.init.normal_(tensor)
    torch.nn.init.uniform_(unit.bn.running_var, 0.5, 2)
    words = torch.randn(1, 2 * 3, 5, dtype=torch.float64)
    found = unit(words, [2, 3], [8, 12])
    weight, bias = unit.conv_project.weight[:, :, 0, 0], unit.conv_project.bias
    for row in range(8):
        for column in range(12):
            projected = weight @ words[0, 3 * (row // 4) + column // 4] + bias
            normed = (projected - unit.bn.running_mean) / (unit.bn.running_var + 1e-6).sqrt()
            expected = (normed * unit.bn.weight + unit.bn.bias).clamp(min=0)
            torch.testing.assert_close(found[0, :, row, column], expected)


def test_timm_api():
    model = check_timm("conformer_ti", TINY, (64, 96), 16 + 64)
    tokens, cells = model.forward_features(torch.randn(1, 3, 64, 96))
    assert tokens.shape == (1, 1 + 4 * 6, 16) and cells.shape == (1, 64, 2, 3)


def test_logits_are_the_sum_of_the_branches():
    model = timm.create_model("conformer_ti", num_classes=4, **TINY).eval()
    image = torch.randn(2, 3, 32, 32)
    tokens, cells = model.forward_features(image)
    of_tokens, of_cells = model.forward_branches(image)
    torch.testing.assert_close(of_tokens, model.trans_cls_head(tokens[:, 0]))
    torch.testing.assert_close(of_cells, model.conv_cls_head(cells.mean((2, 3))))
    torch.testing.assert_close(model(image), of_tokens + of_cells)


@pytest.mark.parametrize("embed", [None, "densenet"])
def test_equip(embed, tmp_path):
    model = check_equip("conformer_ti", TINY, (64, 64), tmp_path, embed)
    assert model.layout.dim == 16 and [branch.dim for branch in model.layout.branches] == [64]
    assert model.layout.has_class_token and not model.layout.branches[0].has_class_token


def test_each_branch_has_its_head_and_its_share_of_the_loss():
    model = sot.equip("conformer_ti", 3, HEAD, pretrained=False, model_args=TINY, label_smoothing=0.1).eval()
    assert isinstance(model.classifier, BranchedHead)
    image, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 2])
    tokens, cells = model.body.forward_features(image)
    own, other = model.classifier, model.classifier.others[0]
    assert (own.fusion, other.fusion) == ("sum", "word")
    words = cells.flatten(2).mT
    logits = SecondOrderHead.forward(own, tokens[:, 0], tokens[:, 1:]), other(None, words)
    found = model(image, labels=labels)
    assert torch.equal(own(tokens[:, 0], tokens[:, 1:], others=[(None, words)]), found.logits)
    torch.testing.assert_close(found.logits, logits[0] + logits[1])
    losses = [F.cross_entropy(part, labels, label_smoothing=0.1) for part in logits]
    torch.testing.assert_close(found.loss, (losses[0] + losses[1]) / 2)
    split = model.tokens(image)
    assert split.grid == (4, 4) and split.branches[0].grid == (2, 2)


def test_a_head_of_branches_wants_the_tokens_of_all():
    model = sot.equip("conformer_ti", 3, HEAD, pretrained=False, model_args=TINY)
    with pytest.raises(ValueError, match="expected the tokens of 1 further branches, got 0"):
        model.classifier(torch.randn(2, 16), torch.randn(2, 4, 16))
    representation = model.classifier(torch.randn(2, 16), torch.randn(2, 4, 16), pre_logits=True)
    assert representation.shape == (2, model.classifier.num_features)


def test_conventional_heads_give_the_original():
    source = timm.create_model("conformer_ti", num_classes=3, **TINY).eval()
    model = sot.equip(source, head={"fusion": "class"}, model_args=TINY).eval()
    other = model.classifier.others[0]
    assert (other.fusion, other.config.pool) == ("word", "gap")
    model.classifier.class_linear.load_state_dict(source.trans_cls_head.state_dict())
    other.word_linear.load_state_dict(source.conv_cls_head.state_dict())
    image = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(image).logits, source(image))


@pytest.mark.slow
def test_an_instance_is_equipped_too():
    source = timm.create_model("conformer_ti", num_classes=3)
    model = sot.equip(source, head=HEAD)
    assert torch.equal(
        model.body.conv_trans_12.fusion_block.conv3.weight, source.conv_trans_12.fusion_block.conv3.weight
    )
