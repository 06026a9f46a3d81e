"""What a comparison of heads found: a table, JSON, CSV and a picture."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from sot.core.head import HeadConfig
from sot.errors import SettingError
from sot.evaluation.metrics import interval
from sot.files import as_csv, as_png, rich_table, write_atomically
from sot.training.run_folder import RUN_FILE

if TYPE_CHECKING:
    from sot.figures import Drawing


@dataclass(frozen=True)
class Result:
    """One head: its scores by seed, what it costs, and the settings that cross-validation chose.

    `labels` are those of a class that each seed has drawn, None if it had all. What chooses nothing has no `held_out`.
    """

    head: str
    config: HeadConfig | None
    scores: list[float]
    params: int
    macs: int
    seconds: float
    epoch_ratio: float
    learning_rate: float
    weight_decay: float
    held_out: float | None
    labels: int | None = None

    @property
    def mean(self) -> float:
        """Mean score over the seeds."""
        return float(np.mean(self.scores))

    @property
    def score(self) -> str:
        """Mean score in percent, with its interval."""
        half = interval(self.scores)
        return f"{100 * self.mean:.2f}" + ("" if half is None else f" ± {100 * half:.2f}")

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        values = asdict(self)
        return {"head": values.pop("head"), "mean": self.mean, "interval": interval(self.scores), **values}


@dataclass(frozen=True)
class ProbeComparison:
    """All heads on one backbone and data set; `best` is the one that the held-out part prefers.

    The backbone took `feature_seconds` for the training set, and would take `unsorted_seconds` for texts as they come.
    """

    model: str
    data: str
    metric: str
    feature_seconds: float
    unsorted_seconds: float | None
    results: list[Result]
    best: str | None
    turns: int = 1  # folds that were scored in turn, if that is what scores are of

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        setting = {"model": self.model, "data": self.data, "metric": self.metric, "best": self.best}
        rows = [result.to_dict() for result in self.results]
        seconds = {"feature_seconds": self.feature_seconds, "unsorted_seconds": self.unsorted_seconds}
        return {**setting, **seconds, "heads": rows}

    def caption(self) -> str:
        """What the numbers of the table are."""
        seeds, what = len(self.results[0].scores), "seed" if self.turns == 1 else "fold"
        caption = (
            f"mean ± 95 % interval over {seeds} {what}{'s'[: seeds > 1]}; "
            f"best on the held-out part of train: {self.best}; "
            f"epoch: of the {self.feature_seconds:.1f} s the backbone took for train"
        )
        if not self.unsorted_seconds:
            return caption
        largest = max(result.epoch_ratio for result in self.results) * self.feature_seconds / self.unsorted_seconds
        unsorted = f"not sorted by length the texts would take {self.unsorted_seconds:.1f} s"
        return f"{caption}; {unsorted}, and an epoch at most {largest:.2%} of that"

    def table(self) -> Table:
        """For a terminal."""
        narrow: dict[str, Any] = {"collapse_padding": True, "pad_edge": False, "box": SIMPLE_HEAD}  # for 80 columns
        name, numbers = (
            Column("head", no_wrap=True),
            (f"{self.metric}, %", "held out", "params", "MACs M", "sec", "epoch"),
        )
        columns = [Column("labels", no_wrap=True), name] if self.has_draws else [name]
        table = rich_table(columns, numbers, title=f"{self.model} on {self.data}", caption=self.caption(), **narrow)
        for result in self.results:
            held_out = "" if result.held_out is None else f"{100 * result.held_out:.2f}"
            cells = [result.score, held_out, f"{result.params:,}", f"{result.macs / 1e6:.2f}"]
            labels = [] if not self.has_draws else ["all" if result.labels is None else str(result.labels)]
            style = "bold" if result.head == self.best and result.labels == self.results[-1].labels else None
            table.add_row(
                *labels, result.head, *cells, f"{result.seconds:.1f}", f"{result.epoch_ratio:.2%}", style=style
            )
        return table

    @property
    def has_draws(self) -> bool:
        """Whether labels were drawn."""
        return any(result.labels is not None for result in self.results)

    def rows(self) -> list[dict[str, Any]]:
        """One row a head, of plain cells."""
        rows = [{k: v for k, v in result.to_dict().items() if k != "config"} for result in self.results]
        return [{**row, "scores": " ".join(map(str, row["scores"]))} for row in rows]

    def figure(self) -> Drawing:
        """Score over labels as lines, or of all labels sorted dots, with intervals."""
        from sot.figures import short_name

        draw = draw_lines if self.has_draws else draw_dots
        return draw(self.results, f"{self.metric}, %", f"{short_name(self.model)} on {self.data}")

    def write(self, out: Path) -> None:
        """probe.json, probe.csv and probe.png."""
        write_atomically(out / "probe.json", json.dumps(self.to_dict(), indent=1))
        write_atomically(out / "probe.csv", as_csv(self.rows()))
        write_atomically(out / "probe.png", as_png(self.figure()))


def _kind(result: Result) -> str:
    if result.head == "sot":
        return "sot.Classifier"
    config = result.config
    second = config is not None and config.pool in ("mgcrp", "gcp", "mhc3") and config.fusion != "class"
    return "second order" if second else "first order"


def draw_dots(results: list[Result], score: str, title: str) -> Drawing:
    """Heads sorted by their mean, the best on top: a dot with its interval each, its parameters in a column."""
    from matplotlib.lines import Line2D

    from sot.figures import BLUE, ORANGE, SMALL, VERMILION, dots, sheet

    colours = {"sot.Classifier": VERMILION, "second order": ORANGE, "first order": BLUE}
    shown = [result for result in results if result.head != "majority"] or results  # which would squeeze the others
    ordered = sorted(shown, key=lambda result: -result.mean)
    figure, ((axes,),) = sheet(max(2.3, 1.6 + 0.24 * len(ordered)))
    points = [(100 * row.mean, 100 * (interval(row.scores) or 0), colours[_kind(row)]) for row in ordered]
    dots(axes, [row.head for row in ordered], points)
    column: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", "fontsize": SMALL}
    for row, result in enumerate(ordered):
        axes.annotate(f"{result.params:,}", (1.14, row), **column)
    axes.annotate("parameters", (1.14, -1), **column)
    axes.set_xlabel(f"{score}: mean and 95 % CI")
    kinds = [kind for kind in colours if kind in map(_kind, ordered)]
    keys = [Line2D([], [], marker="o", color=colours[kind], label=kind) for kind in kinds]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=SMALL, frameon=False)
    figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def draw_lines(results: list[Result], score: str, title: str) -> Drawing:
    """A line for each head over labels a class, with intervals; all labels come last. The legend is beside them."""
    from sot.figures import MARKERS, SERIES, SMALL, VERMILION, sheet

    counts = sorted({math.inf if result.labels is None else result.labels for result in results})
    places = {count: place for place, count in enumerate(counts)}
    figure, ((axes,),) = sheet(5)
    names = list(dict.fromkeys(result.head for result in results))
    others = [name for name in names if name != "sot"]
    ends = {result.head: result.mean for result in sorted(results, key=lambda row: row.labels or math.inf)}
    for name in sorted(names, key=lambda name: -ends[name]):  # the legend in the order of the lines' ends
        rows = sorted((places[row.labels or math.inf], row.mean, row.scores) for row in results if row.head == name)
        shift = 0.04 * (names.index(name) - (len(names) - 1) / 2)  # so that intervals do not hide each other
        number = -1 if name == "sot" else others.index(name)
        look: dict[str, Any] = {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)]}
        if name == "sot":
            look |= {"color": VERMILION, "linewidth": 2.5, "zorder": 5}
        halves = [100 * (interval(scores) or 0) for *_, scores in rows]
        where, means = [place + shift for place, *_ in rows], [100 * mean for _, mean, _ in rows]
        axes.errorbar(where, means, halves, label=name, capsize=2, markersize=5, **look)
    axes.set_xticks(range(len(counts)), ["all" if math.isinf(count) else str(count) for count in counts])
    axes.set_xlabel("labels a class")
    axes.set_ylabel(f"{score}: mean and 95 % CI over draws")
    figure.legend(loc="outside right center", fontsize=SMALL, frameon=False)
    figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def check_results_folder(out: Path) -> None:
    """Refuse, before the long work, a folder that its results could not be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SettingError("{out} {} cannot be written to ({}): choose another folder", out, error.strerror) from error
    for file in [out / name for name in ("rows.jsonl", "probe.json", "probe.csv", "probe.png")]:
        if file.is_dir():
            raise SettingError("{} is a folder, in the way of a file of results: choose another {out}", file)
    best = out / "best"
    if best.is_symlink() or (best.exists() and not best.is_dir()):
        raise SettingError("{} is no folder, in the way of the best model: choose another {out}", best)
    if best.exists() and any(best.iterdir()) and not (best / RUN_FILE).is_file():
        raise SettingError("{} is not a model that sot probe saved, and would be replaced: choose another {out}", best)
