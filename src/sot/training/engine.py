"""transformers' Trainer with what the recipes add: decay groups, their schedule, EMA, and whole checkpoints."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from sot.data.images import make_seed
from sot.evaluation.multi_label import class_scores
from sot.files import counted, weights_of, writing
from sot.models.accelerate import accelerate
from sot.training.keeping import DecideAtEpochs, KeepLoss, best_of, evaluations
from sot.training.rates import learning_rate_factor, parameter_groups
from sot.training.recipe import Recipe
from sot.training.run_folder import MANIFEST, UNFINISHED, finish_checkpoint, last_whole_checkpoint, remove_old
from sot.training.starting import merge_adapters

logger = logging.getLogger("sot")
EMA_FILE = "ema.safetensors"
CLASSES_FILE = "classes.json"  # scores of each class
BEST = "best"  # folder of the weights to keep, until the run ends
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathered from all processes on the first


class Diverged(ValueError):
    """The loss is no longer a number."""


class Average:
    """Exponential moving average of the weights and of the statistics beside them, in shards where those are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """One step towards the model; whole numbers such as counters are copied."""
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                self.values[name].lerp_(value.to(self.values[name]), 1 - self.decay)
            else:
                self.values[name].copy_(value)

    @contextmanager
    def worn_by(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, for as long as the context lasts."""
        own = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self.values)
        try:
            yield
        finally:
            model.load_state_dict(own)

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """The average as whole tensors on the first process, nothing on the others; all have to call this."""
        with self.worn_by(model):  # whose weights come back when it ends: clone
            gathered: dict[str, Any] = get_model_state_dict(model, options=WHOLE)
            return {name: value.clone(memory_format=torch.contiguous_format) for name, value in gathered.items()}

    def load(self, model: nn.Module, file: Path) -> None:
        """Read the average from a file of whole tensors, whatever part of each this process keeps."""
        with self.worn_by(model):
            saved: dict[str, Any] = {**load_file(file)}
            set_model_state_dict(model, saved, options=WHOLE)
            self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}


class KeepAverage(TrainerCallback):
    """Starts the average with the training, when the weights are where they will stay, and updates it at every step."""

    def __init__(self, trainer: SoTTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the weights, or with the average of the checkpoint."""
        self.trainer.average = Average(kwargs["model"], self.trainer.recipe.ema)
        if self.trainer.resumed_from is not None:
            self.trainer.average.load(kwargs["model"], self.trainer.resumed_from / EMA_FILE)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer.average is not None
        self.trainer.average.update(kwargs["model"])


class ByLength(LengthGroupedSampler):
    """Texts of like length together, in an order of seed and epoch: a run resumed within an epoch finds it again."""

    def __init__(self, sampler: LengthGroupedSampler, trainer: SoTTrainer) -> None:
        super().__init__(sampler.batch_size, lengths=sampler.lengths, generator=torch.Generator())
        self.trainer = trainer

    def __iter__(self) -> Iterator[int]:
        epoch = int((self.trainer.state.epoch or 0) + 1e-6)  # of its last step, which rounding may leave below
        self.generator.manual_seed(make_seed(self.trainer.recipe.seed, epoch))
        return super().__iter__()


class SoTTrainer(Trainer):
    """Trainer for one recipe; it accelerates the model before anything wraps it."""

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, recipe: Recipe, model: Any, **kwargs: Any) -> None:
        super().__init__(model=accelerate(model), **kwargs)
        self.remove_callback(PrinterCallback)  # standard output is for results
        self.recipe = recipe
        self.average: Average | None = None
        self.resumed_from: Path | None = None
        self.staging = False
        self.by_class: dict[str, dict[str, float]] = {}  # of the last evaluation
        self.add_callback(DecideAtEpochs(recipe))
        self.add_callback(KeepLoss(self))
        if recipe.ema > 0:
            self.add_callback(KeepAverage(self))

    def _get_train_sampler(self, *args: Any) -> Any:
        sampler = super()._get_train_sampler(*args)
        return ByLength(sampler, self) if isinstance(sampler, LengthGroupedSampler) else sampler

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW over the recipe's groups."""
        if self.optimizer is None:
            groups = parameter_groups(self.model if model is None else model, self.recipe)
            lr, betas, eps = self.recipe.lr, self.recipe.betas, self.recipe.adam_epsilon
            # fused goes over the memory once: a seventh of the time of torch's own choice on a CPU
            self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The recipe's schedule, for whatever number of steps its epochs have."""
        if self.lr_scheduler is None:
            epochs = self.recipe.epochs + self.recipe.cooldown_epochs
            factor = learning_rate_factor(self.recipe, num_training_steps / epochs)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As usual, but a loss that is no number ends the run at once."""
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._check_finite("the loss", loss)
        return loss

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As usual; a frozen backbone neither drops units nor follows the statistics of batches."""
        if self.recipe.freeze and model.training:
            self.accelerator.unwrap_model(model).backbone.eval()
        return super().compute_loss(model, *args, **kwargs)

    def _check_finite(self, what: str, *values: Tensor) -> None:
        bad = next((value for value in values if not torch.isfinite(value).all()), None)
        if bad is None:
            return
        last = last_whole_checkpoint(Path(self.args.output_dir))
        group = {"lr": 1.0} if self.optimizer is None else self.optimizer.param_groups[0]
        rate = self.recipe.lr * group["lr"] / group.get("initial_lr", group["lr"])  # groups have rates of their own
        kept = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        said = f"{what} is {bad.item()}" if bad.numel() == 1 else f"{what} are no longer numbers"
        where = f"at step {self.state.global_step}, learning rate {rate:.3g}"
        raise Diverged(f"training diverged: {said} {where}: try a smaller lr; {kept}")

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """With the averaged weights, if the recipe averages them; those to keep so far are written."""
        self._check_finite("the weights", *(weight.detach() for weight in self.model.parameters()))
        with nullcontext() if self.average is None else self.average.worn_by(self.model):
            scores = dict(super().evaluate(*args, **kwargs))
        self._check_finite("the loss of the evaluation", torch.tensor(scores.get("eval_loss", 0.0)))
        if self.recipe.metric is not None:
            rows = evaluations(self.state.log_history, self.recipe.metric)
            if best_of(rows, self.recipe.metric) == len(rows) - 1:
                self._keep_best()
        return scores

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As usual; the scores of each class are kept beside, for the card."""
        found = super().evaluation_loop(*args, **kwargs)
        self.by_class = class_scores(self.model.config, np.asarray(found.predictions), np.asarray(found.label_ids))
        return found

    def _keep_best(self) -> None:
        """Put the model as it was evaluated beside the checkpoints, whole or not at all."""
        out = Path(self.args.output_dir)
        try:
            self.save_best(out / UNFINISHED / BEST)
            if self.is_world_process_zero():
                (out / UNFINISHED / BEST / CLASSES_FILE).write_text(json.dumps(self.by_class, indent=1))
                finish_checkpoint(out / UNFINISHED / BEST, out / BEST)
        finally:
            if self.is_world_process_zero():
                shutil.rmtree(out / UNFINISHED, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Logits in float32, whatever the model computes in, and no loss.

        That of the last batch would count the samples which make it as large on every process twice: the metrics have
        it from the logits of each sample.
        """
        _, logits, labels = super().prediction_step(*args, **kwargs)
        return None, None if logits is None else logits.float(), labels

    def save_best(self, folder: Path) -> None:
        """The trained model in Hugging Face layout; every process has to call this."""
        average = self.average
        whole: Any = get_model_state_dict(self.model, options=WHOLE) if average is None else average.whole(self.model)
        if self.is_world_process_zero():
            model, weights = merge_adapters(self.model, whole)
            staged = folder / UNFINISHED
            try:
                with writing(folder / "model.safetensors"):
                    model.save_pretrained(staged, state_dict=weights)
                    for file in staged.iterdir():
                        os.replace(file, folder / file.name)
            finally:
                shutil.rmtree(staged, ignore_errors=True)

    # --- checkpoints: written elsewhere, then moved into place whole

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self.staging else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        out, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        if (out / name / MANIFEST).is_file():
            return
        self._check_finite("the weights", *(weight.detach() for weight in self.model.parameters()))
        self.staging = True
        with self._going_on_without(name):
            super()._save_checkpoint(model, trial)
        self.staging = False
        average = {} if self.average is None else self.average.whole(self.model)
        self.accelerator.wait_for_everyone()  # others write to the folder too
        if self.args.should_save and (out / UNFINISHED / name).is_dir():
            with self._going_on_without(name):
                if average:
                    save_file(average, out / UNFINISHED / name / EMA_FILE)
                finish_checkpoint(out / UNFINISHED / name, out / name)
                shutil.rmtree(out / UNFINISHED)
                remove_old(out, keep=2)
        self.accelerator.wait_for_everyone()  # the next look for a checkpoint has to find this one

    @contextmanager
    def _going_on_without(self, name: str) -> Iterator[None]:
        """A full disk, as each library calls it, loses this checkpoint and nothing else."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            out = Path(self.args.output_dir)
            kept = last_whole_checkpoint(out)
            logger.warning("Could not write %s (%s); training goes on, the last checkpoint is %s.", name, error, kept)
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Where Trainer only logs that weights are missing; those that share memory with others are not."""
        weights = self.model.state_dict()
        there = {value.data_ptr() for name, value in weights.items() if name not in load_result.missing_keys}
        missing = [name for name in load_result.missing_keys if weights[name].data_ptr() not in there]
        if missing:
            raise ValueError(f"the checkpoint lacks {counted(len(missing), 'weights')}, first {missing[0]}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with weights_of(str(checkpoint)):  # which transformers reads by pickle, of tensors and numbers alone
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with weights_of(str(checkpoint)):
            super()._load_rng_state(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.resumed_from = Path(resume_from_checkpoint)
