"""`sot finetune`: text classifiers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sot.cli.options import (
    AccumulationOption,
    DataOption,
    DevOption,
    HeadOption,
    JsonOption,
    LabelOption,
    LogOption,
    OutOption,
    OverwriteOption,
    PairOption,
    RecipeOption,
    RegressionOption,
    ResumeOption,
    SetOption,
    TaskOption,
    TextOption,
    check_log,
    print_scores,
    read_recipe,
    text_data,
)


def finetune(
    model: Annotated[str, typer.Option(help="A Hugging Face text model: hub name or folder.")],
    out: OutOption,
    task: TaskOption = None,
    data: DataOption = None,
    dev: DevOption = None,
    text: TextOption = "sentence",
    pair: PairOption = None,
    label: LabelOption = "label",
    regression: RegressionOption = False,
    recipe: RecipeOption = "text",
    head: HeadOption = None,
    settings: SetOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    accumulation: AccumulationOption = 1,
    log: LogOption = "tensorboard",
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a text classifier by a recipe."""
    report_to = check_log(log)
    chosen, parsed = read_recipe(recipe, settings, head, "text")
    columns = (text, pair, label)
    table, name = text_data(task, data, dev, columns, regression=regression)
    from sot.training.run import full_name
    from sot.training.train_texts import fine_tune

    source: dict[str, Any] = {"source": data and full_name(data), "dev": dev and full_name(str(dev))}
    source |= {"columns": [*columns], "regression": regression}
    options = {"resume": resume, "overwrite": overwrite, "accumulation": accumulation, "report_to": report_to}
    metrics = fine_tune(model, table, name, out, chosen, parsed, source=source, **options)  # type: ignore[arg-type]
    print_scores(metrics, as_json, f"{model} on {name}, in {out}")
