"""Evaluation against timm's and scikit-learn's own numbers, ImageNet-A's classes, and what is refused."""

import importlib.util
import json
import shutil
from importlib import resources

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, top_k_accuracy_score
from test_cli import sot
from timm.data import ImageNetInfo
from timm.utils import accuracy

from sot.data.imagenet import match_classes, subset_name
from sot.evaluation.evaluate import open_images
from sot.models.equip import equip
from sot.models.folder import load_model
from sot.training.recipe import Recipe

HEAD = {"heads": 2, "left_dim": 3, "right_dim": 3}
SYNSETS, DESCRIPTIONS = ImageNetInfo().label_names(), ImageNetInfo().label_descriptions()
NAMINGS = {
    "synsets": SYNSETS,
    "descriptions": DESCRIPTIONS,
    "first words": [description.split(",")[0] for description in DESCRIPTIONS],
    "descriptions, some spelt otherwise": [("a " if i % 20 == 0 else "") + d for i, d in enumerate(DESCRIPTIONS)],
    "numbers": [str(number) for number in range(1000)],
    "LABEL_k": [f"LABEL_{number}" for number in range(1000)],
    "synsets in another order": SYNSETS[::-1],
}


def indices(name):
    file = resources.files("timm.data") / "_info" / f"imagenet_{name}_indices.txt"
    return [int(line) for line in file.read_text().split()]


def noise(number):
    draw = np.random.default_rng(number)
    coarse = Image.fromarray(draw.integers(0, 255, (6, 7, 3), dtype=np.uint8))
    return coarse.resize((70, 60), Image.Resampling.BICUBIC)


def save(model, folder, labels):
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {name: number for number, name in enumerate(labels)}
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def thousand():
    """A model of 1000 classes that tells the images of this file apart."""
    torch.manual_seed(0)
    model = equip("test_vit", 1000, HEAD, pretrained=False).eval()
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.mul_(20)
    return model


@torch.inference_mode()
def logits_of(model, pictures):
    pixels = model.processor(pictures, return_tensors="pt")["pixel_values"]
    return torch.cat([model(pixel_values=part).logits for part in pixels.split(64)])


@pytest.fixture(scope="module", params=["a", "r"])
def adversarial(request, thousand, tmp_path_factory):
    """An image in each of the 200 folders, and 80 more in folders that the model puts first to eighth."""
    root, columns = tmp_path_factory.mktemp("imagenet"), indices(request.param)
    pictures = [noise(number) for number in range(280)]
    logits = logits_of(thousand, pictures)
    ranked = logits[:, columns].argsort(1, descending=True)
    targets = [number if number < 200 else int(ranked[number, number % 8]) for number in range(280)]
    for number, (picture, target) in enumerate(zip(pictures, targets)):
        folder = root / SYNSETS[columns[target]]
        folder.mkdir(exist_ok=True)
        picture.save(folder / f"{number}.png")
    return root, request.param, logits, torch.tensor(targets)


@pytest.mark.parametrize("naming", NAMINGS)
def test_imagenet_a_and_r_are_scored_among_their_200_classes(naming, adversarial, thousand, tmp_path):
    root, name, logits, targets = adversarial
    folder = save(thousand, tmp_path / "model", NAMINGS[naming])
    columns = [999 - column for column in indices(name)] if "another order" in naming else indices(name)
    result = sot("evaluate", folder, "--data", root, "--json")
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)
    top1, top5 = accuracy(logits[:, columns], targets, topk=(1, 5))
    assert (scores["accuracy"], scores["top5"]) == pytest.approx((float(top1) / 100, float(top5) / 100), abs=1e-6)
    assert scores["note"] == f"among the 200 classes of ImageNet-{name.upper()} (of 1000 the model knows)"
    assert sum(samples for _, samples, *_ in scores["classes"]) == 280


def test_all_classes_lets_the_model_choose_among_1000(adversarial, thousand, tmp_path):
    root, name, logits, targets = adversarial
    folder = save(thousand, tmp_path / "model", DESCRIPTIONS)
    restricted = open_images(folder, str(root)).evaluate(64, iter)
    result = open_images(folder, str(root)).evaluate(64, iter, all_classes=True)
    truth = torch.tensor(indices(name))[targets]
    top1, top5 = accuracy(logits, truth, topk=(1, 5))
    assert result.scores["accuracy"] == pytest.approx(float(top1) / 100, abs=1e-6)
    assert result.scores["top5"] == pytest.approx(float(top5) / 100, abs=1e-6)
    expected = top_k_accuracy_score(truth, logits.numpy(), k=5, labels=range(1000))
    assert result.scores["top5"] == pytest.approx(expected)
    assert result.note == "among all 1000 classes" and result.scores["top5"] < restricted.scores["top5"]
    assert restricted.scores["accuracy"] > 0.02


