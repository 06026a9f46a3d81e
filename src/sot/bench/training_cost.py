"""What `sot train` adds to a step: the same model, loader and optimiser in a bare loop, in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback, set_seed
from transformers.utils import logging

from sot.bench.cases import Measurement, measurements_of
from sot.bench.timing import Progress, Race
from sot.core.head import HeadConfig
from sot.data.images import load_images
from sot.training.image_model import build_model
from sot.training.rates import parameter_groups
from sot.training.recipe import Recipe
from sot.training.train_images import ImageTrainer, make_trainer, split_batch, training_arguments

BARE, OURS = "bare loop", "ours: sot train"


class Clock(TrainerCallback):
    """Wall and process time at the beginning of every step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Trainer calls this when it has the batch; the next call ends the step, with the next batch loaded."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def steps(self) -> tuple[float, float]:
        """Median wall and process time of a step, without the first, which sets things up."""
        wall, cpu = ([later - earlier for earlier, later in pairwise(times[1:])] for times in (self.wall, self.cpu))
        return median(wall), median(cpu)


def train_rows(
    model: str, data: str, recipe: Recipe, steps: int, rounds: int, progress: Progress = iter
) -> list[Measurement]:
    """Time of a step in both, and what `sot train` takes of the bare loop's."""
    pictures = load_images(data, recipe.seed)
    if steps < 3 or steps * recipe.batch_size > len(pictures.train):
        most = len(pictures.train) // recipe.batch_size
        raise ValueError(
            f"steps must be between 3 and the {most} batches of {recipe.batch_size} in {data}, got {steps}"
        )
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(recipe, Path(folder), {**split_batch(recipe, 1), "report_to": "none"})
        arguments.eval_strategy = arguments.save_strategy = arguments.logging_strategy = "no"
        arguments.max_steps = steps

        def trainer() -> ImageTrainer:
            set_seed(recipe.seed)
            built = build_model(model, pictures.labels, recipe, HeadConfig.from_dict(recipe.head), pretrained=False)
            return make_trainer(built, pictures, recipe, arguments)

        runs: dict[str, Callable[[ImageTrainer], Clock]] = {
            BARE: lambda made: _bare_loop(made, recipe, steps),
            OURS: _trained,
        }
        result = Race({name: [] for name in runs}, {name: [] for name in runs})
        for number in progress(range(rounds)):
            for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
                wall, cpu = runs[name](trainer()).steps()
                result.wall[name].append(wall)
                result.cost[name].append(cpu)
    return measurements_of(result, f"step of {model}", BARE)


def _trained(trainer: ImageTrainer) -> Clock:
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    return clock


def _bare_loop(trainer: ImageTrainer, recipe: Recipe, steps: int) -> Clock:
    clock, model = Clock(), trainer.model.train()
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe), lr=recipe.lr, betas=recipe.betas)
    loader: Any = DataLoader(
        trainer.train_dataset, recipe.batch_size, shuffle=True, collate_fn=trainer.data_collator, drop_last=True
    )
    for _, batch in zip(range(steps), loader):
        clock.on_step_begin()
        batch = {name: value.to(model.device) for name, value in batch.items()}
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock
