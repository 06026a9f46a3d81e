"""How a recipe changes images for training: each by itself, and mixed in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm.data
from PIL import Image
from torch import Tensor

from sot.data.images import seeded, stack
from sot.training.recipe import Recipe


def train_transform(recipe: Recipe, data_config: dict[str, Any]) -> Callable[[Image.Image], Tensor]:
    """timm's training augmentation with the recipe's strengths."""
    transform: Callable[[Image.Image], Tensor] = timm.data.create_transform(
        data_config["input_size"],
        is_training=True,
        scale=recipe.scale,
        ratio=(1.0, 1.0) if recipe.scale == (1.0, 1.0) else None,
        hflip=recipe.flip,
        color_jitter=recipe.color_jitter or None,
        auto_augment=recipe.rand_augment,
        re_prob=recipe.erasing,
        re_mode="pixel",
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
    )
    return transform


class Collate:
    """Stacks images; mixup or cutmix mixes them and their labels, drawn from the seed, epoch and first image."""

    def __init__(self, recipe: Recipe, num_classes: int) -> None:
        self.seed = recipe.seed
        self.mixup = None
        if recipe.mixup > 0 or recipe.cutmix > 0:
            self.mixup = timm.data.Mixup(
                recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing, num_classes=num_classes
            )

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = stack(items)
        if self.mixup is not None:
            with seeded(self.seed, items[0]["epoch"], items[0]["index"]):
                batch["pixel_values"], batch["labels"] = self.mixup(batch["pixel_values"], batch["labels"])
        return batch
