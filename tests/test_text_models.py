"""Text models: padding on either side, exports, rates by depth, what a run keeps of its data."""

import json
from shutil import copytree

import pytest
import torch
import transformers as hf
from test_cli import sot as command
from test_equip import FAMILIES, GPT, HEAD, TEXT, backbone, logits
from test_text_data import write

import sot
from sot.core.head import HeadConfig
from sot.data.texts import TextData, TextSplit
from sot.evaluation.export import export_model, load_exported
from sot.explain.words import split_words
from sot.models.tokens import split_text
from sot.training.rates import parameter_groups
from sot.training.recipe import Recipe
from sot.training.train_texts import fine_tune

BERT = "google-bert/bert-base-uncased"
SIZES = ["--set", "epochs=1", "--set", "batch_size=8", "--set", "head.representation_size=16", "--logger", "none"]
TABLE = "sentence,label,words\n" + "the cats sleep,1,cats\nthe cats sleeps,0,cat\n" * 8


@pytest.mark.parametrize("name", FAMILIES)
def test_left_padding_changes_nothing(name):
    source = backbone(FAMILIES[name])
    for weight in source.parameters():
        torch.nn.init.normal_(weight, std=0.3)  # so that positions matter
    model, ids = sot.equip(source, 3, HEAD), torch.randint(5, 99, (1, 6))
    padding = torch.full((1, 3), FAMILIES[name].pad_token_id or 0)
    inputs = {"input_ids": torch.cat([padding, ids], 1), "attention_mask": torch.tensor([[0] * 3 + [1] * 6])}
    expected = logits(model, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert torch.allclose(logits(model, **inputs), expected, rtol=1e-4, atol=1e-5)
    other = {**inputs, "attention_mask": torch.tensor([[0] * 3 + [7, -1, 2, -1, 1, 3]])}  # any number but 0 is kept
    assert torch.equal(logits(model, **other), logits(model, **inputs))


def test_positions_that_are_given_are_kept():
    model, ids = sot.equip(backbone(FAMILIES["bert"]), 3, HEAD), torch.randint(5, 99, (1, 6))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(6).flip(0)[None]}
    hidden = model.eval().backbone(**given).last_hidden_state
    assert torch.equal(logits(model, **given), model.classify(split_text(hidden, None, None, "first"), None)[1])


def test_equipped_models_pad_on_the_right(stand_ins, tmp_path):
    tokenizer = hf.AutoTokenizer.from_pretrained(stand_ins[BERT], padding_side="left")
    copytree(stand_ins[BERT], tmp_path / "left")
    tokenizer.save_pretrained(tmp_path / "left")
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "left").padding_side == "left"
    assert sot.equip(tmp_path / "left", 2).processor.padding_side == "right"


