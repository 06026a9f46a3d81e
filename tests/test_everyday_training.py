"""Training as a person with data of their own meets it: what is chosen, kept, left out, divided, and told."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from test_cli import sot
from transformers import TrainerControl, TrainerState

from sot.core.head import HeadConfig, SecondOrderHead
from sot.data.images import load_images
from sot.data.splits import Split
from sot.data.texts import TextData, TextSplit
from sot.errors import SettingError
from sot.evaluation.evaluate import unseen_part
from sot.evaluation.metrics import image_scores, text_scores
from sot.models.equip import equip
from sot.models.folder import load_model
from sot.training import run
from sot.training.conduct import warn_of_labels
from sot.training.engine import Diverged
from sot.training.folds import summarized
from sot.training.keeping import DecideAtEpochs, best_of, kept_evaluation, stops_early
from sot.training.recipe import Recipe, load_recipe
from sot.training.recipe_choice import choose_recipe, has_weights
from sot.training.run_folder import check_out, kept_split
from sot.training.starting import load_weights, prepare
from sot.training.train_images import train_images
from sot.training.train_texts import fine_tune

HEAD = HeadConfig(heads=2, left_dim=3, right_dim=3)
TINY = {"epochs": 1, "batch_size": 16, "img_size": 32}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of coloured noise, eleven of each."""
    root, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number, name in enumerate(("red", "green", "blue")):
        (root / name).mkdir()
        for index in range(11):
            noise = draw.integers(0, 80, (20, 24, 3), dtype=np.uint8)
            noise[..., number] += 120
            Image.fromarray(noise).save(root / name / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    file = tmp_path_factory.mktemp("table") / "mine.csv"
    rows = [f"the cats {'sleep' if i % 2 else 'sleeps'},{'right' if i % 2 else 'wrong'}" for i in range(40)]
    file.write_text("sentence,label\n" + "\n".join(rows) + "\n")
    return file


@pytest.fixture
def bert(stand_ins):
    return stand_ins["google-bert/bert-base-uncased"]


def words(count=24):
    texts = ["the cats sleep" if i % 2 else "the cats sleeps" for i in range(count)]
    return TextData(TextSplit(texts, None, [float(i % 2) for i in range(count)]), None, ["wrong", "right"], "macro_f1")


def text_recipe(**settings):
    return Recipe(task="text", **{"epochs": 2, "batch_size": 8, "lr": 1e-2, **settings})


def run_texts(bert, out, recipe, data=None, **options):
    head = HeadConfig(representation_size=16)
    return fine_tune(bert, data or words(), "words", out, recipe, head, report_to="none", **options)


# --- what is chosen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, data, weights, expected",
    [
        ("deit_tiny_patch16_224", "photos", False, "finetune"),
        ("sot_tiny", "photos", False, "scratch"),
        ("sot_tiny", "photos", True, "finetune"),
        ("google/vit-base-patch16-224", "photos", False, "finetune"),
        ("deit_tiny_patch16_224", "digits", False, "digits"),
    ],
)
def test_the_recipe_follows_the_weights(model, data, weights, expected):
    assert choose_recipe(model, data, weights)[0] == expected


def test_default_recipes_leave_the_size_to_the_model(stand_ins):
    assert has_weights(stand_ins["vit_small_patch16_224"]) and not has_weights("sot_7")
    for name in ("finetune", "scratch"):
        assert load_recipe(name).img_size is None and load_recipe(name).metric == "auto"


def test_few_samples_have_more_epochs_up_to_a_number_of_steps():
    recipe = Recipe(epochs=3, min_steps=200, batch_size=16, warmup_epochs=0.3)
    few = recipe.for_samples(100)
    assert few.epochs == 29 and few.evaluate_every == 2 and few.warmup_epochs == pytest.approx(2.9)
    assert few.for_samples(100) == few and recipe.for_samples(100_000) == recipe


def test_weights_that_cannot_be_downloaded_are_one_sentence_and_leave_no_folder(photos, tmp_path):
    result = sot("train", "--model", "test_vit", "--data", photos, "--out", tmp_path / "run")
    said = " ".join(result.stderr.split())
    assert result.returncode == 2 and "Traceback" not in said and not (tmp_path / "run").exists()
    assert "published weights of test_vit cannot be downloaded" in said and "--recipe scratch" in said


