"""`equip` on vision models that name their parts otherwise, drop while training, or come in half precision."""

import pytest
import timm
import torch
import transformers as hf

import sot

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIZE = {"image_size": 32, "patch_size": 8}
SWIN = hf.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
PIXELS = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_the_class_token_of_clip_is_none_of_its_words():
    torch.manual_seed(0)
    source = hf.CLIPVisionModel(hf.CLIPVisionConfig(**SMALL, **SIZE))
    model = sot.equip(source, 2).eval()
    layout = model.layout
    assert layout.has_class_token and layout.num_prefix_tokens == 1 and layout.norm == "post_layernorm"
    with torch.no_grad():
        tokens = model.tokens(PIXELS)
        pooled = source.eval()(PIXELS).pooler_output  # its own norm on the class token
    assert tokens.word_tokens.shape == (3, 16, 16) and tokens.grid == (4, 4)
    torch.testing.assert_close(tokens.class_token, pooled)


@pytest.mark.parametrize(
    "config, message",
    [
        (hf.YolosConfig(**SMALL, image_size=[32, 32], patch_size=8), "its detection tokens are"),
        (hf.PixtralVisionConfig(**SMALL, **SIZE), "PixtralVisionModel has no word tokens"),
    ],
)
def test_models_whose_tokens_are_not_those_of_one_picture_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        sot.equip(hf.AutoModel.from_config(config), 2)


def test_a_model_of_texts_and_pictures_is_equipped_in_parts(tmp_path):
    parts = {"text_config": {**SMALL, "vocab_size": 9}, "vision_config": {**SMALL, **SIZE}}
    hf.CLIPModel(hf.CLIPConfig(**parts, projection_dim=8)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="CLIPModel reads texts and images: equip its text_model or its vision_model"):
        sot.equip(tmp_path, 2)


@pytest.mark.parametrize("config", [SWIN, hf.ViTConfig(**SMALL, **SIZE)])
def test_pictures_are_cast_to_the_type_of_the_backbone(config, tmp_path):
    hf.AutoModel.from_config(config).bfloat16().save_pretrained(tmp_path)
    model = sot.equip(tmp_path, 2)
    assert model.backbone.dtype == torch.bfloat16
    assert model(PIXELS).logits.isfinite().all()


@pytest.mark.parametrize(
    "name, arguments",
    [
        (
            "vit_tiny_patch16_224",
            {"depth": 3, "drop_path_rate": 0.5, "proj_drop_rate": 0.3, "attn_drop_rate": 0.1, "pos_drop_rate": 0.2},
        ),
        ("swin_tiny_patch4_window7_224", {"drop_path_rate": 0.0}),  # 0.1 by default
        ("convnext_atto", {"drop_path_rate": 0.2}),
        ("sot_7", {"drop_path_rate": 0.1}),
    ],
)
def test_what_a_timm_model_drops_while_training_is_kept(name, arguments):
    model = sot.equip(timm.create_model(name, num_classes=2, **arguments))
    assert model.config.backbone_config.model_args == arguments


def test_dropout_that_cannot_be_read_off_asks_for_its_arguments():
    model = timm.create_model("test_vit", num_classes=2)
    model.blocks[0].mlp.drop1.p = 0.5
    with pytest.raises(ValueError, match="was built with arguments that cannot be read off it"):
        sot.equip(model)


def test_a_folder_of_a_timm_model_knows_its_classes(tmp_path):
    hf.TimmWrapperForImageClassification(hf.TimmWrapperConfig(architecture="test_vit", num_labels=3)).save_pretrained(
        tmp_path / "wrapped"
    )
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=4), tmp_path / "timm", safe_serialization=True)
    assert sot.equip(tmp_path / "wrapped").num_labels == 3 and sot.equip(tmp_path / "timm").num_labels == 4


def test_one_class_is_a_number_for_everybody(stand_ins, tmp_path):
    model = sot.equip(stand_ins["google-bert/bert-base-uncased"], 1)
    assert model.config.problem_type == "regression"
    with torch.no_grad():
        model.classifier.word_linear.bias.fill_(15.0)
    model.save_pretrained(tmp_path)
    (found,) = hf.pipeline("text-classification", str(tmp_path), device="cpu")("the cat")
    assert found["score"] > 10


def test_a_head_by_hand_takes_a_dictionary_of_its_fields():
    head = sot.SecondOrderHead(16, 3, {"fusion": "class"})
    assert head.config == sot.HeadConfig(fusion="class")
    for wrong in ("sum", 3):
        with pytest.raises(ValueError, match="a head is given by HeadConfig or a dictionary of its fields, got "):
            sot.SecondOrderHead(16, 3, wrong)
    with pytest.raises(ValueError, match="a head is given by HeadConfig or a dictionary"):
        timm.create_model("sot_7", head="sum")


@pytest.mark.parametrize("arguments", [{"class_token": False}, {"pos_embed": "learn", "qkv_bias": True}])
def test_what_the_family_has_of_its_own_cannot_be_chosen(arguments):
    with pytest.raises(ValueError, match=f"{', '.join(arguments)} cannot be chosen"):
        timm.create_model("sot_7", **arguments)
