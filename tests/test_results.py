"""The tables of docs/results-*.md are what the commands make of the results that are kept beside them."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sot.core.head import HeadConfig
from sot.evaluation.metrics import interval
from sot.paper.side_by_side import collect, side_by_side_markdown
from sot.paper.table import load_paper_table
from sot.paper.work import Store, Unit

DOCS = Path(__file__).parent.parent / "docs"
FOLDER = DOCS / "results"
NETTE_ARGS = {"embed": "naive", "patch_size": 16, "embed_dim": 64, "depth": 4, "num_heads": 4}
NETTE = ("img_size=112", f"model_args={json.dumps(NETTE_ARGS)}")
SETTINGS = {  # of the commands in the page, by the folder of their results
    "": (),
    "cifar10-all": ("train_samples=0",),
    "clipped": ("max_grad_norm=1",),
    "imagenette": (*NETTE, "train_samples=4000"),
    "imagenette-exact": (*NETTE, "train_samples=4000", "head.norm=svpn", "head.exponent=0.25"),
    "imagenette-long": (*NETTE, "train_samples=0", "epochs=16"),
    "texts": ("precision=bfloat16",),
    "texts/mpnet": ("precision=bfloat16", "lr=5e-5"),
    "texts/sst2": ("precision=bfloat16", "train_samples=9000"),
}
PAGES = {  # where the tables of a folder stand
    "": "results-cifar10.md",
    "cifar10-all": "results-cifar10.md",
    "clipped": "results-cifar10.md",
    "imagenette": "results-imagenette.md",
    "imagenette-exact": "results-imagenette.md",
    "imagenette-long": "results-imagenette.md",
    "texts": "results-texts.md",
    "texts/mpnet": "results-texts.md",
    "texts/sst2": "results-texts.md",
}
CORRUPTIONS = ("", "imagenette")  # folders of models that were evaluated on corrupted images
TABLES = [(folder, file) for folder in SETTINGS for file in sorted((FOLDER / folder).glob("table-*.md"))]
PROBES = [*sorted((FOLDER / "probes").glob("*.json")), FOLDER / "probes" / "depth" / "cola-3.json"]
SEEDS = range(5)


def page(name):
    return (DOCS / name).read_text()


def results_of(folder):
    return [json.loads(file.read_text()) for file in sorted((FOLDER / folder / "results").glob("*.json"))]


def units_of(name, folder):
    """Units of all rows as `sot reproduce` plans them of the data that the results are about."""
    results = results_of(folder)
    data = {result["task"]: (result["model"], result["data"]) for result in results}
    rows = load_paper_table(name, "cpu", SETTINGS[folder]).rows
    rows = [replace(row, tasks=tuple(task for task in row.tasks if task in data)) for row in rows]
    return [
        Unit(row, replace(row.recipe, seed=seed), row.model or data[task][0], task, data[task][1])
        for seed in SEEDS
        for row in rows
        for task in row.tasks or (None,)
    ]


@pytest.mark.parametrize(("folder", "file"), TABLES, ids=lambda value: getattr(value, "stem", value))
def test_the_tables_show_the_results(folder, file):
    name = file.stem.removeprefix("table-")
    store = Store(FOLDER / folder)
    units = [unit for unit in units_of(name, folder) if store.result(unit) is not None]
    table = load_paper_table(name, "cpu", SETTINGS[folder])
    shown = [line for line in file.read_text().splitlines() if line.startswith("| ")]
    made = side_by_side_markdown(table, collect(table, units, store)).splitlines()
    assert shown == [line for line in made if line.startswith("| ")]
    assert all(line in page(PAGES[folder]) for line in shown), f"{PAGES[folder]} has another table {name}"


def tables_of(folder):
    """Those whose rows the settings leave as they are."""
    if folder.startswith("texts"):
        return ("6",)
    return ("4a", "4b") if folder == "imagenette-exact" else ("1", "3b", "4a", "4b", "4c", "4d")


@pytest.mark.parametrize("folder", SETTINGS)
def test_every_result_belongs_to_a_row(folder):
    known = {unit.key for name in tables_of(folder) for unit in units_of(name, folder)}
    kept = {file.stem for file in (FOLDER / folder / "results").glob("*.json")}
    assert kept and kept <= known, "a recipe was changed, or a result of something else was kept"


def test_no_folder_of_results_is_left_out():
    folders = {str(file.parent.parent.relative_to(FOLDER)) for file in FOLDER.rglob("results/*.json")}
    assert {folder.removeprefix(".") for folder in folders} == set(SETTINGS)


@pytest.mark.parametrize("file", PROBES, ids=lambda file: file.stem)
def test_the_probes_are_in_the_page(file):
    found = json.loads(file.read_text())
    for row in found["heads"]:
        HeadConfig.from_dict(row["config"])
        score = f"{100 * row['mean']:.2f} ± {100 * interval(row['scores']):.2f}"
        line = f"| {row['head']} | {score} | {100 * row['held_out']:.2f} | {row['params']:,} |"
        assert line in page("results-probes.md"), f"docs/results-probes.md has other numbers of {file.stem}"


def test_sounds_are_in_their_page():
    found = json.loads((FOLDER / "esc50" / "probe.json").read_text())
    scores = {row["head"]: f"{100 * row['mean']:.2f} ± {100 * interval(row['scores']):.2f}" for row in found["heads"]}
    best = max(found["heads"], key=lambda row: row["mean"])["head"]
    page, summary = (DOCS / "audio.md").read_text(), (DOCS / "results.md").read_text()
    for row in found["heads"]:
        score = f"**{scores[best]}**" if row["head"] == best else scores[row["head"]]
        held_out = "" if row["held_out"] is None else f"{100 * row['held_out']:.2f}"
        line = f"| {row['head']} | {score} | {held_out} | {row['params']:,} | {row['seconds']:.1f} |"
        assert line in page and len(row["scores"]) == 5, f"audio.md has other numbers of {row['head']}"
    assert all(scores[name] in summary for name in ("gap", "mgcrp-exact-0.25", "sot"))
    named = page.split("--heads majority")[1].split()[0]
    assert {*f"majority{named}".split(",")} == {*scores}


def test_what_epochs_of_the_probes_cost_is_in_their_page():
    found = [json.loads((FOLDER / "probes" / f"{name}.json").read_text()) for name in ("imagenette", "sst2", "cola")]
    costs = [{row["head"]: f"{row['epoch_ratio']:.2%}".replace("%", " %") for row in each["heads"]} for each in found]
    for head in (
        "class",
        "class+gap",
        "class+ep8",
        "class+ep32",
        "class+gcp",
        "class+mgcrp",
        "class+mgcrp-exact-0.25",
        "attn",
    ):
        assert f"| {head} | {' | '.join(cost[head] for cost in costs)} |" in page("probing.md")


def test_the_probes_of_every_depth_are_in_the_page():
    files = {2: "depth/cola-2", 3: "depth/cola-3", 4: "depth/cola-4", 5: "depth/cola-5", 6: "cola"}
    for layers, name in files.items():
        rows = {row["head"]: row for row in json.loads((FOLDER / "probes" / f"{name}.json").read_text())["heads"]}
        chosen = [rows[head] for head in ("ep8", "class+ep8", "class+mgcrp-exact-0.25")]
        cells = [f"{shown(row['scores'])} ({100 * row['held_out']:.2f})" for row in chosen]
        assert f"| {layers} | {' | '.join(cells)} |" in page("results-probes.md")


def shown(scores):
    mean = f"{100 * np.mean(scores):.2f}"
    return mean if len(scores) == 1 else f"{mean} ± {100 * interval(scores):.2f}"


@pytest.mark.parametrize("folder", CORRUPTIONS)
def test_the_corruptions_are_in_the_page(folder):
    seeds = {}
    for file in sorted((FOLDER / folder / "corruptions").glob("*.json")):
        model = json.loads((FOLDER / folder / "results" / file.name).read_text())
        head = json.dumps(model["recipe"]["head"], sort_keys=True)
        seeds.setdefault(head, []).append(json.loads(file.read_text()))
    assert len(seeds) > 1
    for found in seeds.values():
        clean, corrupted = ([each[kind] for each in found] for kind in ("clean", "corrupted"))
        lost = [before - after for before, after in zip(clean, corrupted)]
        assert f"| {shown(clean)} | {shown(corrupted)} | {shown(lost)} |" in page("results-corruptions.md")


GROUPS = {
    "none": ("clean",),
    **{f"{name} blur": (f"{name}_blur",) for name in ("defocus", "glass", "motion", "zoom")},
    "contrast": ("contrast",),
    "noise, mean of three": ("gaussian_noise", "shot_noise", "impulse_noise"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_the_corruptions_of_cifar10_are_in_the_page_one_by_one(group):
    seeds = {}
    for file in sorted((FOLDER / "corruptions").glob("*.json")):
        head = json.loads((FOLDER / "results" / file.name).read_text())["recipe"]["head"]
        found = json.loads(file.read_text())
        scores = {"clean": found["clean"], **{row["corruption"]: row["accuracy"] for row in found["rows"]}}
        kind = "class" if head.get("fusion") == "class" else head.get("norm", "fast")
        seeds.setdefault(kind, []).append(np.mean([scores[name] for name in GROUPS[group]]))
    cells = " | ".join(shown(seeds[kind]) for kind in ("class", "fast", "svpn"))
    assert f"| {group} | {cells} |" in page("results-corruptions.md")


def test_what_blur_does_to_singular_values_is_in_the_page():
    found = json.loads((FOLDER / "robust" / "spectrum.json").read_text())
    ranks, text = (2, 4, 8, 14), page("results-corruptions.md")
    shares = " | ".join(f"{found['clean spectrum'][f'value {rank} of largest']:.3f}" for rank in ranks)
    assert f"| none: share of the largest | 1 | {shares} |" in text
    for row in found["rows"][1:7]:  # of three noises the first
        name = row["corruption"].replace("_", " ")
        values = [row["largest"], *(row[f"value {rank} of largest"] for rank in ranks)]
        alike = [row[f"vectors {rank} alike"] for rank in (1, *ranks)]
        parts = [row[key] for key in ("class", "words", "words, clean values", "words, clean vectors")]
        assert f"| {name}: times as large | {' | '.join(f'{value:.2f}' for value in values)} |" in text
        assert f"| {name}: vectors alike | {' | '.join(f'{value:.2f}' for value in alike)} |" in text
        assert f"| {name} | {' | '.join(f'{part:.1f}' for part in parts)} |" in text


def test_heads_fitted_anew_are_in_the_page():
    rows = json.loads((FOLDER / "robust" / "refit.json").read_text())
    for row in rows:
        cells = " | ".join(f"{row[name]:.1f}" for name in ("clean", "defocus_blur", "glass_blur", "motion_blur"))
        assert f"| {row['head']} | {cells} |" in page("results-corruptions.md")


def test_whitened_starts_are_in_the_page():
    rows = json.loads((FOLDER / "robust" / "whiten.json").read_text())
    for head, start in (("default", "random"), ("whiten", "random rotations of whitened directions")):
        scores = [100 * row["accuracy"] for row in rows if row["head"] == head]
        assert f"| {start} | {np.mean(scores):.1f} ± {interval(scores):.1f} |" in page("tried.md")


def test_few_fine_tuned_labels_are_in_the_page():
    text = page("results-texts.md")
    tables = runpy.run_path(str(FOLDER / "few-tuned" / "tables.py"))
    made = {"HEADER": "table", "SEARCH": "search", "WORDS": "words"}
    for header, written in ((tables[header], tables[name]()) for header, name in made.items()):
        assert written in text and written.startswith(header) and len(written) > len(header)


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*/*.py")), ids=lambda script: script.stem)
def test_scripts_beside_the_results_find_what_they_import(script):
    assert runpy.run_path(str(script), run_name="imported")["__doc__"]


def test_summaries_repeat_the_tables():
    tables = "".join(map(page, {*PAGES.values(), "results-probes.md", "audio.md", "few-labels.md"})).replace("**", "")
    readme = page("../README.md")
    figures = re.findall(r"[-+]?\d+\.\d+ ± \d+\.\d+", page("results.md") + readme[readme.index("Evidence is in") :])
    assert len(figures) > 30
    assert [figure for figure in figures if f"| {figure} " not in tables] == []


def test_the_losses_of_fine_tuned_texts_are_in_the_page():
    losses = {}
    for result in results_of("texts"):
        fusion = result["recipe"]["head"].get("fusion", "sum")
        losses.setdefault((result["task"], fusion), []).append(result["scores"]["loss"])
    for task, name in {"cola": "CoLA", "rte": "RTE", "mrpc": "MRPC", "sick": "SICK"}.items():
        cells = [f"{np.mean(each):.3f} ± {interval(each):.3f}" for each in (losses[task, f] for f in ("class", "late"))]
        assert f"| {name} | {' | '.join(cells)} |" in page("results-texts.md")


def test_the_learned_exponents_are_in_the_page():
    for row in json.loads((FOLDER / "learned" / "cifar10.json").read_text()):
        cells = f"| {row['start']} | {row['rate']} | {np.mean(row['exponents']):.2f} | {100 * row['accuracy']:.2f} |"
        assert cells in page("results-cifar10.md")
