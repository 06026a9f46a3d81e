"""`sot finetune`: text classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sot.cli.groups import grouped
from sot.cli.options import RecipeOption
from sot.cli.runs import RunOptions
from sot.cli.texts import TextOptions, check_text_model


@grouped
def finetune(
    *,
    model: Annotated[str, typer.Option(help="A Hugging Face text model: hub name or folder; or the folder of a run.")],
    texts: TextOptions,
    recipe: RecipeOption = "text",
    run: RunOptions,
) -> None:
    """Fine-tune a text classifier."""
    run.check()
    check_text_model(model)
    texts.check(run.folds)
    chosen, head = run.recipe_and_head(recipe, model, "text")
    run.say_of_warmup(recipe, chosen)
    table, name = texts.read()
    from sot.training.run_folder import full_name
    from sot.training.train_texts import fine_tune

    source = texts.source()
    identity = {"command": "finetune", "model": full_name(model), "data": name, **source}
    identity["head"] = None if head is None else head.to_dict()

    def start(folder: Path, **how: Any) -> dict[str, float]:
        return fine_tune(model, table, name, folder, chosen, head, source=source, **how)

    run.carry_out(start, chosen, identity, f"{model} on {name}", recipe)
