"""Saved folders: what they say of themselves, and that nothing in them is run."""

import json
import shutil

import pytest
import torch
from test_classifier import build, inputs

import sot
from sot.limits import read_settings
from sot.models.configuration import SoTConfig
from sot.models.folder import class_names, folder_modality, load_config, load_model, trained_length

CODE = {"AutoConfig": "code.Config", "AutoModelForSequenceClassification": "code.Model"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, stand_ins):
    root = tmp_path_factory.mktemp("folders")
    head = {"heads": 2, "left_dim": 3, "right_dim": 3}
    sot.equip("test_vit", labels=["a", "b"], head=head, pretrained=False).save_pretrained(root / "image")
    text = sot.equip(stand_ins["google-bert/bert-base-uncased"], labels=["a", "b"], head=head)
    text.save_pretrained(root / "text")
    return root


def change(folder, **values):
    """Write other settings into a config.json; None takes one out."""
    settings = json.loads((folder / "config.json").read_text()) | values
    kept = {name: value for name, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_folder_says_what_it_reads(folders, tmp_path, modality):
    assert json.loads((folders / modality / "config.json").read_text())["modality"] == modality
    shutil.copytree(folders / modality, tmp_path / "old")
    for folder in (folders / modality, change(tmp_path / "old", modality=None)):  # as the first ones were saved
        assert folder_modality(folder) == modality == load_config(folder).modality
        model, processor = load_model(folder)
        assert model.config.modality == modality and processor is not None and not model.training
        assert class_names(folder) == ["a", "b"]


def test_a_modality_that_does_not_fit_is_named():
    for settings, message in (
        ({"modality": "smell"}, "modality must be one of image, text, audio, got 'smell'"),
        ({"modality": "image"}, "a model of modality 'image' needs a layout"),
        ({"modality": "text", "layout": {"dim": 8}}, "a model of modality 'text' has no layout"),
    ):
        with pytest.raises(ValueError, match=message):
            SoTConfig(**settings)


@pytest.mark.parametrize("model_type", ["second-order-transformer", "sot", "unheard-of"])
def test_a_folder_with_code_is_refused_without_a_question(folders, tmp_path, monkeypatch, model_type):
    folder = tmp_path / "code"
    shutil.copytree(folders / "text", folder)
    change(folder, auto_map=CODE, model_type=model_type)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(ValueError, match=r"brings code of its own \(auto_map in its config.json\), which is not run"):
        load_model(folder)
    if model_type == "unheard-of":
        with pytest.raises(ValueError, match="brings code of its own: pass trust_remote_code=True to run it"):
            sot.equip(folder, 2)
    assert not (tmp_path / "ran").exists()


def test_texts_are_cut_as_in_training(folders, tmp_path):
    shutil.copytree(folders / "text", tmp_path / "run")
    assert trained_length(tmp_path / "run") is None
    (tmp_path / "run" / "recipe.yaml").write_text("max_length: 7\n")
    assert load_model(tmp_path / "run")[1].model_max_length == 7
    for content in ("max_length: [", "- 1", "epochs: 3", "max_length: many"):
        (tmp_path / "run" / "recipe.yaml").write_text(content)
        with pytest.raises(ValueError, match=r"recipe.yaml is damaged"):
            load_model(tmp_path / "run")


@pytest.mark.parametrize("kind", ["image", "text", "branches"])
def test_tokens_take_what_the_model_takes(kind):
    model, given = build(kind), inputs(kind)
    wanted = {} if kind == "branches" else {"output_hidden_states": True}
    tokens, result = model.tokens(**given, **wanted), model(**given, **wanted)
    assert torch.equal(model.classify(tokens, None)[1], result.logits)
    assert tokens.class_token.shape == (2, model.config.hidden_size) and model.config.has_class_token
    assert (tokens.mask is None) == (kind != "text") == (tokens.grid is not None)
    if wanted:
        for ours, theirs in zip(tokens.outputs.hidden_states, result.hidden_states, strict=True):
            assert torch.equal(ours, theirs)
    half = tokens.to(torch.bfloat16)
    assert half.word_tokens.dtype == torch.bfloat16 == [*half.branches, half][0].word_tokens.dtype
    assert tokens.word_tokens.dtype == torch.float32 and half.grid == tokens.grid


def test_words_of_a_tokenizer_are_no_settings(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"type": "WordPiece", "vocab": {"player": 2447, "height": 9000}}}))
    assert read_settings(file)["model"]["vocab"]["player"] == 2447
    file.write_text(json.dumps({"num_layers": 2447}))
    with pytest.raises(ValueError, match="asks for num_layers=2,447"):
        read_settings(file)
