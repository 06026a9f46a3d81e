"""A table of the paper as a picture: ours beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.lines import Line2D

from sot.evaluation.metrics import interval
from sot.figures import BLUE, INK, SMALL, VERMILION, Drawing, dots, sheet
from sot.paper.side_by_side import Cell, Cells, has_gain
from sot.paper.table import TableOfPaper, TableRow

Line = tuple[str, str, Cell]  # name, colour and numbers of a row


def _lines(rows: Sequence[tuple[TableRow, Cells]], column: str) -> list[Line]:
    """The rows of which we have a score, the best first."""
    found = [(row.name, _colour(row), cells[column]) for row, cells in rows if cells[column].ours]
    return sorted(found, key=lambda line: -(line[2].mean() or 0))


def _colour(row: TableRow) -> str:
    return BLUE if row.conventional or row.recipe.head.get("fusion") == "class" else VERMILION


def draw_table(table: TableOfPaper, rows: Sequence[tuple[TableRow, Cells]], about: str) -> Drawing:
    """A row of panels for every score or task: ours with intervals, sorted, and beside it the paper's if it has any."""
    scores = {column: lines for column in table.columns if has_gain(column) and (lines := _lines(rows, column))}
    theirs = any(cell.paper is not None for lines in scores.values() for *_, cell in lines)
    counts = [len(lines) for lines in scores.values()] or [1]
    shape: dict[str, Any] = {"height_ratios": counts, "width_ratios": [3, 2] if theirs else [1]}
    figure, panels = sheet(1.2 + sum(0.75 + 0.27 * count for count in counts), len(counts), 1 + theirs, **shape)
    for (ours, *paper), (column, lines) in zip(panels, scores.items()):
        means = [(cell.mean() or 0, interval(cell.ours) or 0, colour) for _, colour, cell in lines]
        dots(ours, [name for name, *_ in lines], means)
        ours.set_title(f"{table.columns[column]}: ours", fontsize=10)
        for axes in paper:
            _draw_paper(axes, lines, table.columns[column])
    _legend(figure, [line for lines in scores.values() for line in lines], theirs)
    figure.suptitle(f"Table {table.name}, {about}:\n{table.title}", fontsize=11, parse_math=False)
    return figure


def _draw_paper(axes: Any, lines: Sequence[Line], heading: str) -> None:
    """In the rows of ours; rows that the paper lacks are empty."""
    known = [(row, cell.paper, colour) for row, (_, colour, cell) in enumerate(lines) if cell.paper is not None]
    if not known:
        axes.set_axis_off()
        return
    dots(axes, [""] * len(lines), [])
    for row, value, colour in known:
        axes.plot(value, row, "D", color=colour, markerfacecolor="white")
    axes.margins(x=0.12)
    axes.set_title(f"{heading}: the paper", fontsize=10)


def _legend(figure: Drawing, lines: Sequence[Line], theirs: bool) -> None:
    names = {BLUE: "class token alone", VERMILION: "with pooled words"}
    used = [colour for colour in names if any(line[1] == colour for line in lines)]
    keys = [Line2D([], [], color=colour, linewidth=4, label=names[colour]) for colour in used if len(used) > 1]
    spread = any(len(cell.ours) > 1 for *_, cell in lines)
    keys.append(Line2D([], [], color=INK, marker="o", label="ours: mean and 95 % CI" if spread else "ours, one seed"))
    if theirs:
        paper: dict[str, Any] = {"marker": "D", "markerfacecolor": "white", "linestyle": ""}
        keys.append(Line2D([], [], color=INK, label="the paper, on its own data", **paper))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=SMALL, frameon=False)
