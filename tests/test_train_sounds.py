"""Sounds from training to prediction: commands and sot.Classifier."""

import json

import numpy as np
import pytest
import soundfile
from audio_models import audio_folder
from transformers import pipeline
from typer.testing import CliRunner

import sot
from sot.cli.main import app
from sot.data.sound_sets import TONES, tones

SHORT = ("--set", "epochs=2", "--set", "min_steps=0", "--set", "lr=3e-3", "--set", "train_samples=40")


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny model of tones, as `sot train` leaves it."""
    place = tmp_path_factory.mktemp("sounds")
    folder = audio_folder("wav2vec2-layer", place / "model")
    out = place / "run"
    found = run("train", "--model", folder, "--data", "tones", "--out", out, "--logger", "none", *SHORT)
    assert found.exit_code == 0, found.output
    return out


def files(folder):
    for number, (wave, kind) in enumerate(tones()[:10]):
        place = folder / TONES[kind]
        place.mkdir(parents=True, exist_ok=True)
        soundfile.write(place / f"{number}.flac", wave.samples[: 9000 + 100 * number], wave.rate)
    return folder


def test_training_leaves_a_model_for_pipelines(trained):
    config = json.loads((trained / "config.json").read_text())
    assert config["modality"] == "audio" and set(config["label2id"]) == set(TONES)
    assert "audio-classification" in (trained / "README.md").read_text()
    found = pipeline("audio-classification", str(trained))(tones()[0][0].samples)
    assert {each["label"] for each in found} == set(TONES)


def test_evaluate_and_predict(trained, tmp_path):
    folder = files(tmp_path / "files")
    scored = run("evaluate", trained, "--data", folder, "--json")
    assert scored.exit_code == 0, scored.output
    assert 0 <= json.loads(scored.stdout)["accuracy"] <= 1
    seen = run("evaluate", trained, "--data", "tones", "--json")
    assert sum(row[1] for row in json.loads(seen.stdout)["classes"]) == 40  # of 200, what it was not trained on
    (folder / "bad.wav").write_text("no")
    found = run("predict", trained, folder, "--json")
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(rows) == 11 and sum(row["error"] is not None for row in rows) == 1 and found.exit_code == 1
    assert "1 of 11 inputs could not be read" in str(found.exception)


def test_mistakes_are_told_before_training(trained, tmp_path):
    folder, out = files(tmp_path / "files"), tmp_path / "out"
    audio = audio_folder("sew", tmp_path / "sew")
    for arguments, said in (
        (("train", "--model", "test_vit", "--data", folder, "--out", out), "is a timm model"),
        (("train", "--model", audio, "--data", "digits", "--out", out), "model of images|audio"),
        (("train", "--model", audio, "--data", "tones", "--out", out, "--recipe", "digits"), "is for images"),
        (
            ("train", "--model", audio, "--data", "tones", "--out", out, "--set", "seconds=0"),
            "seconds must be",
        ),
        (("evaluate", trained, "--data", "digits"), "holds no sounds"),
        (("evaluate", trained, "--data", "tones", "--corruptions", "noise"), "is a model for sounds"),
        (("predict", trained, "--text", "a"), "is a model for sounds"),
        (("predict", trained, tmp_path / "sew"), "holds no sounds"),
    ):
        found = run(*arguments)
        assert found.exit_code == 1 and isinstance(found.exception, ValueError), found.output
        assert any(part in str(found.exception) for part in said.split("|")), found.exception
    assert not out.exists()


def test_seconds_of_a_recipe_are_those_of_the_model(tmp_path):
    folder = audio_folder("hubert", tmp_path / "model")
    settings = (*SHORT, "--set", "seconds=0.4", "--set", "train_samples=10", "--set", "epochs=1")
    found = run("train", "--model", folder, "--data", "tones", "--out", tmp_path / "run", "--head", "none", *settings)
    assert found.exit_code == 0, found.output
    assert json.loads((tmp_path / "run" / "config.json").read_text())["max_seconds"] == 0.4


def test_classifier_reads_files_and_samples(tmp_path):
    backbone = audio_folder("wav2vec2-layer", tmp_path / "model")
    waves = [wave.samples[: 8000 + 100 * number] for number, (wave, _) in enumerate(tones()[:50])]
    labels = [TONES[kind] for _, kind in tones()[:50]]
    fitted = sot.Classifier(backbone, head="gap", verbose=0).fit(waves, labels)
    assert fitted.score(waves, labels) > 0.4
    soundfile.write(tmp_path / "a.wav", waves[0], 16_000, "FLOAT")
    one, two = fitted.predict_proba([tmp_path / "a.wav"]), fitted.predict_proba([(waves[0], 16_000)])
    np.testing.assert_allclose(one, two, atol=1e-6)
    np.testing.assert_allclose(one, fitted.predict_proba(waves)[:1], atol=1e-5)  # whatever shares its batch
    with pytest.raises(ValueError, match=r"X\[1\]: .*floating-point"):
        fitted.predict([waves[0], [1, 2, 3]])
    with pytest.raises(FileNotFoundError, match=r"X\[0\]: no such sound"):
        fitted.predict(["nowhere.wav"])
    found = fitted.explain((waves[0], 16_000))
    assert found.edges[-1] == pytest.approx(0.5) and found.target in TONES
    fitted.save(tmp_path / "saved")
    said = pipeline("audio-classification", str(tmp_path / "saved"))(waves[0])
    assert said[0]["score"] == pytest.approx(one.max(), abs=1e-5)
    assert run("predict", tmp_path / "saved", tmp_path / "a.wav", "--json").exit_code == 0


def test_classifier_adapts_its_backbone(tmp_path):
    backbone = audio_folder("hubert", tmp_path / "model")
    waves, labels = [wave.samples[:8000] for wave, _ in tones()[:20]], [TONES[kind] for _, kind in tones()[:20]]
    adapted = sot.Classifier(backbone, adapt="finetune", adapt_steps=2, verbose=0).fit(waves, labels)
    assert np.isfinite(adapted.predict_proba(waves)).all()
    with pytest.raises(ValueError, match="is for texts, and this model reads sounds"):
        sot.Classifier(backbone, adapt="contrastive", verbose=0).fit(waves, labels)
