"""What people do with the models of the comparison tables: another embedding, explaining, exporting, probing."""

import pytest
import timm
import torch
from PIL import Image
from transformers import pipeline

import sot
from sot import HeadConfig, SecondOrderHead
from sot.explain import explain_image
from sot.models.branched import heads_of
from sot.models.embedding.token_embed import ResampledEmbed
from sot.models.folder import load_model
from sot.models.variants import register_peers
from sot.paper.comparison import load_comparisons
from sot.probe import with_head

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


@pytest.mark.parametrize("fusion", [*(fusion.value for fusion in sot.Fusion)])
def test_maps_are_those_of_the_first_branch_whatever_the_fusion(fusion):
    model = conformer(fusion=fusion)
    for method in ("hirescam", "relevance"):
        found = explain_image(model, model.processor, picture(), method=method)
        assert all(column.values.shape == (14, 14) and column.values.any() for column in found.columns)
        assert len(found.columns) == (3 if fusion in ("sum", "concat", "late") else 1)


def test_no_branch_is_exported_with_a_decomposition():
    for head in heads_of(conformer(norm="svpn").classifier):
        program = torch.export.export(head.pool, (torch.randn(2, 9, head.pool.projection.in_features),))
        assert not any(word in str(node.target) for node in program.graph.nodes for word in ("linalg", "svd"))


def test_a_head_probed_on_the_first_of_two_branches_is_a_model_of_one():
    model = conformer()
    head = SecondOrderHead(model.config.hidden_size, 2, HeadConfig(**SMALL_HEAD))
    combined = with_head(model, head.eval(), ["x", "y"], "single_label_classification")
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        tokens = model.tokens(pixels)
        expected = head(tokens.class_token, tokens.word_tokens)
        torch.testing.assert_close(combined(pixel_values=pixels).logits, expected)


def check_whole_way(model, folder):
    """Train a step, save, load, classify by a pipeline, explain: what works for every model."""
    pixels = torch.randn(2, 3, 224, 224)
    model.train()(pixel_values=pixels, labels=torch.tensor([1, 0])).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    model.eval().save_pretrained(folder)
    again, processor = load_model(folder)
    with torch.no_grad():
        assert torch.equal(again(pixel_values=pixels).logits, model(pixel_values=pixels).logits)
    assert {row["label"] for row in pipeline("image-classification", str(folder))(picture())} == {"a", "b"}
    found = explain_image(again, processor, picture(), method="hirescam")
    parts, logits = found.contributions, found.contributions.logits
    assert parts.class_part + parts.word_part + parts.bias == pytest.approx(logits, abs=1e-4 * abs(logits).max())
    assert all(column.values.shape == found.grid for column in found.columns)


def test_pit_takes_another_embedding_on_its_own_grid(tmp_path):
    model = sot.equip("pit_ti_224", labels=["a", "b"], head=SMALL_HEAD, pretrained=False, embed="densenet")
    embedding = model.body.patch_embed
    assert isinstance(embedding, ResampledEmbed) and embedding.cells == tuple(model.body.pos_embed.shape[2:])
    check_whole_way(model, tmp_path)
    with pytest.raises(ValueError, match="progressive sampling holds the first layers"):
        sot.equip("pit_ti_224", 2, pretrained=False, embed="ps")


COMPARED = {row.model for table in load_comparisons().values() for row in table.rows}
WITH_OUR_EMBEDDING = sorted(name for name in COMPARED if not name.startswith(("sot", "ps_vit", "autoformer")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "embed"),
    [*((name, None) for name in sorted(COMPARED)), *((name, "densenet") for name in WITH_OUR_EMBEDDING)],
)
def test_every_model_of_the_tables_goes_the_whole_way_with_our_head(name, embed, tmp_path):
    check_whole_way(sot.equip(name, labels=["a", "b"], pretrained=False, embed=embed), tmp_path)


@pytest.mark.parametrize(
    "name", ["autoformer_tiny", "conformer_ti", "irpe_qkv_small", "ps_vit_ti_14", "pvt_tiny", "sot_7", "t2t_vit_7"]
)
def test_timm_chooses_device_and_type(name):
    register_peers()
    model = timm.create_model(name, device="meta", dtype=torch.float64)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float64}
