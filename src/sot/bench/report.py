"""A benchmark's rows as a table, Markdown, JSON or bars, with what they were measured on."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from sot.bench.cases import EXACT, FAST, Measurement
from sot.bench.timing import CPU, Spread, device_name
from sot.files import rich_table

if TYPE_CHECKING:
    from sot.figures import Drawing

COLUMNS = ("case", "what", "cost", "ratio", "by wall clock", "note")
MAX_BESIDE = 3  # panels of a picture


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

    def figure(self) -> Drawing:
        """The ratios with their quartiles, a panel for each case: beside each other where they measure the same."""
        from sot.figures import BLUE, GREY, SMALL, dots, sheet

        cases: dict[str, list[tuple[str, Spread]]] = {}
        for row in self.rows:
            if row.ratio is not None:
                cases.setdefault(row.case, []).append((row.name, row.ratio))
        if not cases:
            raise ValueError(f"nothing to draw: {self.title} has no ratios")
        names = [[name for name, _ in rows] for rows in cases.values()]
        beside = len(names) <= MAX_BESIDE and all(each == names[0] for each in names)
        shape = (1, len(names)) if beside else (len(names), 1)
        height = 0.27 * sum(map(len, names[:1] if beside else names)) + 0.6 * shape[0] + 1
        figure, axes = sheet(height, *shape, sharex=True, height_ratios=[1] if beside else list(map(len, names)))
        for number, (panel, (case, rows)) in enumerate(zip(axes.flat, cases.items())):
            colours = [BLUE if name.startswith("ours") else GREY for name, _ in rows]
            dots(panel, [name for name, _ in rows] if number == 0 or not beside else [""] * len(rows), [])
            for place, (colour, (_, ratio)) in enumerate(zip(colours, rows)):
                panel.barh(place, ratio.median, 0.7, color=colour)
                panel.plot([ratio.low, ratio.high], [place, place], color="black", linewidth=1.2)
            panel.axvline(1, color="black", linewidth=0.8)
            panel.set_xlim(left=0)
            panel.set_title(case.split(":")[0] if beside else case, fontsize=10)
        quantity = "time" if all(row.unit == "ms" for row in self.rows if row.ratio) else "cost"
        figure.supxlabel(f"{quantity} relative to {self._reference}; line: quartiles", fontsize=SMALL)
        what = {case.partition(": ")[2] for case in cases} if beside else set()
        figure.suptitle(f"{self.title}: {what.pop()}" if len(what) == 1 else self.title, fontsize=11)
        return figure

    @property
    def _reference(self) -> str:
        """What the ratios are to, if it is one thing: its own are exactly one."""
        names = {row.name for row in self.rows if row.ratio and row.ratio.low == row.ratio.high == 1}
        found = names.pop() if len(names) == 1 else "the reference"
        return "the published head" if found == "published" and "head" in self.title else found


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
