"""`sot train`: classifiers of images and sounds."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sot.cli.options import (
    AccumulationOption,
    HeadOption,
    JsonOption,
    LabelOption,
    LogOption,
    MultiLabelOption,
    OutOption,
    OverwriteOption,
    ResumeOption,
    SeparatorOption,
    SetOption,
    WorkersOption,
    check_log,
    of_data,
    of_start,
    picture_columns,
    read_recipe,
    read_tags,
)
from sot.cli.runs import (
    BalanceOption,
    ChosenRecipeOption,
    FoldsOption,
    FreezeOption,
    LoraOption,
    MetricOption,
    PatienceOption,
    WeightsOption,
    check_run,
    likely_recipe,
    own_head,
    run,
    run_settings,
    say,
)


def train(
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
    out: OutOption,
    label: LabelOption = "label",
    multi_label: MultiLabelOption = False,
    separator: SeparatorOption = None,
    recipe: ChosenRecipeOption = None,
    head: HeadOption = None,
    settings: SetOption = None,
    metric: MetricOption = None,
    patience: PatienceOption = None,
    balance: BalanceOption = False,
    folds: FoldsOption = None,
    pretrained: Annotated[
        bool,
        of_start("--pretrained", help="Start from the published weights, whatever the recipe."),
    ] = False,
    weights: WeightsOption = None,
    freeze: FreezeOption = False,
    lora: LoraOption = None,
    strict: Annotated[
        bool,
        of_data("--strict", help="Refuse unreadable files. Default: leave them out, and list them."),
    ] = False,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    workers: WorkersOption = 0,
    accumulation: AccumulationOption = 1,
    log: LogOption = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Train an image or sound classifier."""
    report_to = check_log(log)
    check_run(out, resume, overwrite, weights)
    sounds = _check_data(data)
    wanted = [*(settings or []), *run_settings(metric, patience, balance, freeze, lora)]
    recipe = recipe or ("sounds" if sounds else None)
    task = "audio" if sounds else "image"
    read_recipe(recipe or likely_recipe(data), wanted, head, task)  # refuses mistakes before torch is loaded
    columns = picture_columns(data, label, read_tags(label, multi_label, separator))
    name, why, has_weights = _chosen(model, data, recipe, weights is not None)
    own = [] if sounds else _own_size(model, name)
    chosen, parsed = read_recipe(name, [*own, *wanted], head, task)
    parsed = own_head(model, head, parsed)
    from sot.training.run_folder import full_name
    from sot.training.train_images import train_images
    from sot.training.train_sounds import train_sounds

    options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "weights": weights, "strict": strict}
    options |= {"workers": workers, "accumulation": accumulation, "report_to": report_to}
    options |= {"pretrained": pretrained or has_weights or sounds, "chosen": why, "say": say, "columns": columns}
    identity: dict[str, Any] = {"command": "train", "model": full_name(model), "data": full_name(data)}
    identity["head"] = None if parsed is None else parsed.to_dict()

    def start(folder: Any, **how: Any) -> dict[str, float]:
        return (train_sounds if sounds else train_images)(model, data, folder, chosen, parsed, **how)

    run(start, out, folds, chosen, identity, options, f"{model} on {data}", as_json)


def _check_data(data: str) -> bool:
    """Whether the data are sounds; what is neither that nor images is refused."""
    from sot.data.spec import check_pictures, holds_sounds

    if holds_sounds(data):
        return True
    check_pictures(data)
    return False


def _chosen(model: str, data: str, recipe: str | None, weights: bool) -> tuple[str, str, bool]:
    """Name of the recipe, the same with why it was chosen, and whether it starts from published weights."""
    from sot.training.choice import FINETUNE, choose_recipe, has_weights

    name, why = (recipe, "") if recipe is not None else choose_recipe(model, data, weights)
    published = name == FINETUNE and not weights and has_weights(model)
    return name, f"{name} ({why})" if why else name, published


def _own_size(model: str, recipe: str) -> list[str]:
    """The package's recipes size images for timm models: of others it is the processor's, until a user sets it."""
    from sot.models.equip import is_timm
    from sot.training.recipe import recipe_names

    return ["img_size=null"] if recipe in recipe_names() and not is_timm(model) else []
