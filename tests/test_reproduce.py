"""The paper's tables: as data they agree with the models, and `sot reproduce` trains, resumes, merges and reports."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from test_cli import sot
from test_scale import TORCHRUN, launch

from sot.core.head import HeadConfig
from sot.evaluation.evaluate import open_images
from sot.models.complexity import count_parameters
from sot.paper.cost import estimate_work
from sot.paper.side_by_side import collect, side_by_side_markdown
from sot.paper.table import choose_rows, choose_tasks, load_paper_table, table_names
from sot.paper.work import Store, Where, do, plan, read_task

TINY = [
    *("--set", "epochs=2", "--set", "train_samples=96", "--set", "batch_size=32"),
    *("--set", "model_args={embed: naive, patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}"),
]
SETTINGS = TINY[1::2]


@pytest.mark.parametrize("name", table_names())
def test_every_table_can_be_read_and_its_rows_differ(name):
    for preset in ("paper", "cpu"):
        table = load_paper_table(name, preset)
        assert table.rows and len({row.name for row in table.rows}) == len(table.rows)
        settings = [(row.model, row.recipe.head, row.recipe.embed, row.recipe.model_args) for row in table.rows]
        assert all(settings.count(each) == 1 for each in settings), "two rows train the same"
        for row in table.rows:
            assert set(row.paper) <= set(table.columns) and set(row.tasks) <= set(table.columns)
            assert (row.recipe.task == "text") == bool(row.tasks)


@pytest.mark.parametrize("name", ["3a", "3b"])
def test_parameters_the_paper_prints_are_those_of_the_rows(name):
    for row in load_paper_table(name, "paper").rows:
        if "params" not in row.paper:
            continue
        with torch.device("meta"):
            model = timm.create_model(row.model, head=row.recipe.head, **row.recipe.model_args)
        idle = 0.257 if row.recipe.head["fusion"] == "concat" else 0  # a layer the authors left in
        assert count_parameters(model) / 1e6 + idle == pytest.approx(row.paper["params"], rel=0.01), row.name


def test_the_presets_differ_in_the_recipe_and_not_in_the_heads():
    for name in ("3b", "4a", "4b", "4c", "4d"):
        paper, small = load_paper_table(name, "paper"), load_paper_table(name, "cpu")
        for theirs, ours in zip(paper.rows, small.rows):
            assert theirs.name == ours.name and theirs.recipe.epochs > ours.recipe.epochs
            assert HeadConfig.from_dict(theirs.recipe.head) == HeadConfig.from_dict(ours.recipe.head)


def norms_of(name, preset, settings=()):
    heads = {row.name: HeadConfig.from_dict(row.recipe.head) for row in load_paper_table(name, preset, settings).rows}
    return {row: (head.norm, head.exponent) for row, head in heads.items() if head.fusion != "class"}


@pytest.mark.parametrize("preset", ["paper", "cpu"])
def test_rows_have_the_papers_norm_unless_they_name_another(preset):
    for name in ("1", "3b", "4a", "4b", "4c", "4d", "5a"):
        for row, norm in norms_of(name, preset).items():
            words = row.replace("GCP", "isqrt").split(", ")
            usual = ("isqrt", 0.5) if "isqrt" in words else (None, 0.5) if "GAP" in words else ("svpn_fast", 0.5)
            assert norm == usual or "exact" in row or row in ("none", "1/τ", "EPN", "LN"), (name, row)
    assert norms_of("4d", preset)["svPN exact"] == ("svpn", 0.5)
    assert {norm for row, norm in norms_of("4c", preset).items() if "fast" in row} == {("svpn_fast", 0.5)}
    assert norms_of("4c", preset)["exact, α = 0.25"] == ("svpn", 0.25)


def test_settings_reach_the_rows_whose_head_has_them():
    norms = norms_of("3b", "cpu", ["head.norm=svpn", "head.exponent=0.25"])
    assert norms["late, GCP"] == norms["late, MGCrP"] == ("svpn", 0.25) and norms["late, GAP"] == (None, 0.5)
    norms = norms_of("3b", "cpu", ["head.exponent=0.25", "head.left_dim=8"])
    assert norms["sum, GCP"] == ("isqrt", 0.5) and norms["sum, MGCrP"] == ("svpn_fast", 0.25)
    with pytest.raises(ValueError, match=r"what makes row '0\.5K, 9×9': head \{'left_dim': 9, 'right_dim': 9\} to"):
        load_paper_table("4b", "cpu", ["head.representation_size=1000"])


def test_rows_and_tasks_are_chosen():
    table = load_paper_table("3b", "cpu")
    assert choose_rows(table, "2, 11-12") == [table.rows[1], table.rows[10], table.rows[11]]
    assert choose_rows(table, "2,1-3,2") == [table.rows[1], table.rows[0], table.rows[2]]
    for wanted in ("0", "16", "3-99", "a", "3-", "5-3"):
        with pytest.raises(ValueError, match="rows"):
            choose_rows(table, wanted)
    rows = load_paper_table("6", "cpu").rows
    assert {row.tasks for row in choose_tasks(rows, "rte,cola")} == {("cola", "rte")}
    with pytest.raises(ValueError, match=r"no task 'mnli'; they have: cola, rte"):
        choose_tasks(rows, "mnli")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two seeds of two rows of table 1, trained by the command."""
    out = tmp_path_factory.mktemp("reproduce")
    result = sot(
        *("reproduce", "1", "--preset", "cpu", "--data", "digits", "--seeds", 2, "--rows", "1,3"), *TINY, "--out", out
    )
    assert result.returncode == 0, result.stderr
    return out, result


