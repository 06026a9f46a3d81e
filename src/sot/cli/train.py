"""`sot train`: image classifiers."""

from __future__ import annotations

from typing import Annotated

import typer

from sot.cli.options import (
    AccumulationOption,
    HeadOption,
    JsonOption,
    LogOption,
    OutOption,
    OverwriteOption,
    RecipeOption,
    ResumeOption,
    SetOption,
    WorkersOption,
    check_log,
    print_scores,
    read_recipe,
)


def train(
    model: Annotated[
        str,
        typer.Option(help="A timm name (sot_tiny, …), or a Hugging Face vision model: hub name or folder."),
    ],
    data: Annotated[
        str,
        typer.Option(help="digits, a folder, a .tar file, torch/NAME@FOLDER, hfds/NAME, hfids/NAME, wds/NAME@FOLDER."),
    ],
    out: OutOption,
    recipe: RecipeOption = "digits",
    head: HeadOption = None,
    settings: SetOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Start from a name's published weights; a folder's are always read.")
    ] = False,
    workers: WorkersOption = 0,
    accumulation: AccumulationOption = 1,
    log: LogOption = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Train an image classifier by a recipe."""
    report_to = check_log(log)
    chosen, parsed = read_recipe(recipe, [*_own_size(model, recipe), *(settings or [])], head, "image")
    from sot.training.train_images import train_images

    metrics = train_images(
        model,
        data,
        out,
        chosen,
        parsed,
        resume=resume,
        overwrite=overwrite,
        pretrained=pretrained,
        workers=workers,
        accumulation=accumulation,
        report_to=report_to,
    )
    print_scores(metrics, as_json, f"{model} on {data}, in {out}")


def _own_size(model: str, recipe: str) -> list[str]:
    """The package's recipes size pictures for timm models: of others it is the processor's, until a user sets it."""
    from sot.models.equip import is_timm
    from sot.training.recipe import recipe_names

    return ["img_size=null"] if recipe in recipe_names() and not is_timm(model) else []
