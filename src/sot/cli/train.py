"""`sot train`: classifiers of images and sounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sot.cli.groups import grouped
from sot.cli.options import (
    LabelOption,
    MultiLabelOption,
    SeparatorOption,
    WorkersOption,
    of_data,
    of_start,
    of_training,
    picture_columns,
    read_tags,
)
from sot.cli.runs import RunOptions, likely_recipe


@grouped
def train(
    *,
    model: Annotated[
        str,
        typer.Option(help="A timm name (sot_tiny, …), a Hugging Face vision or audio model, or the folder of a run."),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="Folder with one subfolder per class, a table, a .tar file, digits, tones, torch/NAME@DIR, "
            "hfds/NAME, hfids/NAME or wds/NAME@DIR."
        ),
    ],
    label: LabelOption = "label",
    multi_label: MultiLabelOption = False,
    separator: SeparatorOption = None,
    recipe: Annotated[
        str | None,
        of_training(
            help="Recipe name (see `sot recipes`) or YAML file. "
            "Default: finetune for models with weights, else scratch."
        ),
    ] = None,
    pretrained: Annotated[
        bool, of_start("--pretrained", help="Start from the published weights, whatever the recipe.")
    ] = False,
    run: RunOptions,
    strict: Annotated[
        bool, of_data("--strict", help="Refuse unreadable files. Default: leave them out, and list them.")
    ] = False,
    workers: WorkersOption = 0,
) -> None:
    """Train an image or sound classifier."""
    from sot.data.spec import check_pictures, holds_sounds

    run.check()
    sounds = holds_sounds(data)
    if not sounds:
        check_pictures(data)
    recipe = recipe or ("sounds" if sounds else None)
    task = "audio" if sounds else "image"
    given = run.weights is not None
    run.recipe_and_head(recipe or likely_recipe(model, data, given), model, task)  # refuses mistakes without torch
    columns = picture_columns(data, label, read_tags(label, multi_label, separator))
    name, why, has_weights = _chosen(model, data, recipe, given)
    chosen, head = run.recipe_and_head(name, model, task, [] if sounds else _own_size(model, name))
    run.say_of_warmup(name, chosen)
    from sot.training.run_folder import full_name
    from sot.training.train_images import train_images
    from sot.training.train_sounds import SOUNDS

    options: dict[str, Any] = {"strict": strict, "workers": workers, "columns": columns}
    options |= {"pretrained": pretrained or has_weights or sounds, "medium": SOUNDS if sounds else None}
    identity: dict[str, Any] = {"command": "train", "model": full_name(model), "data": full_name(data)}
    identity["head"] = None if head is None else head.to_dict()

    def start(folder: Path, **how: Any) -> dict[str, float]:
        return train_images(model, data, folder, chosen, head, **options, **how)

    run.carry_out(start, chosen, identity, f"{model} on {data}", why)


def _chosen(model: str, data: str, recipe: str | None, weights: bool) -> tuple[str, str, bool]:
    """Name of the recipe, the same with why it was chosen, and whether it starts from published weights."""
    from sot.training.recipe_choice import FINETUNE, choose_recipe, has_weights

    name, why = (recipe, "") if recipe is not None else choose_recipe(model, data, weights)
    published = name == FINETUNE and not weights and has_weights(model)
    return name, f"{name} ({why})" if why else name, published


def _own_size(model: str, recipe: str) -> list[str]:
    """The package's recipes size images for timm models: of others it is the processor's, until a user sets it."""
    from sot.models.equip import is_timm
    from sot.training.recipe import recipe_names

    return ["img_size=null"] if recipe in recipe_names() and not is_timm(model) else []
