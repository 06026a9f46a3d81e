"""Write the tables of fine-tuned texts in docs/results-texts.md anew from rows.jsonl: `python tables.py`."""

import json
from pathlib import Path

import numpy as np

from sot.evaluation.metrics import interval

ROWS = Path(__file__).parent / "rows.jsonl"
PAGE = ROWS.parent.parent.parent / "results-texts.md"
SETS = {
    "sick": ("SICK", "accuracy"),
    "mrpc": ("MRPC, F1", "f1"),
    "cola": ("CoLA, MCC", "mcc"),
    "rte": ("RTE", "accuracy"),
}
HEADS = {"class": "class token", "paper": "paper's head", "default": "default head"}
SEARCH = "| set | labels | head | rate | numbers | dropout | held out |\n|---|---:|---|---:|---:|---:|---:|"
WORDS = "| set | labels | words | draws | held out | gain |\n|---|---:|---|---:|---:|---:|"
WAYS = {
    None: "default head",
    "zero": "… its linear layer starts at zero",
    "whiten": "… its projections start whitened",
    "mix": "… reads a learned mixture of all layers",
    3: "… reads layer 3",
}
HEADER = "| set | labels | draws | class token | paper's head | gain | default head | gain |\n|---|" + "---:|" * 7


def rows(on, search=False):
    """Of what was scored on `on`, in percent: by set and labels (None: all), then row and score.

    Draw 0 is for the search, of words as they are.
    """
    found = {}
    for row in map(json.loads, ROWS.read_text().splitlines()):
        if row["on"] == on and (row["draw"] == 0) == search:
            score = 100 * row["scores"][f"eval_{SETS[row['task']][1]}"]
            found.setdefault((row["task"], row["labels"]), []).append((row, score))
    order = {task: place for place, task in enumerate(SETS)}
    return sorted(found.items(), key=lambda each: (order[each[0][0]], each[0][1] or float("inf")))


def cell(values, sign=""):
    """Mean and half of its interval; a gain is bold where 0 is outside."""
    mean, half = np.mean(values), interval(values)
    text = f"{mean:{sign}.1f} ± {half:.1f}"
    return f"**{text}**" if sign and abs(mean) > half else text


def line(task, labels, found):
    """One row of the table; gains are paired by draws that all heads have."""
    heads = {head: {row["draw"]: score for row, score in found if row["head"] == head} for head in HEADS}
    draws = sorted(set.intersection(*map(set, heads.values())))
    values = {head: np.array([each[draw] for draw in draws]) for head, each in heads.items()}
    cells = [SETS[task][0], f"{labels:,}" if labels else "all", str(len(draws)), cell(values["class"])]
    for head in ("paper", "default"):
        cells += [cell(values[head]), cell(values[head] - values["class"], "+")]
    return f"| {' | '.join(cells)} |"


def table():
    """A row for each set and number of labels."""
    return "\n".join([HEADER, *(line(*key, found) for key, found in rows("dev"))])


def search():
    """A row for each setting that was tried on held-out texts; the best of each head is bold."""
    lines = [SEARCH]
    for (task, labels), found in rows("held", search=True):
        for head, title in HEADS.items():
            tried = [each for each in found if each[0]["head"] == head]
            best = max(score for _, score in tried)
            for row, score in tried:
                sizes = [f"{row.get('representation_size', 1000):,}", str(row.get("dropout", 0.5))]
                cells = [SETS[task][0], f"{labels:,}", title, f"{row['lr']:.0e}".replace("e-0", "e-")]
                cells += ["", ""] if head == "class" else sizes
                cells += [f"**{score:.1f}**" if score == best else f"{score:.1f}"]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def words():
    """A row for each way to read or start the words: its score, and its gain over the default on the same draws."""
    lines = [WORDS]
    for (task, labels), found in rows("held"):
        ways = {way: {row["draw"]: score for row, score in found if row.get("words") == way} for way in WAYS}
        for way, draws in ways.items():
            gains = [score - ways[None][draw] for draw, score in draws.items()]
            cells = [SETS[task][0], f"{labels:,}", WAYS[way], str(len(draws)), cell(list(draws.values()))]
            lines.append(f"| {' | '.join([*cells, '' if way is None else cell(gains, '+')])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    blocks = PAGE.read_text().split("\n\n")
    for header, written in ((HEADER, table()), (SEARCH, search()), (WORDS, words())):
        place = next(place for place, block in enumerate(blocks) if block.startswith(header))
        blocks[place] = written
    PAGE.write_text("\n\n".join(blocks).rstrip("\n") + "\n")
