"""`equip`: what it takes, what it keeps, what it refuses; text families."""

import copy
import json
import logging

import numpy as np
import pytest
import timm
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import sot
from sot import HeadConfig
from sot.models.tokens import split_text

HEAD = HeadConfig(heads=2, left_dim=3, right_dim=3)
TEXT = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
GPT = {"vocab_size": 99, "n_embd": 16, "n_layer": 2, "n_head": 2}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
ENCODERS = {
    "bert": hf.BertConfig(**TEXT),
    "roberta": hf.RobertaConfig(**TEXT, pad_token_id=1),
    "distilbert": hf.DistilBertConfig(vocab_size=99, dim=16, n_layers=2, n_heads=2, hidden_dim=32),
    "albert": hf.AlbertConfig(**TEXT, embedding_size=8),
    "electra": hf.ElectraConfig(**TEXT, embedding_size=8),
    "deberta-v2": hf.DebertaV2Config(**TEXT),
    "mpnet": hf.MPNetConfig(**TEXT),
    "xlm-roberta": hf.XLMRobertaConfig(**TEXT),
    "modernbert": hf.ModernBertConfig(
        **TEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
}
DECODERS = {
    "openai-gpt": hf.OpenAIGPTConfig(**GPT),
    "gpt2": hf.GPT2Config(**GPT, bos_token_id=1, eos_token_id=1),
    "gpt-neox": hf.GPTNeoXConfig(**TEXT),
    "llama": hf.LlamaConfig(**TEXT),
    "qwen2": hf.Qwen2Config(**TEXT, num_key_value_heads=2),
    "qwen3": hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8),
}
T5 = hf.T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
FAMILIES = {**ENCODERS, **DECODERS, "t5": T5}


def backbone(config):
    loader = hf.AutoModelForTextEncoding if config.model_type == "t5" else hf.AutoModel
    return loader.from_config(copy.deepcopy(config))


def batch(length=9):
    ids, mask = torch.randint(5, 99, (2, length)), torch.ones(2, length, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model, **inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_text_family_builds_trains_saves_and_loads(name, tmp_path):
    source = backbone(FAMILIES[name])
    before = copy.deepcopy(source.state_dict())
    model, inputs = sot.equip(source, 3, HEAD), batch()
    assert isinstance(model, sot.SoTForSequenceClassification)
    assert model.config.class_position == ("first" if name in ENCODERS else "last")
    kept = model.backbone.state_dict()
    assert all(torch.equal(value, before[key]) for key, value in kept.items())
    model.train()(**inputs, labels=torch.tensor([0, 2])).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert all(torch.equal(value, before[key]) for key, value in source.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, **inputs), logits(model, **inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_right_padding_changes_nothing(name):
    model, inputs = sot.equip(backbone(FAMILIES[name]), 3, HEAD), batch()
    short = {key: value[1:, :6] for key, value in inputs.items()}
    assert torch.allclose(logits(model, **inputs)[1:], logits(model, **short), atol=1e-6)


@pytest.mark.parametrize("position", ["first", "last"])
def test_either_padding_side_finds_the_same_class_token(position):
    model = sot.equip(backbone(ENCODERS["bert"]), 3, HEAD, class_position=position)
    hidden = torch.randn(1, 5, 16)
    padding = torch.full((1, 3, 16), float("nan"))
    mask, empty = torch.ones(1, 5).long(), torch.zeros(1, 3).long()
    right = split_text(torch.cat([hidden, padding], 1), None, torch.cat([mask, empty], 1), position)
    left = split_text(torch.cat([padding, hidden], 1), None, torch.cat([empty, mask], 1), position)
    expected = hidden[:, 0 if position == "first" else -1]
    assert torch.equal(right.class_token, expected) and torch.equal(left.class_token, expected)
    assert left.mask.sum() == right.mask.sum() == 4
    result = model.classify(right, None)[1]
    assert torch.allclose(result, model.classify(left, None)[1], atol=1e-6) and result.isfinite().all()


def test_class_token_through_the_pooler_of_bert():
    source = backbone(ENCODERS["bert"]).eval()
    model, inputs = sot.equip(source, 3, HeadConfig(fusion="class"), class_pooler=True), batch()
    expected = model.classifier.class_linear(source(**inputs).pooler_output)
    assert torch.allclose(logits(model, **inputs), expected, atol=1e-6)
    plain = sot.equip(source, 3, HeadConfig(fusion="class"))
    expected = plain.classifier.class_linear(source(**inputs).last_hidden_state[:, 0])
    assert torch.allclose(logits(plain, **inputs), expected, atol=1e-6)
    with pytest.raises(ValueError, match="class_pooler needs a backbone with a pooler"):
        sot.equip(backbone(DECODERS["gpt2"]), 3, HEAD, class_pooler=True)


def test_a_classifier_gives_its_backbone_and_its_labels(tmp_path):
    labels = {0: "no", 1: "yes", 2: "maybe"}
    source = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, id2label=labels))
    model = sot.equip(source, head=HEAD)
    assert model.config.id2label == labels and model.config.label2id == {"no": 0, "yes": 1, "maybe": 2}
    assert torch.equal(model.backbone.embeddings.word_embeddings.weight, source.bert.embeddings.word_embeddings.weight)
    source.save_pretrained(tmp_path)
    assert sot.equip(tmp_path, head=HEAD).config.id2label == labels
    assert sot.equip(hf.T5ForConditionalGeneration(T5), 2, HEAD).num_labels == 2


