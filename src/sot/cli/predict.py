"""`sot predict`: classes of pictures and texts."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sot.cli.options import BatchOption, JsonOption, console, errors, plain, refuse

if TYPE_CHECKING:
    from sot.evaluation.predict import Prediction


def predict(
    folder: Annotated[Path, typer.Argument(help="A trained model, or a file that `sot export` made of one.")],
    inputs: Annotated[list[str] | None, typer.Argument(help="Pictures; or - for one path or text a line.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text; repeatable.")] = None,
    pair: Annotated[list[str] | None, typer.Option(help="The second text of a pair, one for each --text.")] = None,
    top: Annotated[int, typer.Option(help="How many classes to show.", min=1)] = 3,
    batch_size: BatchOption = 32,
    as_json: JsonOption = False,
) -> None:
    """Classify pictures or texts."""
    from sot.evaluation.export import load_exported
    from sot.evaluation.predict import predict_images, predict_texts
    from sot.models.accelerate import accelerate
    from sot.models.folder import load_model

    given = _given(inputs or [], text or [], pair or [])
    if folder.suffix in (".onnx", ".pt2"):
        model, processor = load_exported(folder)
    else:
        model, processor = load_model(folder)
        accelerate(model)
    if model.config.modality == "text":
        if inputs and "-" not in inputs:
            raise ValueError(f"{folder} is a model for texts: give --text, or - for one a line, not {inputs[0]!r}")
        predictions = predict_texts(model, processor, given, top, batch_size, pair)
    else:
        refuse(f"{folder} is a model for pictures", {"--text": bool(text), "--pair": bool(pair)})
        predictions = predict_images(model, processor, given, top, batch_size)
    failed = _print_predictions(predictions, as_json)
    if failed:
        raise ValueError(f"{failed} of {len(given)} inputs could not be read")


def _given(inputs: list[str], text: list[str], pair: list[str]) -> list[str]:
    """Paths or texts of the command line, or of standard input."""
    from sot.evaluation.predict import check_unicode

    check_unicode(*text, *pair)
    if pair and (inputs or len(pair) != len(text)):
        raise ValueError(f"--pair is given once for each --text, and for no other input, got {len(pair)}")
    if "-" in inputs:
        refuse("- reads every input from standard input", {"--text": bool(text), "other inputs": len(inputs) > 1})
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text is reported, the others read
        inputs = [line.rstrip("\n") for line in sys.stdin]
    if not inputs and not text:
        raise ValueError("nothing to predict: give pictures, --text, or - to read lines from standard input")
    return [*inputs, *text]


def _print_predictions(predictions: Iterable[Prediction], as_json: bool) -> int:
    """Print them, and return how many inputs could not be read."""
    table, failed = Table("input", "class", "score"), 0
    for prediction in predictions:
        failed += prediction.error is not None
        if as_json:
            typer.echo(json.dumps(vars(prediction)))
            continue
        if prediction.error is not None:
            errors.print(plain(f"Cannot read {prediction.source}: {prediction.error}"), style="yellow", soft_wrap=True)
        source = "\n".join(filter(None, (prediction.source, prediction.pair)))
        for number, (name, score) in enumerate(prediction.classes):
            table.add_row(plain(source if number == 0 else ""), plain(name), f"{score:.3f}")
    if not as_json and table.row_count:
        console.print(table)
    return failed
