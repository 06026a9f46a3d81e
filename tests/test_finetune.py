"""Fine-tuning texts end to end, on tiny models: evaluation, prediction, batches of like length, mistakes."""

import json
from functools import wraps
from shutil import copytree, rmtree

import pytest
import torch
from safetensors.torch import load_file
from test_cli import sot

from sot.core.head import HeadConfig
from sot.data.texts import TextData, TextSplit
from sot.models.modeling import SoTForSequenceClassification
from sot.training.recipe import Recipe
from sot.training.train_texts import fine_tune


@pytest.fixture
def texts():
    """One word and nine by turns."""
    lengths = [1, 9] * 24
    split = TextSplit(["cats " * length for length in lengths], None, [float(length > 6) for length in lengths])
    return TextData(split, split, ["short", "long"], "accuracy")


def test_fine_tuning_a_text_model_evaluating_and_predicting(stand_ins, tmp_path):
    out, table = tmp_path / "run", tmp_path / "table.csv"
    rows = [f"the cats {'sleep' if i % 2 else 'sleeps'},{'right' if i % 2 else 'wrong'}" for i in range(24)]
    table.write_text("words,answer\n" + "\n".join(rows) + "\n")
    model = stand_ins["google-bert/bert-base-uncased"]
    columns = ["--text", "words", "--label", "answer"]
    sizes = ["--set", "epochs=8", "--set", "lr=1e-2", "--set", "batch_size=8", "--set", "head.representation_size=16"]
    data = ["--data", table, "--dev", table, *columns]
    result = sot("finetune", "--model", model, "--out", out, "--logger", "none", *data, *sizes)
    assert result.returncode == 0, result.stderr
    result = sot("evaluate", out, "--data", table, *columns, "--json")
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)
    result = sot("predict", out, "--text", "the cats sleep", "--text", "the cats sleeps", "--json")
    rows = [json.loads(line)["classes"][0][0] for line in result.stdout.splitlines()]
    assert scores["accuracy"] == 1.0 and rows == ["right", "wrong"]


def test_fine_tuning_mistakes(stand_ins, tmp_path):
    model = stand_ins["google-bert/bert-base-uncased"]
    for options, message in (
        (["--task", "glue"], "unknown task 'glue'"),
        (["--task", "cola"], "task cola needs --data"),
        ([], "name a --task, or give --data a table"),
        (["--task", "acceptability", "--recipe", "digits"], "recipe digits is for images"),
        (["--task", "acceptability", "--dev", "no.csv"], "--dev no.csv is for tables, and task acceptability has its"),
        (["--task", "acceptability", "--text", "foo"], "--text foo is for tables, and task acceptability has its own"),
        (["--task", "acceptability", "--pair", "foo"], "--pair foo is for tables, and task acceptability has its own"),
        (["--task", "acceptability", "--label", "foo"], "--label foo is for tables, and task acceptability has its"),
        (["--data", "hfds/a", "--dev", "no.csv"], "--dev no.csv is for tables, and hfds/a has its own"),
        (["--task", "acceptability", "--head", "heads=[1"], "the value of 'heads=[1' is not valid YAML"),
        (["--task", "acceptability", "--head", "exponent="], "key=value, got 'exponent='"),
    ):
        result = sot("finetune", "--model", model, "--out", tmp_path / "out", *options)
        assert result.returncode == 2 and message in " ".join(result.stderr.split()), result.stderr
        assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("grouped", [False, True])
def test_batches_of_like_length_need_less_padding_and_resume_with_the_same_bits(
    grouped, texts, stand_ins, tmp_path, monkeypatch
):
    used, forward = [], SoTForSequenceClassification.forward

    @wraps(forward)  # Trainer reads its signature
    def watched(model, *args, **kwargs):
        if model.training:
            used.append(float(kwargs["attention_mask"].float().mean()))
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(SoTForSequenceClassification, "forward", watched)
    recipe = Recipe(task="text", epochs=2, batch_size=4, lr=1e-3, group_by_length=grouped)
    model, head = str(stand_ins["google-bert/bert-base-uncased"]), HeadConfig(representation_size=16)
    fine_tune(model, texts, "lengths", tmp_path / "run", recipe, head, report_to="none")
    assert len(used) == 24 and (sum(used) > 0.8 * 24) is grouped

    copytree(tmp_path / "run", tmp_path / "cut")
    rmtree(tmp_path / "cut" / "checkpoint-24")
    (tmp_path / "cut" / "model.safetensors").unlink()
    fine_tune(model, texts, "lengths", tmp_path / "cut", recipe, head, resume=True, report_to="none")
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "cut"))
    assert len(used) == 36 and all(torch.equal(resumed[name], value) for name, value in whole.items())