@pytest.fixture
def text_folder(tmp_path):
    words = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "dogs", "bark"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "gpt")
    hf.GPT2Model(hf.GPT2Config(**{**GPT, "vocab_size": 8})).save_pretrained(tmp_path / "gpt")
    return tmp_path / "gpt"


def test_a_tokenizer_without_padding_gets_one_once_and_aloud(text_folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "sot"):
        model = sot.equip(str(text_folder), labels=["bad", "good"], head=HEAD)
    assert len([r for r in caplog.records if "padding token" in r.message]) == 1
    assert model.processor.pad_token == "<pad>" and model.config.pad_token_id == 8
    assert model.backbone.get_input_embeddings().num_embeddings == 9
    model.save_pretrained(tmp_path / "out")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer(["the cat sat", "dogs bark"], padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded, **inputs), logits(model, **inputs))
    result = hf.pipeline("text-classification", str(tmp_path / "out"))(["the cat sat", "dogs bark"], batch_size=2)
    assert {row["label"] for row in result} <= {"bad", "good"}


def test_an_image_folder_of_transformers_keeps_its_processor(tmp_path):
    hf.ViTModel(hf.ViTConfig(**VIT)).save_pretrained(tmp_path / "vit")
    hf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    model = sot.equip(tmp_path / "vit", labels=["cat", "dog"], head=HEAD)
    model.save_pretrained(tmp_path / "out")
    pipe = hf.pipeline("image-classification", str(tmp_path / "out"))
    from PIL import Image

    assert {row["label"] for row in pipe(Image.new("RGB", (50, 40), "red"))} == {"cat", "dog"}


HF_VISION = {
    "vit": hf.ViTConfig(**VIT),
    "deit": hf.DeiTConfig(**VIT),
    "swin": hf.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4),
    "dinov2": hf.Dinov2Config(**VIT),
    "dinov2 registers": hf.Dinov2WithRegistersConfig(**VIT),
    "beit": hf.BeitConfig(**VIT, intermediate_size=32),
    "pvt": hf.PvtConfig(image_size=32, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2]),
    "vit mae": hf.ViTMAEConfig(**VIT, intermediate_size=32),
    "convnext": hf.ConvNextConfig(hidden_sizes=[8, 8, 8, 16], depths=[1] * 4, image_size=32),
    "resnet": hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1] * 4),
}
PREFIX = {"vit": 1, "deit": 2, "swin": 0, "dinov2": 1, "dinov2 registers": 5, "beit": 1, "pvt": 1, "vit mae": 1}


@pytest.mark.parametrize("name", HF_VISION)
def test_image_family_of_transformers(name, tmp_path):
    source = hf.AutoModel.from_config(copy.deepcopy(HF_VISION[name])).eval()
    model, images = sot.equip(source, 3, HEAD), torch.randn(2, 3, 32, 32)
    assert model.config.layout["num_prefix_tokens"] == PREFIX.get(name, 0)
    assert model.config.head["fusion"] == ("sum" if PREFIX.get(name) else "word")
    first = logits(model, pixel_values=images)
    assert torch.equal(logits(model, pixel_values=images), first)
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, pixel_values=images), first)
    model.train()(pixel_values=images, labels=torch.tensor([0, 2])).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


SMALL_VIT = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("test_vit", {}),
        ("vit_tiny_patch16_224", SMALL_VIT),
        ("vit_tiny_patch16_224", {**SMALL_VIT, "in_chans": 1, "reg_tokens": 2, "mlp_ratio": 2.0}),
        ("deit_tiny_distilled_patch16_224", SMALL_VIT),
        ("swin_tiny_patch4_window7_224", {"img_size": 56, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)}),
        ("test_resnet", {"in_chans": 1}),
    ],
)
def test_an_instance_of_timm_is_copied_with_the_arguments_it_was_built_with(name, arguments, tmp_path):
    source = timm.create_model(name, **arguments)
    before = copy.deepcopy(source.state_dict())
    model = sot.equip(source, 3, HEAD)
    size = model.processor.crop_size
    images = torch.randn(2, arguments.get("in_chans", 3), size["height"], size["width"])
    expected = source.eval().forward_features(images)
    assert torch.allclose(model.eval().backbone.timm_model.forward_features(images), expected, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, pixel_values=images), logits(model, pixel_values=images))
    assert all(torch.equal(value, before[key]) for key, value in source.state_dict().items())


