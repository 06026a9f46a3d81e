"""Accuracy on corrupted images."""

import json

import numpy as np
import pytest
from PIL import Image
from test_cli import sot

from sot.data.images import seeded
from sot.evaluation.robustness import Corrupted, corruption, corruption_names, evaluate_corrupted, mean_accuracy


@pytest.fixture(scope="module")
def shades(tmp_path_factory):
    """Dark and light images: brightness tells the classes apart, and corrupting it does not."""
    folder = tmp_path_factory.mktemp("shades")
    draw = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 12)):
        for name, level in (("dark", 60), ("light", 190)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(draw.normal(level, 8, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def trained(shades, tmp_path_factory):
    out = tmp_path_factory.mktemp("robust") / "run"
    small = ("--set", "model_args={embed: naive, patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}")
    steps = ("--set", "epochs=8", "--set", "batch_size=16", "--set", "lr=3e-3", "--logger", "none")
    result = sot("train", "--model", "sot_7", "--data", shades, "--out", out, "--recipe", "digits", *small, *steps)
    assert result.returncode == 0, result.stderr
    return out


def test_corruptions_change_pictures_the_more_the_worse_and_come_again_with_the_seed():
    picture = Image.fromarray(np.full((32, 32, 3), 128, dtype=np.uint8))

    def noisy(severity, seed):
        with seeded(seed):
            return np.asarray(corruption("gaussian_noise", severity)(picture)).astype(float)

    assert np.abs(noisy(5, 0) - 128).mean() > 2 * np.abs(noisy(1, 0) - 128).mean() > 0
    assert (noisy(3, 1) == noisy(3, 1)).all() and (noisy(3, 1) != noisy(3, 2)).any()


def test_names_are_groups_or_corruptions():
    assert len(corruption_names("common")) == 15 and len(corruption_names("all")) == 19
    assert corruption_names("fog, snow") == ["fog", "snow"]
    with pytest.raises(ValueError, match=r"unknown corruption 'rain'; accepted: common, all, .*fog"):
        corruption_names("fog,rain")


def test_the_command_shows_clean_and_corrupted_accuracy(shades, trained):
    words = ("evaluate", trained, "--data", shades, "--corruptions", "gaussian_noise,brightness", "--severities", "1,5")
    result = sot(*words)
    assert result.returncode == 0, result.stderr
    assert "gaussian_noise" in result.stdout and "severity 5" in result.stdout
    found = json.loads(sot(*words, "--json").stdout)
    clean = json.loads(sot("evaluate", trained, "--data", shades, "--json").stdout)["accuracy"]
    assert found["clean"] == clean == 1.0, "shades are easy"
    assert [(row["corruption"], row["severity"]) for row in found["rows"]] == [
        *(("gaussian_noise", 1), ("gaussian_noise", 5), ("brightness", 1), ("brightness", 5))
    ]
    assert found["corrupted"] == pytest.approx(np.mean([row["accuracy"] for row in found["rows"]]))
    assert found["rows"][3]["accuracy"] < 1.0, "what was dark is light"


def test_some_pictures_are_the_same_ones_every_time(shades, trained):
    found = [evaluate_corrupted(trained, str(shades), ["shot_noise"], [5], samples=10) for _ in range(2)]
    assert found[0] == found[1] and (10 * found[0][1].accuracy) % 1 == pytest.approx(0)
    short = json.loads(sot("evaluate", trained, "--data", shades, "--samples", 10, "--json").stdout)
    assert sum(row[1] for row in short["classes"]) == 10
    refused = sot("evaluate", trained, "--data", shades, "--samples", 100)
    assert refused.returncode == 2 and "24 samples to draw from, fewer than 100" in refused.stderr


def test_the_mean_leaves_the_clean_pictures_out():
    assert mean_accuracy([Corrupted("clean", 0, 1.0), Corrupted("fog", 1, 0.5), Corrupted("fog", 3, 0.1)]) == 0.3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--corruptions", "rain"], "unknown corruption 'rain'"),
        (["--corruptions", "fog", "--severities", "6"], "a severity must be from 1 to 5, got 6"),
        (["--corruptions", "fog", "--severities", "mild"], "--severities are numbers from 1 to 5 such as 1,3,5"),
    ],
)
def test_what_cannot_be_is_refused(words, message, shades, trained):
    result = sot("evaluate", trained, "--data", shades, *words)
    assert result.returncode == 2 and message in result.stderr


def test_small_pictures_are_refused():
    with pytest.raises(ValueError, match="at least 32 pixels a side"):
        corruption("fog", 1)(Image.new("RGB", (31, 64)))
