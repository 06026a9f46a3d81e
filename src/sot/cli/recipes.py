"""`sot recipes`: settings of training by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from sot.cli.options import console


def recipes(name: Annotated[str | None, typer.Argument(help="Recipe to print. Default: list all.")] = None) -> None:
    """List the recipes, or print one."""
    from sot.training.recipe import load_recipe, recipe_names

    if name is not None:
        typer.echo(load_recipe(name).to_yaml(), nl=False)
        return
    table = Table("recipe", "task", "about")
    for each in recipe_names():
        recipe = load_recipe(each)
        table.add_row(each, recipe.task, recipe.about)
    console.print(table)
