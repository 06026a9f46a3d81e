"""SetFit and sot.Classifier on the same labels of SST-2, MRPC or SICK: accuracy and time, one JSON object a line.

    python setfit_peer.py setfit --model MODEL --data SST-2 --labels 8 64 --draws 3 --tuned TUNED --out setfit.jsonl
    python setfit_peer.py sot    --model MODEL --data SST-2 --labels 8 64 --draws 3 --tuned TUNED --out setfit.jsonl

SetFit knows no pairs: it gets both texts as one, with the tokenizer's separator between them. The first command wants
`pip install setfit==1.2.0`, the second this package; they may be in different environments. The first leaves the
backbones that it tuned in TUNED, on which the second fits its head, too. Lines that are there are kept.
"""

import argparse
import csv
import json
import time
from pathlib import Path

import numpy as np


# Files to train and to score on, columns of the texts, column of the label
LAYOUTS = {
    "SST-2": ("train.tsv", "dev.tsv", ["sentence"], "label"),
    "MRPC": ("train.tsv", "dev.tsv", ["#1 String", "#2 String"], "Quality"),
    "SICK": ("SICK_train.txt", "SICK_test_annotated.txt", ["sentence_A", "sentence_B"], "entailment_judgment"),
}


def read(file, texts, label):
    """Texts, or pairs of them, and their labels."""
    with open(file, encoding="utf-8-sig", newline="") as opened:
        rows = list(csv.DictReader(opened, delimiter="\t", quoting=csv.QUOTE_NONE))
    items = [tuple(row[column] for column in texts) if len(texts) == 2 else row[texts[0]] for row in rows]
    return items, np.unique([row[label] for row in rows], return_inverse=True)[1]


def draw(labels, count, seed):
    """So many of each class, as `sot probe --labels` draws them of all."""
    source = np.random.default_rng(seed)
    drawn = [source.permutation(np.flatnonzero(labels == each))[:count] for each in np.unique(labels)]
    return np.sort(np.concatenate(drawn))


def by_setfit(options, texts, labels, test, seed, tuned):
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    began, clock = time.perf_counter(), time.process_time()
    model = SetFitModel.from_pretrained(options.model)
    separator = f" {model.model_body.tokenizer.sep_token} "

    def joined(items):
        return [item if isinstance(item, str) else separator.join(item) for item in items]

    args = TrainingArguments(
        output_dir=str(tuned) + ".run", max_steps=options.steps, seed=seed, save_strategy="no", report_to="none"
    )
    data = Dataset.from_dict({"text": joined(texts), "label": labels.tolist()})
    Trainer(model=model, args=args, train_dataset=data).train()
    seconds, cpu = time.perf_counter() - began, time.process_time() - clock
    right = np.asarray(model.predict(joined(test[0]), show_progress_bar=False)) == test[1]
    body = model.model_body[0].auto_model
    body.save_pretrained(tuned)
    model.model_body.tokenizer.save_pretrained(tuned)
    return {"setfit": {"accuracy": float(right.mean()), "seconds": seconds, "cpu": cpu}}


def by_sot(options, texts, labels, test, seed, tuned):
    import sot

    class ChosenOnce(sot.Classifier):
        """Mixture and penalty are those for the backbone as it was: one that SetFit tuned tells nothing of them."""

        def _fit_head(self, frozen, adapted, targets):
            tokens.append(frozen)
            if adapted is None and len(tokens) > 1:
                adapted = frozen
            return super()._fit_head(tokens[0], adapted, targets)

    kinds = {"sot, frozen": (options.model, None), "sot, contrastive": (options.model, "contrastive")}
    if tuned.is_dir():
        kinds["sot on SetFit's backbone"] = (str(tuned), None)
    found, tokens = {}, []
    for name, (model, adapt) in kinds.items():
        began, clock = time.perf_counter(), time.process_time()
        settings = {"adapt": adapt, "adapt_steps": options.steps, "cache": None, "random_state": seed, "verbose": 0}
        fitted = ChosenOnce(model, **settings).fit(texts, labels)
        seconds, cpu = time.perf_counter() - began, time.process_time() - clock
        found[name] = {"accuracy": fitted.score(*test), "seconds": seconds, "cpu": cpu}
        found[name]["chosen"] = fitted.fitted_.chosen.mixture
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["setfit", "sot"])
    for name in ("--model", "--data", "--tuned", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--labels", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    name = next(name for name in LAYOUTS if name.lower() == Path(options.data).name.lower())
    *files, texts, label = LAYOUTS[name]
    train, test = (read(Path(options.data) / file, texts, label) for file in files)
    out = Path(options.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    for seed in range(options.draws):
        for count in options.labels:
            about = {"data": name, "labels": count, "draw": seed, "steps": options.steps, "kind": options.kind}
            if any(about.items() <= row.items() for row in done):
                continue
            rows, tuned = draw(train[1], count, seed), Path(options.tuned) / f"{name}-{count}-{seed}"
            run = by_setfit if options.kind == "setfit" else by_sot
            found = run(options, [train[0][row] for row in rows], train[1][rows], test, seed, tuned)
            with out.open("a") as opened:
                opened.write(json.dumps({**about, "found": found}) + "\n")
            print(about, found, flush=True)


if __name__ == "__main__":
    main()
