"""Searching settings: the space, what is held out, resuming, several workers, and the command."""

import csv
import importlib.util
import json
import math
import os

import numpy as np
import pytest
import yaml
from test_cli import sot

from sot.core.head import HeadConfig
from sot.data.images import load_images
from sot.data.sources import class_numbers
from sot.data.splits import stratified
from sot.data.texts import TextData, TextSplit
from sot.errors import SettingError
from sot.training.recipe import Recipe, load_recipe
from sot.training.search import Range, parse_search, search_space, settle, size
from sot.training.study import Failure, Search
from sot.training.tune import Plan, Tuner
from sot.training.tuning_jobs import TuningJob, hold_out_images, text_job
from sot.training.tuning_report import cost_of

TABLE = "sentence,label\n" + "".join(
    f"the cats {'sleep' if i % 2 else 'sleeps'},{'right' if i % 2 else 'wrong'}\n" for i in range(40)
)
SMALL = ["--set", "batch_size=8", "--set", "epochs=2", "--head", "representation_size=16", "--logger", "none"]


@pytest.fixture
def bert(stand_ins):
    return str(stand_ins["google-bert/bert-base-uncased"])


@pytest.fixture
def table(tmp_path):
    (tmp_path / "data.csv").write_text(TABLE)
    return tmp_path / "data.csv"


def rows_of(out):
    return list(csv.DictReader((out / "trials.csv").open()))


# --- the space ---------------------------------------------------------------------------------------------------


def test_values_and_ranges_are_read():
    assert parse_search("lr=1e-5..1e-3:log") == ("lr", Range(1e-5, 1e-3, log=True))
    name, whole = parse_search("epochs=3..10")
    assert (name, whole) == ("epochs", Range(3, 10)) and whole.whole and not Range(0.1, 1.0).whole
    assert parse_search("lr=1e-5, 3e-5") == ("lr", [1e-5, 3e-5])
    assert parse_search("head.norm=svpn,svpn_fast") == ("head.norm", ["svpn", "svpn_fast"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "has the form key=values"),
        ("lr=", "has the form key=values"),
        ("lr=1e-3..1e-5", "must be below the high one"),
        ("lr=0..1:log", "must be above 0 and below"),
        ("lr=1..2:exp", "is low..high or low..high:log"),
        ("lr=a..b", "is low..high or low..high:log"),
    ],
)
def test_what_is_no_search_is_refused(text, said):
    with pytest.raises(SettingError, match=said):
        parse_search(text)


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ("lr=-1,1", "lr must be at least 0"),
        ("rate=1,2", "unknown recipe key 'rate'"),
        ("head.rate=1,2", "unknown head setting 'rate'"),
        ("head.dropout=0.5..2.0", "dropout must be in"),
        ("seed=1,2", "cannot vary seed"),
    ],
)
def test_every_value_is_tried_on_the_recipe_before_the_first_trial(search, said):
    with pytest.raises(ValueError, match=said):
        search_space((load_recipe("text"), HeadConfig()), [search])


@pytest.mark.parametrize(("recipe", "sizes"), [("bert", (36, 6)), ("gpt", (16, 4)), ("roberta", (48, 8))])
def test_the_papers_grids_for_words_and_for_the_class_token_alone(recipe, sizes):
    chosen = load_recipe(recipe)
    words, idle = search_space((chosen, HeadConfig.from_dict(chosen.head)), [])
    assert size(words) == sizes[0] and not idle
    for head in (None, HeadConfig(fusion="class")):
        space, idle = search_space((chosen, head), [])
        assert size(space) == sizes[1] and list(idle) == ["head.representation_size", "head.dropout"]


def test_what_is_pinned_is_not_searched_and_a_search_replaces_the_grid():
    recipe = load_recipe("bert")
    trained = recipe, HeadConfig.paper(**recipe.head)
    space, _ = search_space(trained, ["lr=1e-5..1e-4"], ["batch_size", "head.dropout"])
    assert space == {"lr": Range(1e-5, 1e-4), "head.representation_size": [1000, 4000, 5000]}
    with pytest.raises(SettingError, match="nothing to search"):
        search_space((load_recipe("text"), HeadConfig()), [])


def test_a_trial_has_the_settings_in_recipe_and_head():
    recipe = load_recipe("bert")
    changed, head = settle(
        (recipe, HeadConfig.paper(**recipe.head)), {"lr": 3e-5, "head.representation_size": 4000, "head.dropout": 0.8}
    )
    assert changed.lr == 3e-5 and not changed.grid
    assert (head.left_dim, head.dropout, head.norm, head.exponent, head.heads) == (63, 0.8, "svpn_fast", 0.5, 1)
    assert HeadConfig.from_dict(Recipe.from_dict(yaml.safe_load(changed.to_yaml())).head) == head


