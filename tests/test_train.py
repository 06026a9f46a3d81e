"""Training commands end to end, on tiny models: resume after kill -9, damage, NaN, evaluation, prediction."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from test_cli import sot

from sot.core.head import HeadConfig
from sot.data.images import ImageSet, load_images, seeded
from sot.evaluation.evaluate import open_images
from sot.files import digest
from sot.training.engine import Diverged
from sot.training.image_model import Collate, build_model, data_config
from sot.training.recipe import Recipe, load_recipe
from sot.training.run_folder import is_whole, last_whole_checkpoint
from sot.training.train_images import train_images

SETTINGS = [
    *(
        "epochs=2",
        "batch_size=16",
        "img_size=32",
        "ema=0.9",
        "mixup=0.8",
        "cutmix=1.0",
        "erasing=0.25",
        "drop_path=0.1",
    ),
    "head={heads: 2, left_dim: 3, right_dim: 3, dropout: 0.5}",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums round differently over another number of threads: here and in the processes started from here it is one."""
    threads, torch_threads = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(torch_threads)
    os.environ.pop("OMP_NUM_THREADS") if threads is None else os.environ.update(OMP_NUM_THREADS=threads)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Three classes of coloured noise: 48 images to train on, 12 to validate on."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        for number, name in enumerate(("red", "green", "blue")):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                noise = draw.integers(0, 80, (20, 24, 3), dtype=np.uint8)
                noise[..., number] += 120
                Image.fromarray(noise).save(root / split / name / f"{index}.png")
    return root


def arguments(pictures, out, *more):
    options = [option for setting in SETTINGS for option in ("--set", setting)]
    return [
        "train",
        "--model",
        "test_vit",
        "--data",
        pictures,
        "--out",
        out,
        "--logger",
        "none",
        "--recipe",
        "digits",
        *options,
        *more,
    ]


@pytest.fixture(scope="module")
def finished(pictures, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    result = sot(*arguments(pictures, out))
    assert result.returncode == 0, result.stderr
    return out


def test_a_run_folder_holds_everything(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "recipe.yaml", "metrics.csv"} <= names
    assert {"metrics.json", "curves.png", "README.md", "run.json"} <= names
    rows = json.loads((finished / "metrics.json").read_text())
    assert [row["epoch"] for row in rows] == [1, 2] and all("eval_accuracy" in row for row in rows)
    assert load_recipe(str(finished / "recipe.yaml")).ema == 0.9
    assert Image.open(finished / "curves.png").size[0] > 500
    config = json.loads((finished / "config.json").read_text())
    assert config["id2label"] == {"0": "blue", "1": "green", "2": "red"}


@pytest.mark.parametrize("moment", ["after the first checkpoint", "while the second is written"])
def test_killed_and_resumed_ends_with_the_same_bits(moment, pictures, finished, tmp_path):
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "sot", *map(str, arguments(pictures, out))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 240

    def ready():
        if moment == "after the first checkpoint":
            return (out / "checkpoint-3").exists()
        return any((out / "unfinished").glob("checkpoint-6/*"))

    while not ready() and process.poll() is None and time.time() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "model.safetensors").exists()
    result = sot(*arguments(pictures, out, "--resume"))
    assert result.returncode == 0, result.stderr
    expected, actual = load_file(finished / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_damaged_checkpoint_falls_back_to_the_one_before(pictures, finished, tmp_path, caplog):
    out = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(finished), str(out)], check=True)
    (out / "model.safetensors").unlink()
    with (out / "checkpoint-6" / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"damage")
    assert not is_whole(out / "checkpoint-6") and last_whole_checkpoint(out) == out / "checkpoint-3"
    assert "checkpoint-6 is damaged or unfinished: falling back to the one before" in caplog.text
    result = sot(*arguments(pictures, out, "--resume"))
    assert result.returncode == 0, result.stderr
    expected, actual = load_file(finished / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def on_a_full_disk(*command):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    limited = f"{limit}; from sot.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", limited, *map(str, command)], capture_output=True, text=True, timeout=300
    )


