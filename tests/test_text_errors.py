"""What is wrong with texts, their tokenizer or their length is said in one sentence, before the long work."""

import json
import os
import tarfile

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from scipy.stats import pearsonr, spearmanr
from test_cli import sot
from test_text_data import write, write_set
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sot.data.images import load_images
from sot.data.texts import Columns, TextData, TextSplit, load_set, load_table, load_task
from sot.evaluation.metrics import text_scores
from sot.evaluation.predict import predict_texts
from sot.models.equip import equip
from sot.models.from_transformers import check_length, knows_words, position_limit
from sot.probe.samples import picture_digest, text_samples
from sot.training.recipe import Recipe
from sot.training.train_texts import fine_tune

SCORES = "sentence1\tsentence2\tscore\na\tb\t1\n"
SIZES = {"vocab_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 20}
SMALL = {**SIZES, "hidden_size": 16, "intermediate_size": 16, "pad_token_id": 1}


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.tsv", "sentence\tlabel\na\tx\nb\n", "a.tsv, row 2: nothing in column 'label'"),
        ("a.csv", "label,sentence\nx,a\ny\n", "a.csv, row 2: nothing in column 'sentence'"),
        ("a.csv", "sentence,label\na,x\nb,\n", "a.csv, row 2: nothing in column 'label'"),
        ("a.jsonl", '{"sentence": "a", "label": 1}\n{"sentence": "b", "label": null}', "row 2: nothing in column 'lab"),
        ("a.jsonl", '{"sentence": "a", "label": 1}\n{"sentence": "b"}', "row 2: nothing in column 'label'"),
        ("a.jsonl", '{"sentence": "a", "label": 1}\n{"label": 0}', "row 2: nothing in column 'sentence'"),
        ("a.csv", "label,sentence\nx,a\ny,well, no\n", "a.csv, row 2: more cells than the 2 of the header"),
        ("a.tsv", "label\tsentence\nx\ta\tb\ny\tc\n", "a.tsv, row 1: more cells than the 2 of the header"),
        (
            "a.csv",
            "sentence,label,sentence\na,x,b\n",
            "a.csv has two columns of one name; it has sentence, label, sent",
        ),
        ("a.tsv", "label\tsentence\tlabel\nx\ta\ty\n", "a.tsv has two columns of one name; it has label, sentence"),
        ("a.jsonl", '{"sentence": "\\ud800", "label": 1}', r"row 1: column 'sentence' is not Unicode, got '\\ud800'"),
        ("a.csv", f'sentence,label\na,x\n"{"b" * 140_000},y\nc,x\n', "a.csv, row 2: a quote that is never closed"),
        ("a.csv", '"sentence,label\na,x\n', "a.csv: a quote in its header is never closed"),
    ],
)
def test_a_table_that_cannot_be_read_whole_is_refused_with_its_row(name, text, message, tmp_path):
    file = write(tmp_path, name, text)
    with pytest.raises(ValueError, match=message):
        load_table(file, file, Columns())
    with pytest.raises(ValueError, match=message):  # as `sot evaluate` reads it
        load_table(None, file, Columns(), ["x", "y", "0", "1"])


@pytest.mark.parametrize("name, between", [("a.csv", ","), ("a.tsv", "\t")])
def test_a_text_of_any_length_is_read(name, between, tmp_path):
    (tmp_path / name).write_text(f"sentence{between}label\n{'b' * 140_000}{between}x\nc{between}y\n")
    data = load_table(tmp_path / name, None, Columns())
    assert [len(text) for text in data.train.texts] == [140_000, 1]


def test_a_number_is_no_name_of_a_class_in_a_table(tmp_path):
    """GLUE's are written so; here 0 would count as the class called -1."""
    train = write(tmp_path, "train.csv", "sentence,label\na,-1\nb,1\n")
    dev = write(tmp_path, "dev.csv", "sentence,label\na,0\n")
    with pytest.raises(ValueError, match=r"dev.csv, row 1: label '0' is none of -1, 1"):
        load_table(train, dev, Columns())
    with pytest.raises(ValueError, match=r"dev.csv, row 1: label '0' is none of no, yes"):
        load_table(None, dev, Columns(), ["no", "yes"])


