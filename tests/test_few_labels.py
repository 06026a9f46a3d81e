"""The tables of few labels in docs/few-labels.md are what is kept beside it."""

import json
import runpy
from pathlib import Path

import pytest

from sot.evaluation.metrics import interval

PAGE = Path(__file__).parent.parent / "docs" / "few-labels.md"
FOLDER = PAGE.parent / "results" / "few"
TABLES = runpy.run_path(str(FOLDER / "tables.py"))


@pytest.mark.parametrize("name", TABLES["names"]())
def test_the_tables_show_the_results(name):
    table, rows = TABLES["set_table"](name), json.loads((FOLDER / f"{name}.json").read_text())["heads"]
    assert table in PAGE.read_text()
    for row in rows:
        cell = f"{100 * row['mean']:.1f} ± {100 * interval(row['scores']):.1f}"
        assert cell in next(line for line in table.splitlines() if line.startswith(f"| {row['head']} |"))
        assert len(row["scores"]) == (10 if row["labels"] <= 128 else 3)
    assert (FOLDER / f"{name}.png").is_file() and f"results/few/{name}.png" in PAGE.read_text()


def test_the_summary_is_that_of_all_sets():
    assert TABLES["summary"]() in PAGE.read_text()
    files = {file.stem.split("-")[0] for file in FOLDER.glob("*.json")}
    assert files == set(TABLES["names"]()) and len(files) >= 3, "each has a title"


def test_setfit_stands_beside_it():
    table = TABLES["setfit_table"]()
    assert table in PAGE.read_text() and all(name in table for name in ("setfit", "contrastive", "SetFit's backbone"))


def test_leads_are_paired_by_draws_and_combined_over_sets():
    scores = {"sot": [0.5, 0.7, 0.9], "gap": [0.4, 0.6, 0.8], "class": [0.6, 0.6, 0.6], "attn": [0.5, 0.6]}
    found = {(head, 8): {"scores": each} for head, each in scores.items()}
    mean, half = TABLES["lead"](found, "gap", 8)
    assert mean == pytest.approx(10) and half == pytest.approx(0, abs=1e-6)  # though both go up and down
    assert TABLES["lead"](found, "class", 8)[1] == pytest.approx(100 * interval([-0.1, 0.1, 0.3]))
    assert TABLES["lead"](found, "attn", 8)[0] == pytest.approx(5)  # the two draws that both have
    assert TABLES["mean_lead"]([(3.0, 3.0), (1.0, 4.0)]) == "+2.0 ± 2.5"
    assert TABLES["mean_lead"]([(-6.0, 3.0), (-1.0, 4.0)]) == "**-3.5 ± 2.5**"


def test_a_set_has_heads_of_several_runs(tmp_path, monkeypatch):
    def row(head, labels, scores):
        return {"head": head, "labels": labels, "scores": scores, "seconds": 0.5}

    runs = {
        "rte": [row("sot", 8, [0.5, 0.7]), row("sot", 128, [0.8, 0.8])],
        "rte-slow": [row("sot", 128, [0.1, 0.1]), row("attn", 128, [0.6, 0.8])],
    }
    for name, heads in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"heads": heads}))
    for name, place in {"HERE": tmp_path, "SETFIT": tmp_path / "setfit.jsonl"}.items():
        monkeypatch.setitem(TABLES["read"].__globals__, name, place)
    *_, ours, attn = TABLES["set_table"]("rte").splitlines()
    assert ours.startswith("| sot | 60.0 ± ") and ours.endswith(" | 80.0 ± 0.0 | 0.50 |")
    assert attn.startswith("| attn |  | 70.0 ± ")
    assert TABLES["summary"]().splitlines()[-1].startswith("| attn | 1 |  | +10.0 ± ")
    page = TABLES["written"]("# Page\n\n| `sot` minus | old |\n\nText.\n")
    assert page.startswith("# Page\n\n| `sot` minus | sets |") and "old" not in page and "Text." in page
    assert page.endswith("results/few/rte.png)\n") and TABLES["written"](page) == page
