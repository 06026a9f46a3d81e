"""Audio models of transformers with the head: each family as a tiny random one."""

import numpy as np
import pytest
import torch
from audio_models import FAMILIES, RATE, WAVEFORMS, audio_backbone, audio_folder
from transformers import AutoModelForAudioClassification, Speech2TextConfig, Speech2TextModel, WhisperModel, pipeline

import sot
from sot.models.audio import clip_seconds
from sot.models.folder import load_model
from sot.training.starting import add_adapters, merge_adapters


def equipped(family, folder=None, **options):
    backbone, extractor = audio_backbone(family)
    model = sot.equip(backbone, 3, {"heads": 2, "left_dim": 4, "right_dim": 4}, **options).eval()
    if model.processor is None:
        model.processor = sot.models.audio.with_mask(extractor)
    return model


def clips(*lengths):
    draw = np.random.default_rng(0)
    return [draw.standard_normal(length).astype(np.float32) * 0.1 for length in lengths]


def batch(model, sounds):
    return dict(model.processor(sounds, sampling_rate=RATE, padding=padding(model), return_tensors="pt"))


def padding(model):
    return "max_length" if model.main_input_name == "input_features" else True


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward(family):
    model = equipped(family)
    output = model(**batch(model, clips(8000, 8000)), labels=torch.tensor([0, 2]))
    assert model.config.modality == "audio" and output.logits.shape == (2, 3)
    output.loss.backward()
    still = {name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None}
    assert not still - {"backbone.masked_spec_embed"}
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_never_matters(family):
    model = equipped(family)
    sounds = clips(8000, 5000, 12345, 5000)
    with torch.no_grad():
        together = model(**batch(model, sounds)).logits
        alone = torch.cat([model(**batch(model, [sound])).logits for sound in sounds])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_save_load_and_pipeline(family, tmp_path):
    model = equipped(family, labels=["dog", "cat", "rain"])
    model.save_pretrained(tmp_path)
    sound = clips(6000)[0]
    inputs = batch(model, [sound])
    with torch.no_grad():
        expected = model(**inputs).logits
        loaded, extractor = load_model(tmp_path)
        assert type(extractor) is type(model.processor)
        torch.testing.assert_close(loaded(**inputs).logits, expected, atol=0, rtol=0)
        auto = AutoModelForAudioClassification.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(auto(**inputs).logits, expected, atol=0, rtol=0)
    found = pipeline("audio-classification", str(tmp_path))(sound)
    scores = {each["label"]: each["score"] for each in found}
    wanted = dict(zip(["dog", "cat", "rain"], expected.softmax(-1)[0].tolist()))
    assert scores == pytest.approx(wanted, abs=1e-5)


def test_ast_reads_its_class_token_and_not_the_distillation_token_as_a_word():
    model = equipped("ast")
    inputs = batch(model, clips(8000))
    tokens, hidden = model.tokens(**inputs), model.backbone(inputs["input_values"]).last_hidden_state
    assert model.config.has_class_token and tokens.grid[0] * tokens.grid[1] == hidden.shape[1] - 2
    torch.testing.assert_close(tokens.class_token, hidden[:, 0])
    torch.testing.assert_close(tokens.word_tokens, hidden[:, 2:])


def test_words_of_whisper_are_the_frames_that_the_clip_fills():
    model = equipped("whisper")
    tokens = model.tokens(**batch(model, clips(16000, 4000)))
    assert tokens.mask.sum(1).tolist() == [50, 13] and tokens.word_tokens.shape[1] == 100
    assert tokens.mask[1, :13].all()


@pytest.mark.parametrize("family", WAVEFORMS)
def test_words_of_waveforms_are_frames(family):
    model = equipped(family)
    tokens = model.tokens(**batch(model, clips(8000, 4000)))
    alone = model.tokens(**batch(model, clips(4000)))
    assert tokens.mask.sum(1).tolist() == [tokens.word_tokens.shape[1], alone.word_tokens.shape[1]]


def test_hidden_states_of_several_lengths_are_refused_in_words():
    model = equipped("wav2vec2")
    with pytest.raises(ValueError, match="pass one length"):
        model(**batch(model, clips(8000, 4000)), output_hidden_states=True)
    assert len(model(**batch(model, clips(8000, 8000)), output_hidden_states=True).hidden_states) == 3


def test_whole_whisper_gives_its_encoder(tmp_path):
    encoder, extractor = audio_backbone("whisper")
    whole = WhisperModel(encoder.config)
    model = sot.equip(whole, 2)
    torch.testing.assert_close(model.backbone.conv1.weight, whole.encoder.conv1.weight)
    whole.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    loaded = sot.equip(tmp_path, 2)
    torch.testing.assert_close(loaded.backbone.conv1.weight, whole.encoder.conv1.weight)
    assert not any("decoder" in name for name, _ in loaded.named_parameters())
    assert loaded.processor(clips(8000)[0], sampling_rate=RATE).attention_mask.sum() == 50


def test_equip_of_a_folder_and_depth(tmp_path):
    folder = audio_folder("hubert", tmp_path)
    model = sot.equip(folder, labels=["a", "b"], depth=1)
    assert len(model.backbone.encoder.layers) == 1 and model.config.head["fusion"] == "word"
    assert model.processor.return_attention_mask


def test_seconds_that_a_model_reads():
    assert clip_seconds(*about(equipped("whisper"))) == 2.0
    assert clip_seconds(*about(equipped("ast"))) == pytest.approx(0.64)
    model = equipped("sew")
    assert clip_seconds(*about(model)) == 10.0
    model.config.max_seconds = 3.0
    assert clip_seconds(*about(model)) == 3.0


def about(model):
    return model.config, model.processor


def test_mistakes_are_told_in_words():
    model = equipped("wav2vec2")
    with pytest.raises(ValueError, match="pass input_values"):
        model()
    size = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 9}
    with pytest.raises(ValueError, match=r"Speech2Text.* does not say which"):
        sot.equip(Speech2TextModel(Speech2TextConfig(**size)), 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_trains_every_adapter_and_is_merged(family):
    pytest.importorskip("peft")
    model = equipped(family)
    inputs = batch(model, clips(8000))
    before = model(**inputs).logits
    add_adapters(model, 2)
    adapters = {name: weight for name, weight in model.named_parameters() if "lora" in name}
    for weight in adapters.values():
        weight.data += 0.1
    after = model(**inputs).logits
    assert not torch.allclose(before, after, atol=1e-4)
    after.sum().backward()
    assert not [name for name, weight in adapters.items() if weight.grad is None]
    merged, weights = merge_adapters(model, model.state_dict())
    assert not any("lora" in name for name in weights)
    torch.testing.assert_close(merged.eval()(**inputs).logits, after, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_of_peft_is_saved_with_the_head(family, tmp_path):
    peft = pytest.importorskip("peft")
    model = equipped(family)
    model.save_pretrained(tmp_path / "base")
    inputs = batch(model, clips(8000))
    layers = [name for name, layer in model.backbone.named_modules() if isinstance(layer, torch.nn.Linear)]
    settings = peft.LoraConfig(r=2, target_modules=layers, modules_to_save=["classifier"])
    adapted = peft.get_peft_model(model, settings).eval()
    before = adapted(**inputs).logits
    for weight in adapted.parameters():
        weight.data += 0.1 * weight.requires_grad
    expected = adapted(**inputs).logits
    assert not torch.allclose(before, expected)
    adapted.save_pretrained(tmp_path / "adapter")
    base, _ = load_model(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(**inputs).logits, expected)
