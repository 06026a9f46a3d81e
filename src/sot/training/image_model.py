"""The image model that a recipe asks for, and how it reads images: as they are, and changed and mixed for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm.data
import torch
from PIL import Image
from torch import Tensor

from sot.core.head import HeadConfig
from sot.data.images import check_processor, processor_transform, seeded, stack
from sot.errors import NoClassTokenError, SettingError
from sot.files import one_line
from sot.models.equip import equip, is_timm
from sot.models.from_timm import resize_processor
from sot.models.modeling import SoTForImageClassification
from sot.saved import is_trained
from sot.training.recipe import Recipe
from sot.training.starting import continue_from

NO_WEIGHTS = (
    "the published weights of {} cannot be downloaded: connect to the hub, give them as {weights}, "
    "or train from random ones by {recipe} scratch ({})"
)


def build_model(
    name: str, labels: list[str], recipe: Recipe, head: HeadConfig | None, pretrained: bool, multi_label: bool = False
) -> Any:
    """The model with its head, or with the conventional one (`head` None): class token, or average of the words."""
    _check_arguments(recipe.model_args)
    if multi_label and (recipe.mixup or recipe.cutmix):
        raise ValueError("mixup and cutmix mix images of one class each: set both to 0 where they may have several")
    smoothing = 0.0 if recipe.mixup or recipe.cutmix else recipe.label_smoothing  # mixup smooths its own labels
    common: dict[str, Any] = {"labels": labels, "pretrained": pretrained, "label_smoothing": smoothing}
    common["problem_type"] = "multi_label_classification" if multi_label else None
    if is_trained(name) or not is_timm(name):
        return _build_from_transformers(name, recipe, head, common)
    wanted = {"img_size": recipe.img_size, "drop_path_rate": recipe.drop_path or None}
    arguments = {**recipe.model_args, **{key: value for key, value in wanted.items() if value is not None}}
    options = {**common, "embed": recipe.embed}

    def make(chosen: HeadConfig, model_args: dict[str, Any]) -> Any:
        try:
            return equip(name, head=chosen, model_args=model_args, **options)
        except OSError as error:
            if not pretrained or Path(name).is_dir():
                raise
            raise SettingError(NO_WEIGHTS, name, one_line(error)) from error
        except (TypeError, RuntimeError, AssertionError) as error:
            if isinstance(error, TypeError) and "img_size" in model_args:  # not of models that take any size
                built = make(chosen, {key: value for key, value in model_args.items() if key != "img_size"})
                resize_processor(built.processor, model_args["img_size"])
                return built
            raise ValueError(f"{name} cannot be built with {model_args}: {one_line(error)}") from error

    return with_plain_head(head, lambda chosen: make(chosen, arguments))


def _build_from_transformers(name: str, recipe: Recipe, head: HeadConfig | None, common: dict[str, Any]) -> Any:
    settings = {"drop_path": recipe.drop_path, "embed": recipe.embed, "model_args": recipe.model_args}
    for setting, value in settings.items():
        if value:
            raise ValueError(f"{setting} is for timm models, and {name} is none, got {setting}={value}")
    if is_trained(name):
        loss = {key: common[key] for key in ("label_smoothing", "problem_type")}
        built = continue_from(name, common["labels"], head, loss)
    else:
        built = with_plain_head(head, lambda chosen: equip(name, head=chosen, **common))
    if built.config.modality != "image":
        raise ValueError(f"{name} is no model of images: fine-tune it on texts with sot finetune")
    if built.processor is None:
        raise ValueError(f"{name} has no image processor beside it that can be loaded")
    _, height, width = check_processor(built.processor, name)
    if recipe.img_size not in (None, *({height} & {width})):
        sizes = f"null, as {name} reads images of {height}×{width} pixels"
        raise ValueError(f"img_size must be {sizes}, got {recipe.img_size}")
    _check_reading(built, name)
    return built


@torch.no_grad()  # not inference_mode: what a backbone keeps of this pass is used in training
def _check_reading(built: SoTForImageClassification, name: str) -> None:
    """Refuse an image processor that training cannot follow, or whose images the backbone cannot read."""
    orange = Image.new("RGB", (64, 64), (255, 128, 0))
    wanted, seen = processor_transform(built.processor)(orange), train_transform(Recipe(), data_config(built))(orange)
    if not torch.allclose(wanted, seen, atol=0.05):
        raise ValueError(f"the image processor of {name} scales or orders colours in a way that training does not")
    mode = built.training
    try:
        built.eval()(wanted[None])
    except (RuntimeError, ValueError, AssertionError) as error:
        said = f"{name} cannot read images of {tuple(wanted.shape)}, which its image processor makes"
        raise ValueError(f"{said}: {one_line(error)}") from error
    built.train(mode)


def with_plain_head(head: HeadConfig | None, make: Callable[[HeadConfig], Any]) -> Any:
    """What `make` makes of a head; without one, of the class token, or of the average where there is none."""
    if head is not None:
        return make(head)
    try:
        return make(HeadConfig(fusion="class"))
    except NoClassTokenError:
        return make(HeadConfig(fusion="word", pool="gap"))


def _check_arguments(model_args: Mapping[str, Any]) -> None:
    """Refuse what timm takes but no image or head fits."""
    if model_args.get("in_chans", 3) != 3:
        raise ValueError(f"in_chans of model_args must be 3, as images are read in RGB, got {model_args['in_chans']}")
    taken = [name for name in ("num_classes", "pretrained", "features_only") if name in model_args]
    if taken:
        said = "model_args cannot set {}: the data, {pretrained} and the head decide that"
        raise SettingError(said, ", ".join(taken))


def data_config(model: SoTForImageClassification) -> dict[str, Any]:
    """The image processor that is saved with the model in the words of timm, so that training sees what it will."""
    processor = model.processor
    normal = getattr(processor, "do_normalize", True)
    resample = Image.Resampling.BICUBIC if processor.resample is None else processor.resample
    return {
        "input_size": check_processor(processor, "the model"),
        "interpolation": Image.Resampling(resample).name.lower(),
        "mean": processor.image_mean if normal else (0.0,) * 3,
        "std": processor.image_std if normal else (1.0,) * 3,
    }


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