# --- what is held out --------------------------------------------------------------------------------------------


def test_of_every_class_a_share_is_held_out():
    labels = [0] * 80 + [1] * 15 + [2] * 5
    kept, held = stratified(labels, 0.2, seed=0)
    assert sorted(kept + held) == list(range(100))
    counts = np.bincount([labels[i] for i in held])
    assert counts.tolist() == [16, 3, 1]
    assert stratified(labels, 0.2, seed=0)[1] == held != stratified(labels, 0.2, seed=1)[1]
    with pytest.raises(ValueError, match="too few samples to hold out"):
        stratified([0], 0.2, 0)


def test_pictures_are_held_out_without_the_validation_part():
    whole = load_images("digits", 0)
    part = hold_out_images(whole, 0.25, 0)
    assert set(part.val.indices).isdisjoint(part.train.indices) and part.val.source is whole.train
    before, held = np.bincount(class_numbers(whole.train)), np.bincount(class_numbers(part.val))
    assert np.abs(held - before / 4).max() <= 1


# --- the study ---------------------------------------------------------------------------------------------------


def parabola(number, values, report):
    return -((values["x"] - 3) ** 2)


def open_search(tmp_path, sampler="tpe", space=None, name="s", prune=False):
    return Search(f"sqlite:///{tmp_path}/s.db", name, space or {"x": Range(0.0, 10.0)}, sampler, 0, prune, lower=False)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_resumed_search_tries_what_an_uninterrupted_one_does(tmp_path, sampler):
    whole = open_search(tmp_path, sampler)
    whole.run(parabola, 14, lambda: None)
    for total in (5, 5, 14):
        parts = open_search(tmp_path, sampler, name="parts")
        parts.run(parabola, total, lambda: None)
        assert len(parts.rows()) == total
    assert [row["x"] for row in parts.rows()] == [row["x"] for row in whole.rows()]
    assert len({row["x"] for row in whole.rows()}) == 14 and abs(whole.best().params["x"] - 3) < 1.5


