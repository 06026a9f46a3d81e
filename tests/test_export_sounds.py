"""Audio models as torch programs and ONNX."""

import json

import numpy as np
import pytest
import soundfile
from audio_models import audio_backbone
from typer.testing import CliRunner

import sot
from sot.cli.main import app
from sot.evaluation.export import export_model
from sot.models.audio import with_mask


def saved(family, folder):
    backbone, extractor = audio_backbone(family)
    model = sot.equip(backbone, labels=["a", "b"], head={"heads": 2, "left_dim": 4, "right_dim": 4})
    model.processor = with_mask(extractor)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["ast", "whisper", "wav2vec2", "wav2vec2-layer", "hubert", "data2vec"])
def test_torch_program_predicts_as_the_model(family, tmp_path):
    folder = saved(family, tmp_path / "model")
    exported = export_model(folder, "torch", tmp_path / "out" / "model.pt2")
    assert max(exported.differences.values()) < 1e-4
    for number, count in enumerate((8000, 5000)):
        samples = np.random.default_rng(number).standard_normal(count) * 0.1
        soundfile.write(tmp_path / f"{number}.wav", samples, 16_000, "FLOAT")
    files = [str(tmp_path / f"{number}.wav") for number in range(2)]
    rows = []
    for model in (folder, exported.file):
        found = CliRunner().invoke(app, ["predict", str(model), *files, "--json"])
        assert found.exit_code == 0, found.output
        rows.append([json.loads(line)["classes"] for line in found.stdout.splitlines()])
    for one, two in zip(*rows):
        assert dict(one) == pytest.approx(dict(two), abs=1e-4)


@pytest.mark.parametrize("family", ["wavlm", "sew"])
def test_what_no_exporter_follows_is_told_in_a_sentence(family, tmp_path):
    with pytest.raises(ValueError, match="cannot be exported for clips of any length"):
        export_model(saved(family, tmp_path / "model"), "torch", tmp_path / "out" / "model.pt2")
    assert not (tmp_path / "out" / "model.pt2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ast", "whisper", "hubert"])
def test_onnx(family, tmp_path):
    pytest.importorskip("onnxruntime")
    exported = export_model(saved(family, tmp_path / "model"), "onnx", tmp_path / "out" / "model.onnx")
    assert max(exported.differences.values()) < 1e-3
