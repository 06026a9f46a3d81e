"""Ours beside the paper's: as a table for a terminal, Markdown, CSV and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from sot.evaluation.metrics import interval
from sot.files import as_csv, as_png, rich_table, write_atomically
from sot.paper.table import TableOfPaper, TableRow
from sot.paper.work import Store, Unit

COUNTS = ("params", "macs", "speed")  # what a result has beside its scores
TASK_SCORES = ("mcc", "f1", "pearson", "accuracy")  # of a text task, the first it has


@dataclass(frozen=True)
class Cell:
    """One number of a table: ours by seed, and the paper's."""

    ours: list[float]
    paper: float | None

    def mean(self) -> float | None:
        """Over the seeds."""
        return float(np.mean(self.ours)) if self.ours else None

    def show(self, places: int = 2) -> str:
        """Mean, and 95 % interval where there are several seeds."""
        if not self.ours:
            return "–"
        half = round(interval(self.ours) or 0, places)  # nothing where all seeds agree, as on the number of parameters
        return f"{np.mean(self.ours):.{places}f}" + (f" ± {half:.{places}f}" if half else "")

    def show_paper(self) -> str:
        """As printed."""
        return "–" if self.paper is None else f"{self.paper:g}"


Cells = dict[str, Cell]
Result = tuple[str | None, dict[str, Any]]  # the task of a unit, and what it scored


def collect(table: TableOfPaper, units: Sequence[Unit], store: Store) -> list[tuple[TableRow, Cells]]:
    """The cells of every row that the units belong to, from the results there are."""
    rows = {unit.row.name: unit.row for unit in units}
    results: dict[str, list[Result]] = {name: [] for name in rows}
    for unit in units:
        if (result := store.result(unit)) is not None:
            results[unit.row.name].append((unit.task, result))
    return [(row, {c: _cell(row, c, results[name]) for c in table.columns}) for name, row in rows.items()]


def _cell(row: TableRow, column: str, results: Sequence[Result]) -> Cell:
    of_task = column in row.tasks
    values = [_value(result, column, of_task) for task, result in results if (task == column) == of_task]
    return Cell([value for value in values if value is not None], row.paper.get(column))


def _value(result: dict[str, Any], column: str, of_task: bool) -> float | None:
    if column == "params":
        return float(result["params"]) / 1e6
    if column == "macs":
        return None if result.get("macs") is None else float(result["macs"]) / 1e9
    if column == "speed":  # a CPU is shared with others: its own time tells more than the clock on the wall
        seconds = result["cpu_seconds" if result["device"] == "cpu" else "seconds"]
        return None if result["resumed"] else float(result["samples"]) / seconds
    name = next(score for score in TASK_SCORES if score in result["scores"]) if of_task else column
    value = result["scores"].get(name)
    return None if value is None else 100 * value


def has_gain(column: str) -> bool:
    """Whether more of it is better."""
    return column not in COUNTS


def subject(units: Sequence[Unit], data: str | None) -> str:
    """What a table was trained on, for its title: the data set and its size, of texts the model."""
    from sot.figures import short_name

    first = units[0]
    if first.task is not None:
        return ", ".join(dict.fromkeys(short_name(unit.model) for unit in units))
    count = first.recipe.train_samples or int(first.about_data["train"])
    return f"{Path(data or '').name}, {count:,} images"


def _table_lines(table: TableOfPaper, rows: Sequence[tuple[TableRow, Cells]]) -> list[list[str]]:
    """A header and a line for each row, without columns that nobody has a number in and tasks not asked for."""
    header, lines, first = ["row"], [[row.name] for row, _ in rows], rows[0][1]
    for column, heading in table.columns.items():
        asked = [cells[column] for row, cells in rows if not row.tasks or column in row.tasks]
        if not any(cell.ours or cell.paper for cell in asked):
            continue
        gain = ["gain"] if has_gain(column) else []
        header += [heading, *gain, "paper", *gain]
        for line, (_, cells) in zip(lines, rows):
            cell, base = cells[column], Cell([], None) if cells is first else first[column]
            ours, theirs = [cell.show(0 if column == "speed" else 2)], [cell.show_paper()]
            if gain:
                ours.append(_gain(cell.mean(), base.mean()))
                theirs.append(_gain(cell.paper, base.paper))
            line += ours + theirs
    return [header, *lines]


def _gain(value: float | None, base: float | None) -> str:
    return "–" if value is None or base is None else f"{value - base:+.2f}"


def _caption(table: TableOfPaper, rows: Sequence[tuple[TableRow, Cells]]) -> str:
    seeds = {len(cell.ours) for _, cells in rows for cell in cells.values() if cell.ours}
    shown = " to ".join(str(n) for n in sorted({min(seeds), max(seeds)})) if seeds else "no"
    words = f"Ours: mean ± 95 % interval over {shown} seed{'s' * (shown != '1')}; gain: over the first row."
    return f"{words} {table.note}".strip()


def side_by_side_table(table: TableOfPaper, rows: Sequence[tuple[TableRow, Cells]]) -> Table:
    """For a terminal."""
    header, *lines = _table_lines(table, rows)
    title = f"Table {table.name}: {table.title}"
    return rich_table(header[:1], header[1:], lines, title=title, caption=_caption(table, rows))


def side_by_side_markdown(table: TableOfPaper, rows: Sequence[tuple[TableRow, Cells]]) -> str:
    """For a document."""
    header, *lines = _table_lines(table, rows)
    rule = ["---", *["---:"] * (len(header) - 1)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])
    return f"{text}\n\n{_caption(table, rows)}\n"


def as_rows(table: TableOfPaper, rows: Sequence[tuple[TableRow, Cells]]) -> list[dict[str, Any]]:
    """One line for each row and column, of plain values."""
    return [
        {
            "table": table.name,
            "row": row.name,
            "column": column,
            "mean": cells[column].mean(),
            "interval": interval(cells[column].ours),
            "seeds": len(cells[column].ours),
            "values": " ".join(f"{value:.4f}" for value in cells[column].ours),
            "paper": cells[column].paper,
        }
        for row, cells in rows
        for column in table.columns
    ]


def write_report(table: TableOfPaper, rows: Sequence[tuple[TableRow, Cells]], out: Path, about: str) -> None:
    """table-NAME.md, .csv and .png, whose title says what the rows are `about`."""
    from sot.paper.picture import draw_table

    out.mkdir(parents=True, exist_ok=True)
    name = f"table-{table.name}"
    write_atomically(out / f"{name}.md", side_by_side_markdown(table, rows))
    write_atomically(out / f"{name}.csv", as_csv(as_rows(table, rows)))
    write_atomically(out / f"{name}.png", as_png(draw_table(table, rows, about)))
