"""`sot evaluate`: how good a trained model is."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sot.cli.options import (
    BatchOption,
    EncodingOption,
    JsonOption,
    LabelOption,
    PairOption,
    SeparatorOption,
    TaskOption,
    TextOption,
    console,
    is_first_process,
    of_data,
    of_output,
    picture_columns,
    plain,
    print_scores,
    progress,
    read_tags,
    refuse,
)
from sot.cli.texts import TextOptions
from sot.files import as_png, check_writable, rich_table, write_atomically

if TYPE_CHECKING:
    from sot.evaluation.evaluate import Evaluation

SEVERITIES = "1,3,5"
_progress = partial(progress, title="Evaluating")


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    data: Annotated[str | None, of_data(help="As --data of sot train or sot finetune.")] = None,
    task: TaskOption = None,
    text: TextOption = "sentence",
    pair: PairOption = None,
    label: LabelOption = "label",
    encoding: EncodingOption = None,
    separator: SeparatorOption = None,
    all_classes: Annotated[
        bool, typer.Option(help="Let the model choose classes that the data does not have.")
    ] = False,
    confusion: Annotated[Path | None, of_output(help="Write the confusion matrix to this .png file.")] = None,
    samples: Annotated[int, of_data(help="Score this many images, drawn once. 0: all.", min=0)] = 0,
    corruptions: Annotated[
        str | None, typer.Option(help="Corrupt images: common, all, noise, blur, weather, digital, or names.")
    ] = None,
    severities: Annotated[str, typer.Option(help="Severities of the corruptions, from 1 to 5.")] = SEVERITIES,
    batch_size: BatchOption = 64,
    as_json: JsonOption = False,
) -> None:
    """Score a trained model: accuracy, F1, calibration, each class; or the metric of a GLUE task."""
    from sot.saved import class_names, folder_config, folder_modality

    several = folder_config(folder).get("problem_type") == "multi_label_classification"
    refuse(f"{folder} has one class for each input", {"--separator": separator is not None and not several})
    modality = folder_modality(folder)
    reads_texts, kind = modality == "text", "sounds" if modality == "audio" else "images"
    texts_only = {"--task": task is not None, "--text": text != "sentence", "--pair": pair is not None}
    texts_only |= {"--encoding": encoding is not None}
    pictures_only = {"--samples": samples > 0, "--all-classes": all_classes, "--corruptions": corruptions is not None}
    if reads_texts:
        refuse(f"{folder} is a model for texts", pictures_only)
    else:
        sounds = {"--corruptions": corruptions is not None and modality == "audio"}
        refuse(f"{folder} is a model for {kind}", texts_only | sounds)
    if corruptions is not None:
        unfit = {"--confusion": confusion is not None, "--all-classes": all_classes, "--corruptions": several}
        refuse("--corruptions scores accuracy of one class an image", unfit)
        _evaluate_corrupted(folder, data, corruptions, severities, batch_size, samples, as_json)
        return
    refuse("there are no --corruptions", {"--severities": severities != SEVERITIES})
    _check_confusion(confusion, several=several)
    _check_data(folder, data, task, None if reads_texts else kind, several)
    from sot.evaluation.evaluate import draw_confusion, evaluate_text, open_images, unseen_part

    if reads_texts:
        read = TextOptions(task, data, None, text, pair, label, False, encoding, several, separator)
        texts, _ = read.read(class_names(folder))
        texts = texts if data is None else unseen_part(folder, data, texts)
        _check_confusion(confusion, texts.labels is not None)
        result = evaluate_text(folder, texts, batch_size, _progress)
    else:
        columns = picture_columns(str(data), label, read_tags(label, several, separator))
        pictures = open_images(folder, str(data), samples, columns)
        result = pictures.evaluate(batch_size, _progress, all_classes)
    _show(result, folder, as_json)
    if confusion is not None and is_first_process():
        write_atomically(confusion, as_png(draw_confusion(result)))


def _check_data(folder: Path, data: str | None, task: str | None, kind: str | None, several: bool) -> None:
    """Raise ValueError for data of the other kind, which the readers would only call missing."""
    from sot.data.rows import SUFFIXES, check_table
    from sot.data.tags import has_pictures

    if kind is not None:
        if data is None:
            raise ValueError(f"an {'image' if kind == 'images' else 'audio'} model needs --data to be evaluated on")
        _check_kind(folder, kind, data)
        table = Path(data).suffix in SUFFIXES and Path(data).is_file()
        if table and not has_pictures(data):
            raise ValueError(f"{folder} is a model for images, and {data} is a table of texts")
        if several and not table:
            raise ValueError(f"{folder} may see several classes in an image: --data must be a table, got {data}")
    elif task is None and data is not None and not data.startswith("hfds/"):
        place = Path(data)
        if place.is_dir() and not any(place.glob("*.tsv")) and not any(place.glob("*.txt")):
            raise ValueError(f"{folder} is a model for texts: give --data a table of them, and {data} is a folder")
        if not place.is_dir():
            check_table(place)


def _check_kind(folder: Path, kind: str, data: str) -> None:
    from sot.data.spec import holds_sounds

    if holds_sounds(data) != (kind == "sounds"):
        other = "no sounds" if kind == "sounds" else "sounds"
        raise ValueError(f"{folder} is a model for {kind}, and {data} holds {other}")


def _check_confusion(file: Path | None, classes: bool = True, several: bool = False) -> None:
    if file is None:
        return
    if file.suffix.lower() != ".png":
        raise ValueError(f"--confusion must end in .png, got {file}")
    if not file.parent.is_dir():
        raise ValueError(f"--confusion {file} needs the folder {file.parent}, which is not there")
    check_writable(file)
    if not classes:
        raise ValueError(f"--confusion {file} is for classes, and the data has numbers to predict")
    if several:
        raise ValueError(f"--confusion {file} is for one class a sample, and the model may predict several")


def _show(result: Evaluation, folder: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps({**result.scores, "note": result.note, "classes": result.by_class(), "f1": result.f1_by_class()})
        )
        return
    print_scores(result.scores, False, f"{folder} {result.note}")
    f1 = result.f1_by_class()
    rows = [(plain(n), str(samples), f"{r:.3f}", f"{p:.3f}", f"{f1[n]:.3f}") for n, samples, r, p in result.by_class()]
    if rows:  # none of a regression
        console.print(rich_table(["class"], ["samples", "recall", "precision", "f1"], rows))


def _evaluate_corrupted(
    folder: Path, data: str | None, wanted: str, severities: str, batch_size: int, samples: int, as_json: bool
) -> None:
    if data is None:
        raise ValueError("--corruptions needs an image model and --data")
    _check_kind(folder, "images", data)
    levels = [part.strip() for part in severities.split(",")]
    if not all(level.isdigit() for level in levels):
        raise ValueError(f"--severities are numbers from 1 to 5 such as 1,3,5, got {severities!r}")
    from sot.evaluation.robustness import corruption_names, evaluate_corrupted, mean_accuracy

    numbers = [int(level) for level in levels]
    found = evaluate_corrupted(folder, data, corruption_names(wanted), numbers, batch_size, samples, _progress)
    if as_json:
        rows = [vars(each) for each in found]
        typer.echo(json.dumps({"clean": found[0].accuracy, "corrupted": mean_accuracy(found), "rows": rows[1:]}))
        return
    table = rich_table(["corruption"], [f"severity {n}" for n in numbers], title=plain(f"{folder}: accuracy"))
    for name in dict.fromkeys(each.corruption for each in found[1:]):
        table.add_row(name, *(f"{each.accuracy:.4f}" for each in found if each.corruption == name))
    console.print(table)
    console.print(f"clean {found[0].accuracy:.4f}, corrupted {mean_accuracy(found):.4f} on average")