def test_only_the_whole_set_of_classes_bears_its_name():
    assert [subset_name([SYNSETS[i] for i in indices(name)]) for name in "ar"] == ["ImageNet-A", "ImageNet-R"]
    assert subset_name(SYNSETS[:200]) is None
    assert match_classes(["n01440764"], [str(i) for i in range(10)]) is None
    assert match_classes(["n01440764"], list(reversed(DESCRIPTIONS))) is None
    assert match_classes(["b", "a"], ["a", "b", "c"]) == [1, 0]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A model of three classes, and a folder of images of them."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("three")
    labels = ["one", "three", "two"]
    model = equip("test_vit", labels=labels, head=HEAD, pretrained=False).eval()
    model.save_pretrained(root / "model")
    pictures = [noise(number) for number in range(60)]
    guessed = logits_of(model, pictures).argmax(1).tolist()
    for number, picture in enumerate(pictures):
        label = labels[guessed[number] if number % 3 else number % 9 // 3]
        (root / "data" / label).mkdir(parents=True, exist_ok=True)
        picture.save(root / "data" / label / f"{number}.png")
    return root


def test_a_folder_is_scored_as_timm_and_scikit_learn_score_it(three):
    """On the same pixels exactly; timm's own transform makes slightly other pixels, which hardly matters."""
    result = open_images(three / "model", str(three / "data")).evaluate(16, iter)
    model, processor = load_model(three / "model")
    data = timm.data.create_dataset("", root=str(three / "data"))
    config = timm.data.resolve_model_data_config(model.backbone.timm_model)
    loader = timm.data.create_loader(data, batch_size=60, is_training=False, use_prefetcher=False, **config)
    theirs, targets = next(iter(loader))
    files = [data.filename(i, absolute=True) for i in range(len(data))]
    ours = processor([Image.open(file).convert("RGB") for file in files], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        logits, timm_logits = (model(pixel_values=pixels).logits for pixels in (ours, theirs))
    top1 = float(accuracy(logits, targets)[0]) / 100
    assert result.scores["accuracy"] == pytest.approx(top1, abs=1e-6) == accuracy_score(targets, logits.argmax(1))
    assert result.confusion.sum() == len(targets) == 60
    assert result.scores["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, targets)), abs=1e-5)
    assert (ours - theirs).abs().max() < 0.05 and (logits - timm_logits).abs().max() < 0.05 * logits.std()
    assert abs(float(accuracy(timm_logits, targets)[0]) / 100 - top1) <= 1 / 60 + 1e-6


def test_all_of_a_folder_is_scored_unless_the_model_was_trained_on_it(three, tmp_path):
    run = tmp_path / "run"
    settings = ["epochs=1", "batch_size=8", "img_size=32", "seed=5", "head={heads: 2, left_dim: 3, right_dim: 3}"]
    options = [word for setting in settings for word in ("--set", setting)]
    data = three / "data"
    command = ["train", "--model", "test_vit", "--data", "data", "--out", run, "--logger", "none"]
    result = sot(*command, "--recipe", "digits", *options, cwd=three)
    assert result.returncode == 0, result.stderr
    own = json.loads(sot("evaluate", run, "--data", data, "--json").stdout)
    last = json.loads((run / "metrics.json").read_text())[-1]
    assert sum(samples for _, samples, *_ in own["classes"]) == 12
    assert own["accuracy"] == pytest.approx(last["eval_accuracy"], abs=1 / 12 + 1e-6)  # the processor's other pixels
    (tmp_path / "other").symlink_to(data)
    same = json.loads(sot("evaluate", run, "--data", tmp_path / "other", "--json").stdout)
    assert same == own
    file = run / "run.json"
    assert json.loads(file.read_text())["data"] == str(data.resolve())
    file.write_text(file.read_text().replace(str(data.resolve()), "data"))  # as versions before wrote it
    assert json.loads(sot("evaluate", run, "--data", data, "--json", cwd=three).stdout) == own
    other = sot("evaluate", three / "model", "--data", data, "--json")
    assert sum(samples for _, samples, *_ in json.loads(other.stdout)["classes"]) == 60


def test_what_cannot_be_evaluated_is_one_sentence(three, tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    for name in ("one", "four"):
        (tmp_path / "data" / name).mkdir(parents=True)
        noise(0).save(tmp_path / "data" / name / "x.png")
    model, data = three / "model", three / "data"
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([tmp_path / "nowhere", "--data", data], "nowhere is not a model: it has no config.json"),
        ([tmp_path / "empty", "--data", data], "empty is not a model: it has no config.json"),
        ([tmp_path / "damaged", "--data", data], "config.json is damaged"),
        ([model], "an image model needs --data to be evaluated on"),
        ([model, "--data", tmp_path / "none"], "unknown data"),
        ([model, "--data", tmp_path / "empty"], "holds no images: it needs one folder for each class"),
        ([model, "--data", tmp_path / "data"], "has classes the model was not trained on: four"),
        ([model, "--data", "digits"], "has classes the model was not trained on: 0, 1"),
    ):
        result = sot("evaluate", *arguments)
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1
    for file, content, message in (
        ("config.json", b"[]", "config.json is damaged: it holds '[]', not an object of JSON"),
        ("config.json", b"\xff", "config.json is damaged: 'utf-8' codec"),
        ("config.json", b"{}", "damaged names no classes: it is not a model that sot trained"),
        ("run.json", b"[]", "run.json is damaged: it holds '[]', not an object of JSON"),
        ("model.safetensors", b"", "the weights in"),
    ):
        shutil.copytree(model, tmp_path / "damaged", dirs_exist_ok=True)
        (tmp_path / "damaged" / file).write_bytes(content)
        task = ["--task", "cola"] if content == b"{}" else []
        result = sot("evaluate", tmp_path / "damaged", "--data", data, *task)
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1
        (tmp_path / "damaged" / "run.json").unlink(missing_ok=True)
    for arguments, message in (
        ([tmp_path / "nowhere", "x.png"], "nowhere is not a model"),
        ([model], "nothing to predict"),
        ([model, tmp_path / "no.png"], "1 of 1 input could not be read"),
    ):
        result = sot("predict", *arguments)
        assert result.returncode == 2 and message in result.stderr, result.stderr


@pytest.fixture(scope="module")
def sentences(stand_ins, tmp_path_factory):
    """A run on sentences, cut to four tokens."""
    root = tmp_path_factory.mktemp("sentences")
    rows = [f"the cats {'sleep' if i % 2 else 'sleeps'},{'right' if i % 2 else 'wrong'}" for i in range(8)]
    (root / "table.csv").write_text("sentence,label\n" + "\n".join(rows) + "\n")
    model, table = stand_ins["google-bert/bert-base-uncased"], root / "table.csv"
    settings = ["epochs=1", "batch_size=8", "max_length=4", "head.representation_size=16"]
    options = [word for setting in settings for word in ("--set", setting)]
    command = ["finetune", "--model", model, "--data", table, "--dev", table, "--out", root / "run"]
    result = sot(*command, "--logger", "none", *options)
    assert result.returncode == 0, result.stderr
    return root


def test_texts_are_cut_as_they_were_in_training(sentences):
    _, tokenizer = load_model(sentences / "run")
    assert tokenizer.model_max_length == 4 != Recipe().max_length
    long = " ".join(["the cats sleep"] * 500)  # more tokens than the model has positions
    short = sot("predict", sentences / "run", "--text", "the cats sleep the cats", "--json")
    result = sot("predict", sentences / "run", "--text", long, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["classes"] == json.loads(short.stdout)["classes"]
    table = sentences / "long.csv"
    table.write_text(f"sentence,label\n{long},right\n")  # one class only: the model knows the others
    result = sot("evaluate", sentences / "run", "--data", table, "--json")
    assert result.returncode == 0, result.stderr


def test_tables_that_do_not_fit_the_model_are_refused(sentences, tmp_path):
    table = tmp_path / "table.csv"
    for text, options, message in (
        ("sentence,label\na,perhaps\n", [], "table.csv, row 1: label 'perhaps' is none of right, wrong"),
        ("words,label\na,right\n", [], "has no column 'sentence'; it has words, label"),
        ("sentence,label\na,right\n", ["--label", "answer"], "has no column 'answer'; it has sentence, label"),
        ("sentence,label\na,right\n", ["--pair", "other"], "has no column 'other'; it has sentence, label"),
        ("sentence,label\n", [], "has no rows"),
    ):
        table.write_text(text)
        result = sot("evaluate", sentences / "run", "--data", table, *options)
        assert result.returncode == 2 and message in result.stderr, result.stderr
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tscore\n" + "a cat\tthe cat\t2.5\nthe cats\ta\t1.0\n")
    for options, message in (
        ([], "name a --task, or give --data a table"),
        (["--data", tmp_path / "no.csv"], "no such file"),
        (["--task", "acceptability"], "the classes of the data (unacceptable, acceptable) are not the model's"),
        (["--task", "stsb", "--data", tmp_path], "run predicts classes (right, wrong)"),
    ):
        result = sot("evaluate", sentences / "run", *options)
        assert result.returncode == 2 and message in result.stderr, result.stderr


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
@pytest.mark.parametrize("command", [["train", "--data", "digits"], ["finetune", "--task", "acceptability"]])
def test_logging_to_a_missing_wandb_is_refused_before_any_work(command, tmp_path):
    result = sot(*command, "--model", "test_vit", "--out", tmp_path / "run", "--logger", "wandb")
    assert result.returncode == 2 and "--logger wandb needs the library wandb: pip install wandb" in result.stderr
    assert not (tmp_path / "run").exists()
