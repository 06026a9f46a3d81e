"""Both models behave as Hugging Face models do: outputs, embeddings, losses, configuration, loading."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2Model,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

import sot
from sot import SoTForImageClassification, SoTForSequenceClassification

HEAD = {"heads": 2, "left_dim": 4, "right_dim": 4}
LAYERS, HEADS, WIDTH, CLASSES, VOCABULARY, LENGTH = 2, 4, 32, 3, 50, 7
SIZES = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH, "intermediate_size": 37}
TEXT = {
    "bert": lambda: BertModel(BertConfig(vocab_size=VOCABULARY, **SIZES)),
    "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)),
    "t5": lambda: T5EncoderModel(
        T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=37, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0
        )
    ),
}
IMAGE = {
    "vit": lambda: ViTModel(ViTConfig(image_size=24, patch_size=6, **SIZES)),
    "timm": lambda: timm.create_model("test_vit", img_size=32),
}
BACKBONES = TEXT | IMAGE


def build(name="bert", num_classes=CLASSES, fusion="sum", **settings):
    return sot.equip(BACKBONES[name](), num_classes, {**HEAD, "fusion": fusion}, **settings).eval()


def inputs(name="bert", batch=4):
    if name in IMAGE:
        size = 32 if name == "timm" else 24
        return {"pixel_values": torch.randn(batch, 3, size, size)}
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": torch.randint(5, VOCABULARY, (batch, LENGTH)), "attention_mask": mask}


def auto_class(name):
    return AutoModelForImageClassification if name in IMAGE else AutoModelForSequenceClassification


# --- outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit"])
def test_hidden_states_and_attentions(name):
    model, batch = build(name), inputs(name)
    plain = model(**batch)
    assert plain.hidden_states is None and plain.attentions is None
    model.set_attn_implementation("eager")
    output = model(**batch, output_hidden_states=True, output_attentions=True)
    length = 17 if name == "vit" else LENGTH
    assert [state.shape for state in output.hidden_states] == [(4, length, WIDTH)] * (LAYERS + 1)
    assert [weights.shape for weights in output.attentions] == [(4, HEADS, length, length)] * LAYERS
    torch.testing.assert_close(output.logits, plain.logits)


def test_a_timm_backbone_returns_hidden_states_only():
    model, batch = build("timm"), inputs("timm")
    output = model(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == len(model.body.blocks)
    torch.testing.assert_close(output.logits, model(**batch).logits)
    with pytest.raises(ValueError, match="output_attentions"):
        model(**batch, output_attentions=True)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_configured_outputs_need_not_be_asked_for(name):
    model, batch = build(name), inputs(name)
    model.config.output_hidden_states = True
    model.config.output_attentions = True  # also chooses the attention that has them
    output = model(**batch)
    assert len(output.hidden_states) == LAYERS + 1 and len(output.attentions) == LAYERS
    refused = model(**batch, output_hidden_states=False, output_attentions=False)
    assert refused.hidden_states is None and refused.attentions is None


@pytest.mark.parametrize("name", ["bert", "vit", "timm"])
def test_tuples_hold_the_same(name):
    model, batch = build(name), inputs(name)
    batch |= {"labels": torch.tensor([0, 1, 2, 0]), "output_hidden_states": True}
    expected = model(**batch)
    loss, logits, states = model(**batch, return_dict=False)
    assert torch.equal(loss, expected.loss) and torch.equal(logits, expected.logits)
    assert all(map(torch.equal, states, expected.hidden_states))
    model.config.return_dict = False
    assert isinstance(model(**batch), tuple)


@pytest.mark.parametrize("name", TEXT)
def test_embedded_words_equal_their_numbers(name):
    model, batch = build(name), inputs(name)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    assert torch.equal(
        model(inputs_embeds=embedded, attention_mask=batch["attention_mask"]).logits, model(**batch).logits
    )


# --- embeddings and configuration --------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXT)
def test_resized_embeddings_survive_saving(name, tmp_path):
    model, batch = build(name), inputs(name)
    before = model(**batch).logits
    model.resize_token_embeddings(VOCABULARY + 9)
    assert model.get_input_embeddings().num_embeddings == VOCABULARY + 9
    assert model.config.vocab_size == model.config.backbone_config.vocab_size == VOCABULARY + 9
    assert torch.equal(model(**batch).logits, before)
    batch["input_ids"][0, 1] = VOCABULARY + 8
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert loaded.config.vocab_size == VOCABULARY + 9
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_settings_of_the_backbone_are_those_of_the_model():
    config = build("bert").config
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (LAYERS, HEADS, WIDTH)
    config.num_hidden_layers, config.pad_token_id = 1, 3
    assert (config.backbone_config.num_hidden_layers, config.backbone_config.pad_token_id) == (1, 3)
    assert len(SoTForSequenceClassification(config).backbone.encoder.layer) == 1
    assert build("vit").config.image_size == 24
    assert not hasattr(build("timm").config, "vocab_size") and not hasattr(config, "no_such_setting")


@pytest.mark.parametrize("name", BACKBONES)
def test_configuration_survives_json(name, tmp_path):
    config = build(name, labels=["a", "b", "c"], label_smoothing=0.1).config
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    loaded.name_or_path = ""
    for other in (loaded, copy.deepcopy(config), type(config).from_dict(config.to_dict())):
        assert other.to_json_string() == config.to_json_string()
    assert loaded.id2label == {0: "a", 1: "b", 2: "c"} and loaded.label_smoothing == 0.1
    assert type(loaded.backbone_config) is type(config.backbone_config)


@pytest.mark.parametrize("name", BACKBONES)
def test_gradient_checkpointing_changes_no_gradient(name):
    model, batch = build(name).train(), inputs(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    gradients = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing == enabled
        model.zero_grad()
        model(**batch, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == sum(1 for p in model.parameters() if p.requires_grad)
    for first, second in zip(*gradients):
        torch.testing.assert_close(first, second)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


# --- loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKBONES)
def test_loading_gives_the_same_logits(name, tmp_path):
    model, batch = build(name), inputs(name)
    model.save_pretrained(tmp_path)
    loaded = auto_class(name).from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model) and torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_loading_restores_shared_weights(tmp_path):
    model = sot.equip("coat_lite_tiny", 3, HEAD, pretrained=False).eval()
    image = torch.randn(1, 3, 224, 224)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(image).logits, model(image).logits)
    assert len(list(loaded.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["bert", "vit", "timm"])
@pytest.mark.parametrize("fusion", ["sum", "late"])
def test_another_number_of_classes_gives_a_new_head(name, fusion, tmp_path):
    model, batch = build(name, fusion=fusion), inputs(name)
    model.save_pretrained(tmp_path)
    loaded = auto_class(name).from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True).eval()
    assert len(loaded.config.id2label) == 5
    output = loaded(**batch, labels=torch.tensor([0, 4, 2, 3]))
    assert output.logits.shape == (4, 5) and output.logits.isfinite().all() and output.loss.isfinite()
    for linear in (loaded.classifier.class_linear, loaded.classifier.word_linear):
        assert (linear.bias == 0).all() and 0.01 < linear.weight.std() < 0.03
    old, new = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(old[key], new[key]) for key in old if "_linear." not in key)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_bare_backbone_is_given_a_new_head(name, tmp_path):
    backbone = build(name).backbone
    backbone.save_pretrained(tmp_path)
    model_class = SoTForImageClassification if name in IMAGE else SoTForSequenceClassification
    model, report = model_class.from_pretrained(tmp_path, num_labels=5, output_loading_info=True)
    assert report["missing_keys"] and all(key.startswith("classifier.") for key in report["missing_keys"])
    assert all(torch.equal(value, backbone.state_dict()[key]) for key, value in model.backbone.state_dict().items())
    logits = model.eval()(**inputs(name)).logits
    assert logits.shape == (4, 5) and logits.isfinite().all()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"sot\.equip"):
        SoTForSequenceClassification.from_pretrained(tmp_path)


# --- losses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "vit", "timm"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_indices_and_of_probabilities(name, smoothing):
    model, batch = build(name, label_smoothing=smoothing), inputs(name)
    labels = torch.tensor([0, 2, 1, 1])
    output = model(**batch, labels=labels)
    log_probabilities = output.logits.log_softmax(-1)
    target = F.one_hot(labels, CLASSES) * (1 - smoothing) + smoothing / CLASSES
    torch.testing.assert_close(output.loss, -(target * log_probabilities).sum(-1).mean())
    soft = torch.rand(4, CLASSES).softmax(-1)
    target = soft * (1 - smoothing) + smoothing / CLASSES
    torch.testing.assert_close(model(**batch, labels=soft).loss, -(target * log_probabilities).sum(-1).mean())
    assert model.config.problem_type is None  # soft labels do not turn it into another problem


def test_late_fusion_adds_two_losses_and_averages_probabilities():
    model, batch = build(fusion="late"), inputs()
    labels = torch.tensor([0, 2, 1, 1])
    output = model(**batch, labels=labels)
    hidden = model.backbone(**batch).last_hidden_state
    words = batch["attention_mask"].bool()
    words[:, 0] = False
    head = model.classifier
    branches = head.class_linear(hidden[:, 0]), head.word_linear(head.pool(hidden, words))
    torch.testing.assert_close(output.loss, sum(F.cross_entropy(branch, labels) for branch in branches))
    torch.testing.assert_close(output.logits.exp(), sum(branch.softmax(-1) for branch in branches) / 2)


def test_loss_of_several_labels():
    model, batch = build(problem_type="multi_label_classification"), inputs()
    labels = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 1]])
    output = model(**batch, labels=labels)
    probability = output.logits.sigmoid()
    expected = -(labels * probability.log() + (1 - labels) * (1 - probability).log()).mean()
    torch.testing.assert_close(output.loss, expected)
    assert torch.equal(model(**batch, labels=labels.float()).loss, output.loss)


@pytest.mark.parametrize("num_classes", [1, 3])
def test_loss_of_a_regression(num_classes):
    model, batch = build(num_classes=num_classes, problem_type="regression" if num_classes > 1 else None), inputs()
    labels = torch.randn(4, num_classes)
    output = model(**batch, labels=labels)
    torch.testing.assert_close(output.loss, (output.logits - labels).square().mean())
    if num_classes == 1:
        assert torch.equal(model(**batch, labels=labels.squeeze(-1)).loss, output.loss)
