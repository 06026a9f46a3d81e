"""Heads on a frozen backbone: the cache, the choice of settings, what is written, and what is refused."""

import csv
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy import stats
from test_cli import sot
from transformers import AutoModelForImageClassification

from sot.bench.timing import thread_count
from sot.data.images import load_images
from sot.data.sources import Subset
from sot.data.text import TextSplit
from sot.metrics import interval
from sot.models.equip import equip
from sot.probe import Backbone, Budget, Features, cache_features, choose_heads, open_backbone
from sot.probe.compare import Contest
from sot.probe.heads import HEADS, build_head, count_macs, token_statistics
from sot.probe.journal import Journal
from sot.probe.samples import encode, image_samples, text_samples
from sot.probe.train import Task, split_rows

QUICK = Budget(epochs=8, learning_rates=(1e-2,), weight_decays=(0.01,))


@pytest.fixture(autouse=True)
def one_thread():
    """Steps this small are slower on several."""
    with thread_count(1):
        yield


def tiny_vit(**arguments):
    torch.manual_seed(0)
    return equip("test_vit", 2, {"pool": "gap", "fusion": "word"}, pretrained=False, model_args=arguments).eval()


@pytest.fixture(scope="module")
def vit():
    return tiny_vit(img_size=32)


@pytest.fixture(scope="module")
def digits():
    return Subset(load_images("digits").train, range(80))  # a whole chunk and a part of one


@pytest.fixture
def passes(vit):
    """Sizes of the batches that went through the backbone."""
    seen = []
    hook = vit.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
    )
    yield seen
    hook.remove()


def stop_after_one(items, title):
    yield items[0]
    raise KeyboardInterrupt


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*/*.npy"))}


# --- the cache ---------------------------------------------------------------------------------------------


def test_the_cache_holds_the_tokens_of_the_model_in_half_precision(vit, digits, tmp_path):
    features = cache_features(vit, image_samples(vit, digits, "digits"), tmp_path)
    rows = np.array([70, 3, 77])
    pixels = vit.processor([digits[row][0] for row in rows], return_tensors="pt")["pixel_values"]
    direct, cached = encode(vit, {"pixel_values": pixels}), features.batch(rows)
    torch.testing.assert_close(cached.word_tokens, direct.word_tokens, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(cached.class_token, direct.class_token, rtol=1e-3, atol=1e-4)
    assert cached.mask is None and cached.word_tokens.dtype == torch.float32
    assert features.words.dtype == np.float16 and isinstance(features.words, np.memmap)
    assert features.labels.tolist() == [label for _, label in (digits[row] for row in range(80))]
    assert features.seconds > 0 and features.batch(rows, with_words=False).word_tokens.numel() == 0


def test_an_interrupted_cache_goes_on_where_it_was(vit, digits, passes, tmp_path):
    samples = image_samples(vit, digits, "digits")
    cache_features(vit, samples, tmp_path / "whole")
    passes.clear()
    with pytest.raises(KeyboardInterrupt):
        cache_features(vit, samples, tmp_path / "parts", stop_after_one)
    assert passes == [1, 64]  # one picture tells how many words there are
    passes.clear()
    cache_features(vit, samples, tmp_path / "parts")
    assert passes == [16]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    passes.clear()
    cache_features(vit, samples, tmp_path / "parts")
    assert passes == []


def damage_a_number(folder):
    with (folder / "words.npy").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\x42")


def cut_off(folder):
    file = folder / "words.npy"
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize(
    "damage, again",
    [
        (damage_a_number, [16]),
        (cut_off, [16]),
        (lambda folder: (folder / "class.npy").unlink(), [64, 16]),
        (lambda folder: (folder / "labels.npy").write_bytes(b"nothing"), [64, 16]),
        (lambda folder: (folder / "cache.json").write_text("{"), [1, 64, 16]),
        (lambda folder: (folder / "cache.json").write_text("[]"), [1, 64, 16]),
    ],
)
def test_what_is_damaged_is_computed_again_with_a_warning(damage, again, vit, digits, passes, tmp_path, caplog):
    samples = image_samples(vit, digits, "digits")
    cache_features(vit, samples, tmp_path)
    before = contents(tmp_path)
    (folder,) = tmp_path.iterdir()
    damage(folder)
    passes.clear()
    cache_features(vit, samples, tmp_path)
    assert passes == again and contents(tmp_path) == before
    assert "damaged" in caplog.text


def test_another_model_data_or_transform_is_another_cache(vit, digits, tmp_path):
    def key(model, source):
        return cache_features(model, image_samples(model, source, "digits"), tmp_path).key

    few = Subset(digits, range(3))
    first = key(vit, few)
    assert key(tiny_vit(img_size=32), few) == first and len(list(tmp_path.iterdir())) == 1
    weights, size, transform = tiny_vit(img_size=32), tiny_vit(img_size=48), tiny_vit(img_size=32)
    with torch.no_grad():
        weights.backbone.timm_model.blocks[0].mlp.fc1.bias[0] += 1e-3
    transform.processor.image_mean = [0.1, 0.2, 0.3]
    for model, source, part in (
        (weights, few, "model"),
        (size, few, "model"),
        (transform, few, "transform"),
        (vit, Subset(digits, range(1, 4)), "data"),
    ):
        other = key(model, source)
        assert other[part] != first[part]
    assert len(list(tmp_path.iterdir())) == 5
    (recorded,) = [f for f in tmp_path.glob("*/cache.json") if json.loads(f.read_text())["key"] == first]
    assert recorded.parent.name in {folder.name for folder in tmp_path.iterdir()}


