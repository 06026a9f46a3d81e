"""Which recipe trains a model on images where the user names none."""

from __future__ import annotations

from pathlib import Path

import timm

from sot.models.from_timm import is_timm

DIGITS, FINETUNE, SCRATCH = "digits", "finetune", "scratch"


def has_weights(model: str) -> bool:
    """Whether a name has published weights; folders and names of the hub bring theirs."""
    if Path(model).is_dir() or not is_timm(model) or not timm.is_model(model):
        return True
    published = timm.get_pretrained_cfg(model)
    return published is not None and bool(published.has_weights)


def choose_recipe(model: str, data: str, weights: bool) -> tuple[str, str]:
    """Its name, and why; `weights` says that the user gives some."""
    if data == DIGITS:
        return DIGITS, "made for this data"
    if weights:
        return FINETUNE, "you give weights"
    if has_weights(model):
        return FINETUNE, "the model has weights"
    return SCRATCH, "the model has no published weights"