def test_an_instance_with_arguments_that_cannot_be_seen_asks_for_them():
    source = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT, qk_norm=True)
    with pytest.raises(ValueError, match=r"pass them as model_args=\{...\}"):
        sot.equip(source, 3, HEAD)
    model = sot.equip(source, 3, HEAD, model_args={**SMALL_VIT, "qk_norm": True})
    assert model.num_labels == 3
    with pytest.raises(ValueError, match="model_args"):  # same shapes, another function
        sot.equip(timm.create_model("vit_tiny_patch16_224", **SMALL_VIT, act_layer="relu"), 3, HEAD)


def test_folders_of_timm(tmp_path):
    source = timm.create_model("test_vit", num_classes=7)
    timm.models.save_for_hf(source, tmp_path / "timm", safe_serialization=True)
    model = sot.equip(tmp_path / "timm", 3, HEAD)
    images = torch.randn(2, 3, 160, 160)
    expected = source.eval().forward_features(images)
    assert torch.equal(model.eval().backbone.timm_model.forward_features(images), expected)
    wrapped = hf.TimmWrapperModel(hf.TimmWrapperConfig(architecture="test_vit", num_labels=3)).eval()
    wrapped.save_pretrained(tmp_path / "wrapped")
    expected = wrapped.timm_model.forward_features(images)
    for given in (wrapped, tmp_path / "wrapped"):
        model = sot.equip(given, 3, HEAD).eval()
        assert torch.equal(model.backbone.timm_model.forward_features(images), expected)


@pytest.mark.parametrize(
    "name, side, params",
    [
        ("deit_tiny_patch16_224", 14, 7.02),
        ("deit_small_patch16_224", 24, 25.55),
        ("deit_base_patch16_224", 38, 95.19),
        ("swin_tiny_patch4_window7_224", 24, 31.46),
        ("swin_base_patch4_window7_224", 38, 96.14),
    ],
)
def test_the_papers_ours_rows_have_its_parameters(name, side, params):
    head = {"left_dim": side, "right_dim": side}
    with torch.device("meta"):
        model = sot.equip(name, 1000, head, pretrained=False, embed="densenet")
    count = sum(p.numel() for key, p in model.named_parameters() if not key.endswith("pos_embed"))
    assert count / 1e6 == pytest.approx(params, rel=5e-3)


@pytest.mark.parametrize("name, size", [("vit_tiny_patch16_224", 32), ("swin_tiny_patch4_window7_224", 56)])
def test_replaced_embedding_trains_saves_and_loads(name, size, tmp_path):
    arguments = {"img_size": size}
    arguments |= SMALL_VIT if name.startswith("vit") else {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)}
    model = sot.equip(name, 3, HEAD, pretrained=False, embed="densenet", model_args=arguments)
    images = torch.randn(2, 3, size, size)
    model.train()(pixel_values=images, labels=torch.tensor([0, 2])).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, pixel_values=images), logits(model, pixel_values=images))


def test_without_a_class_token_the_fusion_becomes_word_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING, "sot"):
        model = sot.equip("test_resnet", 3, HEAD, pretrained=False)
    assert model.config.head["fusion"] == "word" and len(caplog.records) == 1
    with pytest.raises(ValueError, match="fusion 'class' needs a class token"):
        sot.equip("test_resnet", 3, HeadConfig(fusion="class"), pretrained=False)


