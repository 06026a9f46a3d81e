"""Commands that use a trained model: evaluate, predict, export."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sot.cli.runs import (
    BatchOption,
    JsonOption,
    LabelOption,
    PairOption,
    TaskOption,
    TextOption,
    console,
    errors,
    is_first_process,
    print_scores,
    progress,
    text_data,
)
from sot.files import write_atomically

if TYPE_CHECKING:
    from sot.evaluation.evaluate import Evaluation
    from sot.evaluation.predict import Prediction

SEVERITIES = "1,3,5"


def plain(text: str) -> Text:
    """What users wrote, as it is: no markup, no emoji; of bytes that are no text their numbers."""
    return Text(text.encode(errors="backslashreplace").decode())


def _refuse(why: str, options: Mapping[str, bool]) -> None:
    """Raise ValueError for options that were given and would be ignored."""
    given = [name for name, is_given in options.items() if is_given]
    if given:
        raise ValueError(f"{why}: leave out {' and '.join(given)}")


def _progress(items: Iterable[Any]) -> Iterable[Any]:
    return progress(items, "Evaluating")


def evaluate(
    folder: Annotated[Path, typer.Argument(help="A trained model.")],
    data: Annotated[str | None, typer.Option(help="As in sot train, or as in sot finetune.")] = None,
    task: TaskOption = None,
    text: TextOption = "sentence",
    pair: PairOption = None,
    label: LabelOption = "label",
    all_classes: Annotated[
        bool, typer.Option(help="Let the model choose among classes the data does not have.")
    ] = False,
    confusion: Annotated[Path | None, typer.Option(help="Write the confusion matrix as a PNG picture.")] = None,
    samples: Annotated[int, typer.Option(help="Score only so many pictures, drawn once; 0 is all.", min=0)] = 0,
    corruptions: Annotated[
        str | None, typer.Option(help="Corrupt pictures: common, all, noise, blur, weather, digital, or names.")
    ] = None,
    severities: Annotated[str, typer.Option(help="Of the corruptions, from 1 to 5: 1,3,5.")] = SEVERITIES,
    batch_size: BatchOption = 64,
    as_json: JsonOption = False,
) -> None:
    """Score a trained model: accuracy, loss, calibration, by class; or the metric of a GLUE task."""
    from sot.evaluation.evaluate import draw_confusion, evaluate_text, open_images
    from sot.models.folder import class_names, folder_modality

    reads_texts = folder_modality(folder) == "text"
    texts_only = {"--task": task is not None, "--text": text != "sentence", "--pair": pair is not None}
    texts_only["--label"] = label != "label"
    pictures_only = {"--samples": samples > 0, "--all-classes": all_classes, "--corruptions": corruptions is not None}
    if reads_texts:
        _refuse(f"{folder} is a model for texts", pictures_only)
    else:
        _refuse(f"{folder} is a model for pictures", texts_only)
    if corruptions is not None:
        _refuse("--corruptions scores accuracy", {"--confusion": confusion is not None, "--all-classes": all_classes})
        _evaluate_corrupted(folder, data, corruptions, severities, batch_size, samples, as_json)
        return
    _refuse("there are no --corruptions", {"--severities": severities != SEVERITIES})
    if reads_texts:
        texts, _ = text_data(task, data, None, (text, pair, label), class_names(folder))
        _check_confusion(confusion, texts.labels is not None)
        result = evaluate_text(folder, texts, batch_size, _progress)
    elif data is None:
        raise ValueError("an image model needs --data to be evaluated on")
    else:
        _check_confusion(confusion)
        result = open_images(folder, data, samples).evaluate(batch_size, _progress, all_classes)
    _show(result, folder, as_json)
    if confusion is not None and is_first_process():
        write_atomically(confusion, draw_confusion(result))


def _check_confusion(file: Path | None, classes: bool = True) -> None:
    if file is None:
        return
    if file.suffix.lower() != ".png":
        raise ValueError(f"--confusion must end in .png, got {file}")
    if not file.parent.is_dir():
        raise ValueError(f"--confusion {file} needs the folder {file.parent}, which is not there")
    if not classes:
        raise ValueError(f"--confusion {file} is for classes, and the data has numbers to predict")


def _show(result: Evaluation, folder: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**result.scores, "note": result.note, "classes": result.by_class()}))
        return
    print_scores(result.scores, False, f"{folder} {result.note}")
    rows = result.by_class()
    if not rows:  # of a regression
        return
    table = Table("class")
    for column in ("samples", "recall", "precision"):
        table.add_column(column, justify="right")
    for name, samples, recall, precision in rows:
        table.add_row(plain(name), str(samples), f"{recall:.3f}", f"{precision:.3f}")
    console.print(table)


def _evaluate_corrupted(
    folder: Path, data: str | None, wanted: str, severities: str, batch_size: int, samples: int, as_json: bool
) -> None:
    from sot.evaluation.robustness import corruption_names, evaluate_corrupted, mean_accuracy

    if data is None:
        raise ValueError("--corruptions needs an image model and --data")
    levels = [part.strip() for part in severities.split(",")]
    if not all(level.isdigit() for level in levels):
        raise ValueError(f"--severities are numbers from 1 to 5 such as 1,3,5, got {severities!r}")
    numbers = [int(level) for level in levels]
    found = evaluate_corrupted(folder, data, corruption_names(wanted), numbers, batch_size, samples, _progress)
    if as_json:
        rows = [vars(each) for each in found]
        typer.echo(json.dumps({"clean": found[0].accuracy, "corrupted": mean_accuracy(found), "rows": rows[1:]}))
        return
    table = Table("corruption", title=plain(f"{folder}: accuracy"))
    for number in numbers:
        table.add_column(f"severity {number}", justify="right")
    for name in dict.fromkeys(each.corruption for each in found[1:]):
        table.add_row(name, *(f"{each.accuracy:.4f}" for each in found if each.corruption == name))
    console.print(table)
    console.print(f"clean {found[0].accuracy:.4f}, corrupted {mean_accuracy(found):.4f} on average")


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
    from sot.models.folder import load_model

    given = _given(inputs or [], text or [], pair or [])
    model, processor = load_exported(folder) if folder.suffix in (".onnx", ".pt2") else load_model(folder)
    if model.config.modality == "text":
        if inputs and "-" not in inputs:
            raise ValueError(f"{folder} is a model for texts: give --text, or - for one a line, not {inputs[0]!r}")
        predictions = predict_texts(model, processor, given, top, batch_size, pair)
    else:
        _refuse(f"{folder} is a model for pictures", {"--text": bool(text), "--pair": bool(pair)})
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
        _refuse("- reads every input from standard input", {"--text": bool(text), "other inputs": len(inputs) > 1})
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


def export(
    folder: Annotated[Path, typer.Argument(help="A trained model.")],
    to: Annotated[str, typer.Option(help="onnx or torch.")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", help="File to write; model.onnx or model.pt2 in FOLDER.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model for onnxruntime or torch, for any number of samples and tokens, and check it."""
    from sot.evaluation.export import export_model

    result = export_model(folder, to, out)
    if as_json:
        typer.echo(json.dumps({"file": str(result.file), "differences": result.differences}))
        return
    table = Table("samples", title=plain(f"{result.file}, {result.file.stat().st_size / 1e6:.1f} MB"))
    table.add_column("largest difference of a logit", justify="right")
    for samples, difference in result.differences.items():
        table.add_row(str(samples), f"{difference:.1e}")
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (evaluate, predict, export):
        app.command()(command)
