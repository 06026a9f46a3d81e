"""What people do with the models of the comparison tables: another embedding, explaining, exporting, probing."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import pipeline

import sot
from sot import HeadConfig, SecondOrderHead
from sot.core.normalizers import ProductSingularValuePowerNorm
from sot.evaluate import load_model
from sot.explain import explain_image
from sot.export import without_decompositions
from sot.models.branched import heads_of
from sot.models.embedding import ResampledEmbed
from sot.probe import combine

CONFORMER = {"embed_dim": 16, "num_heads": 2, "channel_ratio": 0.25}
SMALL_HEAD = {"heads": 2, "left_dim": 3, "right_dim": 3}


def conformer(**head):
    torch.manual_seed(0)
    names = ["a", "b", "c"]
    return sot.equip(
        "conformer_ti", labels=names, head={**SMALL_HEAD, **head}, pretrained=False, model_args=CONFORMER
    ).eval()


def picture():
    torch.manual_seed(1)
    return Image.fromarray(torch.randint(0, 255, (48, 64, 3), dtype=torch.uint8).numpy())


@pytest.mark.parametrize("fusion", ["sum", "concat", "word"])
def test_all_branches_take_part_in_an_explanation(fusion):
    model = conformer(fusion=fusion)
    found = explain_image(model, model.processor, picture())
    with torch.no_grad():
        pixels = model.processor(picture(), return_tensors="pt")["pixel_values"]
        logits = model(pixel_values=pixels).logits[0].double().numpy()
    parts = found.contributions
    scale = abs(logits).max()
    assert parts.class_part + parts.word_part + parts.bias == pytest.approx(logits, abs=1e-4 * scale)
    assert any("2 branches" in note for note in found.notes)
    assert found.columns[-1].values.shape == found.grid


def test_no_branch_is_exported_with_a_decomposition():
    changed = without_decompositions(conformer(norm="svpn"))
    assert [type(head.pool.norm) for head in heads_of(changed.classifier)] == [ProductSingularValuePowerNorm] * 2


def test_a_head_probed_on_the_first_of_two_branches_is_a_model_of_one():
    model = conformer()
    head = SecondOrderHead(model.config.hidden_size, 2, HeadConfig(**SMALL_HEAD))
    combined = combine(model, head.eval(), SimpleNamespace(labels=["x", "y"]))
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        tokens, _ = model.tokens(pixels)
        expected = head(tokens.class_token, tokens.word_tokens)
        torch.testing.assert_close(combined(pixel_values=pixels).logits, expected)


@pytest.mark.parametrize("name", ["pit_ti_224", pytest.param("pit_b_224", marks=pytest.mark.slow)])
def test_pit_takes_another_embedding_on_its_own_grid(name, tmp_path):
    model = sot.equip(name, labels=["a", "b"], head=SMALL_HEAD, pretrained=False, embed="densenet").eval()
    embedding = model.body.patch_embed
    assert isinstance(embedding, ResampledEmbed) and embedding.cells == tuple(model.body.pos_embed.shape[2:])
    pixels = torch.randn(1, 3, 224, 224)
    loss = model(pixel_values=pixels, labels=torch.tensor([1])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    again, _ = load_model(tmp_path)
    with torch.no_grad():
        assert torch.equal(again.eval()(pixel_values=pixels).logits, model(pixel_values=pixels).logits)
    assert {row["label"] for row in pipeline("image-classification", str(tmp_path))(picture())} == {"a", "b"}
    with pytest.raises(ValueError, match="progressive sampling holds the first layers"):
        sot.equip(name, 2, pretrained=False, embed="ps")