def test_a_file_of_the_data_that_changes_makes_another_cache(vit, tmp_path):
    for name in ("a", "b"):
        for number in range(5):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    first = image_samples(vit, load_images(str(tmp_path)).train, "folder").identity["data"]
    assert image_samples(vit, load_images(str(tmp_path)).train, "folder").identity["data"] == first
    for file in tmp_path.glob("*/*.png"):
        Image.new("RGB", (9, 8), (9, 9, 9)).save(file)
    assert image_samples(vit, load_images(str(tmp_path)).train, "folder").identity["data"] != first


@pytest.fixture(scope="module")
def bert(stand_ins):
    return equip(stand_ins["google-bert/bert-base-uncased"], 2, {"pool": "gap", "fusion": "word"}).eval()


def sentences(count):
    draw = np.random.default_rng(0)
    words = ["the", "cat", "cats", "sleep", "sleeps"]
    return [" ".join(draw.choice(words, size=draw.integers(1, 9))) for _ in range(count)]


def test_texts_are_stored_without_padding_and_come_back_with_a_mask(bert, tmp_path):
    texts = sentences(100)
    split = TextSplit(texts, None, [float(len(text.split()) % 2) for text in texts])
    samples = text_samples(bert, split, "texts", 6, regression=False)
    features = cache_features(bert, samples, tmp_path)
    lengths = [min(6, len(text.split())) for text in texts]  # this tokenizer adds no special tokens
    assert np.diff(features.starts).tolist() == sorted(length - 1 for length in lengths)
    assert len(features.words) == sum(lengths) - 100
    rows = np.array([99, 0, 50])
    batch = features.batch(rows)
    for position, row in enumerate(rows):
        direct = encode(bert, samples.batch([row]))  # alone, so without padding
        kept = batch.word_tokens[position][batch.mask[position]]
        torch.testing.assert_close(kept, direct.word_tokens[direct.mask], rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(batch.class_token[position], direct.class_token[0], rtol=1e-3, atol=2e-3)
    assert features.key["transform"]["max_length"] == 6
    with pytest.raises(ValueError, match="the texts of one have one token each"):
        text_samples(bert, TextSplit(["cat", "the"], None, [0.0, 1.0]), "one", 6, regression=False)
    with pytest.raises(ValueError, match="none is empty"):
        text_samples(bert, TextSplit([], None, []), "none", 6, regression=False)


# --- heads -------------------------------------------------------------------------------------------------


def test_heads_are_those_that_the_tokens_allow():
    everything = choose_heads(["all"], 384, True)
    assert everything == HEADS and len(HEADS) == 19
    words = choose_heads(["all"], 384, False)
    assert list(words) == [name for name in HEADS if not name.startswith("class")]
    assert "ep32" not in choose_heads(["all"], 48, True) and "ep8" in choose_heads(["all"], 48, True)
    assert list(choose_heads(["mgcrp", "class", "mgcrp"], 384, True)) == ["mgcrp", "class"]
    for names, dim, has_class_token, message in (
        (["class"], 64, False, "head 'class' needs a class token, and this backbone has none; accepted: gap, max"),
        (["ep32"], 48, True, "head 'ep32' needs a token width that 32 divides, and this backbone has 48"),
        (["linear"], 64, True, "unknown head 'linear'; accepted: all, class, gap"),
        ([], 64, True, "unknown head"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_heads(names, dim, has_class_token)


def hand_made(count, seed, dim=16, words=24, class_tokens=True):
    """Two classes of tokens with equal means and variances: one channel goes with, or against, its neighbour."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, count).astype(float)
    tokens = draw.standard_normal((count, words, dim))
    sign = np.where(labels == 1, 1, -1)[:, None, None]
    tokens[..., 1::2] = 0.9 * sign * tokens[..., ::2] + 0.44 * tokens[..., 1::2]
    first = draw.standard_normal((count, dim)).astype(np.float16) if class_tokens else None
    starts = np.arange(count + 1) * words
    return Features(first, tokens.reshape(-1, dim).astype(np.float16), starts, labels, 1.0, {"seed": seed})


def test_only_second_order_heads_see_second_order_statistics(tmp_path):
    contest = Contest(hand_made(400, 1), hand_made(300, 2), Task(2), QUICK, Journal(tmp_path / "rows.jsonl"))
    names = ["class", "gap", "class+gap", "gcp", "mgcrp", "mgcrp-exact"]
    heads = {name: HEADS[name] for name in names}
    results = {result.head: result.mean for result in contest.run(heads, seeds=1)}
    assert all(results[name] < 0.6 for name in names[:3]), results
    assert all(results[name] > 0.9 for name in names[3:]), results
    assert contest.best(heads) in names[3:]


def test_all_heads_read_the_same_standardised_tokens():
    features = hand_made(300, 0)
    features.words[:, 3] = 2.5  # a channel that never varies
    norm = token_statistics(features)
    heads = [build_head(HEADS[name], 2, norm) for name in ("class", "gap", "mgcrp")]
    tokens = features.batch(np.arange(300))
    words = heads[0].norm(tokens.word_tokens).flatten(0, 1)
    both = torch.stack([part.std(0) for part in (words, heads[0].norm(tokens.class_token))])
    assert words.isfinite().all() and (both[:, torch.arange(16) != 3] < 2).all()
    for head in heads:
        assert torch.equal(head.norm.weight, heads[0].norm.weight) and not head.norm.weight.requires_grad
    pooled = torch.cat([words, heads[0].norm(tokens.class_token).repeat_interleave(24, 0)])
    torch.testing.assert_close(pooled.mean(0), torch.zeros(16), atol=1e-4, rtol=0)


def test_multiply_adds_of_heads_are_counted():
    norm = torch.zeros(32), torch.ones(32)
    assert count_macs(build_head(HEADS["class"], 10, norm), 49) == 32 * 10
    expected = 49 * 32 * 6 * 28 + 6 * 49 * 14 * 14 + 6 * 14 * 14 * 10
    counted = count_macs(build_head(HEADS["mgcrp"], 10, norm), 49)
    assert expected <= counted <= expected + 6 * 14 * 14 * 4  # the rest are the power iterations


# --- choosing and reporting --------------------------------------------------------------------------------


def test_the_choice_never_sees_the_test_set(tmp_path):
    train, heads = hand_made(120, 1), {name: HEADS[name] for name in ("class", "mgcrp")}
    budget = Budget(epochs=2, learning_rates=(1e-3, 1e-2))
    chosen = []
    for number, test in enumerate((hand_made(50, 2), hand_made(70, 3, words=5))):
        if number:
            test.words[:] = np.nan
            test.labels[:] = 0
        contest = Contest(train, test, Task(2), budget, Journal(tmp_path / f"{number}.jsonl"))
        contest.run(heads, seeds=1)
        chosen.append([contest.best(heads), *(contest.choice(head) for head in heads.values())])
    assert chosen[0] == chosen[1]


def test_the_held_out_part_is_no_part_of_what_is_fitted():
    fit, held_out = split_rows(100, 0.2)
    assert len(held_out) == 20 and sorted([*fit, *held_out]) == list(range(100))
    assert np.array_equal(held_out, split_rows(100, 0.2)[1])
    with pytest.raises(ValueError, match="1 training samples are too few"):
        split_rows(1, 0.2)


def test_finished_rows_are_read_back_and_damaged_ones_computed_again(tmp_path, caplog):
    file, heads = tmp_path / "rows.jsonl", {name: HEADS[name] for name in ("class", "gap")}

    def run(seeds, budget=QUICK):
        contest = Contest(hand_made(60, 1), hand_made(40, 2), Task(2), budget, Journal(file))
        return contest.run(heads, seeds)

    first = run(2)
    rows = file.read_text().splitlines()
    assert len(rows) == 2 * (1 + 2)
    assert run(2) == first and file.read_text().splitlines() == rows
    file.write_text("\n".join([*rows[:-1], rows[-1][:20]]) + "\n")
    again = run(2)
    assert [result.scores for result in again] == [result.scores for result in first]
    assert "damaged" in caplog.text and file.read_text().splitlines()[:-1] == rows[:-1]
    run(3)
    assert len(file.read_text().splitlines()) == 2 * (1 + 3)
    run(2, Budget(epochs=1, learning_rates=(1e-2,), weight_decays=(0.01,)))  # another budget, other rows
    assert len(file.read_text().splitlines()) == 2 * (1 + 3) + 2 * (1 + 2)


def test_a_number_can_be_predicted(tmp_path):
    train, test = hand_made(200, 1), hand_made(100, 2)
    for part in (train, test):
        part.labels[:] = part.class_tokens[:, 0].astype(float)
    budget = Budget(epochs=20, learning_rates=(1e-2,), weight_decays=(0.01,))
    contest = Contest(train, test, Task(1, "pearson"), budget, Journal(tmp_path / "rows.jsonl"))
    assert contest.run({"class": HEADS["class"]}, 1)[0].mean > 0.9


@pytest.mark.parametrize("scores", [[0.5, 0.6], [0.91, 0.92, 0.9], [0.1, 0.4, 0.3, 0.35, 0.2]])
def test_the_interval_is_students(scores):
    low, high = stats.t.interval(0.95, len(scores) - 1, loc=np.mean(scores), scale=stats.sem(scores))
    assert interval(scores) == pytest.approx((high - low) / 2)
    assert interval(scores[:1]) is None


# --- the command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stripes(tmp_path_factory):
    """Horizontal and vertical stripes."""
    root, draw = tmp_path_factory.mktemp("stripes"), np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 15)):
        for name in ("across", "down"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                lines = np.repeat(draw.integers(0, 255, (32, 1, 3), dtype=np.uint8), 32, axis=1)
                pixels = lines if name == "across" else lines.transpose(1, 0, 2)
                Image.fromarray(np.ascontiguousarray(pixels)).save(root / split / name / f"{number}.png")
    return root


def test_probing_pictures_leaves_tables_a_picture_and_a_model(stripes, tmp_path):
    out = tmp_path / "probe"
    command = ["probe", "--model", "test_vit", "--no-pretrained", "--img-size", 32, "--data", stripes, "--out", out]
    command += ["--heads", "class,gap,class+mgcrp-exact", "--seeds", 2, "--epochs", 3, "--threads", 1]
    result = sot(*command, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((out / "probe.json").read_text())
    assert [row["head"] for row in report["heads"]] == ["class", "gap", "class+mgcrp-exact"]
    assert all(len(row["scores"]) == 2 and row["epoch_ratio"] > 0 for row in report["heads"])
    assert report["heads"][0]["params"] == 2 * 64 + 2
    with (out / "probe.csv").open() as file:
        assert [float(row["mean"]) for row in csv.DictReader(file)] == [row["mean"] for row in report["heads"]]
    assert (out / "probe.png").read_bytes().startswith(b"\x89PNG")

    held_out = {row["head"]: row["held_out"] for row in report["heads"]}
    best = next(row for row in report["heads"] if row["head"] == report["best"])
    assert best["held_out"] == max(held_out.values())
    scores = json.loads(sot("evaluate", out / "best", "--data", stripes, "--json").stdout)
    assert scores["accuracy"] == pytest.approx(best["scores"][0], abs=1 / 30)  # the cache rounds to half precision
    prediction = json.loads(sot("predict", out / "best", stripes / "val" / "down" / "0.png", "--json").stdout)
    assert prediction["classes"][0][0] in ("across", "down")
    assert AutoModelForImageClassification.from_pretrained(out / "best").config.head == best["config"]

    rows = (out / "rows.jsonl").read_bytes()
    again = sot(*command)
    assert again.returncode == 0 and "class+mgcrp-exact" in again.stdout and "±" in again.stdout
    assert (out / "rows.jsonl").read_bytes() == rows


def test_weights_come_from_a_file(tmp_path):
    state = timm.create_model("test_vit", num_classes=0, img_size=32).state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    backbone = Backbone("test_vit", weights=tmp_path / "weights.safetensors", img_size=32)
    loaded = open_backbone(backbone).backbone.timm_model.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in state.items() if name in loaded) and loaded


def test_probing_texts(stand_ins, tmp_path):
    rows = [f"{text},{'long' if len(text.split()) > 4 else 'short'}" for text in sentences(80)]
    for name, part in (("train", rows[:60]), ("dev", rows[60:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["sentence,label", *part]) + "\n")
    model, out = stand_ins["google-bert/bert-base-uncased"], tmp_path / "probe"
    command = ["probe", "--model", model, "--data", tmp_path / "train.csv", "--dev", tmp_path / "dev.csv"]
    options = ["--heads", "class,class+gcp", "--seeds", 2, "--epochs", 2, "--max-length", 7, "--cache", tmp_path / "c"]
    result = sot(*command, "--out", out, *options, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["metric"] == "accuracy" and len(list((tmp_path / "c").iterdir())) == 2
    best = next(row for row in report["heads"] if row["head"] == report["best"])
    scores = json.loads(sot("evaluate", out / "best", "--data", tmp_path / "dev.csv", "--json").stdout)
    assert scores["accuracy"] == pytest.approx(best["scores"][0], abs=1 / 20)
    long = sot("predict", out / "best", "--text", "the cat " * 400, "--json")  # cut as it was in probing
    assert long.returncode == 0, long.stderr


def test_a_backbone_without_class_token(digits, tmp_path):
    model = tiny_vit(img_size=32, class_token=False, global_pool="avg")
    features = cache_features(model, image_samples(model, digits, "digits"), tmp_path)
    assert features.class_tokens is None
    contest = Contest(features, features, Task(10), QUICK, Journal(tmp_path / "rows.jsonl"))
    (result,) = contest.run(choose_heads(["gap"], features.dim, False), seeds=1)
    assert 0 <= result.mean <= 1


def test_mistakes_are_one_sentence_before_any_work(stripes, stand_ins, tmp_path):
    (tmp_path / "empty.csv").write_text("sentence,label\n")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "other.pt").write_bytes(b"")
    state = timm.create_model("test_vit", num_classes=0).state_dict()
    save_file({**state, "norm.weight": torch.ones(1 + state["norm.weight"].numel())}, tmp_path / "wide.safetensors")
    save_file({key: value for key, value in state.items() if key != "cls_token"}, tmp_path / "half.safetensors")
    bert = stand_ins["google-bert/bert-base-uncased"]
    vit = ["--model", "test_vit", "--no-pretrained"]
    for arguments, message in (
        ([*vit, "--data", stripes, "--heads", "class,liner"], "unknown head 'liner'; accepted: all, class, gap"),
        ([*vit, "--data", stripes, "--heads", ","], "unknown head"),
        ([*vit], "name the data: --data, or for texts also --task"),
        ([*vit, "--task", "cola"], "test_vit is a model for images: it needs --data"),
        ([*vit, "--data", tmp_path / "nothing"], "holds no pictures"),
        ([*vit, "--data", stripes, "--weights", tmp_path / "no.safetensors"], "no such file"),
        ([*vit, "--data", stripes, "--weights", tmp_path / "other.pt"], "other.pt holds no plain weights"),
        ([*vit, "--data", stripes, "--weights", tmp_path / "half.safetensors"], "test_vit: it lacks 1 weights, first"),
        ([*vit, "--data", stripes, "--weights", tmp_path / "wide.safetensors"], "does not fit test_vit"),
        (["--model", "no_such_model", "--data", stripes], "unknown model 'no_such_model'"),
        (["--model", bert, "--data", tmp_path / "empty.csv"], "empty.csv has no rows"),
        (["--model", bert, "--task", "acceptability", "--weights", tmp_path / "other.pt"], "--weights is for a timm"),
    ):
        result = sot("probe", *arguments, "--out", tmp_path / "out")
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()