def test_a_run_tells_what_was_chosen_and_a_line_an_epoch(photos, stand_ins, tmp_path):
    out, few = tmp_path / "run", ["--set", "min_steps=0", "--set", "epochs=2"]
    folder = stand_ins["vit_small_patch16_224"]
    result = sot("train", "--model", folder, "--data", photos, "--out", out, "--logger", "none", *few)
    assert result.returncode == 0, result.stderr
    said = result.stderr
    for part in (
        f"weights {folder}",
        "images of 160×160 pixels",
        "fusion sum, pool mgcrp",
        "finetune (the model has",
    ):
        assert part in said, said
    assert "26 samples to train on, 7 to validate on; 3 classes: blue, green, red" in said
    lines = [line for line in said.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 2 and all("loss" in line and "macro_f1" in line and "lr" in line for line in lines)
    assert all(line.endswith(" left") for line in lines)
    card = (out / "README.md").read_text()
    assert "was kept, the best by macro_f1 on the validation set" in card


def test_a_warmup_longer_than_half_the_run_is_shortened_aloud(photos, stand_ins, tmp_path):
    out, few = tmp_path / "run", ["--set", "min_steps=0", "--set", "epochs=1", "--logger", "none"]
    result = sot("train", "--model", stand_ins["vit_small_patch16_224"], "--data", photos, "--out", out, *few)
    assert result.returncode == 0, result.stderr
    assert "Warm-up shortened to 0.1 of 1 epoch: recipe finetune has 1 of 10.\n" in result.stderr
    assert yaml.safe_load((out / "recipe.yaml").read_text())["warmup_epochs"] == pytest.approx(0.1)


def test_a_long_epoch_is_told_of_after_a_minute_and_every_ten(monkeypatch):
    clock, lines = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(run.time, "monotonic", lambda: clock.now)
    said = run.Lines(lines.append, Recipe())
    state, control = TrainerState(max_steps=4000), TrainerControl()
    said.on_train_begin(None, state, control)
    for state.global_step in range(1, 4001):
        clock.now += 0.5
        said.on_step_end(None, state, control)
    assert lines == [
        "step 120 of 4,000, 32 min left",
        "step 1,320 of 4,000, 22 min left",
        "step 2,520 of 4,000, 12 min left",
        "step 3,720 of 4,000, 2 min left",
    ]


# --- what is kept ------------------------------------------------------------------------------------------


def history(*values, metric="macro_f1"):
    return [{"epoch": float(number + 1), f"eval_{metric}": value} for number, value in enumerate(values)]


def test_the_first_best_evaluation_counts_and_patience_ends_the_run():
    rows = history(0.5, 0.7, 0.7, 0.6)
    assert best_of(rows, "macro_f1") == 1 and best_of(history(2.0, 1.0, 3.0, metric="loss"), "loss") == 1
    assert best_of(history(float("nan"), 0.1), "macro_f1") == 1
    tied = [{**row, "eval_loss": loss} for row, loss in zip(history(0.5, 1.0, 1.0, 1.0), (0.1, 0.6, 0.3, 0.4))]
    assert best_of(tied, "macro_f1") == 2, "of equal scores the smaller loss"
    recipe = Recipe(metric="macro_f1", patience=2)
    assert stops_early(rows, recipe) and not stops_early(rows[:3], recipe)
    assert not stops_early(rows, Recipe(metric="macro_f1")) and not stops_early(rows, Recipe())
    assert kept_evaluation(rows, recipe) == {"epoch": 2.0, "eval_macro_f1": 0.7}


@pytest.mark.parametrize("settings", [{"patience": 1}, {"freeze": True, "lora": 4}, {"lr": 0.0}])
def test_settings_that_contradict_each_other_are_refused(settings):
    with pytest.raises(ValueError, match=r"patience|freeze|lr must be above 0"):
        Recipe(**settings)


def test_a_run_stops_early_and_keeps_its_best_epoch_and_resumes_to_the_same(bert, tmp_path):
    recipe = text_recipe(epochs=6, lr=1e-9, metric="auto", patience=1)
    scores = run_texts(bert, tmp_path / "run", recipe)
    rows = json.loads((tmp_path / "run" / "metrics.json").read_text())
    kept = json.loads((tmp_path / "run" / "kept.json").read_text())
    assert len(rows) == 2 and kept["epoch"] == 1 and kept["metric"] == "macro_f1"
    assert scores["eval_macro_f1"] == rows[0]["eval_macro_f1"] and not (tmp_path / "run" / "best").exists()
    card, by_class = ((tmp_path / "run" / name).read_text() for name in ("README.md", "classes.json"))
    assert "stopped after 1 evaluation without a better one" in card
    assert str(bert) not in card and f"# {Path(bert).name} on " in card.replace("\\", "")
    mean = np.mean([row["f1"] for row in json.loads(by_class).values()])
    assert mean == pytest.approx(scores["eval_macro_f1"]) and re.search(r"\| right \| \d+ \| \d\.\d{3} \|", card)
    again = run_texts(bert, tmp_path / "run", recipe, resume=True)
    assert again == scores and len(json.loads((tmp_path / "run" / "metrics.json").read_text())) == 2
    model, _ = load_model(tmp_path / "run")
    assert model.config.id2label == {0: "wrong", 1: "right"}


def test_many_tiny_epochs_are_saved_when_they_are_evaluated():
    def saved(steps, recipe, **flags):
        control, found = TrainerControl(**flags), []
        for epoch in range(1, 7):
            control.should_save = control.should_evaluate = True
            state = TrainerState(epoch=float(epoch), max_steps=6 * steps)
            DecideAtEpochs(recipe).on_epoch_end(SimpleNamespace(num_train_epochs=6), state, control)
            found += [epoch] if control.should_save else []
        return found

    assert saved(5, Recipe(evaluate_every=4)) == [4, 6] and saved(5, Recipe()) == [1, 2, 3, 4, 5, 6]
    assert saved(100, Recipe(evaluate_every=4)) == [1, 2, 3, 4, 5, 6]
    assert saved(5, Recipe(evaluate_every=4), should_training_stop=True) == [1, 2, 3, 4, 5, 6]  # by a signal


def test_an_unknown_metric_is_refused_with_those_there_are(bert, tmp_path):
    with pytest.raises(SettingError, match=r"metric must be one of macro_f1, accuracy, mcc, loss, .*got 'top5'"):
        run_texts(bert, tmp_path / "run", text_recipe(metric="top5"))
    assert not (tmp_path / "run").exists()


def test_scores_of_classes_are_scikit_learns_and_top5_needs_six_classes():
    from sklearn.metrics import f1_score

    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(50, 3)), draw.integers(0, 3, 50)
    found = text_scores("macro_f1", logits, labels.astype(float))
    assert found["macro_f1"] == pytest.approx(f1_score(labels, logits.argmax(1), average="macro"))
    assert {"accuracy", "mcc", "loss", "calibration_error"} <= set(found) and "top5" not in image_scores(logits, labels)
    assert "top5" in image_scores(draw.normal(size=(50, 6)), labels)