def test_a_full_disk_keeps_the_last_checkpoint_and_says_so(pictures, finished, tmp_path):
    out = tmp_path / "full"
    subprocess.run(["cp", "-r", str(finished), str(out)], check=True)
    subprocess.run(["rm", "-r", str(out / "checkpoint-6"), str(out / "model.safetensors")], check=True)
    result = on_a_full_disk(*arguments(pictures, out, "--resume"))
    assert "Could not write checkpoint-6" in result.stderr and "the last checkpoint is" in result.stderr
    assert result.returncode == 2 and "Traceback" not in result.stderr  # the model itself does not fit either
    assert last_whole_checkpoint(out) == out / "checkpoint-3"
    assert sot(*arguments(pictures, out, "--resume")).returncode == 0
    expected, actual = load_file(finished / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_full_disk_leaves_no_part_of_the_best_epoch(pictures, tmp_path):
    command = arguments(pictures, out := tmp_path / "full", "--metric", "loss")
    assert sot(*command).returncode == 0
    for gone in (out / "checkpoint-6", out / "model.safetensors"):
        subprocess.run(["rm", "-r", str(gone)], check=True)
    result = on_a_full_disk(*command, "--resume")
    assert result.returncode == 2 and f"cannot write {out / 'unfinished' / 'best'}" in result.stderr
    assert (out / "checkpoint-3").is_dir() and not (out / "unfinished").exists()


def test_nan_loss_stops_with_step_rate_and_checkpoint(pictures, tmp_path):
    recipe = Recipe(epochs=1, batch_size=16, img_size=32, lr=1e30, head={"heads": 2, "left_dim": 3, "right_dim": 3})
    with pytest.raises(Diverged, match=r"the loss is (nan|inf) at step \d+, learning rate .*no checkpoint yet"):
        train_images("test_vit", str(pictures), tmp_path / "nan", recipe, HeadConfig(**recipe.head), report_to="none")


def test_evaluate_agrees_with_predict_and_says_among_which_classes(pictures, finished, tmp_path):
    picture = tmp_path / "confusion.png"
    result = sot("evaluate", finished, "--data", pictures, "--json", "--confusion", picture)
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)
    assert scores["note"] == "among all 3 classes" and picture.is_file()
    files = sorted((pictures / "val").rglob("*.png"))
    (tmp_path / "broken.png").write_bytes(b"not an image")
    result = sot("predict", finished, *files, tmp_path / "broken.png", "--json", "--batch-size", "5")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 2 and "1 of 13 inputs could not be read" in result.stderr
    assert rows[-1]["error"] and len(rows) == 13
    right = [row["classes"][0][0] == Path(row["source"]).parent.name for row in rows[:-1]]
    assert np.mean(right) == pytest.approx(scores["accuracy"])
    assert all(sum(score for _, score in row["classes"]) == pytest.approx(1, abs=1e-5) for row in rows[:-1])


def test_conventional_head_and_models_without_class_token(pictures, tmp_path):
    for model in ("test_vit", "test_resnet"):
        out = tmp_path / model
        options = [
            "--head",
            "none",
            "--recipe",
            "digits",
            "--set",
            "epochs=1",
            "--set",
            "batch_size=16",
            "--set",
            "img_size=32",
        ]
        result = sot("train", "--model", model, "--data", pictures, "--out", out, "--logger", "none", *options)
        assert result.returncode == 0, result.stderr
        head = json.loads((out / "config.json").read_text())["head"]
        assert (head["fusion"], head["pool"]) == (("class", "mgcrp") if model == "test_vit" else ("word", "gap"))


