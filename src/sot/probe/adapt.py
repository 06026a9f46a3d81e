"""Training a backbone for a classifier: how long, when it is likely to pay, and together with its head."""

from __future__ import annotations

import copy
import math
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from sot.extras import need
from sot.models.equip import Equipped
from sot.probe.inputs import ModelInputs
from sot.training.engine import SoTTrainer
from sot.training.recipe import Recipe

ADAPTATIONS = ("contrastive", "finetune")
BATCH = 16
FEW, LOW = 64, 0.9  # labels a class and score held out, below which adapting is likely to pay


@dataclass(frozen=True)
class Adaptation:
    """How long, and from which seed."""

    steps: int
    seed: int
    max_length: int
    shows_progress: bool = False


def advice(modality: str, labels_a_class: float, score: float) -> str | None:
    """One sentence where adapting the backbone is likely to pay."""
    if labels_a_class >= FEW or score >= LOW:
        return None
    kind = "contrastive" if modality == "text" else "finetune"
    return (
        f'With {labels_a_class:.0f} labels a class and {100 * score:.0f} % held out, adapt="{kind}" is likely to pay.'
    )


def check_contrast(model: Equipped) -> None:
    """Refuse what no contrast can train, or trains without its libraries."""
    if model.config.modality != "text":
        kind = {"image": "images", "audio": "sounds"}[model.config.modality]
        raise ValueError(f'adapt="contrastive" is for texts, and this model reads {kind}: take adapt="finetune"')
    for library in ("sentence_transformers", "datasets"):
        need(library, 'adapt="contrastive"', "adapt")


def trainer_arguments(folder: str, settings: Adaptation) -> dict[str, Any]:
    """What both trainers are told."""
    return {
        "output_dir": folder,
        "max_steps": settings.steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 2e-5,
        "warmup_steps": settings.steps // 10,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": not settings.shows_progress,
        "seed": settings.seed,
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }


def train_all(model: Equipped, inputs: ModelInputs, targets: Tensor, settings: Adaptation) -> None:
    """Train a model with its fitted head from there; its backbone is its own afterwards."""
    model.backbone = copy.deepcopy(model.backbone)
    model.requires_grad_(True)
    model.classifier.norm.requires_grad_(False)  # the standardisation
    labels = targets if model.config.problem == "multi_label_classification" else targets.argmax(1)
    epochs = math.ceil(settings.steps / math.ceil(len(inputs) / BATCH))
    recipe = Recipe(lr=5e-5, epochs=epochs, schedule="linear", warmup_epochs=0.1 * epochs, weight_decay=0.01)
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer_arguments(folder, settings)
        trainer = SoTTrainer(
            recipe,
            model=model,
            args=TrainingArguments(**arguments, max_grad_norm=1.0, remove_unused_columns=False),
            train_dataset=range(len(inputs)),  # numbers of samples, which the collator reads
            data_collator=lambda rows: {**inputs.batch(rows), "labels": labels[rows]},
        )
        trainer.train()
    model.eval()
