"""Fine-tune a text model on few labels by the paper's protocol, for docs/results-texts.md.

python docs/results/few-tuned/few_tuned.py JOBS.jsonl ROWS.jsonl --model all-MiniLM-L6-v2 --texts TEXTS

A job is a line such as {"task": "sick", "labels": 500, "draw": 1, "head": "paper", "lr": 1e-4, "on": "dev"}; other keys
are settings of the recipe `bert`. Draw d trains with seed d on the first `labels` of the training set, in an order of
its own. `held` scores on the 500 that follow ("held": 1000 on 1,000), `dev` on the development set. A row that is there
is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sot.training.train_texts as train_texts
from sot.core.head import HeadConfig
from sot.data.texts import TextData, TextSplit, load_task
from sot.models.modeling import SoTForSequenceClassification
from sot.models.tokens import split_text
from sot.training.recipe import load_recipe

sys.path.append(str(Path(__file__).parent.parent))
from whitened import start_whitened

FOLDERS = {"sick": "sick", "cola": "glue/CoLA", "mrpc": "glue/MRPC", "rte": "glue/RTE"}
HELD = 500
HEADS = {  # of one head each
    "class": {"fusion": "class"},
    "paper": {"norm": "svpn_fast", "exponent": 0.5},
    "default": {"norm": "svpn", "exponent": 0.25},
}
own_tokens, own_build = SoTForSequenceClassification.tokens, train_texts.build_text_model


@torch.no_grad()
def whiten(model: SoTForSequenceClassification, texts: TextSplit) -> None:
    """Start the projections from whitened directions of the first 500 texts' words."""
    model.eval()
    batches = [slice(start, start + 50) for start in range(0, min(500, len(texts)), 50)]
    pairs = [None if texts.pairs is None else texts.pairs[rows] for rows in batches]
    inputs = [
        model.processor(texts.texts[rows], pair, padding=True, truncation=True, max_length=128, return_tensors="pt")
        for rows, pair in zip(batches, pairs)
    ]
    read = [model.tokens(**each) for each in inputs]
    tokens = torch.cat([each.word_tokens[each.mask > 0] for each in read])
    start_whitened(model.classifier.pool.projection, tokens)
    model.train()


def change_words(words: str | int | None) -> None:
    """Read the words of a layer (0 the embedding), or a softmax mixture of all ("mix").

    "zero" starts the words' linear layer at 0, "whiten" their projections from whitened directions.
    """

    def tokens(self: Any, input_ids: Any = None, attention_mask: Any = None, *rest: Any, **kwargs: Any) -> Any:
        found = own_tokens(self, input_ids, attention_mask, **{**kwargs, "output_hidden_states": True})
        states, found.outputs.hidden_states = torch.stack(found.outputs.hidden_states), None  # not among the logits
        mixed = torch.einsum("l,lbtd->btd", self.classifier.mix.softmax(0), states) if words == "mix" else states[words]
        found.word_tokens = split_text(mixed, None, attention_mask, self.config.class_position).word_tokens
        return found

    def build(*args: Any) -> Any:
        model = own_build(*args)
        if words == "mix":
            model.classifier.mix = nn.Parameter(torch.zeros(1 + model.backbone.config.num_hidden_layers))
        if words == "zero":
            nn.init.zeros_(model.classifier.word_linear.weight)
        if words == "whiten":
            whiten(model, args[1].train)
        return model

    usual = words in (None, "zero", "whiten")
    SoTForSequenceClassification.tokens = own_tokens if usual else tokens
    train_texts.build_text_model = build


def drawn(data: TextData, job: dict[str, Any]) -> TextData:
    """The texts of a job's draw, and those to score on."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1000 + job["draw"])).tolist()
    labels, held = job["labels"], job.get("held", HELD)
    dev = data.train.take(order[labels : labels + held]) if job["on"] == "held" else data.dev
    return replace(data, train=data.train.take(order[:labels]), dev=dev)


def run(job: dict[str, Any], model: str, texts: Path) -> dict[str, Any]:
    """Train and score one job."""
    settings = {key: value for key, value in job.items() if key not in ("task", "labels", "draw", "head", "on", "held")}
    change_words(settings.pop("words", None))
    sizes = {key: settings.pop(key) for key in ("representation_size", "dropout", "heads") if key in settings}
    head = {"pool": "mgcrp", "heads": 1, "representation_size": 1000, "dropout": 0.5, **HEADS[job["head"]], **sizes}
    config = HeadConfig(fusion="class") if job["head"] == "class" else HeadConfig(**head)
    recipe = load_recipe("bert")
    usual = {"seed": job["draw"], "evaluate_every": recipe.epochs, "group_by_length": True, "grid": {}}
    recipe = replace(recipe, **{**usual, **settings})
    data = drawn(load_task(job["task"], texts / FOLDERS[job["task"]]), job)
    out, start = Path(tempfile.mkdtemp()), time.process_time()
    try:
        scores = train_texts.fine_tune(model, data, "drawn", out / "run", recipe, config, report_to="none")
    finally:
        shutil.rmtree(out)
    return {**job, "scores": scores, "seconds": round(time.process_time() - start)}


def next_job(jobs: Path, rows: Path) -> dict[str, Any] | None:
    """The first job without a row."""
    done = [json.loads(line) for line in rows.read_text().splitlines()] if rows.is_file() else []
    for row in done:
        del row["scores"], row["seconds"]
    return next((job for job in map(json.loads, jobs.read_text().splitlines()) if job not in done), None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    while (job := next_job(given.jobs, given.rows)) is not None:
        row = run(job, given.model, given.texts)
        with given.rows.open("a") as file:
            print(json.dumps(row), file=file)
