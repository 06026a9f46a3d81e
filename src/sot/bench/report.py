"""A benchmark's rows as a table, Markdown, JSON or a bar chart, with what they were measured on."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from sot.bench.cases import EXACT, FAST, Measurement
from sot.bench.devices import CPU, device_name
from sot.files import as_png, rich_table

COLUMNS = ("case", "what", "cost", "ratio", "by wall clock", "note")


def processor() -> str:
    """Name of the processor, as the system gives it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class BenchReport:
    """What was measured, and on what; no rounds where nothing is timed."""

    title: str
    threads: int
    rounds: int
    rows: list[Measurement]
    device: torch.device = CPU

    @property
    def processor(self) -> str:
        """What computed."""
        return processor() if self.device.type == "cpu" else device_name(self.device)

    @property
    def caption(self) -> str:
        """The setting in one sentence, and in another how exact compares to fast."""
        threads = f"{self.threads} thread{'s'[: self.threads > 1]}, " if self.device.type == "cpu" else ""
        setting = f"{self.processor}, {threads}torch {torch.__version__}"
        if self.rounds == 0:
            return f"{setting}; bytes beyond inputs and parameters."
        on_cpu = "process time" if self.threads == 1 else "wall clock"
        clock = on_cpu if self.device.type == "cpu" else "time of the device"
        how = f"{clock} in turns, median (quartiles) of {self.rounds} rounds, ratios within a round."
        return " ".join([f"{setting}; {how}", *self.comparison])

    @property
    def comparison(self) -> list[str]:
        """How exact compares to fast, in one sentence, if both were measured."""
        costs = {(row.case, row.name): row.cost for row in self.rows}
        pairs = [
            (case, cost / costs[case, FAST])
            for (case, name), cost in costs.items()
            if (case, FAST) in costs and name == EXACT
        ]
        told = ", ".join(f"{ratio:.2f} ({case})" for case, ratio in pairs)
        return [f"Exact takes this share of the time of fast: {told}."] if told else []

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        setting = {
            "processor": self.processor,
            "threads": self.threads,
            "torch": torch.__version__,
            "rounds": self.rounds,
        }
        return {"benchmark": self.title, **setting, "rows": [asdict(row) for row in self.rows]}

    def table(self) -> Table:
        """For a terminal."""
        columns, lines = _shown(self.rows)
        return rich_table(columns, [], lines, title=self.title, caption=self.caption)

    def markdown(self) -> str:
        """For a page."""
        columns, lines = _shown(self.rows)
        rows = [columns, ["---"] * len(columns), *lines]
        return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", self.caption])

    def picture(self) -> bytes:
        """Bars of the ratios, one for each row that has one, with quartiles, as PNG."""
        from matplotlib.figure import Figure

        ratios = [(row, row.ratio) for row in self.rows if row.ratio is not None]
        if not ratios:
            raise ValueError(f"nothing to draw: {self.title} has no ratios")
        figure = Figure(figsize=(9, 1 + 0.28 * len(ratios)), layout="constrained")
        axes = figure.subplots()
        for position, (row, ratio) in enumerate(ratios):
            below, above = ratio.median - ratio.low, ratio.high - ratio.median
            color = "C0" if row.name.startswith("ours") else "C7"
            axes.barh(position, ratio.median, xerr=[[below], [above]], color=color, ecolor="0.3")
        axes.set_yticks(range(len(ratios)), [f"{row.case}: {row.name}" for row, _ in ratios], fontsize=7)
        axes.invert_yaxis()
        axes.axvline(1, color="0.6", linewidth=0.8)
        axes.set(xlabel="ratio to the reference", title=self.title)
        return as_png(figure)


def cells(row: Measurement) -> list[str]:
    """A row as texts, one for each column."""
    cost = f"{row.cost:.2f} {row.unit}"
    # a single measurement has no spread worth printing
    exact = row.wall_ratio is None
    ratio = "" if row.ratio is None else f"{row.ratio.median:.2f}" if exact else str(row.ratio)
    wall = "" if row.wall_ratio is None else str(row.wall_ratio)
    return [row.case, row.name, cost, ratio, wall, row.note]


def _shown(rows: list[Measurement]) -> tuple[list[str], list[list[str]]]:
    """Columns that hold anything, and their cells; the name of a case stands at its first row only."""
    table = [cells(row) for row in rows]
    for number in range(len(table) - 1, 0, -1):
        if rows[number].case == rows[number - 1].case:
            table[number][0] = ""
    used = [column for column in range(len(COLUMNS)) if any(line[column] for line in table)]
    return [COLUMNS[column] for column in used], [[line[column] for column in used] for line in table]
