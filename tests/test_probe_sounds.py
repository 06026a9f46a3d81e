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
from sot.probe import FrozenBackbone, cache_features, open_backbone, read_sounds
from sot.probe.budget import Budget
from sot.probe.choice import draw_folds
from sot.probe.contest import rotated
from sot.probe.features import Features
from sot.probe.fitting import Target, choose_settings
from sot.probe.heads import token_statistics
from sot.probe.names import HEADS


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
    command += ("--rates", "1e-3,1e-2", "--decays", "0.05", "--search-folds", 1)
    found = probe(*command, "--heads", "gap,mgcrp", "--out", tmp_path / "out", "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["heads"]
    assert rows[1]["learning_rate"] in (1e-3, 1e-2) and rows[1]["weight_decay"] == 0.05
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


def test_settings_are_chosen_by_folds_of_the_data_too():
    labels, folds = np.array([0.0, 1.0] * 6), [*"aabbccaabbcc"]
    features = Features(None, np.zeros((12, 2), dtype=np.float16), np.arange(13), labels, 6.0, {})
    train = rotated(features, folds)[0][0]
    drawn = draw_folds(train.labels[train.rows], 8, groups=train.folds_of(train.rows))
    held_out = [train.rows[~fitted].tolist() for fitted in drawn]
    assert held_out == [[2, 3, 8, 9], [4, 5, 10, 11]]
    alone = rotated(features, [*"aabbaabbaabb"])[0][0]  # one fold is left, and cannot be held out of itself
    assert draw_folds(alone.labels[alone.rows], 6, groups=alone.folds_of(alone.rows)).any(1).all()


@pytest.mark.parametrize(("folds", "count"), [(1, 1), (2, 2), (None, 4)])
def test_fewer_folds_choose_settings(monkeypatch, folds, count):
    draw = np.random.default_rng(0)
    words, labels = draw.standard_normal((40, 8)).astype(np.float16), np.arange(40.0) % 2
    features = Features(None, words, np.arange(41), labels, 6.0, {}, folds=np.arange(40) // 10)
    fitted = []
    monkeypatch.setattr("sot.probe.fitting.train_head", lambda head, features, rows, *_, seed: fitted.append(len(rows)))
    budget = Budget(learning_rates=(1e-3,), weight_decays=(0.01,), search_folds=folds)
    choose_settings(HEADS["max"], features, np.arange(40), token_statistics(features), Target(2), budget)
    assert fitted == [30] * count


def test_labels_of_a_table_may_change_and_files_may_be_missing(tmp_path, table, caplog):
    folder = audio_folder("hubert", tmp_path / "model")
    model = open_backbone(FrozenBackbone(str(folder)))
    table.write_text(table.read_text() + f"\nnone.wav,{TONES[0]},2")

    def labels():
        data = read_sounds(model, str(table), label="category", fold="fold")
        return cache_features(model, data.train, tmp_path / "cache").labels

    first = labels()
    assert np.isnan(first[-1]) and not np.isnan(first[:-1]).any()
    assert "1 of 21 samples" in caplog.text and "none.wav" in caplog.text
    table.write_text(table.read_text().replace(TONES[0], "zither"))
    assert not np.array_equal(labels()[:-1], first[:-1])


def test_mistakes(tmp_path, table):
    folder = audio_folder("hubert", tmp_path / "model")
    for options, said in (
        (("--data", "tones", "--fold-column", "fold"), "fold_column"),
        (("--data", table, "--label", "category", "--fold-column", "none"), "no such column"),
        (("--data", table), "has no column 'label'"),
        (("--data", "nowhere"), "unknown data"),
        (("--data", "tones", "--pair", "b"), "is for texts"),
        (("--data", "tones", "--rates", "1e-3,fast"), "--rates takes numbers above 0 with commas"),
        (("--data", "tones", "--decays", "0"), "--decays takes numbers above 0 with commas"),
    ):
        found = probe("--model", folder, *options, "--out", tmp_path / "out")
        assert found.exit_code == 1 and isinstance(found.exception, ValueError) and said in str(found.exception)
