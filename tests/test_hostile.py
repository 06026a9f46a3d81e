"""Folders of strangers: nothing in them runs, nothing in them fills the memory, and a sentence says what is wrong."""

import io
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import time

import pytest
from PIL import Image
from test_cli import sot

import sot as package
from sot.cli.main import COMMANDS
from sot.files import as_markdown, visible
from sot.limits import read_settings
from sot.models.folder import load_model
from sot.training.recipe import Recipe
from sot.training.run import model_card

HEAD = {"heads": 2, "left_dim": 3, "right_dim": 3}
DATA = ("--data", "digits", "--out", "out")
OPENS = {  # commands that open a folder, as they are given one; {} is that folder
    "predict": ("{}", "x.png"),
    "evaluate": ("{}", "--data", "digits"),
    "explain": ("{}", "x.png", "--out", "out"),
    "export": ("{}", "--out", "out/model.onnx"),
    "ui": ("{}", "--no-browser"),
    "train": ("--model", "{}", *DATA),
    "finetune": ("--model", "{}", "--task", "acceptability", "--out", "out"),
    "tune": ("{}", "--search", "lr=1e-5,1e-4", *DATA),
    "probe": ("--model", "{}", *DATA),
}
OPENS_NONE = {"models", "backbones", "convert", "recipes", "demo", "reproduce"}


@pytest.fixture(scope="module")
def place(tmp_path_factory, stand_ins):
    root = tmp_path_factory.mktemp("hostile")
    package.equip("test_vit", labels=["a", "b"], head=HEAD, pretrained=False).save_pretrained(root / "image")
    bert = stand_ins["google-bert/bert-base-uncased"]
    package.equip(bert, labels=["a", "b"], head=HEAD).save_pretrained(root / "text")
    whisper = stand_ins["openai/whisper-tiny"]
    package.equip(whisper, labels=["a", "b"], head=HEAD).save_pretrained(root / "audio")
    shutil.copytree(bert, root / "backbone")
    Image.new("RGB", (64, 64)).save(root / "x.png")
    return root


def change(folder, name="config.json", **values):
    settings = json.loads((folder / name).read_text())
    for key, value in values.items():
        part, _, inner = key.partition("__")
        target, last = (settings[part], inner) if inner else (settings, part)
        target[last] = value
    (folder / name).write_text(json.dumps(settings))