@pytest.mark.parametrize("sampler", ["grid", "tpe"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_trial_is_run_again_and_finished_ones_are_not(tmp_path, sampler, error):
    tried = []

    def stops(number, values, report):
        tried.append(values["x"])
        if len(tried) == 2:
            raise error
        return values["x"]

    space = {"x": [1, 2, 3, 4]}
    with pytest.raises(error):
        open_search(tmp_path, sampler, space).run(stops, 4, lambda: None)
    search = open_search(tmp_path, sampler, space)
    search.run(stops, 4, lambda: None)
    assert tried[2] == tried[1] and len(tried) == 5
    assert sorted(row["state"] for row in search.rows()) == ["complete"] * 4 + ["interrupted"]
    if sampler == "grid":
        assert sorted(tried[:1] + tried[2:]) == [1, 2, 3, 4]


def test_a_killed_process_of_this_machine_leaves_its_trial_to_others(tmp_path):
    space = {"x": [1, 2, 3]}
    if (child := os.fork()) == 0:  # which dies in its first trial, without a word
        open_search(tmp_path, "grid", space).run(lambda *_: os._exit(9), 3, lambda: None)
    os.waitpid(child, 0)
    search = open_search(tmp_path, "grid", space)
    assert len(search.running()) == 1 and search.left(3) == 2
    search.run(lambda number, values, report: values["x"], 3, lambda: None)
    assert sorted(row["x"] for row in search.rows() if row["state"] == "complete") == [1, 2, 3]


def test_two_workers_share_a_study_and_count_each_others_trials(tmp_path):
    first, second = (open_search(tmp_path, "random") for _ in range(2))
    tried = []

    def outer(number, values, report):
        tried.append((number, values["x"]))
        if len(tried) == 1:
            second.run(lambda *trial: tried.append((trial[0], trial[1]["x"])) or 0.0, 4, lambda: None)
            assert second.left(4) == 0 and len(second.running()) == 1
        return 0.0

    first.run(outer, 4, lambda: None)
    assert sorted(number for number, _ in tried) == [0, 1, 2, 3] and len({x for _, x in tried}) == 4


def test_a_failed_trial_counts_and_a_bad_one_is_pruned(tmp_path):
    def objective(number, values, report):
        for epoch in range(4):
            report(epoch, 0.0 if number == 6 else 1.0 + epoch)
        if number == 2:
            raise Failure("the loss is nan")
        return 1.0

    search = open_search(tmp_path, "random", prune=True)
    search.run(objective, 8, lambda: None)
    states = {row["trial"]: row["state"] for row in search.rows()}
    assert (states[2], states[6]) == ("failed", "pruned") and search.rows()[2]["error"] == "the loss is nan"
    assert list(states.values()).count("complete") == 6


def test_a_study_of_something_else_is_refused(tmp_path):
    open_search(tmp_path).join({"recipe": "a"})
    open_search(tmp_path).join({"recipe": "a"})
    with pytest.raises(SettingError, match="searches something else"):
        open_search(tmp_path).join({"recipe": "b"})


def test_a_journal_file_is_a_storage_and_a_bad_url_is_named(tmp_path):
    space = {"x": [1, 2]}
    search = Search(str(tmp_path / "shared" / "journal.log"), "s", space, "grid", 0, False, False)
    search.run(parabola, 2, lambda: None)
    assert len(search.rows()) == 2
    with pytest.raises(SettingError, match="cannot be opened"):
        Search("nosuch://user:secret@host/db", "s", space, "grid", 0, False, False)


# --- what it costs -----------------------------------------------------------------------------------------------


def test_the_cost_of_a_grid_is_counted_and_of_others_bounded():
    space = {"batch_size": [10, 20], "epochs": [1, 3], "lr": [0.1, 0.2]}
    cost = cost_of(space, Recipe(task="text"), 8, (100, 30), 0.01)
    assert (cost.steps, cost.winner_steps, cost.exact) == (2 * (10 + 5 + 30 + 15), 3 * 13, True)
    assert cost.seconds == pytest.approx(0.01 * (8 * 2 * 110 + 3 * 130))
    bound = cost_of(space, Recipe(task="text"), 5, (100, 30), None)
    assert (bound.steps, bound.seconds, bound.exact) == (5 * 30, None, False)


# --- all of it ---------------------------------------------------------------------------------------------------


def test_the_development_set_has_no_say(tmp_path, bert):
    """Its labels are wrong, and still the setting is found that learns the others."""
    texts = [f"the cats {'sleep' if i % 2 else 'sleeps'}" for i in range(40)]
    train = TextSplit(texts, None, [float(i % 2) for i in range(40)])
    dev = TextSplit(texts, None, [float(1 - i % 2) for i in range(40)])
    job = text_job(bert, TextData(train, dev, ["a", "b"], "accuracy"), "words", 0.2, 0, {})
    recipe = Recipe(task="text", batch_size=8, epochs=3, seed=0)
    plan = Plan(["lr=1e-9,2e-2"], held_out=0.2)
    lines = []
    outcome = Tuner(job, (recipe, HeadConfig(representation_size=16)), plan).run(
        tmp_path / "out", report_to="none", tell=lines.append
    )
    assert job.samples == (32, 8) and outcome.best["settings"] == {"lr": 2e-2} and outcome.best["value"] == 1.0
    assert outcome.development["eval_accuracy"] == 0.0
    assert not list((tmp_path / "out" / "trials").rglob("*.safetensors"))
    assert len(lines) == 3 and "best 1.0000" in lines[-2]


def test_several_seeds_count_by_their_mean(tmp_path):
    seen = []

    def train(out, trained, everything, **options):
        seen.append((everything, trained[0].seed))
        return {"eval_accuracy": trained[0].lr + trained[0].seed}

    job = TuningJob("model", "data", "accuracy", (8, 2), train, {})
    plan = Plan(["lr=0.1,0.2"], seeds=3)
    outcome = Tuner(job, (Recipe(task="text"), None), plan).run(tmp_path / "out", report_to="none")
    assert seen[:6] == [(False, 0), (False, 1), (False, 2)] * 2 and seen[6:] == [(True, 0)]
    assert outcome.best["value"] == pytest.approx(1.2)


def test_sot_tune_texts(tmp_path, bert, table):
    out = tmp_path / "out"
    command = ["tune", bert, "--data", table, "--dev", table, "--out", out, *SMALL, "--search", "lr=1e-6,1e-2"]
    result = sot(*command, "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    cost = json.loads(result.stdout)
    assert (cost["trials"], cost["steps"], cost["winner_steps"]) == (2, 2 * 2 * 4, 2 * 5) and not out.exists()
    result = sot(*command, "--json")
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["best"]["settings"] == {"lr": 0.01} and "eval_accuracy" in outcome["development"]
    assert {file.name for file in out.iterdir()} >= {"study.db", "trials.csv", "trials.png", "best.yaml", "result.json"}
    best = load_recipe(str(out / "best.yaml"))
    assert (best.lr, best.head["representation_size"], best.grid) == (0.01, 16, {})
    assert len(rows_of(out)) == 2
    result = sot("predict", out / "best", "--text", "the cats sleep", "--json")
    assert result.returncode == 0, result.stderr
    result = sot(*command)
    assert result.returncode == 2 and "--resume" in result.stderr
    weights = (out / "best" / "model.safetensors").stat().st_mtime_ns
    result = sot(*command, "--resume", "--json")  # nothing is left to do
    assert json.loads(result.stdout) == outcome and len(rows_of(out)) == 2
    assert (out / "best" / "model.safetensors").stat().st_mtime_ns == weights


def test_sot_tune_images(tmp_path):
    out = tmp_path / "out"
    sizes = ["--set", "train_samples=64", "--set", "epochs=1", "--set", "img_size=32", "--set", "warmup_epochs=0"]
    small = ["--set", "model_args={embed: naive, patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}"]
    command = [
        "tune",
        "sot_7",
        "--data",
        "digits",
        "--recipe",
        "demo",
        "--out",
        out,
        *sizes,
        *small,
        "--logger",
        "none",
    ]
    result = sot(*command, "--search", "lr=1e-4..1e-2:log", "--trials", "2", "--sampler", "random")
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "the best of 2 trials" in said and "development set" in said
    assert len({row["lr"] for row in rows_of(out)}) == 2 and (out / "best" / "model.safetensors").is_file()


def test_sot_tune_reads_a_folder_of_glue_and_the_papers_head(tmp_path, bert):
    folder = tmp_path / "RTE"
    folder.mkdir()
    rows = "".join(f"{i}\tthe cats\tcats sleep\t{'' if i % 2 else 'not_'}entailment\n" for i in range(20))
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + rows)
    command = [
        "tune",
        "--model",
        bert,
        "--data",
        folder,
        "--recipe",
        "bert",
        "--out",
        tmp_path / "out",
        "--set",
        "batch_size=8",
    ]
    result = sot(*command, "--set", "epochs=2", "--head", "paper", "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["trials"] == 12
    result = sot(*command, "--set", "epochs=2", "--head", "fusion=class", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert (
        "2 trainings on 16 samples" in result.stdout
        and "Not searched, as the head has no words: head.representation_size, head.dropout." in result.stderr
    )


def test_mistakes_are_one_sentence(tmp_path, bert, table):
    base = ["tune", bert, "--data", table, "--dev", table, "--out", tmp_path / "out", *SMALL]
    for options, message in (
        ([], "there is nothing to search: the recipe has no grid for such a head, give --search"),
        (["--model", "other"], "give one model, got "),
        (
            ["--search", "lr=1..2", "--sampler", "grid"],
            "a grid has no ranges, got lr=1..2: list values, or choose --sampler",
        ),
        (["--search", "lr=1e-3,1e-2", "--sampler", "best"], "--sampler must be one of grid, random, tpe, got 'best'"),
        (["--search", "lr=1e-3,1e-2", "--metric", "bleu"], "--metric must be one of"),
        (["--search", "lr=1e-3,1e-2", "--storage", "nosuch://host/db"], "--storage cannot be opened"),
        (["--search", "lr=1e-3,1e-2", "--workers", "2"], "recipe text is for texts: leave out --workers"),
    ):
        result = sot(*base, *options, "--overwrite")
        assert result.returncode == 2 and message in " ".join(result.stderr.split()), result.stderr
        assert "Traceback" not in result.stderr


def test_without_optuna_the_command_says_what_to_install(monkeypatch, tmp_path, bert, table):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "optuna" else find(name, *rest)
    )
    result = sot("tune", bert, "--data", table, "--dev", table, "--out", tmp_path / "out", "--search", "lr=1e-3,1e-2")
    assert result.returncode == 2 and "tuning needs the library optuna: pip install" in " ".join(result.stderr.split())


def test_a_trial_that_diverges_is_named_and_the_others_go_on(tmp_path, bert, table):
    out = tmp_path / "out"
    result = sot(
        "tune", bert, "--data", table, "--dev", table, "--out", out, *SMALL, "--search", "lr=1e-3,1e30", "--json"
    )
    assert result.returncode == 0, result.stderr
    states = {math.log10(float(row["lr"])): row["state"] for row in rows_of(out)}
    assert states == {-3.0: "complete", 30.0: "failed"}
