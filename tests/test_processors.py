"""Image processors and tokenizers whose files are damaged: the file is named, by every command."""

import re
import shutil

import pytest
from test_cli import sot
from transformers import ViTConfig, ViTImageProcessor, ViTModel

from sot import HeadConfig, equip

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 32}
DAMAGES = {
    b'{"size": {': "is damaged: Expecting property name",
    b"": "is damaged: Expecting value",
    b"[1]": "is damaged: it holds '[1]', not an object of JSON",
    b"null": "is damaged: it holds 'None', not an object of JSON",
    b'{"a": "\xff"}': "is damaged: 'utf-8' codec",
}


@pytest.fixture(scope="module")
def models(stand_ins, tmp_path_factory):
    """A backbone of images and one of texts, as Hugging Face saves them, and both with a head, as sot does."""
    root = tmp_path_factory.mktemp("processors")
    ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)).save_pretrained(root / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(root / "vit")
    shutil.copytree(stand_ins["google-bert/bert-base-uncased"], root / "bert")
    for name in ("vit", "bert"):
        equip(root / name, 2, HeadConfig(heads=1, left_dim=4, right_dim=4)).save_pretrained(root / f"trained-{name}")
    return root


@pytest.fixture
def damaged(models, tmp_path):
    """A copy of a model with a file that holds something else."""

    def make(name, file, content):
        shutil.copytree(models / name, tmp_path / name)
        assert (tmp_path / name / file).is_file()
        (tmp_path / name / file).write_bytes(content)
        return tmp_path / name

    return make


def refused(result, says):
    assert result.returncode == 2 and says in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.mark.parametrize("content", DAMAGES)
@pytest.mark.parametrize(
    "name, file", [("vit", "preprocessor_config.json"), ("bert", "tokenizer.json"), ("bert", "tokenizer_config.json")]
)
def test_the_damaged_file_of_a_backbone_is_named(name, file, content, damaged):
    folder = damaged(name, file, content)
    with pytest.raises(ValueError, match=re.escape(f"{folder / file} {DAMAGES[content]}")):
        equip(folder, 2)


@pytest.mark.parametrize("content", DAMAGES)
@pytest.mark.parametrize(
    "name, file", [("trained-vit", "preprocessor_config.json"), ("trained-bert", "tokenizer.json")]
)
def test_the_damaged_file_of_a_trained_model_is_named(name, file, content, damaged, tmp_path):
    folder = damaged(name, file, content)
    given = ["--text", "the cat"] if name == "trained-bert" else [tmp_path / "x.png"]
    refused(sot("predict", folder, *given), f"{folder / file} {DAMAGES[content]}")


def test_commands_that_train_name_it_before_there_is_a_run(damaged, tmp_path):
    folder = damaged("vit", "preprocessor_config.json", b"{")
    for command in ("train", "probe"):
        result = sot(command, "--model", folder, "--data", "digits", "--out", tmp_path / "run")
        refused(result, f"{folder / 'preprocessor_config.json'} is damaged: Expecting property name")
    folder = damaged("bert", "tokenizer_config.json", b"{")
    for command in ("finetune", "probe"):
        result = sot(command, "--model", folder, "--task", "acceptability", "--out", tmp_path / "run")
        refused(result, f"{folder / 'tokenizer_config.json'} is damaged: Expecting property name")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name, file, content, kind",
    [
        ("trained-vit", "preprocessor_config.json", b'{"image_processor_type": "Nope"}', "image processor"),
        ("trained-bert", "tokenizer.json", b"{}", "tokenizer"),
        ("trained-bert", "tokenizer.json", b'{"added_tokens": [], "model": {"type": "Nope"}}', "tokenizer"),
    ],
)
def test_a_whole_file_that_says_nothing_known_is_one_sentence(name, file, content, kind, damaged, tmp_path):
    folder = damaged(name, file, content)
    given = ["--text", "the cat"] if kind == "tokenizer" else [tmp_path / "x.png"]
    refused(sot("predict", folder, *given), f"the {kind} in {folder} cannot be loaded: ")
    backbone = damaged(name.removeprefix("trained-"), file, content)
    assert equip(backbone, 2).processor is None  # as where there is none


def test_a_file_that_is_not_needed_may_be_damaged(models, tmp_path):
    shutil.copytree(models / "vit", tmp_path / "vit")
    (tmp_path / "vit" / "tokenizer.json").write_text("{")
    assert equip(tmp_path / "vit", 2).processor is not None
