"""The tables of few labels in docs/few-labels.md are what is kept beside it."""

import json
from pathlib import Path

import pytest

from sot.evaluation.metrics import interval

PAGE = Path(__file__).parent.parent / "docs" / "few-labels.md"
FILES = sorted((PAGE.parent / "results" / "few").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_tables_show_the_results(file):
    rows = json.loads(file.read_text())["heads"]
    counts = list(dict.fromkeys(row["labels"] for row in rows))
    for head in dict.fromkeys(row["head"] for row in rows):
        found = {row["labels"]: row for row in rows if row["head"] == head}
        assert all(len(row["scores"]) == (10 if count <= 128 else 3) for count, row in found.items())
        cells = [f"{100 * row['mean']:.1f} ± {100 * interval(row['scores']):.1f}" for row in map(found.get, counts)]
        assert f"| {head} | {' | '.join(cells)} |" in PAGE.read_text(), f"{file.stem}: {head}"
    assert file.with_suffix(".png").is_file()


def test_there_are_results():
    assert len(FILES) >= 3