@pytest.fixture
def copied(place, tmp_path):
    def copy(kind):
        shutil.copytree(place / kind, tmp_path / kind)
        shutil.copy(place / "x.png", tmp_path)
        ran = tmp_path / "ran"
        (tmp_path / kind / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Any: pass\n")
        return tmp_path / kind

    return copy


def test_every_command_is_tried_below_or_opens_no_folder():
    assert {command.__name__ for commands in COMMANDS.values() for command in commands} == OPENS.keys() | OPENS_NONE


def agree(*arguments, cwd):
    """Run a command whose standard input says yes to everything."""
    before, sys.stdin = sys.stdin, io.StringIO("y\n" * 100)
    try:
        return sot(*arguments, cwd=cwd)
    finally:
        sys.stdin = before


CODE = {name: "code.Any" for name in ("AutoConfig", "AutoModel", "AutoModelForTextEncoding")}
ATTACKS = {  # a kind of folder, and what its config.json says
    "unknown type": ("image", {"model_type": "unheard-of", "auto_map": CODE}),
    "our type": ("image", {"auto_map": CODE}),
    "type of the backbone": ("text", {"backbone_config__auto_map": CODE, "backbone_config__model_type": "bart"}),
    "kernel of the hub": ("text", {"backbone_config___attn_implementation": "somebody/kernel"}),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("command", OPENS)
def test_no_command_runs_what_comes_with_a_model_nor_asks(copied, tmp_path, command, attack):
    kind, settings = ATTACKS[attack]
    folder = copied(kind)
    change(folder, **settings, **({"_name_or_path": str(folder)} if attack.startswith("type") else {}))
    result = agree(command, *(part.format(folder) for part in OPENS[command]), cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("Error: "), result.stderr
    assert result.stderr.count("\n") == 1 and "wish" not in result.stdout + result.stderr
    assert not (tmp_path / "ran").exists()
    if kind == "image" and command in ("predict", "evaluate", "explain", "export", "ui"):
        assert "brings code of its own" in result.stderr or "not one that sot trained" in result.stderr


@pytest.mark.parametrize("command", ["train", "finetune", "probe", "tune"])
def test_no_command_runs_the_code_of_a_backbone(copied, tmp_path, command):
    folder = copied("backbone")
    change(folder, model_type="unheard-of", auto_map=CODE)
    result = agree(command, *(part.format(folder) for part in OPENS[command]), cwd=tmp_path)
    assert result.returncode == 2 and "brings code of its own" in result.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_yes_to_every_question_runs_nothing(copied, tmp_path):
    folder = copied("image")
    change(folder, model_type="unheard-of", auto_map=CODE)
    said = subprocess.run(
        f"yes | {sys.executable} -m sot predict {folder} x.png",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 2 and "which is not run" in said.stderr and not (tmp_path / "ran").exists()


def nested(depth):
    return '{"a":' * depth + "1" + "}" * depth


def pickled(name):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(name),)

    return pickle.dumps(Runs())


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def only_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickled(folder.parent / "ran"))


HOSTILE = {  # what a folder has of its kind, and what is said of it
    "layers of a text": ("text", {"backbone_config__num_hidden_layers": 10**5}, "num_hidden_layers=100,000; at most"),
    "layers of an image": ("image", {"backbone_config__model_args": {"depth": 10**5}}, "depth=100,000; at most"),
    "layers in stages": ("image", {"backbone_config__model_args": {"depths": [400] * 9}}, "depths=3,600; at most"),
    "iterations": ("image", {"head": {"norm": "svpn_fast", "num_iterations": 10**9}}, "num_iterations=1,000,000,000"),
    "classes": ("text", {"id2label": {str(i): "x" for i in range(10**5 + 1)}}, "100,001 classes; at most 100,000"),
    "number of classes": ("text", {"num_labels": 2 * 10**6}, "2,000,000 classes; at most 100,000"),
    "classes of the backbone": ("image", {"backbone_config__num_classes": 10**9}, "1,000,000,000 classes; at most"),
    "norm": ("image", {"layout__norm": 7}, "layout of the model is damaged: norm is 7"),
    "tokens before words": ("audio", {"layout__num_prefix_tokens": "x"}, "num_prefix_tokens is 'x', not a number >= 0"),
    "no norm": ("image", {"layout__norm": "nowhere"}, "nowhere"),
    "missing classes": ("text", {"id2label": {"0": "a", "7": "b"}}, "does not name all classes in order"),
    "classes without names": ("text", {"id2label": {"0": "a", "1": 7}}, "does not name all classes in order"),
    "classes in a list": ("text", {"id2label": ["a", "b"]}, "config.json is damaged"),
    "width": ("text", {"backbone_config__hidden_size": 2**20}, r"do not fit: \S+ is \[32\], and its config.json asks"),
    "seconds": ("audio", {"max_seconds": -1}, "max_seconds=-1; at least 0.01 seconds of sound are accepted"),
    "heads": ("text", {"backbone_config__num_attention_heads": -1}, "num_attention_heads=-1; at least 0 attention"),
    "type of the backbone": ("text", {"backbone_config__model_type": "unheard-of"}, "is damaged: .*'unheard-of'"),
    "no type of the backbone": ("text", {"backbone_config__model_type": ["a"]}, "is damaged"),
    "backbone in a list": ("text", {"backbone_config": [1]}, "is damaged"),
    "name on the hub": ("image", {"backbone_config__architecture": "hf-hub:some/thing"}, "timm has no model 'hf-hub"),
    "type of numbers": ("text", {"dtype": "banana"}, "is damaged"),
    "other type": ("text", {"model_type": "bert"}, "is a model of type bert, not one that sot trained"),
    "deep": ("text", write("config.json", nested(10**4)), "config.json is damaged"),
    "not so deep": ("text", write("config.json", nested(400)), "nested more than 50 deep"),
    "deep processor": ("image", write("preprocessor_config.json", nested(10**4)), "is damaged"),
    "deep tokenizer": ("text", write("tokenizer.json", nested(10**4)), "tokenizer.json is damaged"),
    "deep recipe": ("text", write("recipe.yaml", "[" * 10**4), "recipe.yaml is damaged"),
    "large": ("text", write("config.json", b" " * (2**26 + 1)), "at most 67,108,864 are accepted"),
    "pickle": ("text", only_pickle, "no file named model.safetensors"),
    "no weights": ("text", write("model.safetensors", b"\xff" * 20), "are damaged or do not fit"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders_are_refused_in_seconds(copied, tmp_path, case):
    kind, edit, message = HOSTILE[case]
    folder = copied(kind)
    edit(folder) if callable(edit) else change(folder, **edit)
    began = time.process_time()
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load_model(folder)
    assert time.process_time() - began < 5 and "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


PROCESSORS = {  # a setting of a processor, and what is said of it
    "huge pictures": ("image", {"crop_size": {"height": 200_000, "width": 9}}, "height=200,000; at most 8,192 pixels"),
    "no resampling": ("image", {"resample": 99}, "image processor in .* reads no input"),
    "no length": ("text", {"model_max_length": -1}, "model_max_length=-1; at least 1 tokens"),
    "days of sound": ("audio", {"chunk_length": 10**6}, "chunk_length=1,000,000; at most 600 seconds"),
    "rate": ("audio", {"sampling_rate": 10**9}, "sampling_rate=1,000,000,000; at most 400,000 samples"),
    "frequencies": ("audio", {"feature_size": 10**6}, "feature_size=1,000,000; at most 1,000 frequencies"),
    "other frequencies": ("audio", {"feature_size": 5}, "has feature_size=5, and the model reads 8"),
    "window": ("audio", {"n_fft": 10**9}, "n_fft=1,000,000,000; at most 10,000 samples"),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_hostile_processors_are_refused(copied, case):
    kind, settings, message = PROCESSORS[case]
    folder = copied(kind)
    change(folder, "tokenizer_config.json" if kind == "text" else "preprocessor_config.json", **settings)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_a_processor_that_makes_other_pictures_is_refused(copied, tmp_path):
    folder = copied("image")
    change(folder, "preprocessor_config.json", size={"height": 168, "width": 168}, do_center_crop=False)
    for name in ("a", "b"):
        (tmp_path / "data" / "val" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "x.png", tmp_path / "data" / "val" / name)
    for command in (("predict", folder, "x.png"), ("evaluate", folder, "--data", "data")):
        result = sot(*command, cwd=tmp_path)
        assert result.returncode == 2 and "does not take what its processor makes" in result.stderr, result.stderr


@pytest.mark.parametrize(
    "settings", [{"num_hidden_layers": 10**5}, {"id2label": {str(i): "x" for i in range(10**5 + 1)}}]
)
def test_a_hostile_backbone_is_refused(copied, settings):
    folder = copied("backbone")
    change(folder, **settings)
    with pytest.raises(ValueError, match="at most 1"):
        package.equip(folder, 2)


# --- what a terminal and a page of Markdown are given ----------------------------------------------------------

EVIL = "\x1b]0;own\x07\u202e\x9b1m\r.png"


def test_control_characters_are_shown(place, copied, tmp_path):
    folder = copied("image")
    change(folder, id2label={"0": EVIL, "1": "b"}, label2id={EVIL: 0, "b": 1})
    shutil.copy(place / "x.png", tmp_path / EVIL)
    for arguments in ((folder, EVIL), (folder, f"missing{EVIL}"), (tmp_path / f"none{EVIL}", "x.png")):
        result = sot("predict", *arguments, cwd=tmp_path)
        printed = result.stdout + result.stderr
        assert not set(EVIL[:2] + "\x07\u202e\x9b\r") - {"]"} & set(printed), printed
        assert r"\x1b" in printed


def test_control_characters_of_classes_are_shown_while_training(place, tmp_path):
    for split, name in itertools.product(("train", "val"), (EVIL, "b")):
        (tmp_path / "data" / split / name).mkdir(parents=True)
        shutil.copy(place / "x.png", tmp_path / "data" / split / name)
    small = ("epochs=1", "min_steps=0", "batch_size=2", "img_size=32")
    settings = [part for setting in small for part in ("--set", setting)]
    model = ("--model", "test_vit", "--recipe", "scratch", "--logger", "none")
    result = sot("train", *model, "--data", "data", "--out", "out", *settings, cwd=tmp_path)
    printed = result.stdout + result.stderr
    assert result.returncode == 0 and r"\x1b" in printed, printed
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(printed), printed


def test_what_is_visible_stays_as_it_is():
    plain = "Zoë 日本 👩‍🔬 a\tb\nc 50 % <i> [x](y)"
    assert visible(plain) == plain and visible(EVIL) == r"\x1b]0;own\x07\u202e\x9b1m\r.png"


def test_a_model_card_holds_no_html_and_no_link_of_a_class():
    labels = ["<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "a\n# b", "`|`", EVIL]
    head = package.HeadConfig().to_dict()
    identity = {"model": "<b>m", "data": labels[1], "command": "train"}
    card = model_card(identity, Recipe(task="image"), {}, labels, head)
    assert r"\<img src=x onerror=alert(1)\>, \[x\](javascript:alert(1)), a # b, \`\|\`, " in card
    assert "\x1b" not in card and r"# \<b\>m on \[x\](javascript" in card
    assert as_markdown("vit_small, 3 (b)") == "vit_small, 3 (b)"


def test_a_tokenizer_that_cuts_texts_is_no_attack(tmp_path):
    cuts = {"truncation": {"max_length": 128, "stride": 0, "strategy": "LongestFirst"}, "padding": {"length": 0}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(cuts))
    assert read_settings(tmp_path / "tokenizer.json") == cuts


@pytest.mark.parametrize("name", ["config.json", "added_tokens.json"])
def test_words_that_are_called_as_settings_are_no_attack(tmp_path, name):
    words = {"player": 30_000, "size": 20_000, "max_length": -1, "head": 10**6}
    content = words if name == "added_tokens.json" else {"label2id": words}
    (tmp_path / name).write_text(json.dumps(content))
    assert read_settings(tmp_path / name) == content