# --- rare classes ------------------------------------------------------------------------------------------


def test_balanced_classes_count_alike_in_the_loss():
    head = SecondOrderHead(8, 2, HeadConfig(fusion="class"))
    logits, target = torch.tensor([[2.0, 0.0]] * 10), torch.tensor([0] * 9 + [1])
    plain = head.loss([logits], target)
    head.class_weights = torch.tensor([10 / 18, 5.0])
    each = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    assert head.loss([logits], target) == pytest.approx(float((each[0] + each[9]) / 2), abs=1e-6)
    assert head.loss([logits], target) > plain and "class_weights" not in head.state_dict()


def test_a_rare_class_is_warned_of_unless_balanced_and_look_alikes_are_named(caplog):
    warn_of_labels(["yes", "no"], [0] * 30 + [1] * 2, balanced=True)
    assert not caplog.text
    warn_of_labels(["yes", "no"], [0] * 30 + [1] * 2, balanced=False)
    assert "Class 'no' has 2 samples to train on, 'yes' has 30" in caplog.text and "balance=true" in caplog.text
    warn_of_labels(["Cat", "cat "], [0, 1], balanced=False)
    assert "'Cat' and 'cat ' differ in case or spaces only" in caplog.text


def test_numbers_to_predict_cannot_be_balanced(bert):
    model = equip(bert, 1)
    with pytest.raises(SettingError, match="balance needs one class for each sample"):
        prepare(model, Recipe(task="text", balance=True), None, None)


# --- splits ------------------------------------------------------------------------------------------------


