"""A benchmark's rows as a table, Markdown, JSON or a bar chart, with what they were measured on."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from sot.bench.cases import Row
from sot.files import as_png

COLUMNS = ("case", "what", "cost", "ratio", "by wall clock", "goal", "note")


def processor() -> str:
    """Name of the processor, as the system gives it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Report:
    """What was measured, and on what; no rounds where nothing is timed."""

    title: str
    threads: int
    rounds: int
    rows: list[Row]

    @property
    def caption(self) -> str:
        """The setting in one sentence."""
        setting = f"{processor()}, {self.threads} thread{'s'[: self.threads > 1]}, torch {torch.__version__}"
        if self.rounds == 0:
            return f"{setting}; bytes beyond inputs and parameters."
        return f"{setting}; process time in turns, median (quartiles) of {self.rounds} rounds, ratios within a round."

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        setting = {"processor": processor(), "threads": self.threads, "torch": torch.__version__, "rounds": self.rounds}
        return {"benchmark": self.title, **setting, "rows": [asdict(row) for row in self.rows]}


def cells(row: Row) -> list[str]:
    """A row as texts, one for each column."""
    cost = f"{row.cost:.2f} {row.unit}"
    # a single measurement has no spread worth printing
    exact = row.wall_ratio is None
    ratio = "" if row.ratio is None else f"{row.ratio.median:.2f}" if exact else str(row.ratio)
    wall = "" if row.wall_ratio is None else str(row.wall_ratio)
    goal = "" if row.goal is None else f"≤ {row.goal:.2f}"
    return [row.case, row.name, cost, ratio, wall, goal, row.note]


def _shown(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Columns that hold anything, and their cells; the name of a case stands at its first row only."""
    table = [cells(row) for row in rows]
    for number in range(len(table) - 1, 0, -1):
        if rows[number].case == rows[number - 1].case:
            table[number][0] = ""
    used = [column for column in range(len(COLUMNS)) if any(line[column] for line in table)]
    return [COLUMNS[column] for column in used], [[line[column] for column in used] for line in table]


def as_table(report: Report) -> Table:
    """For a terminal."""
    columns, lines = _shown(report.rows)
    table = Table(*columns, title=report.title, caption=report.caption)
    for line in lines:
        table.add_row(*line)
    return table


def as_markdown(report: Report) -> str:
    """For a page."""
    columns, lines = _shown(report.rows)
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", report.caption])


def as_picture(report: Report) -> bytes:
    """Bars of the ratios, one for each row that has one, with quartiles and goals, as PNG."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.ratio is not None]
    if not rows:
        raise ValueError(f"nothing to draw: {report.title} has no ratios")
    figure = Figure(figsize=(9, 1 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(rows):
        assert row.ratio is not None
        below, above = row.ratio.median - row.ratio.low, row.ratio.high - row.ratio.median
        color = "C0" if row.name.startswith("ours") else "C7"
        axes.barh(position, row.ratio.median, xerr=[[below], [above]], color=color, ecolor="0.3")
        if row.goal is not None:
            axes.plot([row.goal, row.goal], [position - 0.4, position + 0.4], color="C3")
    axes.set_yticks(range(len(rows)), [f"{row.case}: {row.name}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="0.6", linewidth=0.8)
    axes.set(xlabel="ratio to the reference; red: goal", title=report.title)
    return as_png(figure)
