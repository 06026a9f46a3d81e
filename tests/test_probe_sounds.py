"""Heads on frozen audio backbones, with the folds of a table."""

import json

import numpy as np
import pytest
import soundfile
from audio_models import audio_folder
from typer.testing import CliRunner

from sot.cli.main import app
from sot.data.sound_sets import TONES, tones
from sot.models.folder import load_model
from sot.probe.features import Features
from sot.probe.rotation import rotated


def probe(*options):
    return CliRunner().invoke(app, ["probe", *map(str, options)])


@pytest.fixture
def table(tmp_path):
    """Twenty tones of four kinds, of various lengths, in two folds."""
    (tmp_path / "audio").mkdir()
    rows = ["filename,category,fold"]
    for number, (wave, kind) in enumerate(tones()[:25]):
        if kind < 4:
            soundfile.write(tmp_path / "audio" / f"{number}.wav", wave.samples[: 8000 + 200 * number], wave.rate)
            rows.append(f"{number}.wav,{TONES[kind]},{1 + number // 5 % 2}")
    (tmp_path / "all.csv").write_text("\n".join(rows))
    return tmp_path / "all.csv"


@pytest.mark.parametrize("family", ["whisper", "hubert", "ast"])
def test_folds_of_a_table_take_turns(tmp_path, table, family):
    folder = audio_folder(family, tmp_path / "model")
    command = ("--model", folder, "--data", table, "--label", "category", "--fold-column", "fold", "--epochs", 1)
    found = probe(*command, "--heads", "gap,mgcrp", "--out", tmp_path / "out", "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["heads"]
    assert [row["head"] for row in rows] == ["gap", "mgcrp"] and all(len(row["scores"]) == 2 for row in rows)
    again = probe(*command, "--heads", "gap,mgcrp", "--out", tmp_path / "out")
    assert again.exit_code == 0 and "over 2 folds" in " ".join(again.stdout.split())
    model, extractor = load_model(tmp_path / "out" / "best")
    assert model.config.modality == "audio" and extractor.sampling_rate == 16_000


def test_the_set_that_comes_with_the_package(tmp_path):
    folder = audio_folder("sew", tmp_path / "model")
    found = probe("--model", folder, "--data", "tones", "--heads", "gap", "--out", tmp_path / "out", "--json")
    assert found.exit_code == 0, found.output
    assert len(json.loads(found.stdout)["heads"][0]["scores"]) == 3


def test_a_fold_is_scored_by_the_others_only():
    labels = np.arange(6.0)
    features = Features(None, np.zeros((6, 2), dtype=np.float16), np.arange(7), labels, 6.0, {})
    turns = rotated(features, ["b", "a", "b", "c", "c", "a"])
    assert [test.rows.tolist() for _, test in turns] == [[1, 5], [0, 2], [3, 4]]
    assert all(sorted([*train.rows, *test.rows]) == list(range(6)) for train, test in turns)
    assert len({json.dumps(part.key) for turn in turns for part in turn}) == 6


def test_mistakes(tmp_path, table):
    folder = audio_folder("hubert", tmp_path / "model")
    for options, said in (
        (("--data", "tones", "--fold-column", "fold"), "fold_column"),
        (("--data", table, "--label", "category", "--fold-column", "none"), "no such column"),
        (("--data", table), "has no column 'label'"),
        (("--data", "nowhere"), "unknown data"),
        (("--data", "tones", "--pair", "b"), "is for texts"),
    ):
        found = probe("--model", folder, *options, "--out", tmp_path / "out")
        assert found.exit_code == 1 and isinstance(found.exception, ValueError) and said in str(found.exception)
