"""`sot demo`: the idea in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sot.cli.options import SetOption, console, errors
from sot.files import rich_table


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs and the figure.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(help="Seeds per head.", min=1)] = 3,
    settings: SetOption = None,
) -> None:
    """Compare class token, word tokens and both on real images: minutes on a laptop."""
    from transformers.utils import logging

    from sot.training.demo import run_demo, summary

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    accuracies = run_demo(out, range(seeds), lambda text: errors.print(text, highlight=False), settings or [])
    title = f"digits, accuracy in % over {seeds} seeds"
    console.print(rich_table(["head"], ["mean", "spread"], summary(accuracies), title=title))
    console.print(
        f"Curves: {out / 'demo.png'}. Next: sot train --model deit_tiny_patch16_224 --data FOLDER --out RUN",
        soft_wrap=True,
    )