@pytest.mark.parametrize(
    "change, message",
    [
        (["--data", "nowhere"], "unknown data 'nowhere'; accepted: digits, a folder"),
        (["--recipe", "sot_huge"], "unknown recipe 'sot_huge'"),
        (["--set", "rate=1"], "unknown recipe key 'rate'"),
        (["--head", "pool=avg"], "unknown pool 'avg'"),
        (["--head", "pool"], "key=value, got 'pool'"),
        (["--model", "no_such_net"], "unknown model 'no_such_net'"),
        (["--recipe", "bert"], "recipe bert is for text"),
        (["--data", ""], "unknown data ''; accepted: digits, a folder"),
        (["--set", "model_args={in_chans: 1}"], "in_chans of model_args must be 3, as images are read in RGB, got 1"),
        (["--set", "model_args={num_classes: 7}"], "model_args cannot set num_classes: the data"),
        (["--set", "batch_size=0"], "batch_size must be at least 1"),
        (["--logger", "paper"], "--logger must be tensorboard"),
    ],
)
def test_mistakes_end_before_any_training(change, message, tmp_path):
    base = {"--model": "test_vit", "--data": "digits", "--out": str(tmp_path / "out")}
    base |= dict([change])
    result = sot("train", *(word for pair in base.items() for word in pair))
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"batch_size": 15}, "mix pairs of images: a share of 15 must be even"),
        ({"batch_size": 64}, "batch_size must be at most 48, got 64"),
        ({"batch_size": 16, "train_samples": 49}, "there are 48 samples to draw from, fewer than 49"),
    ],
)
def test_batches_that_cannot_be_made_leave_the_old_run_alone(settings, message, pictures, tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "run.json").write_text("{}")
    recipe = Recipe(epochs=1, img_size=32, cutmix=1.0, **settings)
    with pytest.raises(ValueError, match=message):
        train_images("test_vit", str(pictures), tmp_path, recipe, None, overwrite=True, report_to="none")
    assert (tmp_path / "model.safetensors").exists()


TINY_MAE = ("vit_base_patch16_224.mae", {"depth": 1, "embed_dim": 64, "num_heads": 2})


@pytest.mark.parametrize("model, model_args", [("test_convnext", {}), TINY_MAE])
def test_validation_while_training_is_what_evaluate_computes(model, model_args, pictures, tmp_path):
    """At another size of a model that takes any, and with a tag whose preprocessing is its own."""
    recipe = Recipe(epochs=1, batch_size=16, img_size=32, lr=1e-2, model_args=model_args)
    scores = train_images(model, str(pictures), tmp_path / "run", recipe, None, report_to="none")
    test = open_images(tmp_path / "run", str(pictures))
    assert test.transform(Image.new("RGB", (50, 40))).shape == (3, 32, 32)
    evaluation = test.evaluate(16, iter)
    assert evaluation.scores["loss"] == pytest.approx(scores["eval_loss"], rel=1e-5)
    assert evaluation.scores["accuracy"] == pytest.approx(scores["eval_accuracy"])


def test_training_sees_the_preprocessing_of_the_tag_that_is_saved():
    name, model_args = TINY_MAE
    config = data_config(build_model(name, ["a", "b"], Recipe(img_size=48, model_args=model_args), None, False))
    expected = timm.get_pretrained_cfg(name)
    assert config["mean"] == expected.mean != timm.get_pretrained_cfg("vit_base_patch16_224").mean
    assert config["std"] == expected.std and config["interpolation"] == expected.interpolation
    assert config["input_size"] == (3, 48, 48)


def test_an_existing_run_is_refused_and_another_model_cannot_resume_it(pictures, finished):
    result = sot(*arguments(pictures, finished))
    assert result.returncode == 2 and "exists: continue it with --resume or replace it" in result.stderr
    other = [word if word != "test_vit" else "test_vit2" for word in arguments(pictures, finished, "--resume")]
    result = sot(*other)
    assert result.returncode == 2 and "is a run of model 'test_vit', not 'test_vit2'" in result.stderr