def test_columns_without_a_name_may_be_many(tmp_path):
    file = write(tmp_path, "a.csv", "sentence,label,,\na,x,,\nb,y,,\n")
    assert load_table(file, None, Columns()).train.texts == ["a", "b"]


def test_the_built_in_task_takes_no_data():
    with pytest.raises(ValueError, match="acceptability is built in and takes no data, got nowhere"):
        load_task("acceptability", "nowhere")


def test_an_empty_text_is_a_text(tmp_path):
    file = write(tmp_path, "a.tsv", "sentence\tother\tlabel\n\ta\tx\nb\t\ty\n")
    data = load_table(file, None, Columns("sentence", "other"))
    assert data.train.texts == ["", "b"] and data.train.pairs == ["a", ""]


def test_other_encodings_are_refused_with_the_file(tmp_path):
    for name in ("a.csv", "a.tsv", "a.jsonl"):
        (tmp_path / name).write_bytes('sentence,label\n{"é": 1}\n'.encode("latin-1"))
        with pytest.raises(ValueError, match=f"{name} is not text in UTF-8, name its encoding: "):
            load_table(tmp_path / name, None, Columns())


@pytest.mark.parametrize(
    "task, text, message",
    [
        ("cola", "gj04\t1\t\tFine.\ngj04\t0\n", "dev.tsv, row 2: nothing in column 'sentence'"),
        ("stsb", SCORES + "c\td\tabc\n", "dev.tsv, row 2: score 'abc' is not a finite number"),
        ("stsb", SCORES + "c\td\t\n", "dev.tsv, row 2: nothing in column 'score'"),
        ("stsb", SCORES + "c\td\tnan\n", "dev.tsv, row 2: score 'nan' is not a finite number"),
        ("stsb", SCORES + "c\td\tinf\n", "dev.tsv, row 2: score 'inf' is not a finite number"),
        ("stsb", SCORES, "dev.tsv has one row, and a correlation needs at least two"),
    ],
)
def test_a_row_that_a_task_cannot_use_is_refused(task, text, message, tmp_path):
    write(tmp_path, "dev.tsv", text)
    with pytest.raises(ValueError, match=message):
        load_task(task, tmp_path)


def test_a_set_of_datasets_that_lacks_a_label(tmp_path):
    table = {"sentence": ["a", "b"], "label": [1, None]}
    spec = f"hfds/{write_set(tmp_path / 'set', {'train': table, 'test': table}, ['n', 'y'])}@{tmp_path / 'cache'}"
    with pytest.raises(ValueError, match="train, row 2: nothing in column 'label'"):
        load_set(spec, Columns())


def test_a_correlation_with_what_is_constant_is_zero():
    some, same, truth = np.array([[1.0], [3.0], [2.0]]), np.full((3, 1), 2.0), np.array([1.0, 2.0, 4.0])
    for logits, labels in ((same, truth), (some, np.full(3, 2.0)), (some[:1], truth[:1])):
        scores = text_scores("pearson", logits, labels)
        assert scores["pearson"] == scores["spearman"] == 0 and np.isfinite(scores["loss"])
    scores = text_scores("pearson", some, truth)
    assert scores["pearson"] == pytest.approx(pearsonr(some[:, 0], truth).statistic)
    assert scores["spearman"] == pytest.approx(spearmanr(some[:, 0], truth).statistic)


@pytest.mark.parametrize("kind", [hf.BertConfig, hf.RobertaConfig, hf.GPT2Config, hf.T5Config, hf.CanineConfig])
def test_a_tokenizer_that_is_made_without_files_is_none(kind, tmp_path):
    kind().save_pretrained(tmp_path)
    assert knows_words(hf.AutoTokenizer.from_pretrained(tmp_path)) is (kind is hf.CanineConfig)  # it reads characters