def units_of(name, rows, seeds):
    table = load_paper_table(name, "cpu", SETTINGS)
    return table, plan(choose_rows(table, rows), range(seeds), Where("digits"))


def test_a_table_shows_ours_beside_the_papers(finished):
    out, result = finished
    _, units = units_of("1", "1,3", 2)
    assert "1 of 4: ClassT, seed 0\n" in result.stderr
    assert re.search(r"4 of 4: ClassT\+WordT, seed 1 \(about \d+ minutes left\)\n", result.stderr)
    results = [json.loads((out / "results" / f"{unit.key}.json").read_text()) for unit in units]
    assert len(list((out / "results").iterdir())) == 4
    first = [100 * r["scores"]["accuracy"] for r in results[::2]]
    with (out / "table-1.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["column"] == "accuracy"]
    assert [row["row"] for row in rows] == ["ClassT", "ClassT+WordT"]
    assert float(rows[0]["mean"]) == pytest.approx(sum(first) / 2) and rows[0]["paper"] == "72.2"
    words = (out / "table-1.md").read_text()
    assert f"| ClassT | {sum(first) / 2:.2f} ± " in words and "| 78.6 | +6.40 |" in words
    assert (out / "table-1.png").read_bytes().startswith(b"\x89PNG")
    assert results[0]["params"] < results[1]["params"] and results[0]["samples"] == 192
    words, width = 16, 16  # pieces of 8 px; one layer with an MLP of twice the width
    attention = (words + 1) * 4 * width**2 + 2 * (words + 1) ** 2 * width
    macs = words * 3 * 8 * 8 * width + attention + (words + 1) * 4 * width**2 + 10 * width
    assert results[0]["macs"] == macs < results[1]["macs"]


def test_what_is_trained_is_not_trained_again_not_even_for_another_table(finished):
    out, _ = finished
    before = {file: file.stat().st_mtime_ns for file in (out / "results").iterdir()}
    again = sot(
        "reproduce", "3b", "--preset", "cpu", "--data", "digits", "--seeds", 2, "--rows", "1,11", *TINY, "--out", out
    )
    assert again.returncode == 0 and "of" not in again.stderr.split()
    assert {file: file.stat().st_mtime_ns for file in (out / "results").iterdir()} == before
    assert "–" not in re.search(r"\| class token \|([^|]*)", (out / "table-3b.md").read_text())[1]


def test_an_interrupted_unit_goes_on_and_scores_the_same(finished, tmp_path):
    out, _ = finished
    table, units = units_of("4d", "5", 1)  # the third row of table 1
    store, unit = Store(tmp_path), units[0]
    shutil.copytree(Store(out).run(unit), store.run(unit))
    checkpoints = sorted(store.run(unit).glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    shutil.rmtree(checkpoints[-1])  # as if it had ended after the first epoch
    (store.run(unit) / "model.safetensors").unlink()
    do(unit, store, Where("digits"))
    result, whole = store.result(unit), Store(out).result(unit)
    assert result["scores"]["accuracy"] == whole["scores"]["accuracy"] and result["resumed"] and not whole["resumed"]
    speeds = [collect(table, units, Store(folder))[0][1]["speed"].ours for folder in (out, tmp_path)]
    assert speeds == [[pytest.approx(192 / whole["cpu_seconds"])], []]


def write_fives_and_threes(folder):
    digits, labels = load_digits(return_X_y=True)
    for name in ("3", "5"):
        (folder / name).mkdir(parents=True)
        for number in (labels == int(name)).nonzero()[0][:8]:
            Image.fromarray((digits[number].reshape(8, 8) * 15).astype("uint8")).save(folder / name / f"{number}.png")


def test_what_is_trained_is_evaluated_on_imagenet_a_too(finished, tmp_path):
    out = shutil.copytree(finished[0], tmp_path / "out")
    write_fives_and_threes(tmp_path / "harder")
    options = ["--preset", "cpu", "--data", "digits", "--seeds", 1, "--rows", "1,3", *TINY, "--out", out]
    result = sot("reproduce", "1", *options, "--imagenet-a", tmp_path / "harder")
    assert result.returncode == 0, result.stderr
    _, units = units_of("1", "1,3", 1)
    scores = [Store(out).result(unit)["scores"] for unit in units]
    test = open_images(Store(out).run(units[1]), str(tmp_path / "harder"))
    assert len(test.pictures) == 16 and scores[1]["imagenet_a"] == test.evaluate(4, iter).scores["accuracy"]
    assert scores[1]["accuracy"] == Store(finished[0]).result(units[1])["scores"]["accuracy"]
    assert f"| {100 * scores[1]['imagenet_a']:.2f} |" in (out / "table-1.md").read_text()

    shutil.rmtree(out / "runs")
    again = sot("reproduce", "1", *options, "--imagenet-a", tmp_path / "harder")
    assert again.returncode == 0 and "of" not in again.stderr.split()  # nothing is evaluated twice
    (tmp_path / "harder" / "5").rename(tmp_path / "harder" / "cat")
    other = sot("reproduce", "1", *options, "--imagenet-a", tmp_path / "harder")
    assert other.returncode == 2 and "classes the model was not trained on: cat" in other.stderr
    (tmp_path / "harder" / "cat").rename(tmp_path / "harder" / "5")
    rest = sot("reproduce", "1", *options, "--seeds", 2, "--imagenet-a", tmp_path / "harder")
    assert rest.returncode == 2 and "holds no model to evaluate on" in rest.stderr and "Traceback" not in rest.stderr


def test_results_of_two_machines_are_merged(finished, tmp_path):
    out, _ = finished
    _, units = units_of("1", "1,3", 2)
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, mine in ((here, units[::2]), (there, units[1::2])):
        (folder / "results").mkdir(parents=True)
        for unit in mine:
            shutil.copy(out / "results" / f"{unit.key}.json", folder / "results")
    merged = sot(
        "reproduce",
        "1",
        "--preset",
        "cpu",
        "--data",
        "digits",
        "--seeds",
        2,
        "--rows",
        "1,3",
        *TINY,
        "--out",
        here,
        "--merge",
        there,
        "--report",
    )
    assert merged.returncode == 0 and "2 results taken" in merged.stdout
    assert (here / "table-1.md").read_text() == (out / "table-1.md").read_text()
    options = ("--preset", "cpu", "--data", "digits", *TINY, "--out", here)
    refused = sot("reproduce", "1", *options, "--merge", tmp_path, "--report")
    assert refused.returncode == 2 and "no folder results" in refused.stderr


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[1]", b"\xff\x00"])
def test_a_damaged_result_counts_as_missing(content, finished, tmp_path, caplog):
    table, units = units_of("1", "1,3", 2)
    store = Store(tmp_path)
    assert store.merge(finished[0]) == 4 and store.merge(finished[0]) == 0
    damaged = tmp_path / "results" / f"{units[0].key}.json"
    damaged.write_bytes(content)
    assert store.result(units[0]) is None and f"{damaged} is damaged" in caplog.text
    assert len(collect(table, units, store)[0][1]["accuracy"].ours) == 1
    assert Store(tmp_path / "other").merge(tmp_path) == 3
    assert store.merge(finished[0]) == 1 and store.result(units[0]) is not None


def test_a_key_tells_apart_what_differs_and_nothing_else():
    _, units = units_of("4d", None, 2)
    assert len({unit.key for unit in units}) == len(units) == 12
    _, shared = units_of("4c", "2,4", 2)
    assert {unit.key for unit in shared} <= {unit.key for unit in units}
    spelled_out = load_paper_table("4d", "cpu", [*SETTINGS, "weight_decay=0.03", "head.exponent=0.5"])
    assert {unit.key for unit in plan(spelled_out.rows, range(2), Where("digits"))} == {unit.key for unit in units}
    other = load_paper_table("4d", "cpu", [*SETTINGS, "lr=1e-5", "min_lr=0"])
    assert not {unit.key for unit in plan(other.rows, range(2), Where("digits"))} & {unit.key for unit in units}


def test_an_empty_table_is_a_table_of_dashes(tmp_path):
    table, units = units_of("4d", None, 1)
    words = side_by_side_markdown(table, collect(table, units, Store(tmp_path)))
    assert "| svPN exact | – | – | 76.13 | +1.31 |" in words and "over no seeds" in words


def test_the_state_of_the_art_has_parameters_and_multiply_adds(tmp_path):
    table, units = units_of("5a", "1", 1)
    store = Store(tmp_path)
    store.keep(units[0], {"scores": {"accuracy": 0.5}, "params": 5_700_000, "macs": 1_250_000_000})
    words = side_by_side_markdown(table, collect(table, units, store))
    assert "| params M | paper | MACs G | paper |" in words and "| 5.70 | 5.7 | 1.25 | 1.3 |" in words


def test_dry_run_says_steps_and_hours_and_trains_nothing(tmp_path):
    result = sot(
        "reproduce",
        "4d",
        "--preset",
        "cpu",
        "--data",
        "digits",
        "--seeds",
        2,
        "--rows",
        "1-2",
        *TINY,
        "--out",
        tmp_path / "o",
        "--dry-run",
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"none +│ images │ +2 │ +12 │", result.stdout) and not (tmp_path / "o").exists()
    _, units = units_of("4d", "1", 1)
    cost = estimate_work(units[0], Where("digits"))
    assert cost.steps == 6 and cost.hours > 0
    words = 2 * 2 * 6 * 14 * 16 * 16 * 3  # one of the products alone, forward and backward, for 16 words
    assert cost.macs > 192 * words / 4


def test_dry_run_counts_the_seeds_that_are_missing(finished):
    options = ("--preset", "cpu", "--data", "digits", "--rows", 1, "--seeds", 3, *TINY, "--out", finished[0])
    result = sot("reproduce", "1", *options, "--dry-run")
    assert re.search(r"ClassT +│ images │ +1 │ +6 │", result.stdout), result.stdout + result.stderr


def test_dry_run_of_the_paper_needs_no_data():
    result = sot("reproduce", "4d", "--rows", "6", "--seeds", 1, "--dry-run", "--set", "model_args={embed: naive}")
    assert result.returncode == 0, result.stderr
    assert re.search(r"svPN exact +│ images │ +1 │ +388,120 │", result.stdout), (
        result.stdout
    )  # 310 × ⌈1,281,167 / 1,024⌉


@pytest.fixture
def texts(tmp_path):
    """A folder with one small task."""
    folder = tmp_path / "glue" / "CoLA"
    folder.mkdir(parents=True)
    lines = [f"x\t{number % 2}\t\tthe {'cat sleeps' if number % 2 else 'cats sleeps'}" for number in range(16)]
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("\n".join(lines))
    return folder.parent


def test_texts_too(texts, tmp_path, stand_ins):
    small = ("--set", "epochs=1", "--set", "batch_size=8", "--seeds", 1, "--out", tmp_path / "out")
    words = ("reproduce", "6", "--preset", "cpu", "--texts", texts, "--tasks", "cola", *small)
    assert "needs --model" in sot(*words).stderr
    named = ("--model", stand_ins["google-bert/bert-base-uncased"])
    assert "has no folder for task rte" in sot(*words, *named, "--tasks", "cola,rte").stderr
    costs = sot(*words, *named, "--dry-run")
    assert costs.returncode == 0 and re.search(r"class token \+ ours +│ cola +│ +1 │ +2 │", costs.stdout), costs.stderr
    result = sot(*words, *named)
    assert result.returncode == 0, result.stderr
    results = [json.loads(file.read_text()) for file in (tmp_path / "out" / "results").iterdir()]
    by_fusion = {result["recipe"]["head"].get("fusion", "sum"): result["scores"] for result in results}
    report = (tmp_path / "out" / "table-6.md").read_text()
    for name, fusion in (("class token", "class"), ("class token + ours", "sum")):
        assert f"| {name} | {100 * by_fusion[fusion]['mcc']:.2f} |" in report
    another = tmp_path / "another" / Path(named[1]).name
    shutil.copytree(named[1], another)
    weights = load_file(another / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, another / "model.safetensors", {"format": "pt"})
    refused = sot(*words, "--model", another, "--report")
    assert refused.returncode == 2 and f"is of other weights than {another}: give another --out" in refused.stderr
    (texts / "CoLA" / "train.tsv").unlink()
    for untrainable in (("--dry-run",), ()):
        lacking = sot(*words, *named, *untrainable)
        assert lacking.returncode == 2 and "task cola needs a training and a development set" in lacking.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["9z"], "unknown table '9z'; accepted: 1, 3a"),
        (["3b", "--preset", "gpu"], "unknown preset 'gpu'; accepted: paper, cpu"),
        (["3b"], "images are needed: give --data"),
        (["3b", "--data", "imagenet"], "unknown data 'imagenet'"),
        (["3b", "--data", "digits", "--rows", "99"], "table 3b has rows 1 to 15, got '99'"),
        (["3b", "--data", "digits", "--set", "epoch=3"], "unknown recipe key 'epoch'"),
        (["4b", "--data", "digits", "--set", "head={norm: svpn}"], "what makes row '0.5K, 9×9': head {'left_dim': 9"),
        (["4d", "--data", "digits", "--set", "head.norm=ln"], "{'norm': 'none'} to {'norm': 'ln'}"),
        (["1", "--data", "digits", "--imagenet-a", "nowhere"], "unknown data 'nowhere'"),
        (["1", "--data", "digits", "--set", "seed=7"], "seed cannot be set"),
        (
            ["4d", "--data", "digits", "--set", "train_samples=5000"],
            "there are 1438 samples to draw from, fewer than 5000",
        ),
        (["3a", "--data", "digits", "--set", "model_args={depth: 2}"], "{'embed': 'naive'} to {'embed': None}"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(words, message, tmp_path):
    result = sot("reproduce", *words, "--out", tmp_path / "out")
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_two_processes_share_a_row(tmp_path):
    words = (
        "reproduce",
        "1",
        "--preset",
        "cpu",
        "--data",
        "digits",
        "--seeds",
        "1",
        "--rows",
        "1,3",
        *TINY,
        "--out",
        tmp_path,
    )
    result = launch([*TORCHRUN, "-m", "sot"], *words)
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "results").glob("*.json"))) == 2 and result.stdout.count("Table 1:") == 1


def test_a_task_that_is_not_there_names_the_option_of_this_command():
    with pytest.raises(ValueError, match="task sick needs texts, a folder in which its own has SICK_train"):
        read_task(None, "sick")
