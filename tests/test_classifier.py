"""The classifier is called as a module: hooks on it see what the model computes, and may change it."""

import pytest
import torch
from test_peers_conformer import TINY
from transformers import BertConfig, BertModel

import sot
from sot import Fusion, HeadConfig, SecondOrderHead
from sot.core.packed import Packed

FUSIONS = [fusion.value for fusion in Fusion]
SMALL = {"heads": 2, "left_dim": 3, "right_dim": 3}
BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def build(kind, fusion="sum"):
    head = HeadConfig(fusion=fusion, **SMALL)
    if kind == "text":
        return sot.equip(BertModel(BertConfig(vocab_size=30, **BERT)), 3, head).eval()
    if kind == "image":
        return sot.equip("test_vit", 3, head, pretrained=False).eval()
    return sot.equip("conformer_ti", 3, head, pretrained=False, model_args=TINY).eval()


def inputs(kind):
    if kind != "text":
        size = 160 if kind == "image" else 64
        return {"pixel_values": torch.randn(2, 3, size, size)}
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(0, 30, (2, 9)), "attention_mask": mask}


@pytest.mark.parametrize("kind", ["image", "text", "branches"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_hook_sees_the_logits(kind, fusion):
    model, given, seen = build(kind, fusion), inputs(kind), []
    model.classifier.register_forward_hook(lambda module, args, output: seen.append(output))
    assert torch.equal(model(**given).logits, seen[0])
    result = model(**given, labels=torch.tensor([0, 2]))
    several = fusion == "late" or kind == "branches"  # the loss needs the logits of each
    logits = seen[1][0] if several else seen[1]
    assert torch.equal(result.logits, logits) and len(seen) == 2
    if several:
        assert len(seen[1][1]) == model.classifier.num_branches == (fusion == "late") + 1 + (kind == "branches")


@pytest.mark.parametrize("kind", ["image", "text", "branches"])
def test_a_hook_may_change_the_tokens(kind):
    model, given = build(kind), inputs(kind)
    model.classifier.register_forward_pre_hook(lambda module, args: (torch.zeros_like(args[0]), *args[1:]))
    tokens = model.tokens(**given)
    tokens.class_token = torch.zeros_like(tokens.class_token)
    handle = model.classifier.register_forward_hook(lambda module, args, output: output + 1)
    changed = model(**given).logits
    handle.remove()
    torch.testing.assert_close(changed, model.classify(tokens, None)[1] + 1)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_head_takes_words_without_padding(fusion, pre_norm):
    head = SecondOrderHead(16, 3, HeadConfig(fusion=fusion, pre_norm=pre_norm, **SMALL))
    if pre_norm:
        torch.nn.init.normal_(head.norm.weight)
    class_token, starts = torch.randn(3, 16), torch.tensor([0, 4, 5, 11])
    packed = Packed(torch.randn(11, 16), starts)
    words, mask = packed.padded()
    torch.testing.assert_close(head(class_token, packed), head(class_token, words, mask))
    logits, branches = head(class_token, packed, with_branches=True)
    assert torch.equal(logits, head.merge(branches)) and len(branches) == head.num_branches
    with pytest.raises(ValueError, match="same batch size, got 2 and 3"):
        head(class_token[:2], packed)