def test_a_folder_without_tokenizer_files_is_refused(stand_ins, tmp_path):
    hf.BertModel(hf.BertConfig(**SMALL)).save_pretrained(tmp_path / "bare")
    assert equip(tmp_path / "bare", 2).processor is None
    assert equip(stand_ins["google-bert/bert-base-uncased"], 2).processor is not None
    for command in ("finetune", "probe"):
        result = sot(command, "--model", tmp_path / "bare", "--task", "acceptability", "--out", tmp_path / "out")
        assert result.returncode == 2 and "bare has no tokenizer" in result.stderr and "Traceback" not in result.stderr
        assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A model of 20 positions, whose tokenizer puts two special tokens around a text and three around a pair."""
    folder = tmp_path_factory.mktemp("bert")
    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "[CLS]", "[SEP]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    hf.BertModel(hf.BertConfig(**SMALL)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("length, pairs, least", [(2, False, 3), (3, True, 4), (21, False, 3), (21, True, 4)])
def test_texts_are_cut_to_what_the_model_reads(length, pairs, least, bert, tmp_path):
    model = equip(bert, 2)
    split = TextSplit(["a b " * 20] * 8, ["b " * 30] * 8 if pairs else None, [0.0, 1.0] * 4)
    data, recipe = TextData(split, split, ["n", "y"], "accuracy"), Recipe(task="text", max_length=length)
    message = f"max_length must be between {least} and 20 tokens for this model, got {length}"
    with pytest.raises(ValueError, match=message):
        text_samples(model, split, "texts", length, regression=False)
    with pytest.raises(ValueError, match=message):
        fine_tune(str(bert), data, "texts", tmp_path / "run", recipe, None, report_to="none")
    assert not (tmp_path / "run").exists()
    for accepted in (least, 20):
        samples = text_samples(model, split, "texts", accepted, regression=False)
        assert {len(ids) for ids in samples.data.dataset.encoded["input_ids"]} == {accepted}


def test_a_text_without_tokens_is_reported_and_the_others_predicted(tmp_path):
    words = {word: number for number, word in enumerate(["<unk>", "<pad>", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    config = hf.GPT2Config(vocab_size=4, n_embd=16, n_layer=1, n_head=2, n_positions=20, pad_token_id=1)
    model = equip(hf.GPT2Model(config), 2).eval()
    for texts in ([""], ["", "a b", ""]):
        found = list(predict_texts(model, fast, texts, top=1, batch_size=4))
        assert [each.error for each in found] == [None if text else "it has no tokens" for text in texts]
        assert [len(each.classes) for each in found] == [int(bool(text)) for text in texts]


@pytest.mark.parametrize("command", ["finetune", "probe"])
@pytest.mark.parametrize("pairs", [False, True])
def test_a_model_of_pairs_wants_pairs_and_one_of_texts_wants_texts(command, pairs, bert, tmp_path):
    rows = [json.dumps({"sentence": "a b", "other": "b", "label": number % 2}) for number in range(8)]
    table, trained = write(tmp_path, "a.jsonl", "\n".join(rows)), tmp_path / "out"
    columns, wrong = (["--pair", "other"], []) if pairs else ([], ["--pair", "other"])
    few = ["--set", "epochs=1", "--set", "max_length=9"] if command == "finetune" else ["--seeds", 1]
    few += [] if command == "finetune" else ["--heads", "class", "--max-length", 9]
    done = sot(command, "--model", bert, "--data", table, "--dev", table, "--out", trained, *columns, *few)
    assert done.returncode == 0, done.stderr
    trained = trained if command == "finetune" else trained / "best"
    kinds = ("pairs of texts", "single texts") if pairs else ("single texts", "pairs of texts")
    message = f"this model was trained on {kinds[0]}, and it was given {kinds[1]}"
    second = [] if pairs else ["--pair", "b"]
    for attempt in (
        ["predict", trained, "--text", "a", *second],
        ["evaluate", trained, "--data", table, *wrong],
        ["explain", trained, "--text", "a", *second, "--out", tmp_path / "shown"],
    ):
        refused = sot(*attempt)
        assert refused.returncode == 2 and message in refused.stderr, attempt
    assert sot("evaluate", trained, "--data", table, *columns).returncode == 0
    shown = ["explain", trained, "--text", "a", *(["--pair", ""] if pairs else []), "--out", tmp_path / "shown"]
    assert sot(*shown).returncode == 0


def test_probing_refuses_a_length_in_one_sentence(bert, tmp_path):
    rows = [json.dumps({"sentence": "a b", "label": number % 2}) for number in range(8)]
    table = write(tmp_path, "a.jsonl", "\n".join(rows))
    command = ["probe", "--model", bert, "--data", table, "--dev", table, "--out", tmp_path / "out"]
    result = sot(*command, "--max-length", 21)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "max_length must be between 3 and 20 tokens for this model, got 21" in result.stderr


@pytest.mark.parametrize(
    "config, limit",
    [
        (hf.BertConfig(**SMALL), 20),
        (hf.RobertaConfig(**SMALL), 18),
        (hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=20), 20),
        (hf.OPTConfig(**SIZES, hidden_size=16, ffn_dim=16, word_embed_proj_dim=16, pad_token_id=1), 20),
        (hf.ModernBertConfig(**SMALL), None),
    ],
)
def test_positions_are_counted_as_the_model_counts_them(config, limit):
    model = hf.AutoModel.from_config(config).eval()
    assert position_limit(model) == limit
    model(input_ids=torch.full((1, limit or 40), 5))
    if limit is not None:
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, limit + 1), 5))


def test_a_model_of_rotary_positions_has_no_longest_text(bert):
    model = equip(bert, 2)
    model.backbone = hf.AutoModel.from_config(hf.ModernBertConfig(**SMALL))
    check_length(model, 10_000, pairs=False)
    with pytest.raises(ValueError, match="max_length must be at least 3 tokens for this model, got 2"):
        check_length(model, 2, pairs=False)


def test_one_score_is_too_few_to_probe(bert):
    with pytest.raises(ValueError, match="texts dev has one sample, and a correlation needs at least two"):
        text_samples(equip(bert, 2), TextSplit(["a b"], None, [1.0]), "texts dev", 8, regression=True)


def test_of_three_scores_one_is_held_out_and_its_loss_decides(bert, tmp_path):
    write(tmp_path, "train.tsv", SCORES + "b\ta\t2\na b\tb\t3\n")
    write(tmp_path, "dev.tsv", SCORES + "b\ta\t2\n")
    sizes = ["--heads", "class", "--epochs", 1, "--seeds", 2, "--max-length", 8, "--json"]
    result = sot("probe", "--model", bert, "--task", "stsb", "--data", tmp_path, "--out", tmp_path / "out", *sizes)
    assert result.returncode == 0 and "NaN" not in result.stdout, result.stderr


def test_a_tar_file_that_changes_makes_another_cache(tmp_path, monkeypatch):
    """Also where its images lie unpacked in the working directory, under the names they have in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(100):
            Image.new("RGB", (2, 2), (number, 0, 0)).save(tmp_path / name / f"{number}.png")

    def digest(moment):
        with tarfile.open(tmp_path / "set.tar", "w") as tar:
            for folder in ("a", "b"):
                tar.add(folder)
        os.utime(tmp_path / "set.tar", ns=(moment, moment))
        return picture_digest(load_images(str(tmp_path / "set.tar")).train)

    first = digest(10**18)
    assert digest(10**18) == first and digest(10**18 + 1000) != first
