"""What `sot probe` refuses in one sentence, and damaged files that it works around."""

import json
import re

import numpy as np
import pytest
import timm
from PIL import Image
from test_cli import sot
from test_probe import QUICK, hand_made
from test_probe_cache import only_reading, shared
from transformers import (
    BertConfig,
    BertModel,
    TimmWrapperConfig,
    TimmWrapperModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from sot.bench.timing import thread_count
from sot.core.head import HeadConfig
from sot.data.texts import TextData, TextSplit
from sot.models.equip import equip
from sot.probe import HEADS, FrozenBackbone, read_texts
from sot.probe.contest import Contest
from sot.probe.fitting import Target
from sot.probe.journal import Journal

VIT = ["--model", "test_vit", "--no-pretrained", "--img-size", 32, "--threads", 1]
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def one_thread():
    """Steps this small are slower on several."""
    with thread_count(1):
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with pictures that are not divided into training and validation."""
    folder, draw = tmp_path_factory.mktemp("here"), np.random.default_rng(0)
    for number in range(40):
        file = folder / "flat" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(file)
    return folder


def refused(result, *messages):
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and result.stderr.startswith("Error: ")
    assert all(message in result.stderr for message in messages), result.stderr


# --- the backbone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, size", [("test_vit", 15), ("swin_tiny_patch4_window7_224", 3), ("resnet18", 32), ("pvt_v2_b0", 32)]
)
def test_a_size_that_the_backbone_cannot_have_is_named(name, size):
    with pytest.raises(ValueError, match=f"{name} cannot be built with img_size {size}, take a size that fits or"):
        FrozenBackbone(name, pretrained=False, img_size=size).equip(HeadConfig(pool="gap", fusion="word"))


def test_options_of_the_other_kind_of_model_are_refused(root, stand_ins, tmp_path):
    bert, vit = stand_ins["google-bert/bert-base-uncased"], tmp_path / "vit"
    ViTModel(ViTConfig(image_size=32, **SMALL)).save_pretrained(vit)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(vit)
    data = ["--data", root / "flat", "--out", tmp_path / "out"]
    for option, value in (("--task", "cola"), ("--dev", "dev.csv"), ("--pair", "other")):
        message = f"{option} {value} is for texts, and test_vit is a model for images"
        refused(sot("probe", *VIT, *data, option, value), message)
    for arguments in (["--model", bert, "--task", "acceptability", "--out", tmp_path / "out"], ["--model", vit, *data]):
        message = f"--img-size is for a timm model, and {arguments[1]} is none"
        refused(sot("probe", *arguments, "--img-size", 32), message)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def bert(tmp_path):
    """A text model without tokenizer."""
    BertModel(BertConfig(vocab_size=9, **SMALL)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_a_text_model_without_tokenizer_is_named(bert, tmp_path):
    command = ["probe", "--model", bert, "--task", "acceptability", "--out", tmp_path / "out"]
    refused(sot(*command), f"{bert} has no tokenizer or image processor beside it that can be loaded")
    split = TextSplit(["a b"] * 4, None, [0.0, 1.0] * 2)
    model = equip(bert, 2)
    with pytest.raises(ValueError, match="the model has no tokenizer beside it"):
        read_texts(model, TextData(split, split, ["no", "yes"], "accuracy"), "texts", 8)


def wider(text):
    return text.replace('"hidden_size": 32', '"hidden_size": 64')


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("config.json", lambda old: b"{", "{file} is damaged: Expecting property name"),
        ("config.json", lambda old: b"\xff" + old, "{file} is damaged: 'utf-8' codec"),
        ("config.json", lambda old: b"[]", "{file} is damaged: it holds '[]', not an object"),
        ("config.json", lambda old: wider(old.decode()).encode(), "the weights in {folder} are damaged or do not fit"),
        ("model.safetensors", lambda old: old[:-10], "the weights in {folder} are damaged or do not fit"),
        ("model.safetensors", lambda old: b"", "the weights in {folder} are damaged or do not fit"),
    ],
)
def test_damaged_files_of_a_model_are_named(file, change, message, bert):
    (bert / file).write_bytes(change((bert / file).read_bytes()))
    with pytest.raises(ValueError) as caught:
        equip(bert, 2)
    assert str(caught.value).startswith(message.format(file=bert / file, folder=bert))


@pytest.mark.parametrize("wrapped", [False, True])
def test_damaged_weights_of_a_timm_folder_are_named(wrapped, tmp_path):
    if wrapped:
        TimmWrapperModel(TimmWrapperConfig(architecture="test_vit")).save_pretrained(tmp_path)
    else:
        timm.models.save_for_hf(timm.create_model("test_vit"), tmp_path, safe_serialization=True)
    assert equip(tmp_path, 2)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=re.escape(f"the weights in {tmp_path} are damaged or do not fit")):
        equip(tmp_path, 2)


def test_a_size_of_pictures_is_for_timm_models(bert):
    with pytest.raises(ValueError, match="img_size is for a timm model, and "):
        FrozenBackbone(str(bert), img_size=32).equip(HeadConfig())


# --- what it writes ----------------------------------------------------------------------------------------


def contest(file):
    return Contest(hand_made(60, 1), hand_made(40, 2), Target(2), QUICK, Journal(file))


@pytest.mark.parametrize("line", [0, 1])
@pytest.mark.parametrize(
    "damage",
    [
        lambda row: b"\xff" + json.dumps(row).encode(),
        lambda row: b"[1]",
        lambda row: json.dumps({key: row[key] for key in ("setting", "seed", "head")}).encode(),
        lambda row: json.dumps({**row, "score": None, "choice": {}}).encode(),
        lambda row: json.dumps({**row, "seconds": "3", "choice": {**row.get("choice", {}), "loss": None}}).encode(),
    ],
)
def test_a_damaged_row_is_computed_again_with_a_warning(line, damage, tmp_path, caplog):
    file, heads = tmp_path / "rows.jsonl", {"class": HEADS["class"]}
    (first,) = contest(file).run(heads, 1)
    rows = file.read_bytes().splitlines()
    rows[line] = damage(json.loads(rows[line]))
    file.write_bytes(b"\n".join(rows) + b"\n")
    (again,) = contest(file).run(heads, 1)
    assert (again.scores, again.held_out) == (first.scores, first.held_out)
    assert caplog.text.count(f"A line of {file} is damaged: what it said is computed again.") == 1
    contest(file).run(heads, 1)
    assert caplog.text.count("is damaged") == 1


@pytest.fixture
def no_tokens(monkeypatch):
    def compute(*arguments):
        raise AssertionError("tokens were computed")

    monkeypatch.setattr("sot.probe.compare.cache_features", compute)


def test_results_that_cannot_be_written_are_noticed_before_tokens_are_computed(no_tokens, tmp_path):
    def run(out):
        return sot("probe", *VIT, "--data", "digits", "--out", out, "--cache", tmp_path / "cache")

    (tmp_path / "file").write_text("")
    refused(run(tmp_path / "file"), f"--out {tmp_path / 'file'} cannot be written to (File exists)")
    for name in ("rows.jsonl", "probe.png"):
        (tmp_path / name / name).mkdir(parents=True)
        refused(run(tmp_path / name), f"{tmp_path / name / name} is a folder, in the way of a file of results")
    for name in ("best", "link"):
        (tmp_path / name).mkdir()
    (tmp_path / "best" / "best").write_text("")
    (tmp_path / "link" / "best").symlink_to(tmp_path)
    for name in ("best", "link"):
        refused(run(tmp_path / name), f"{tmp_path / name / 'best'} is no folder, in the way of the best model")
    with shared() as out:
        with only_reading(out):
            result = run(out)
        refused(result, f"--out {out} cannot be written to (Permission denied): choose another folder")


def test_the_best_model_knows_its_training_set_from_everywhere(root, tmp_path):
    command = ["probe", *VIT, "--data", "flat", "--out", tmp_path / "out", "--heads", "class", "--epochs", 1]
    result = sot(*command, "--seeds", 1, cwd=root)
    assert result.returncode == 0, result.stderr
    best = tmp_path / "out" / "best"
    assert json.loads((best / "run.json").read_text())["data"] == str((root / "flat").resolve())
    for cwd, data in ((tmp_path, root / "flat"), (root, "flat"), (root / "flat", "../flat")):
        scores = json.loads(sot("evaluate", best, "--data", data, "--json", cwd=cwd).stdout)
        assert sum(samples for _, samples, *_ in scores["classes"]) == 8, data  # the held-out fifth
    (best / "run.json").write_text("[]")
    refused(sot("evaluate", best, "--data", root / "flat"), f"{best / 'run.json'} is damaged: it holds '[]'")
