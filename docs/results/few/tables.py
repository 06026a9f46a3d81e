"""Write the tables of docs/few-labels.md anew from the JSON files beside this script: `python tables.py`.

NAME.json is a run of `sot probe` on one set. NAME-OTHER.json adds heads that were run by themselves on the same draws.
setfit.jsonl is what setfit_peer.py has written.
"""

import json
import statistics
from pathlib import Path

import numpy as np

from sot.evaluation.metrics import interval

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "few-labels.md"
SETFIT = HERE / "setfit.jsonl"
TITLES = {
    **{"sst2": "SST-2", "sick": "SICK", "mrpc": "MRPC, F1", "cola": "CoLA, MCC", "cola3": "CoLA, layer 3, MCC"},
    "rte": "RTE",
    **{"imagenette": "Imagenette", "cifar10": "CIFAR-10", "fashion": "Fashion-MNIST"},
}
TIMED = 128  # labels a class of the fit whose time is shown


def names():
    """Sets that have results, in the order of the titles."""
    return [name for name in TITLES if (HERE / f"{name}.json").is_file()]


def read(name):
    """Rows of one set by head and labels a class; those of its own file go before those that others add."""
    found = {}
    for file in [HERE / f"{name}.json", *sorted(HERE.glob(f"{name}-*.json"))]:
        for row in json.loads(file.read_text())["heads"]:
            found.setdefault((row["head"], row["labels"]), row)
    return found


def counts_of(keys):
    """Numbers of labels in order; None, which is all of them, last."""
    return sorted({count for _, count in keys}, key=lambda count: (count is None, count))


def shown(counts):
    """As the header of a table."""
    return ["all" if count is None else str(count) for count in counts]


def lines(header, rows):
    """A table in Markdown, its numbers to the right."""
    head, *rest = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return "\n".join([head, "|---|" + "---:|" * (len(header) - 1), *rest])


def set_table(name):
    """Means and intervals of one set, and the seconds of a fit."""
    found = read(name)
    counts = counts_of(found)
    rows = []
    for head in dict.fromkeys(head for head, _ in found):
        cells = [score(found[head, count]["scores"]) if (head, count) in found else "" for count in counts]
        timed = found.get((head, TIMED))
        rows.append([head, *cells, "" if timed is None else f"{timed['seconds']:.2f}"])
    return lines([TITLES[name], *shown(counts), "sec"], rows)


def score(scores):
    """In percent, with its interval."""
    return f"{100 * float(np.mean(scores)):.1f} ± {100 * interval(scores):.1f}"  # rounded as `sot probe` has it


def lead(found, head, count):
    """Of one set, the mean of sot minus a head over the draws that both have, with half of its interval."""
    pairs = zip(found["sot", count]["scores"], found[head, count]["scores"], strict=False)
    differences = [100 * (ours - its) for ours, its in pairs]
    return statistics.mean(differences), interval(differences)


def summary():
    """Mean over sets of sot minus each head."""
    sets = [read(name) for name in names()]
    counts = counts_of([key for found in sets for key in found])
    rows = []
    for head in dict.fromkeys(head for found in sets for head, _ in found if head != "sot"):
        having = [[lead(found, head, count) for found in sets if (head, count) in found] for count in counts]
        rows.append([head, str(max(map(len, having))), *map(mean_lead, having)])
    return lines(["`sot` minus", "sets", *shown(counts)], rows)


def mean_lead(leads):
    """Sets are independent of each other; bold where 0 is outside the interval."""
    if not leads:
        return ""
    mean = statistics.mean(lead for lead, _ in leads)
    half = sum(half**2 for _, half in leads) ** 0.5 / len(leads)
    cell = f"{mean:+.1f} ± {half:.1f}"
    return f"**{cell}**" if abs(mean) > half else cell


def setfit_table():
    """Accuracy and CPU seconds of SetFit and of sot.Classifier on the same draws, and its gain over SetFit."""
    found = {}
    for row in map(json.loads, SETFIT.read_text().splitlines()):
        for kind, each in row["found"].items():
            found.setdefault((row["data"], row["labels"]), {}).setdefault(kind, {})[row["draw"]] = each
    rows, leads = [], {}
    for (data, labels), kinds in found.items():
        for kind, draws in kinds.items():
            right, cpu = ([draws[draw][key] for draw in sorted(draws)] for key in ("accuracy", "cpu"))
            gains = [100 * (each["accuracy"] - kinds["setfit"][draw]["accuracy"]) for draw, each in draws.items()]
            gain = statistics.mean(gains), interval(gains)
            if kind != "setfit":
                leads.setdefault(kind, []).append(gain)
            cells = [score(right), "" if kind == "setfit" else mean_lead([gain]), f"{statistics.median(cpu):.0f}"]
            rows.append([f"{data}, {labels}", kind, str(len(draws)), *cells])
    rows += [["mean of these", kind, "", "", mean_lead(gains), ""] for kind, gains in leads.items()]
    return lines(["set, labels a class", "classifier", "draws", "accuracy, %", "gain over SetFit", "CPU s"], rows)


def written(page):
    """The page with each table in the place of the one that starts like it; a new set comes last, with its picture."""
    blocks = page.rstrip().split("\n\n")
    tables = [(None, summary()), *((name, set_table(name)) for name in names())]
    if SETFIT.is_file():
        tables.append((None, setfit_table()))
    for name, table in tables:
        start = table[: table.index("|", 1) + 1]
        places = [place for place, block in enumerate(blocks) if block.startswith(start)]
        if places:
            blocks[places[0]] = table
        else:
            blocks += [table, f"![score over labels a class, {TITLES[name]}](results/few/{name}.png)"]
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
