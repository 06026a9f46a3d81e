"""SetFit and sot.Classifier on the same labels of a GLUE sentence task: accuracy and time, one JSON object a line.

    python setfit_peer.py setfit --model MODEL --data SST-2 --labels 8 64 --draws 3 --tuned TUNED --out setfit.jsonl
    python setfit_peer.py sot    --model MODEL --data SST-2 --labels 8 64 --draws 3 --tuned TUNED --out setfit.jsonl

The first wants `pip install setfit==1.2.0`, the second this package; they may be in different environments. The first
leaves the backbones that it tuned in TUNED, on which the second fits its head, too. Lines that are there are kept.
"""

import argparse
import csv
import json
import time
from pathlib import Path

import numpy as np


def read(file):
    with open(file, encoding="utf-8-sig", newline="") as opened:
        rows = list(csv.DictReader(opened, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["sentence"] for row in rows], np.array([int(row["label"]) for row in rows])


def draw(labels, count, seed):
    """So many of each class, as `sot probe --labels` draws them of all."""
    source = np.random.default_rng(seed)
    return np.sort(np.concatenate([source.permutation(np.flatnonzero(labels == each))[:count] for each in (0, 1)]))


def by_setfit(options, texts, labels, test, seed, tuned):
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    began, clock = time.perf_counter(), time.process_time()
    model = SetFitModel.from_pretrained(options.model)
    args = TrainingArguments(
        output_dir=str(tuned) + ".run", max_steps=options.steps, seed=seed, save_strategy="no", report_to="none"
    )
    data = Dataset.from_dict({"text": texts, "label": labels.tolist()})
    Trainer(model=model, args=args, train_dataset=data).train()
    seconds, cpu = time.perf_counter() - began, time.process_time() - clock
    right = np.asarray(model.predict(test[0], show_progress_bar=False)) == test[1]
    body = model.model_body[0].auto_model
    body.save_pretrained(tuned)
    model.model_body.tokenizer.save_pretrained(tuned)
    return {"setfit": {"accuracy": float(right.mean()), "seconds": seconds, "cpu": cpu}}


def by_sot(options, texts, labels, test, seed, tuned):
    import sot

    kinds = {"sot, frozen": (options.model, None), "sot, contrastive": (options.model, "contrastive")}
    if tuned.is_dir():
        kinds["sot on SetFit's backbone"] = (str(tuned), None)
    found = {}
    for name, (model, adapt) in kinds.items():
        began, clock = time.perf_counter(), time.process_time()
        settings = {"adapt": adapt, "adapt_steps": options.steps, "cache": None, "random_state": seed, "verbose": 0}
        fitted = sot.Classifier(model, **settings).fit(texts, labels)
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
    train, test = (read(Path(options.data) / f"{part}.tsv") for part in ("train", "dev"))
    out = Path(options.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    name = Path(options.data).name
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
