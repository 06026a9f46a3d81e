"""What a table would cost: steps, multiply-adds, and hours on this machine, from a step of each unit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DataCollatorWithPadding

from sot.models.accelerate import accelerate
from sot.models.complexity import Logits, measure_training
from sot.paper.work import Unit, Where, read_task
from sot.training.image_model import build_model, data_config
from sot.training.train_texts import TextSet, build_text_model

SAMPLES = 16  # in the step that is measured, at most


@dataclass(frozen=True)
class WorkCost:
    """Of one unit; the hours leave out reading the data and evaluating."""

    steps: int
    macs: float
    hours: float


def estimate_work(unit: Unit, where: Where) -> WorkCost:
    """Build the model of a unit and time one step of a small batch, forward and backward."""
    recipe = unit.recipe
    samples = recipe.train_samples or unit.about_data["train"]
    epochs = recipe.epochs + recipe.cooldown_epochs
    size = min(SAMPLES, recipe.batch_size)
    if unit.task is None:
        model = build_model(unit.model, unit.about_data["labels"], recipe, unit.head, False)
        shape = data_config(model)["input_size"]
        inputs: dict[str, Any] = {"pixel_values": torch.randn(size, *shape)}
        seconds = _time_step(model, inputs) / size
        macs = float(measure_training(Logits(model), shape).macs)
    else:
        texts = read_task(where.texts, unit.task)
        assert texts.train is not None
        model = build_text_model(unit.model, texts, recipe, unit.head)
        kept = replace(texts.train, texts=texts.train.texts[:size], labels=texts.train.labels[:size])
        kept.pairs = None if texts.train.pairs is None else texts.train.pairs[:size]
        encoded = TextSet(kept, model.processor, recipe.max_length, texts.labels is None)
        inputs = dict(DataCollatorWithPadding(model.processor)([encoded[index] for index in range(len(encoded))]))
        inputs.pop("labels")
        seconds = _time_step(model, inputs) / size
        with FlopCounterMode(display=False) as counter:
            torch.autograd.backward(model(**inputs).logits.sum())
        macs = counter.get_total_flops() / 2 / size
    steps = epochs * math.ceil(samples / recipe.batch_size)
    return WorkCost(steps, macs * samples * epochs, seconds * samples * epochs / 3600)


def _time_step(model: nn.Module, inputs: dict[str, Any]) -> float:
    """Seconds of the fastest of three steps: the first allocates, others may be disturbed."""
    accelerate(model).train()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        torch.autograd.backward(model(**inputs).logits.sum())
        times.append(time.perf_counter() - start)
        model.zero_grad()
    return min(times)