def test_a_folder_is_divided_class_by_class(photos):
    data = load_images(str(photos), seed=3, stratified=True)
    counts = Counter(label for _, label in (data.val[i] for i in range(len(data.val))))
    assert sorted(counts.values()) == [2, 2, 3]
    plain = load_images(str(photos), seed=3)  # as the first runs did, which still evaluate so
    order = torch.randperm(33, generator=torch.Generator().manual_seed(3)).tolist()
    assert [*plain.val.indices] == order[:7] and [*plain.train.indices] == order[7:]


def test_lone_samples_are_trained_on_and_folds_cover_all_samples_once():
    labels = ["a"] * 12 + ["b"] * 7 + ["c"]
    train, val = Split(1, stratified=True).divide(labels)
    assert 19 in train and len(val) == 4 and sorted(train + val) == [*range(20)]
    assert Split(1, stratified=True).divide(labels) == (train, val) != Split(2, stratified=True).divide(labels)
    folds = [Split(1, fold=(number, 5)).divide(labels)[1] for number in range(5)]
    assert sorted(index for fold in folds for index in fold) == [*range(20)]
    assert all(Counter(labels[i] for i in fold)["a"] in (2, 3) for fold in folds)
    with pytest.raises(ValueError, match="too few samples to split into training and validation: 2"):
        Split(0, fold=(2, 3)).divide(["a", "b"])


def test_data_with_a_validation_part_has_no_folds(tmp_path):
    for split in ("train", "val"):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / split / name / "0.png")
    with pytest.raises(SettingError, match="folds divides data that comes in one piece"):
        load_images(str(tmp_path), fold=(0, 2))


def test_a_table_without_a_development_set_is_divided_and_evaluated_on_the_unseen_part(table, bert, tmp_path):
    out = tmp_path / "run"
    sizes = ["--set", "min_steps=0", "--set", "epochs=8", "--set", "lr=1e-2", "--set", "head.representation_size=16"]
    result = sot("finetune", "--model", bert, "--data", table, "--out", out, "--logger", "none", "--json", *sizes)
    assert result.returncode == 0, result.stderr
    assert "32 samples to train on, 8 to validate on" in result.stderr
    assert json.loads(result.stdout)["eval_macro_f1"] == 1.0 and kept_split(out) == {"stratified": True, "fold": None}
    result = sot("evaluate", out, "--data", table, "--json")
    assert result.returncode == 0, result.stderr
    assert [samples for _, samples, *_ in json.loads(result.stdout)["classes"]] == [4, 4]


def test_only_the_table_of_the_run_is_divided_for_evaluation(tmp_path):
    data, other = words(), tmp_path / "other.csv"
    other.write_text("sentence,label\n")
    whole = TextData(None, data.train, data.labels, data.metric)
    assert unseen_part(tmp_path, str(other), whole) is whole


def test_cross_validation_trains_every_fold_and_resumes_what_is_left(table, bert, tmp_path):
    out = tmp_path / "folds"
    sizes = ["--set", "min_steps=0", "--set", "epochs=1", "--set", "head.representation_size=16", "--logger", "none"]
    command = ["finetune", "--model", bert, "--data", table, "--out", out, "--folds", 2, *sizes]
    result = sot(*command, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["folds"]) == 2 and found["eval_accuracy"]["interval"] is not None
    (out / "fold-2" / "kept.json").unlink()
    result = sot(*command, "--resume")
    assert result.returncode == 0 and "fold 2 of 2" in result.stderr and "fold 1 of 2" not in result.stderr
    assert "±" in result.stdout and (out / "folds.csv").is_file() and kept_split(out / "fold-2")["fold"] == (1, 2)


def test_folds_are_summarized_by_mean_and_interval():
    assert summarized([{"a": 1.0}, {"a": 3.0}])["a"]["mean"] == 2.0


# --- bad data and bad luck ---------------------------------------------------------------------------------


def test_bad_files_are_left_out_and_listed_and_strict_refuses(photos, tmp_path, caplog):
    data = tmp_path / "data"
    subprocess.run(["cp", "-r", str(photos), str(data)], check=True)
    (data / "red" / "0.png").write_bytes(b"no image")
    recipe = Recipe(**TINY)
    with pytest.raises(SettingError, match=r"strict: 1 image cannot be read: .*0.png: it is no image"):
        train_images("test_vit", str(data), tmp_path / "run", recipe, HEAD, report_to="none", strict=True)
    assert not (tmp_path / "run").exists()
    train_images("test_vit", str(data), tmp_path / "run", recipe, HEAD, report_to="none")
    assert (tmp_path / "run" / "left_out.txt").read_text().startswith(str(data / "red" / "0.png"))
    assert "Left out 1 sample that cannot be read" in caplog.text