def test_a_model_with_types_of_tokens_is_exported_to_torch(stand_ins, tmp_path):
    model = sot.equip(stand_ins[BERT], 2, HEAD).eval()
    names = ["input_ids", "token_type_ids", "attention_mask"]  # as BERT's own tokenizer has it
    model.processor = hf.AutoTokenizer.from_pretrained(stand_ins[BERT], model_input_names=names)
    model.save_pretrained(tmp_path)
    exported, _ = load_exported(export_model(tmp_path, "torch").file)
    ids = torch.randint(4, 9, (2, 7))
    mask, types = torch.ones_like(ids), (torch.arange(7) > 3).long().expand(2, -1).contiguous()
    mask[1, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    assert torch.allclose(exported(**inputs).logits, logits(model, **inputs), atol=1e-5)
    assert not torch.allclose(logits(model, **inputs), logits(model, input_ids=ids, attention_mask=mask), atol=1e-5)


@pytest.mark.parametrize(
    "config, lowest, layer, highest",
    [
        (hf.BertConfig(**TEXT), "embeddings.LayerNorm.weight", "encoder.layer.{}.output.dense.weight", None),
        (FAMILIES["distilbert"], "embeddings.position_embeddings.weight", "transformer.layer.{}.ffn.lin1.weight", None),
        (hf.GPT2Config(**GPT), "wpe.weight", "h.{}.mlp.c_fc.weight", "ln_f.weight"),
        (hf.LlamaConfig(**TEXT), "embed_tokens.weight", "layers.{}.mlp.up_proj.weight", "norm.weight"),
    ],
)
def test_rates_follow_the_depth_of_text_models(config, lowest, layer, highest):
    model = sot.equip(backbone(config), 2, HEAD)
    names = {id(p): name.removeprefix("backbone.") for name, p in model.named_parameters()}
    recipe = Recipe(task="text", lr=1.0, layer_decay=0.5)
    rates = {names[id(p)]: group["lr"] for group in parameter_groups(model, recipe) for p in group["params"]}
    assert [rates[name] for name in (lowest, layer.format(0), layer.format(1))] == [0.125, 0.25, 0.5]
    assert rates[highest or "classifier.word_linear.weight"] == 1.0 and len(rates) == len(names)


def test_a_backbone_without_layers_has_no_layer_decay():
    model = sot.equip(backbone(FAMILIES["gpt2"]), 2, HEAD)
    del model.backbone.h
    with pytest.raises(ValueError, match=r"layer_decay must be 1 for GPT2Model, which has no layers, got 0\.5"):
        parameter_groups(model, Recipe(task="text", layer_decay=0.5))


def test_an_empty_half_of_a_pair_is_read_as_in_training(stand_ins):
    model = sot.equip(stand_ins[BERT], 2, HEAD)
    words = split_words(model, model.processor, "the cats", "")
    assert words.names == ["the", "cats"] and words.cut == ""
    assert split_words(model, model.processor, " ", "cats").names == ["cats"]
    with pytest.raises(ValueError, match="no word in the text"):
        split_words(model, model.processor, " ", "")


@pytest.fixture(scope="module")
def run(stand_ins, tmp_path_factory):
    """A run on a table in another folder than the one of the same name beside it."""
    root = tmp_path_factory.mktemp("texts")
    for folder in ("a", "b"):
        (root / folder).mkdir()
        write(root / folder, "table.csv", TABLE)
    table = root / "a" / "table.csv"
    data = ["--data", table, "--dev", table, "--set", "max_length=5"]
    result = command("finetune", "--model", stand_ins[BERT], "--out", root / "run", *data, *SIZES)
    assert result.returncode == 0, result.stderr
    return root / "run"


def test_pipelines_cut_texts_as_training_did(run):
    tokenizer = hf.AutoTokenizer.from_pretrained(run)
    assert tokenizer.model_max_length == 5 and len(tokenizer("cats " * 9, truncation=True)["input_ids"]) == 5


def test_a_run_goes_on_with_its_own_data_only(run, stand_ins):
    kept = json.loads((run / "run.json").read_text())
    table, other = run.parent / "a" / "table.csv", run.parent / "b" / "table.csv"
    assert kept["data"] == "table.csv" and kept["source"] == kept["dev"] == str(table.resolve())
    assert "on table.csv\n" in (run / "README.md").read_text()
    fixed = ["finetune", "--model", stand_ins[BERT], "--out", run, "--resume", "--set", "max_length=5", *SIZES]
    for options, message in (
        (["--data", other, "--dev", table], f"is a run of source '{table}', not '{other}'"),
        (["--data", table, "--dev", other], f"is a run of dev '{table}', not '{other}'"),
        (["--data", table, "--dev", table, "--text", "words"], "is a run of columns ['sentence', None, 'label'], not"),
    ):
        result = command(*fixed, *options)
        assert result.returncode == 2 and message in " ".join(result.stderr.split()), result.stderr
    assert command(*fixed, "--data", table, "--dev", table).returncode == 0


def test_a_run_of_before_goes_on_by_the_name_of_its_data(stand_ins, tmp_path):
    split = TextSplit(["cats sleep", "cats sleeps"] * 4, None, [0.0, 1.0] * 4)
    data, recipe = TextData(split, split, ["n", "y"], "accuracy"), Recipe(task="text", epochs=1, batch_size=4)
    given = (stand_ins[BERT], data, "table.csv", tmp_path / "run", recipe, HeadConfig(representation_size=16))
    fine_tune(*given, report_to="none")
    assert "source" not in json.loads((tmp_path / "run" / "run.json").read_text())
    fine_tune(*given, report_to="none", resume=True, source={"source": "/a/table.csv", "dev": None})


@pytest.mark.parametrize(
    "key, value", [("mixup", 0.8), ("drop_path", 0.1), ("embed", "densenet"), ("model_args", {"a": 1}), ("flip", 0.5)]
)
def test_settings_for_images_are_refused_for_texts(key, value, stand_ins, tmp_path):
    split = TextSplit(["cats"] * 4, None, [0.0, 1.0] * 2)
    data = TextData(split, split, ["n", "y"], "accuracy")
    with pytest.raises(ValueError, match=f"{key} is for images, got {value!r} for the text model"):
        fine_tune(stand_ins[BERT], data, "texts", tmp_path / "run", Recipe(task="text", **{key: value}), None)
    assert not (tmp_path / "run").exists()
