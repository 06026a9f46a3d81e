"""Every notebook of examples/ runs from top to bottom, on small stand-ins for its models and on less data."""

import json
import re
from functools import partial
from pathlib import Path

import matplotlib
import pytest

from sot.core import POOLS
from sot.probe import Budget, classifier

FOLDER = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SMALLER = {"SAMPLES = 400": "SAMPLES = 80", "SAMPLES = 300": "SAMPLES = 80", "400, 60, 16": "40, 2, 4"}


def cells_of(notebook, kind):
    found = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]
    return [(cell, "".join(cell["source"])) for cell in found]


@pytest.fixture
def small(monkeypatch, tmp_path, stand_ins):
    """Code with local models, less data and training, in an empty folder; poolings it adds are gone afterwards."""
    monkeypatch.chdir(tmp_path)
    budget = partial(Budget, least_steps=2, epochs=1, learning_rates=(1e-2,), weight_decays=(0.01,), search_folds=1)
    monkeypatch.setattr(classifier, "Budget", budget)
    matplotlib.use("Agg")
    names = stand_ins | {"vit_small_patch14_dinov2.lvd142m": stand_ins["vit_small_patch16_224"]}
    changes = {f'"{name}"': f'"{folder}"' for name, folder in names.items()} | SMALLER

    def change(code):
        for before, after in changes.items():
            code = code.replace(before, after)
        return code

    kept = dict(POOLS)
    yield change
    POOLS.clear()
    POOLS.update(kept)


def test_there_are_five():
    assert len(NOTEBOOKS) == 5


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_all_cells_run_in_order(notebook, small):
    namespace = {"__name__": notebook.stem}
    for number, (_, code) in enumerate(cells_of(notebook, "code"), start=1):
        exec(compile(small(code), f"{notebook.name}, cell {number}", "exec"), namespace)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_outputs_are_those_of_one_whole_run(notebook):
    cells = [cell for cell, _ in cells_of(notebook, "code")]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] in ("stream", "execute_result") for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert notebook.stat().st_size < 400_000


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_what_a_notebook_names_is_there(notebook):
    prose = "\n".join(text for _, text in cells_of(notebook, "markdown"))
    assert all((FOLDER / target).is_file() for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose))
    assert all((FOLDER.parent / page).is_file() for page in re.findall(r"docs/[\w.-]+\.md", prose))
    assert f"examples/{notebook.name}" in (FOLDER.parent / "README.md").read_text()
    assert f"examples/{notebook.stem}.md" in (FOLDER.parent / "mkdocs.yml").read_text()
