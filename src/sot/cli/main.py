"""The command line. Each command is a file here: it parses, calls the package, and prints."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stdout

import typer
from safetensors import SafetensorError

from sot.cli import bench
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
from sot.cli.ui import ui
from sot.errors import SettingError

COMMANDS = (
    *(models, backbones, convert, train, finetune, recipes, demo),
    *(evaluate, predict, export, probe, explain, reproduce, ui),
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def describe() -> None:
    """Second-order transformers: classify from the class token and the word tokens."""


for command in COMMANDS:
    app.command()(command)
app.add_typer(bench.app, name="bench")


def option_of(setting: str) -> str:
    """What the command line calls a setting of the library."""
    return "--set" if setting == "settings" else f"--{setting.replace('_', '-')}"


def main() -> None:
    """Run the command line; what a user got wrong is one sentence and exit code 2."""
    try:
        with nullcontext() if is_first_process() else redirect_stdout(io.StringIO()):
            app()
    except (ValueError, OSError, SafetensorError) as error:
        said = error.worded(option_of) if isinstance(error, SettingError) else str(error)
        errors.print(f"Error: {said}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
