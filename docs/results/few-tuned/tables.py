"""Write the table of few fine-tuned labels in docs/results-texts.md anew from rows.jsonl: `python tables.py`."""

import json
from pathlib import Path

import numpy as np

from sot.evaluation.metrics import interval

ROWS = Path(__file__).parent / "rows.jsonl"
PAGE = ROWS.parent.parent.parent / "results-texts.md"
SETS = {"sick": ("SICK", "accuracy"), "mrpc": ("MRPC, F1", "f1"), "cola": ("CoLA, MCC", "mcc")}
HEADER = "| set | labels | draws | class token | paper's head | gain | default head | gain |\n|---|" + "---:|" * 7


def scores():
    """Of what was scored on development sets, in percent: by set and labels, then by head, draw by draw."""
    found = {}
    for row in map(json.loads, ROWS.read_text().splitlines()):
        if row["on"] == "dev":
            heads = found.setdefault((row["task"], row["labels"]), {})
            heads.setdefault(row["head"], {})[row["draw"]] = 100 * row["scores"][f"eval_{SETS[row['task']][1]}"]
    return found


def cell(values, sign=""):
    """Mean and half of its interval; a gain is bold where 0 is outside."""
    mean, half = np.mean(values), interval(values)
    text = f"{mean:{sign}.1f} ± {half:.1f}"
    return f"**{text}**" if sign and abs(mean) > half else text


def line(task, labels, heads):
    """One row of the table; gains are paired by draws that all heads have."""
    draws = sorted(set.intersection(*map(set, heads.values())))
    values = {head: np.array([each[draw] for draw in draws]) for head, each in heads.items()}
    cells = [SETS[task][0], f"{labels:,}", str(len(draws)), cell(values["class"])]
    for head in ("paper", "default"):
        cells += [cell(values[head]), cell(values[head] - values["class"], "+")]
    return f"| {' | '.join(cells)} |"


def table():
    """A row for each set and number of labels."""
    order = sorted(scores().items(), key=lambda each: (list(SETS).index(each[0][0]), each[0][1]))
    return "\n".join([HEADER, *(line(*key, heads) for key, heads in order)])


if __name__ == "__main__":
    blocks = PAGE.read_text().split("\n\n")
    place = next(place for place, block in enumerate(blocks) if block.startswith(HEADER))
    blocks[place] = table()
    PAGE.write_text("\n\n".join(blocks).rstrip("\n") + "\n")