def test_image_processor_of_a_timm_model_is_its_evaluation_transform(tmp_path):
    from PIL import Image

    model = sot.equip("test_vit", labels=["a", "b"], head=HEAD, pretrained=False)
    picture = Image.effect_noise((200, 170), 80).convert("RGB")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(timm.create_model("test_vit")))
    ours = model.processor(picture, return_tensors="pt")["pixel_values"][0]
    assert ours.shape == transform(picture).shape and (ours - transform(picture)).abs().mean() < 0.02
    model.save_pretrained(tmp_path)
    rows = hf.pipeline("image-classification", str(tmp_path))(picture)
    assert {row["label"] for row in rows} == {"a", "b"}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: sot.equip("no_such_model_at_all", 3), "unknown model 'no_such_model_at_all'; accepted: a timm name"),
        (lambda: sot.equip("test_vit", 0), "num_classes must be an integer >= 1, got 0"),
        (lambda: sot.equip("test_vit"), "num_classes is needed"),
        (lambda: sot.equip("test_vit", 3, labels=["a", "b"]), "num_classes is 3, but there are 2 labels"),
        (lambda: sot.equip("test_vit", labels=["a", "a"]), "labels must differ"),
        (lambda: sot.equip("test_vit", labels="cat"), "labels must be a list of at least one name, got 'cat'"),
        (
            lambda: sot.equip("test_vit", labels={"a": 0, "b": 1}),
            "labels must be a list of at least one name, got {'a'",
        ),
        (lambda: sot.equip("test_vit", labels={"a"}), "labels must be a list of at least one name, got {'a'}"),
        (lambda: sot.equip("test_vit", labels=[]), r"labels must be a list of at least one name, got \[\]"),
        (lambda: sot.equip("test_vit", 2.0), r"num_classes must be an integer >= 1, got 2\.0"),
        (lambda: sot.equip("test_vit", True), "num_classes must be an integer >= 1, got True"),
        (lambda: sot.equip("test_vit", 2, label_smoothing=2), "label_smoothing must be between 0 and 1, got 2"),
        (lambda: sot.equip("test_vit", 2, label_smoothing=-1), "label_smoothing must be between 0 and 1, got -1"),
        (lambda: sot.equip("test_vit", 2, label_smoothing="a"), "label_smoothing must be between 0 and 1, got 'a'"),
        (lambda: sot.equip("test_vit", 2, problem_type="foo"), "unknown problem_type 'foo'; accepted: regression, sin"),
        (lambda: sot.equip(backbone(ENCODERS["bert"]), 2, embed="densenet"), "timm models only, got BertModel"),
        (lambda: sot.equip(backbone(ENCODERS["bert"]), 2, model_args={"a": 1}), "{'a': 1} are for timm models only"),
        (
            lambda: sot.equip(backbone(ENCODERS["bert"]), 2, head="sum"),
            "or a dictionary of its fields, got 'sum'",
        ),
        (lambda: sot.equip(backbone(ENCODERS["bert"]), 1, head={"fusion": "late"}), "it cannot do regression"),
        (
            lambda: sot.equip(sot.equip("test_vit", 2, pretrained=False), 3),
            "has a second-order head already",
        ),
        (lambda: sot.equip("test_vit", 3, {"pool": "avg"}), "unknown pool 'avg'"),
        (lambda: sot.equip(nn.Linear(2, 2), 3), "neither of timm nor of transformers"),
        (lambda: sot.equip("crossvit_9_240", 3, pretrained=False), "two token sequences of different widths"),
        (lambda: sot.equip("resnet18", 3, pretrained=False, embed="densenet"), "replaces the patch embedding"),
        (lambda: sot.equip(backbone(ENCODERS["bert"]), 3, class_position="middle"), "class_position must be one of"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_number_of_classes_of_numpy_is_one():
    assert sot.equip("test_vit", np.int64(2), HEAD, pretrained=False).num_labels == 2


def test_folders_that_are_not_models_or_have_the_head_already(tmp_path):
    with pytest.raises(ValueError, match=r"is not a model: it has no config.json"):
        sot.equip(tmp_path, 3)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(ValueError, match="unknown model"):
        sot.equip(tmp_path, 3)
    sot.equip("test_vit", 3, HEAD, pretrained=False).save_pretrained(tmp_path / "equipped")
    with pytest.raises(ValueError, match="has a second-order head already"):
        sot.equip(tmp_path / "equipped", 3)


def test_a_head_is_exact_unless_the_fast_one_is_asked_for():
    norms = {
        "svpn": [None, {}, {"heads": 2}, HeadConfig()],
        "svpn_fast": [{"norm": "svpn_fast"}, {"num_values": 2}, {"num_iterations": 3}, HeadConfig.paper()],
        "isqrt": [{"pool": "gcp"}],
        None: [{"pool": "gap"}, {"fusion": "class"}],
    }
    for norm, heads in norms.items():
        for head in heads:
            assert sot.equip("test_vit", 2, head, pretrained=False).config.head["norm"] == norm, head


def test_the_exponent_is_a_quarter_unless_one_or_a_normalisation_is_given():
    given = {
        0.25: [None, {"heads": 2}, HeadConfig()],
        0.5: [HeadConfig(norm="svpn"), {"norm": "svpn"}, {"exponent": 0.5}],
        0.7: [{"exponent": 0.7}],
    }
    for exponent, heads in given.items():
        for head in heads:
            assert sot.equip("test_vit", 2, head, pretrained=False).config.head["exponent"] == exponent, head


def test_layout_is_found_without_gradients_too():
    with torch.no_grad():
        assert sot.equip("vit_tiny_patch16_224", 2, pretrained=False).config.layout["has_class_token"]
