"""`sot finetune`: text classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sot.cli.options import (
    AccumulationOption,
    DataOption,
    DevOption,
    EncodingOption,
    HeadOption,
    JsonOption,
    LabelOption,
    LogOption,
    MultiLabelOption,
    OutOption,
    OverwriteOption,
    PairOption,
    RecipeOption,
    RegressionOption,
    ResumeOption,
    SeparatorOption,
    SetOption,
    TaskOption,
    TextOption,
    check_log,
    read_recipe,
    read_tags,
)
from sot.cli.runs import (
    BalanceOption,
    FoldsOption,
    FreezeOption,
    LoraOption,
    MetricOption,
    PatienceOption,
    WeightsOption,
    check_run,
    own_head,
    run,
    run_settings,
    say,
)
from sot.cli.texts import check_text_model, check_texts, source_of, text_data


def finetune(
    model: Annotated[str, typer.Option(help="A Hugging Face text model: hub name or folder; or the folder of a run.")],
    out: OutOption,
    task: TaskOption = None,
    data: DataOption = None,
    dev: DevOption = None,
    text: TextOption = "sentence",
    pair: PairOption = None,
    label: LabelOption = "label",
    regression: RegressionOption = False,
    encoding: EncodingOption = None,
    multi_label: MultiLabelOption = False,
    separator: SeparatorOption = None,
    recipe: RecipeOption = "text",
    head: HeadOption = None,
    settings: SetOption = None,
    metric: MetricOption = None,
    patience: PatienceOption = None,
    balance: BalanceOption = False,
    folds: FoldsOption = None,
    weights: WeightsOption = None,
    freeze: FreezeOption = False,
    lora: LoraOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    accumulation: AccumulationOption = 1,
    log: LogOption = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a text classifier."""
    report_to = check_log(log)
    check_run(out, resume, overwrite, weights)
    columns = (text, pair, label)
    check_text_model(model)
    tags = read_tags(label, multi_label, separator)
    check_texts(task, data, dev, columns, folds, encoding, tags, regression)
    wanted = [*(settings or []), *run_settings(metric, patience, balance, freeze, lora)]
    chosen, parsed = read_recipe(recipe, wanted, head, "text")
    parsed = own_head(model, head, parsed)
    table, name = text_data(task, data, dev, columns, regression=regression, encoding=encoding, tags=tags)
    from sot.training.run_folder import full_name
    from sot.training.train_texts import fine_tune

    source = source_of(data, dev, columns, regression, tags)
    options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "weights": weights, "say": say}
    options |= {"accumulation": accumulation, "report_to": report_to, "chosen": recipe}
    identity = {"command": "finetune", "model": full_name(model), "data": name, **source}
    identity["head"] = None if parsed is None else parsed.to_dict()

    def start(folder: Path, **how: Any) -> dict[str, float]:
        return fine_tune(model, table, name, folder, chosen, parsed, source=source, **how)

    run(start, out, folds, chosen, identity, options, f"{model} on {name}", as_json)