def test_folders_of_pictures_that_cannot_be_used(tmp_path):
    (tmp_path / "one" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no images"):
        load_images(str(tmp_path / "one"))
    Image.new("RGB", (8, 8)).save(tmp_path / "one" / "a" / "x.png")
    with pytest.raises(ValueError, match="at least two classes"):
        load_images(str(tmp_path / "one"))
    for split, names in (("train", "ab"), ("val", "ac")):
        for name in names:
            (tmp_path / "two" / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "two" / split / name / "x.png")
    with pytest.raises(ValueError, match="differ: b, c"):
        load_images(str(tmp_path / "two"))


def test_unreadable_pictures_are_named_and_more_than_half_ends_the_run(caplog):
    class Source:
        def __init__(self, bad):
            self.bad = bad

        def __len__(self):
            return 150

        def __getitem__(self, index):
            if index in self.bad:
                raise OSError("truncated")
            return Image.new("RGB", (4, 4)), index % 2

    good = ImageSet(Source({7}), lambda image: torch.zeros(3, 4, 4))
    assert [good[i]["labels"] for i in (6, 7, 8)] == [0, 0, 0] and "number 7" in caplog.text
    bad = ImageSet(Source({*range(76)}), lambda image: torch.zeros(3, 4, 4))
    with pytest.raises(ValueError, match=r"76 of 150 images cannot be read, more than half: number 0, number 1"):
        bad[0]


def test_random_choices_depend_on_seed_epoch_and_number_only():
    data = load_images("digits")
    assert len(data.train) + len(data.val) == 1797 and len(data.labels) == 10
    noisy = ImageSet(data.train, lambda image: torch.rand(3, 4, 4), seed=3)
    first = [noisy[i]["pixel_values"] for i in (5, 6)]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(noisy[6]["pixel_values"], first[1]) and not torch.equal(first[0], first[1])
    assert torch.equal(torch.get_rng_state(), state)
    noisy.set_epoch(1)
    assert not torch.equal(noisy[5]["pixel_values"], first[0])
    mix = Collate(Recipe(mixup=0.8, cutmix=1.0), 10)
    batch = [noisy[i] for i in range(4)]
    assert torch.equal(mix(batch)["pixel_values"], mix(batch)["pixel_values"])
    with seeded(1):
        inside = torch.rand(1)
    with seeded(1):
        assert torch.equal(torch.rand(1), inside)


COMPILED = pytest.param("compile=true", marks=[pytest.mark.slow, pytest.mark.skipif(not which("g++"), reason="no g++")])


@pytest.mark.parametrize("setting", ["precision=bfloat16", COMPILED])
def test_other_precision_and_compiled_training_stay_close(setting, pictures, finished, tmp_path):
    result = sot(*arguments(pictures, tmp_path / "out", "--set", setting))
    assert result.returncode == 0, result.stderr
    ours, theirs = (json.loads((folder / "metrics.json").read_text())[-1] for folder in (tmp_path / "out", finished))
    assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.05)
    assert ours["train_loss"] != theirs["train_loss"]


def test_compiling_without_a_compiler_is_refused(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = sot(*arguments(pictures, tmp_path / "out", "--set", "compile=true"))
    assert result.returncode == 2 and "needs a C++ compiler on a CPU: g++ or clang++" in result.stderr


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "scheduler.pt"])
def test_a_pickle_in_a_checkpoint_is_refused_in_a_sentence(name, pictures, finished, tmp_path):
    out = tmp_path / "pickled"
    subprocess.run(["cp", "-r", str(finished), str(out)], check=True)
    subprocess.run(["rm", "-r", str(out / "checkpoint-6")], check=True)
    file = out / "checkpoint-3" / name
    file.write_bytes(pickle.dumps(Touch(tmp_path / "ran"), protocol=2))
    manifest = file.with_name("manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), name: digest(file)}))
    result = sot(*arguments(pictures, out, "--resume"))
    assert result.returncode == 2 and "damaged or do not fit" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "ran").exists()


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
