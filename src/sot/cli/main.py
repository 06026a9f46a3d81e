"""The command line. Each command is a file here: it parses, calls the package, and prints."""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from typing import Annotated

import typer
from safetensors import SafetensorError

from sot import __version__
from sot.cli import bench_counts
from sot.cli.backbones import backbones
from sot.cli.convert import convert
from sot.cli.demo import demo
from sot.cli.evaluate import evaluate
from sot.cli.explain import explain
from sot.cli.export import export
from sot.cli.finetune import finetune
from sot.cli.models import models
from sot.cli.options import errors, is_first_process
from sot.cli.predict import predict
from sot.cli.probe import probe
from sot.cli.recipes import recipes
from sot.cli.reproduce import reproduce
from sot.cli.train import train
from sot.cli.tune import tune
from sot.cli.ui import ui
from sot.errors import Interrupted, SettingError
from sot.files import one_line, visible

COMMANDS = {
    "Train": (train, finetune, tune, probe, recipes, demo),
    "Use": (predict, evaluate, explain, export, ui),
    "Study": (models, backbones, reproduce, convert),
}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sot {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import", envvar="SOT_IMPORT", help="Import your module first, e.g. one that adds a pool or norm."
        ),
    ] = None,
) -> None:
    """Second-order transformers: classify from the class token and the word tokens."""
    if modules:
        sys.path.insert(0, os.getcwd())  # where a console script does not look
    for name in modules or []:
        try:
            import_module(name)
        except Exception as error:  # whatever a stranger's module raises
            raise ValueError(f"--import {name} failed: {one_line(error)}") from error


for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(bench_counts.app, name="bench", rich_help_panel="Study")


def option_of(setting: str) -> str:
    """What the command line calls a setting of the library."""
    return "--set" if setting == "settings" else f"--{setting.replace('_', '-')}"


def _visible(record: logging.LogRecord) -> bool:
    """Keep what a stranger's files are called from steering the terminal through the log."""
    record.msg, record.args = visible(record.getMessage()), ()
    return True


def worded(error: Exception) -> str:
    """An error in the words of the command line; what the system says of a file without its number."""
    if isinstance(error, SettingError):
        return error.worded(option_of)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _say_how_to_go_on(stop: Interrupted) -> None:
    """What was saved, and the command that continues; on standard error, where a run's log is."""
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    if stop.checkpoint is None:
        said = "Stopped before the first checkpoint. Nothing was saved."
    else:
        said = f"Stopped. Saved: {stop.checkpoint}\nContinue with: {shlex.join(['sot', *words, '--resume'])}"
    errors.print(said, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; what a user got wrong is one sentence and exit code 2."""
    logging.getLogger("sot").addFilter(_visible)
    try:
        with nullcontext() if is_first_process() else redirect_stdout(io.StringIO()):
            app(prog_name="sot")
    except Interrupted as stop:
        if is_first_process():
            _say_how_to_go_on(stop)
        raise SystemExit(128 + stop.number) from None
    except (ValueError, OSError, SafetensorError) as error:
        said = worded(error)
        errors.print(f"Error: {said}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
