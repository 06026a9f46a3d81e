"""The paper's tables as data: rows, their settings, and the numbers the paper prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from typing import Any

import yaml

from sot.core.head_config import PAPER_NORMS, merge_head
from sot.errors import SettingError
from sot.paper.comparison import Comparison, load_comparisons
from sot.training.recipe import Recipe, load_recipe

PRESETS = ("paper", "cpu")
COMPARISON_RECIPES = {"5a": "sot_tiny", "5b": "sot_small", "5c": "sot_base"}
ROW_KEYS = ("name", "paper", "model", "recipe", "tasks", "only")


@dataclass(frozen=True)
class TableRow:
    """One row: a model and what it changes in its recipe.

    `model` None is the user's to name; `conventional` models have the head they were published with.
    """

    name: str
    recipe: Recipe
    model: str | None
    paper: dict[str, float] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()  # texts: one training for each
    conventional: bool = False


@dataclass(frozen=True)
class TableOfPaper:
    """A table under one preset; `columns` are scores, or tasks, and their headings."""

    name: str
    title: str
    columns: dict[str, str]
    rows: list[TableRow]
    note: str = ""


def table_names() -> list[str]:
    """Names of the tables."""
    files = (entry.name for entry in (resources.files("sot.paper") / "tables").iterdir())
    return sorted([*(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")), *load_comparisons()])


def load_paper_table(name: str, preset: str, settings: Sequence[str] = ()) -> TableOfPaper:
    """A table by its number in the paper, with its own settings or those for one CPU, and `key=value` changes."""
    if name not in table_names():
        raise ValueError(f"unknown table {name!r}; accepted: {', '.join(table_names())}")
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; accepted: {', '.join(PRESETS)}")
    if any(setting.startswith("seed=") for setting in settings):
        raise SettingError("seed cannot be set: a table is trained with the seeds 0, 1, …, as many as {seeds} says")
    if name in load_comparisons():
        return _comparison(load_comparisons()[name], preset, settings)
    values = yaml.safe_load((resources.files("sot.paper") / "tables" / f"{name}.yaml").read_text())
    rows = [_row(row, values, preset, settings) for row in values["rows"] if row.get("only", preset) == preset]
    return TableOfPaper(name, values["title"], values["columns"], rows, values.get("note", ""))


def _comparison(comparison: Comparison, preset: str, settings: Sequence[str]) -> TableOfPaper:
    """The state of the art: published models as they are, and ours."""
    rows = []
    for row in comparison.rows:
        recipe = load_recipe(COMPARISON_RECIPES[comparison.name] if preset == "paper" else "comparison_cpu")
        recipe = recipe.with_head({"norm": PAPER_NORMS["mgcrp"]})
        if row.side is not None:
            size = {"left_dim": row.side, "right_dim": row.side, "fusion": row.fusion}
            recipe = replace(recipe.with_head(size), embed="densenet")
        paper = {"accuracy": row.imagenet, "params": row.params, "macs": row.macs}
        if row.imagenet_a is not None:
            paper["imagenet_a"] = row.imagenet_a
        conventional = not row.is_ours
        rows.append(
            TableRow(row.name, recipe.changed(settings, fit_head=True), row.model, paper, conventional=conventional)
        )
    columns = {"accuracy": "top-1, %", "imagenet_a": "ImageNet-A, %", "params": "params M", "macs": "MACs G"}
    note = "Our MACs count all products; the paper's, for its own models, leave out those of attention."
    return TableOfPaper(comparison.name, comparison.title, columns, rows, note)


def _row(row: Mapping[str, Any], table: Mapping[str, Any], preset: str, changes: Sequence[str]) -> TableRow:
    recipe = load_recipe(row.get("recipe", table.get("recipes", {}).get(preset)))
    settings = {key: value for key, value in row.items() if key not in ROW_KEYS}
    before = asdict(recipe)
    merged = {key: {**before[key], **value} if isinstance(value, dict) else value for key, value in settings.items()}
    own = Recipe.from_dict({**before, **merged, "head": merge_head(recipe.head, row.get("head", {}))})
    changed = own.changed(changes, fit_head=True)  # --set is for all rows
    for key, value in settings.items():
        was, now = getattr(own, key), getattr(changed, key)
        if isinstance(value, dict):
            was, now = ({name: part.get(name) for name in value} for part in (was, now))
        if was != now:
            said = "{settings} would change what makes row {!r}: {} {} to {}"
            raise SettingError(said, row["name"], key, was, now)
    model = row["model"] if "model" in row else table.get("model")
    return TableRow(row["name"], changed, model, row.get("paper", {}), tuple(row.get("tasks", ())))


def choose_tasks(rows: Sequence[TableRow], wanted: str | None) -> list[TableRow]:
    """The rows with some of their text tasks, such as `cola,rte`; all of them without a choice."""
    if not wanted:
        return list(rows)
    chosen = [name.strip() for name in wanted.split(",")]
    known = list(dict.fromkeys(task for row in rows for task in row.tasks))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"the rows have no task {unknown[0]!r}; they have: {', '.join(known) or 'none, but images'}")
    return [replace(row, tasks=tuple(t for t in row.tasks if t in chosen)) for row in rows if row.tasks]


def choose_rows(table: TableOfPaper, wanted: str | None) -> list[TableRow]:
    """Rows by their numbers, counted from 1, such as `1,3-5`; all of them without a choice."""
    if not wanted:
        return table.rows
    chosen: dict[int, TableRow] = {}  # each once, or it would count as another seed
    for part in wanted.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"rows are numbers and ranges such as 1,3-5, got {wanted!r}")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[0] < 1 or numbers[-1] > len(table.rows):
            raise ValueError(f"table {table.name} has rows 1 to {len(table.rows)}, got {part.strip()!r}")
        chosen |= {number: table.rows[number - 1] for number in numbers}
    return list(chosen.values())