def test_a_run_that_diverges_names_step_and_rate_and_saves_no_numbers_that_are_none(photos, tmp_path):
    recipe = Recipe(**{**TINY, "epochs": 2, "lr": 1e30, "warmup_epochs": 1, "batch_size": 26})
    with pytest.raises(Diverged, match=r"diverged: .* at step \d, learning rate .*try a smaller lr"):
        train_images("test_vit", str(photos), tmp_path / "run", recipe, HEAD, report_to="none")
    for file in (tmp_path / "run").glob("checkpoint-*/model.safetensors"):
        assert all(torch.isfinite(value).all() for value in load_file(file).values())
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_run_that_never_started_leaves_no_folder(bert, tmp_path):
    class Broken(ValueError):
        pass

    from transformers import TrainerCallback

    class Breaks(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            raise Broken

    with pytest.raises(Broken):
        run_texts(bert, tmp_path / "run", text_recipe(), callbacks=[Breaks()])
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(SettingError, match="exists"):
        run_texts(bert, tmp_path / "mine", text_recipe(), callbacks=[Breaks()])
    assert (tmp_path / "mine" / "thesis.tex").is_file()


@pytest.mark.parametrize("steps", [1, 2])  # over which a batch is accumulated
@pytest.mark.parametrize(
    "settings", [{}, {"group_by_length": True}, {"lora": 2, "ema": 0.9}, {"freeze": True}], ids=str
)
def test_sigterm_writes_a_checkpoint_and_the_rest_ends_with_the_same_bits(settings, steps, bert, tmp_path):
    """The signal comes after the second of three steps of an epoch."""
    from transformers import TrainerCallback

    from sot.errors import Interrupted

    class Terminate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    recipe = text_recipe(metric="auto", **settings)
    texts = [" ".join(["the cats sleep" if i % 2 else "the cats sleeps"] * (1 + i)) for i in range(30)]  # all differ
    data = TextData(TextSplit(texts, None, [float(i % 2) for i in range(30)]), None, ["wrong", "right"], "macro_f1")
    run_texts(bert, tmp_path / "whole", recipe, data, accumulation=steps)
    with pytest.raises(Interrupted) as stop:
        run_texts(bert, tmp_path / "cut", recipe, data, accumulation=steps, callbacks=[Terminate()])
    assert stop.value.number == signal.SIGTERM and stop.value.checkpoint == tmp_path / "cut" / "checkpoint-5"
    with pytest.raises(SettingError, match=r"cut is an unfinished run: continue it with resume"):
        load_model(tmp_path / "cut")
    run_texts(bert, tmp_path / "cut", recipe, data, accumulation=steps, resume=True)
    for file in ("model.safetensors", "checkpoint-6/model.safetensors"):  # the best epoch may be the first
        whole, cut = (load_file(tmp_path / name / file) for name in ("whole", "cut"))
        assert all(torch.equal(cut[name], value) for name, value in whole.items())


def test_a_stopped_command_says_what_was_saved_and_how_to_go_on(photos, tmp_path):
    out = tmp_path / "run"
    sizes = [word for name, value in {**TINY, "epochs": 400}.items() for word in ("--set", f"{name}={value}")]
    command = ["train", "--model", "test_vit", "--recipe", "digits", "--data", str(photos), "--out", str(out), *sizes]
    process = subprocess.Popen([sys.executable, "-m", "sot", *command], stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 120
    while not list(out.glob("checkpoint-*")) and process.poll() is None and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in said
    assert f"Saved: {out}/checkpoint-" in said and f"Continue with: sot {' '.join(command)} --resume" in said
    assert "epoch 1 of 400: loss" in said


# --- what one has ------------------------------------------------------------------------------------------


def test_training_goes_on_from_a_run_with_its_head_or_a_new_one(bert, tmp_path, caplog):
    run_texts(bert, tmp_path / "first", text_recipe())
    before = load_file(tmp_path / "first" / "model.safetensors")
    run_texts(str(tmp_path / "first"), tmp_path / "second", text_recipe(lr=1e-9))
    after = load_file(tmp_path / "second" / "model.safetensors")
    assert all(torch.allclose(after[name], value, atol=1e-6) for name, value in before.items())
    assert "a new one is trained" not in caplog.text
    other = words()
    other.labels = ["bad", "good"]
    run_texts(str(tmp_path / "first"), tmp_path / "third", text_recipe(lr=1e-9), other)
    third, name = load_file(tmp_path / "third" / "model.safetensors"), "backbone.encoder.layer.0.output.dense.weight"
    assert torch.allclose(third[name], before[name], atol=1e-6) and "a new one is trained" in caplog.text
    assert not torch.allclose(
        third["classifier.word_linear.weight"], before["classifier.word_linear.weight"], atol=1e-3
    )


def test_pictures_go_on_from_a_run(photos, tmp_path):
    train_images("test_vit", str(photos), tmp_path / "first", Recipe(**TINY), HEAD, report_to="none")
    recipe = Recipe(**{**TINY, "img_size": None, "lr": 1e-9})
    train_images(str(tmp_path / "first"), str(photos), tmp_path / "second", recipe, HEAD, report_to="none")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.allclose(after[name].float(), value.float(), atol=1e-5) for name, value in before.items())


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.timm_model."])
def test_weights_of_a_file_are_read_by_name_whatever_stands_before(prefix, tmp_path):
    source, target = (equip("test_vit", 3, HEAD, pretrained=False) for _ in range(2))
    found = {prefix + name: value for name, value in source.body.state_dict().items()}
    save_file({name: value.contiguous() for name, value in found.items()}, tmp_path / "w.safetensors")
    torch.save({"state_dict": found}, tmp_path / "w.pth")
    for file in ("w.safetensors", "w.pth"):
        load_weights(target, tmp_path / file)
        own = target.body.state_dict()
        assert all(torch.equal(own[name], value) for name, value in source.body.state_dict().items())


def test_weights_that_do_not_fit_are_refused(tmp_path):
    model = equip("test_vit", 3, HEAD, pretrained=False)
    weights = {name: value.contiguous() for name, value in model.body.state_dict().items()}
    for name, kept, message in (
        ("none", {"x": torch.zeros(2)}, "holds no weight of VisionTransformer"),
        ("some", {name: weights[name] for name in list(weights)[:3]}, r"lacks \d+ of \d+ weights of VisionTransformer"),
    ):
        save_file(kept, tmp_path / f"{name}.safetensors")
        with pytest.raises(SettingError, match=message):
            load_weights(model, tmp_path / f"{name}.safetensors")
    torch.save({"model": Path("a")}, tmp_path / "code.pth")
    with pytest.raises(SettingError, match="must be a file of safetensors, or of torch that holds weights alone"):
        load_weights(model, tmp_path / "code.pth")
    with pytest.raises(SettingError, match="no such file"):
        load_weights(model, tmp_path / "gone.pth")


def test_a_frozen_backbone_stays_as_it_is(bert, tmp_path):
    run_texts(bert, tmp_path / "run", text_recipe(freeze=True))
    after, before = load_file(tmp_path / "run" / "model.safetensors"), equip(bert, 2).backbone.state_dict()
    assert all(torch.equal(after[f"backbone.{name}"], value) for name, value in before.items())


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_adapters_are_merged_when_they_are_saved_and_resume_to_the_same_bits(ema, bert, tmp_path):
    recipe = text_recipe(lora=2, ema=ema)
    run_texts(bert, tmp_path / "run", recipe)
    after, before = load_file(tmp_path / "run" / "model.safetensors"), equip(bert, 2).backbone.state_dict()
    assert not any("lora" in name for name in after) and {f"backbone.{name}" for name in before} <= set(after)
    name = "encoder.layer.0.attention.self.query.weight"
    change = after[f"backbone.{name}"] - before[name]
    assert 1 <= torch.linalg.matrix_rank(change, atol=1e-5) <= 2
    assert torch.equal(after["backbone.embeddings.word_embeddings.weight"], before["embeddings.word_embeddings.weight"])
    load_model(tmp_path / "run")
    for path in ("checkpoint-6", "model.safetensors"):
        subprocess.run(["rm", "-r", str(tmp_path / "run" / path)], check=True)
    run_texts(bert, tmp_path / "run", recipe, resume=True)
    again = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in after.items())


