"""The time line of a sound: what its moments contribute, and when."""

import json

import numpy as np
import pytest
import soundfile
import torch
from audio_models import audio_backbone
from typer.testing import CliRunner

import sot
from sot.cli.main import app
from sot.explain import explain_item, explain_sound
from sot.models.audio import with_mask

HEAD = {"heads": 2, "left_dim": 4, "right_dim": 4}


def model_of(family, pool=None):
    backbone, extractor = audio_backbone(family)
    model = sot.equip(backbone, labels=["dog", "cat", "rain"], head={"pool": pool} if pool else HEAD).eval()
    model.processor = with_mask(extractor)
    return model


def sound(samples=8000):
    return np.random.default_rng(0).standard_normal(samples).astype(np.float32) * 0.1


@pytest.mark.parametrize(("family", "moments", "seconds"), [("whisper", 25, 0.5), ("hubert", 40, 0.5), ("ast", 5, 0.5)])
def test_moments_sum_to_the_words_part_of_the_logit(family, moments, seconds):
    model = model_of(family)
    found = explain_sound(model, model.processor, sound(), target="cat", truth="cat")
    words = found.contributions.word_part[1]
    assert found.method == "evidence" and found.columns[0].values.sum() == pytest.approx(words, rel=1e-4, abs=1e-6)
    assert abs(len(found.columns[0].values) - moments) <= 1 and found.edges[-1] == pytest.approx(seconds, abs=0.11)
    spans = found.spans(5)
    assert len(spans) == 5 and spans[0][0] == 0 and spans[-1][1] == found.edges[-1]
    assert sum(value for *_, value in spans) == pytest.approx(words, rel=1e-4, abs=1e-6)
    assert found.png().startswith(b"\x89PNG") and "edges" in found.arrays()


def test_a_pooling_without_evidence_has_gradients():
    model = model_of("wav2vec2-layer", "max")
    found = explain_item(model, model.processor, (sound(), 16_000))
    assert found.method == "gradient" and len(found.columns[0].values) == 39
    with pytest.raises(ValueError, match="accepted method: gradient"):
        explain_sound(model, model.processor, sound(), method="evidence")


def test_what_is_loud_speaks(tmp_path):
    """A head that adds up energy finds the half of a clip that has some."""
    model = model_of("wav2vec2-layer", "gap")
    quiet = np.concatenate([np.zeros(8000), sound(8000)]).astype(np.float32)
    with torch.no_grad():
        words = model.tokens(**model.processor(quiet, sampling_rate=16_000, return_tensors="pt")).word_tokens[0]
        direction = words[-30:].mean(0) - words[:30].mean(0)
        model.classifier.word_linear.weight[0] = direction
    values = explain_sound(model, model.processor, quiet, target="dog").columns[0].values
    assert values[-30:].mean() > values[:30].mean()


def test_command(tmp_path):
    model_of("hubert").save_pretrained(tmp_path / "model")
    soundfile.write(tmp_path / "a.wav", sound(), 16_000)
    run = CliRunner().invoke
    command = ["explain", str(tmp_path / "model"), str(tmp_path / "a.wav"), "--out", str(tmp_path / "out")]
    found = run(app, [*command, "--json", "--label", "dog"])
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert len(record["spans"]) == 20 and record["spans"][-1]["end"] == pytest.approx(0.5)
    assert (tmp_path / "out" / "a.png").is_file() and (tmp_path / "out" / "a.npz").is_file()
    assert "0.00 to 0.0" in run(app, command).stdout
    for options, said in (
        (["--text", "a"], "is a model for sounds"),
        (["--method", "gradcam"], "for sounds; accepted: evidence, gradient"),
        (["--word-model", str(tmp_path / "model")], "--word-model"),
    ):
        refused = run(app, [*command, *options])
        assert refused.exit_code == 1 and said in str(refused.exception)
