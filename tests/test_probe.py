"""Heads on a frozen backbone: the choice of settings, what is written, and what is refused."""

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
from test_probe_cache import sentences, tiny_vit
from transformers import AutoModelForImageClassification

from sot.bench.timing import thread_count
from sot.core.head import HeadConfig, SecondOrderHead
from sot.data.images import load_images
from sot.data.sources import Subset
from sot.evaluation.metrics import interval
from sot.probe import Budget, Features, FrozenBackbone, cache_features, choose_heads, open_backbone
from sot.probe.contest import ENGINES, Contest
from sot.probe.fitting import Target, training_batches
from sot.probe.heads import count_macs, standardising_head, token_statistics
from sot.probe.journal import Journal
from sot.probe.names import HEADS, TRAINED
from sot.probe.samples import image_samples

QUICK = Budget(epochs=8, least_steps=8, learning_rates=(1e-2,), weight_decays=(0.01,))


@pytest.fixture(autouse=True)
def one_thread():
    """Steps this small are slower on several."""
    with thread_count(1):
        yield


# --- heads -------------------------------------------------------------------------------------------------


def test_heads_are_those_that_the_tokens_allow():
    everything = choose_heads(["all"], 384, True)
    assert everything["class+mgcrp-exact-0.25"] == HeadConfig(pre_norm=True), "the default head"
    assert everything == HEADS and len(HEADS) == 26
    words = choose_heads(["all"], 384, False)
    assert list(words) == [name for name in HEADS if not name.startswith("class")] and set(TRAINED) < set(HEADS)
    assert "ep32" not in choose_heads(["all"], 48, True) and "ep8" in choose_heads(["all"], 48, True)
    assert list(choose_heads(["mgcrp", "class", "mgcrp"], 384, True)) == ["mgcrp", "class"]
    sized = choose_heads(["class", "class+ep8", "gcp", "class+mgcrp-exact"], 384, True, 384)
    widths = [SecondOrderHead(384, 2, config).word_features for config in sized.values()]
    assert widths == [0, 384, 27 * 28 // 2, 6 * 8 * 8] and sized["class"] == HEADS["class"]
    for names, dim, has_class_token, message in (
        (["class"], 64, False, "head 'class' needs a class token, and this backbone has none; accepted: gap, max"),
        (["ep32"], 48, True, "head 'ep32' needs a token width that 32 divides, and this backbone has 48"),
        (["linear"], 64, True, "unknown head 'linear'; accepted: all, class, gap"),
        ([], 64, True, "unknown head"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_heads(names, dim, has_class_token)
    for names, size, message in (
        (["class", "gap"], 60, "representation 60 is for gcp and mgcrp, and no head is one of them"),
        (["gcp", "gap"], 5, "representation must be between 6 and 2080 for tokens 64 wide, got 5"),
        (["all"], 10**8, "representation must be between 6 and 2080 for tokens 64 wide, got 100000000"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_heads(names, 64, True, size)


def hand_made(count, seed, dim=16, words=24, class_tokens=True):
    """Two classes of tokens with equal means and variances: one channel goes with, or against, its neighbour."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, count).astype(float)
    tokens = draw.standard_normal((count, words, dim))
    sign = np.where(labels == 1, 1, -1)[:, None, None]
    tokens[..., 1::2] = 0.9 * sign * tokens[..., ::2] + 0.44 * tokens[..., 1::2]
    first = normalized(draw.standard_normal((count, dim))) if class_tokens else None
    starts = np.arange(count + 1) * words
    return Features(first, normalized(tokens.reshape(-1, dim)), starts, labels, 1.0, {"seed": seed})


def normalized(tokens):
    """As a cache has them."""
    centred = tokens - tokens.mean(-1, keepdims=True)
    return (centred / centred.std(-1, keepdims=True)).astype(np.float16)


def test_only_second_order_heads_see_second_order_statistics(tmp_path):
    contest = Contest(hand_made(400, 1), hand_made(300, 2), Target(2), QUICK, Journal(tmp_path / "rows.jsonl"))
    names = ["class", "gap", "class+gap", "gcp", "mgcrp", "mgcrp-exact"]
    heads = {name: HEADS[name] for name in names}
    results = {result.head: result.mean for result in contest.run(heads, seeds=1)}
    assert all(results[name] < 0.6 for name in names[:3]), results
    assert all(results[name] > 0.9 for name in names[3:]), results
    assert contest.best(heads) in names[3:]


def test_samples_that_could_not_be_read_take_no_part(tmp_path):
    train, test = hand_made(400, 1), hand_made(300, 2)
    train.labels[::9] = test.labels[::9] = np.nan
    contest = Contest(train, test, Target(2), QUICK, Journal(tmp_path / "rows.jsonl"))
    (result,) = contest.run({"gcp": HEADS["gcp"]}, seeds=1)
    assert result.mean > 0.9 and round(result.mean * len(test.rows), 6).is_integer()


def test_all_heads_read_the_same_standardised_tokens():
    features = hand_made(300, 0)
    features.words[:, 3] = 2.5  # a channel that never varies
    norm = token_statistics(features)
    heads = [standardising_head(HEADS[name], 2, norm) for name in ("class", "gap", "mgcrp")]
    class_token, (words, starts) = features.batch(np.arange(300), heads[0].norm)
    assert starts.tolist() == features.starts.tolist()
    both = torch.stack([part.std(0) for part in (words, class_token)])
    assert words.isfinite().all() and (both[:, torch.arange(16) != 3] < 2).all()
    for head in heads:
        assert torch.equal(head.norm.weight, heads[0].norm.weight) and not head.norm.weight.requires_grad
    pooled = torch.cat([words, class_token.repeat_interleave(24, 0)])
    torch.testing.assert_close(pooled.mean(0), torch.zeros(16), atol=1e-4, rtol=0)


def test_multiply_adds_of_heads_are_counted():
    norm = torch.zeros(32), torch.ones(32)
    assert count_macs(standardising_head(HEADS["class"], 10, norm), 49) == 32 * 10
    expected = 49 * 32 * 6 * 28 + 6 * 49 * 14 * 14 + 6 * 14 * 14 * 10
    counted = count_macs(standardising_head(HEADS["mgcrp"], 10, norm), 49)
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
        contest = Contest(train, test, Target(2), budget, Journal(tmp_path / f"{number}.jsonl"))
        contest.run(heads, seeds=1)
        chosen.append([contest.best(heads), *(contest.choice(name, head) for name, head in heads.items())])
    assert chosen[0] == chosen[1]


def test_few_samples_are_gone_over_more_often():
    budget = Budget(epochs=10, least_steps=50, batch_size=64)
    assert [budget.epochs_of(samples) for samples in (16, 64, 65, 640, 5000)] == [50, 50, 25, 10, 10]


def test_labels_are_drawn_for_every_seed_and_each_has_its_own_choice(tmp_path):
    train, test = hand_made(200, 1), hand_made(100, 2)
    journal = Journal(tmp_path / "rows.jsonl")
    contest = Contest(train, test, Target(2), QUICK, journal, labels=8)
    drawn = [contest.rows(seed) for seed in range(3)]
    assert all(np.bincount(train.labels[rows].astype(int)).tolist() == [8, 8] for rows in drawn)
    assert not np.array_equal(drawn[0], drawn[1]) and np.array_equal(drawn[0], contest.rows(0))
    heads = {name: HEADS[name] for name in ("sot", "gap", "gcp", "majority", "logreg")}
    results = {result.head: result for result in contest.run(heads, seeds=3)}
    assert len(journal.rows) == 5 * 3 + 3 * 3
    assert results["sot"].labels == 8 and results["sot"].mean > results["gap"].mean + 0.1
    assert results["majority"].params == 0 and results["majority"].held_out is None
    usual = np.bincount(train.labels.astype(int)).argmax()
    assert set(results["majority"].scores) == {(test.labels == usual).mean()}, "that of all training samples"
    assert contest.best({"majority": None, "logreg": None}) is None
    again = Contest(train, test, Target(2), QUICK, journal, labels=8).run(heads, seeds=3)
    assert [row.scores for row in again] == [row.scores for row in results.values()]


def test_texts_of_like_length_share_a_batch_and_each_is_seen_once():
    draw = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(draw.integers(1, 60, 1000))])
    features = Features(None, np.zeros((starts[-1], 4), np.float16), starts, np.zeros(1000))
    rows = draw.permutation(1000)[:900]
    batches = training_batches(features, rows, 64, draw)
    assert len(batches) == 15 and max(map(len, batches)) == 64
    assert sorted(np.concatenate(batches)) == sorted(rows)
    spread = [np.ptp(features.lengths[batch]) for batch in batches]
    assert max(spread) < 15  # of 58
    longest = [features.lengths[batch].max() for batch in batches]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_batches_of_pictures_are_as_they_were_drawn():
    features, rows = hand_made(100, 0), np.random.default_rng(0).permutation(100)
    batches = training_batches(features, rows, 64, np.random.default_rng(1))
    assert np.array_equal(np.concatenate(batches), rows)


def test_finished_rows_are_read_back_and_damaged_ones_computed_again(tmp_path, caplog, monkeypatch):
    file, heads = tmp_path / "rows.jsonl", {name: HEADS[name] for name in ("class", "gap")}

    def run(seeds, budget=QUICK):
        contest = Contest(hand_made(60, 1), hand_made(40, 2), Target(2), budget, Journal(file))
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
    monkeypatch.setitem(ENGINES, "gap", 99)  # a head that is fitted in another way: its rows alone
    run(3)
    assert len(file.read_text().splitlines()) == 2 * (1 + 3) + 2 * (1 + 2) + (1 + 3)


def test_a_number_can_be_predicted(tmp_path):
    train, test = hand_made(200, 1), hand_made(100, 2)
    for part in (train, test):
        part.labels[:] = part.class_tokens[:, 0].astype(float)
    budget = Budget(epochs=20, learning_rates=(1e-2,), weight_decays=(0.01,))
    contest = Contest(train, test, Target(1, "pearson"), budget, Journal(tmp_path / "rows.jsonl"))
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
    assert report["unsorted_seconds"] is None and "sorted" not in again.stdout
    assert again.returncode == 0 and "class+mgcrp-exact" in again.stdout and "±" in again.stdout
    assert (out / "rows.jsonl").read_bytes() == rows


def test_few_labels_of_pictures_are_drawn_and_an_interrupted_run_goes_on(stripes, tmp_path):
    out = tmp_path / "probe"
    command = ["probe", "--model", "test_vit", "--no-pretrained", "--img-size", 32, "--data", stripes, "--out", out]
    command += ["--heads", "sot,gap,logreg,majority", "--seeds", 2, "--threads", 1, "--cache", tmp_path / "cache"]
    result = sot(*command, "--labels", "all,4,8", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert [(row["head"], row["labels"]) for row in report["heads"]] == [
        (head, count) for count in (4, 8, None) for head in ("sot", "gap", "logreg", "majority")
    ]
    rows = (out / "rows.jsonl").read_bytes()
    again = sot(*command, "--labels", "4,8,all")
    assert again.returncode == 0 and (out / "rows.jsonl").read_bytes() == rows, "all of it was kept"
    assert "majority" in again.stdout and (out / "best" / "config.json").is_file()
    for labels, message in (("1", "--labels takes numbers from 2 on"), ("50", "has 40 training samples")):
        refused = sot(*command, "--labels", labels)
        assert refused.returncode == 2 and message in refused.stderr.replace("\n", " ")
    plain = sot(*command, "--heads", "majority", "--out", tmp_path / "plain")
    assert plain.returncode == 0 and not (tmp_path / "plain" / "best").exists()


def test_weights_come_from_a_file(tmp_path):
    state = timm.create_model("test_vit", num_classes=0, img_size=32).state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    backbone = FrozenBackbone("test_vit", weights=tmp_path / "weights.safetensors", img_size=32)
    loaded = open_backbone(backbone).backbone.timm_model.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in state.items() if name in loaded) and loaded


def test_probing_texts(stand_ins, tmp_path):
    rows = [f"{text},{'long' if len(text.split()) > 4 else 'short'}" for text in sentences(80)]
    for name, part in (("train", rows[:60]), ("dev", rows[60:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["sentence,label", *part]) + "\n")
    model, out = stand_ins["google-bert/bert-base-uncased"], tmp_path / "probe"
    command = ["probe", "--model", model, "--data", tmp_path / "train.csv", "--dev", tmp_path / "dev.csv"]
    options = ["--heads", "class,class+gcp", "--seeds", 2, "--epochs", 2, "--max-length", 7, "--cache", tmp_path / "c"]
    result = sot(*command, "--out", out, *options, "--depth", 1, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["metric"] == "macro_f1" and len(list((tmp_path / "c").iterdir())) == 2
    assert report["unsorted_seconds"] > 0
    table = sot(*command, "--out", out, *options, "--depth", 1).stdout
    assert f"{report['unsorted_seconds']:.1f} s" in " ".join(table.split())
    assert report["model"] == f"{model} to layer 1"
    assert json.loads((out / "best" / "config.json").read_text())["backbone_config"]["num_hidden_layers"] == 1
    best = next(row for row in report["heads"] if row["head"] == report["best"])
    scores = json.loads(sot("evaluate", out / "best", "--data", tmp_path / "dev.csv", "--json").stdout)
    assert scores["macro_f1"] == pytest.approx(best["scores"][0], abs=1 / 20)
    long = sot("predict", out / "best", "--text", "the cat " * 400, "--json")  # cut as it was in probing
    assert long.returncode == 0, long.stderr


def test_a_backbone_without_class_token(tmp_path):
    digits = Subset(load_images("digits").train, range(80))
    model = tiny_vit(img_size=32, class_token=False, global_pool="avg")
    features = cache_features(model, image_samples(model, digits, "digits"), tmp_path)
    assert features.class_tokens is None
    contest = Contest(features, features, Target(10), QUICK, Journal(tmp_path / "rows.jsonl"))
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
        ([*vit, "--data", tmp_path / "nothing"], "holds no images"),
        ([*vit, "--data", stripes, "--weights", tmp_path / "no.safetensors"], "no such file"),
        ([*vit, "--data", stripes, "--weights", tmp_path / "other.pt"], "other.pt holds no plain weights"),
        ([*vit, "--data", stripes, "--weights", tmp_path / "half.safetensors"], "test_vit: it lacks 1 weights, first"),
        ([*vit, "--data", stripes, "--weights", tmp_path / "wide.safetensors"], "does not fit test_vit"),
        (["--model", "no_such_model", "--data", stripes], "unknown model 'no_such_model'"),
        (["--model", bert, "--data", tmp_path / "empty.csv"], "empty.csv has no rows"),
        (["--model", bert, "--task", "acceptability", "--weights", tmp_path / "other.pt"], "--weights is for a timm"),
        (["--model", bert, "--task", "acceptability", "--depth", 99], "depth must be an integer from 1 to"),
    ):
        result = sot("probe", *arguments, "--out", tmp_path / "out")
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()
