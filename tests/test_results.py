"""The tables of docs/results.md are what `sot reproduce` makes of the results that are kept beside it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sot.reproduce import Store, Unit, as_markdown, collect, load_table

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
FOLDER = PAGE.parent / "results"
TABLES = sorted(FOLDER.glob("table-*.md"))
RESULTS = [json.loads(file.read_text()) for file in sorted((FOLDER / "results").glob("*.json"))]
SEEDS = range(5)


def units_of(table, data):
    """Units of all rows as `plan` makes them of this data."""
    return [
        Unit(row, replace(row.recipe, seed=seed), row.model, None, data)
        for seed in SEEDS
        for row in table.rows
        if row.model is not None and not row.tasks
    ]


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
def test_the_tables_show_the_results(file):
    name = file.stem.removeprefix("table-")
    table, data = load_table(name, "cpu"), RESULTS[0]["data"]
    units = [unit for unit in units_of(table, data) if Store(FOLDER).result(unit) is not None]
    shown = [line for line in file.read_text().splitlines() if line.startswith("| ")]
    made = as_markdown(table, collect(table, units, Store(FOLDER))).splitlines()
    assert shown == [line for line in made if line.startswith("| ")]
    assert all(line in PAGE.read_text() for line in shown), f"docs/results.md has another table {name}"


def test_every_result_belongs_to_a_row():
    data = RESULTS[0]["data"]
    known = {
        unit.key
        for name in ("1", "3a", "3b", "4a", "4b", "4c", "4d")
        for unit in units_of(load_table(name, "cpu"), data)
    }
    kept = {file.stem for file in (FOLDER / "results").glob("*.json")}
    assert kept and kept <= known, "a recipe was changed, or a result of something else was kept"