# --- sentences that help -----------------------------------------------------------------------------------


WITHOUT_TORCH = """
import contextlib, io, json, sys
sys.modules["torch"] = None
from sot.cli.main import main
ended = []
for words in json.load(sys.stdin):
    sys.argv = ["sot", *words]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as end:
            ended.append((end.code, " ".join(said.getvalue().split())))
        except ImportError as error:
            ended.append((1, str(error)))
print(json.dumps(ended))
"""


def without_torch(commands):
    """Exit code and words of commands in a process where torch cannot be imported."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, input=words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_mistakes_in_arguments_are_told_before_torch_is_loaded(photos, table, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    image, text = ["train", "--model", "x"], ["finetune", "--model", "x"]
    out = ["--out", tmp_path / "run"]
    cases = (
        ([*image, "--data", table, *out], "is a table of texts: use sot finetune"),
        ([*image, "--data", "nowhere", *out], "unknown data 'nowhere'"),
        ([*image, "--data", photos, *out, "--set", "lr=0"], "lr must be above 0"),
        ([*image, "--data", photos, *out, "--set", "epochs=x"], "epochs must be a whole number"),
        (
            [*image, "--data", photos, *out, "--set", "warmup_epochs=11"],
            "warmup_epochs must be at most epochs (10)",
        ),
        ([*image, "--data", photos, *out, "--recipe", "none.yaml"], "no such recipe file"),
        ([*image, "--data", photos, "--out", tmp_path / "used"], "exists: continue it with --resume"),
        ([*image, "--data", photos, "--out", table / "x"], "--out must be a folder"),
        ([*image, "--data", photos, *out, "--weights", "none.pth"], "--weights: no such file"),
        ([*text, "--data", table, *out, "--text", "label"], "different columns, got 'label' twice"),
        ([*text, "--data", "none.csv", *out], "no such file: none.csv"),
        ([*text, "--data", photos, *out], "is a folder, and a table is a file"),
        ([*text, "--data", table, *out, "--metric", "foo"], "--metric must be one of auto, accuracy,"),
        ([*text, "--data", table, *out, "--encoding", "foo"], "--encoding must be one that Python knows"),
        (["finetune", "--model", "deit_tiny_patch16_224", "--data", table, *out], "is a timm model, for images"),
        (["finetune", "--model", "sot_tiny", "--data", table, *out], "is a timm model, for images: use sot train"),
        (["tune", "x", "--data", table, *out, "--search", "lr=1.."], "a range of --search is low..high"),
        (["tune", "x", "--data", table, *out, "--sampler", "foo"], "--sampler must be one of grid, random, tpe"),
        (["tune", "x", "--data", table, *out, "--set", "lr=0"], "lr must be above 0"),
        (["tune", "x", "--data", "nowhere", *out], "unknown data 'nowhere'"),
        (["tune", "sot_tiny", "--data", table, *out], "is a timm model, for images"),
        (["tune", "x", "--data", table, "--out", tmp_path / "used"], "exists: continue it with --resume"),
        ([*text, "--data", table, "--dev", table, "--folds", 3, *out], "--folds 3 divides a table: leave out --dev"),
        ([*text, "--data", table, *out, "--label", "tags"], "has no column 'tags'; it has "),
        ([*text, "--task", "sst3", *out], "unknown task 'sst3'; accepted: cola, sst2,"),
        ([*text, *out], "name a --task, or give --data a table"),
        ([*text, "--data", table, *out, "--regression", "--multi-label"], "--regression and --multi-label exclude"),
        ([*text, "--data", table, *out, "--recipe", "digits"], "recipe digits is for images: use sot train"),
        ([*text, "--data", table, *out, "--set", "head.dropout=2"], "dropout must be in [0, 1), got 2"),
        ([*image, "--data", photos, *out, "--recipe", "bert"], "recipe bert is for text: use sot finetune"),
        ([*image, "--data", photos, *out, "--set", "rand_augment=foo"], "as timm writes it, such as rand-m9"),
        ([*image, "--data", photos, *out, "--multi-label"], "is no table of images: leave out --multi-label"),
        (["tune", "x", "--data", table, *out], "there is nothing to search"),
        (["tune", "x", "--data", table, *out, "--search", "rate=1,2"], "unknown recipe key 'rate'"),
        (["tune", "x", "--data", table, *out, "--search", "head.dropout=0.5,7"], "dropout must be in [0, 1), got 7"),
        (["tune", "x", "--data", table, *out, "--search", "lr=1e-5,1e-4", "--metric", "bleu"], "--metric must be one"),
        (["tune", "x", "--data", table, *out, "--search", "lr=1..2", "--sampler", "grid"], "a grid has no ranges"),
        (["probe", "--model", "x", "--data", photos, *out, "--heads", "foo"], "unknown head 'foo'; accepted: all,"),
        (["probe", "--model", "x", "--data", photos, *out, "--labels", "1"], "--labels takes numbers from 2 on"),
        (["probe", "--model", "x", "--data", photos, *out, "--rates", "fast"], "--rates takes numbers above 0"),
        (["probe", "--model", "x", "--data", "nowhere", *out], "unknown data 'nowhere'"),
        (["probe", "--model", "x", "--data", photos, *out, "--weights", "none.pth"], "--weights: no such file"),
        (["--import", "nowhere", *text, "--data", table, *out], "--import nowhere failed: No module named 'nowhere'"),
        (["ui", tmp_path / "used"], "used is not a model: it has no config.json"),
    )
    for (_, message), (code, said) in zip(cases, without_torch(words for words, _ in cases), strict=True):
        assert code == 2 and message in said, (message, said)
    assert not (tmp_path / "run").exists()


HEADS = {
    "nonsense": "a head setting has the form key=value, got 'nonsense'",
    "pool=foo": "unknown pool 'foo'; accepted: mgcrp, gcp, gap,",
    "norm=foo": "unknown norm 'foo'; accepted: svpn, svpn_fast,",
    "heads=0": "heads must be an integer >= 1, got 0",
    "colour=red": "unknown head setting 'colour'",
    "pool=gap,exponent=0.3": "exponent=0.3 is for mgcrp and gcp only, got pool 'gap'",
    "norm=mpn": "norm 'mpn' needs a covariance, a cross-covariance accepts: svpn,",
    "norm=svpn_fast,num_values=999": "num_values must be at most min(left_dim, right_dim)",
}


@pytest.mark.parametrize("command", ["train", "finetune", "tune"])
def test_mistakes_in_a_head_are_told_before_torch_is_loaded(command, photos, table, tmp_path):
    start = ["tune", "x", "--search", "lr=1e-5,1e-4"] if command == "tune" else [command, "--model", "x"]
    data = photos if command == "train" else table
    ended = without_torch(
        [*start, "--data", data, "--out", tmp_path / "run", "--head", head] for head in (*HEADS, "pool=gap")
    )
    for message, (code, said) in zip(HEADS.values(), ended):
        assert code == 2 and message in said, (message, said)
    code, said = ended[-1]
    assert code == 1 and "import of torch halted" in said  # what is right needs it


def test_the_recipe_that_is_checked_first_is_like_the_one_that_may_be_chosen():
    first, other = load_recipe("finetune"), load_recipe("scratch")
    assert (first.task, first.head, first.grid) == (other.task, other.head, other.grid)


def test_a_folder_is_no_table_and_a_timm_name_no_text_model(photos, bert, tmp_path):
    with pytest.raises(ValueError, match="is a folder, and a table is a file"):
        from sot.data.rows import read_rows

        list(read_rows(photos, None))
    with pytest.raises(ValueError, match="deit_tiny_patch16_224 is a timm model, for images: train it by sot train"):
        run_texts("deit_tiny_patch16_224", tmp_path / "run", text_recipe())
    with pytest.raises(ValueError, match="is no model of images: fine-tune it on texts"):
        train_images(bert, str(photos), tmp_path / "run", Recipe(batch_size=8), HEAD, report_to="none")


def test_settings_reach_into_the_arguments_of_a_model():
    recipe = load_recipe("demo").changed(["model_args.depth=1"])
    assert recipe.model_args["depth"] == 1 and recipe.model_args["embed_dim"] == 64


def test_a_folder_that_nobody_may_write_to_is_refused():
    with pytest.raises(ValueError, match=r"cannot write in /proc"):
        check_out(Path("/proc/run"), False, False)


def test_nothing_to_resume_is_said(bert, tmp_path):
    said = []
    run_texts(bert, tmp_path / "run", text_recipe(epochs=1), resume=True, say=said.append)
    assert said[0] == f"Nothing to resume in {tmp_path / 'run'}: the run starts."


def test_a_model_that_only_the_hub_could_have_is_told_apart(tmp_path):
    with pytest.raises(ValueError, match=r"unknown model 'google-bert/none'; .*; the hub cannot be reached"):
        run_texts("google-bert/none", tmp_path / "run", text_recipe())
