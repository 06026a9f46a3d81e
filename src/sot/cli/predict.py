"""`sot predict`: classes of images and texts."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from sot.cli.options import BatchOption, EncodingOption, JsonOption, console, errors, plain, progress, refuse
from sot.files import check_writable, counted, written_atomically

if TYPE_CHECKING:
    from sot.evaluation.predict import Prediction

EXPORTED = (".onnx", ".pt2")
OUTPUTS = (".csv", ".tsv", ".jsonl")
SHOWN = 120  # characters of a text in a table
PAGE = 500  # inputs in a table; the next begins a new one, so that memory does not grow
FEW = 64  # inputs; for these the compiled kernels would take longer to load than they save


@dataclass
class Given:
    """What is to be predicted, read as it is needed; `rows` are what it stood in, `size` how many, if that is known."""

    items: Iterable[str]
    pairs: Iterable[str] | None = None
    rows: Iterable[Mapping[str, Any]] | None = None
    names: list[str] = field(default_factory=list)
    size: int | None = None


def predict(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model, or a file of `sot export`.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(help="Images, sounds, or folders of them. -: one path or text per line of standard input."),
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text; repeatable. With --data: the text column.")] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help="Second text of a pair, one per --text. With --data: its column.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Table of texts: .csv, .tsv, .txt or .jsonl.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write inputs, classes and scores to a .csv, .tsv or .jsonl file.")
    ] = None,
    encoding: EncodingOption = None,
    top: Annotated[int, typer.Option(help="Classes to show per input.", min=1)] = 3,
    batch_size: BatchOption = 32,
    as_json: JsonOption = False,
) -> None:
    """Classify images, sounds or texts: files, folders or a table."""
    given = _given(folder, inputs or [], text or [], pair or [], data, encoding)
    if output is not None:
        refuse("--output writes a file", {"--json": as_json})
        if output.suffix not in OUTPUTS:
            raise ValueError(f"--output must end in {', '.join(OUTPUTS[:-1])} or {OUTPUTS[-1]}, got {output}")
        check_writable(output)
    predictions, config, limit = _predictions(folder, given, top, batch_size)
    from sot.ops.registry import asked, use

    few = given.size is not None and given.size <= FEW and asked() == "auto"
    with use("torch") if few else nullcontext():
        if output is None:
            done = _print(predictions, as_json)
        else:
            done = _write(output, predictions, given, top, config, limit)
            console.print(plain(f"{counted(done['inputs'], 'predictions')} in {output}"), soft_wrap=True)
    if done["cut"] and not as_json:
        errors.print(f"Cut {counted(done['cut'], 'texts')} at {limit} tokens, the model's limit.", style="yellow")
    if done["failed"]:
        raise ValueError(f"{done['failed']} of {counted(done['inputs'], 'inputs')} could not be read")


# --- what is given -----------------------------------------------------------------------------------------


def _given(
    folder: Path, inputs: list[str], text: list[str], pair: list[str], data: Path | None, encoding: str | None
) -> Given:
    """Paths or texts of the command line, of standard input or of a table; mistakes are found without torch."""
    from sot.data.rows import check_unicode
    from sot.evaluation.formats import exported_folder
    from sot.saved import folder_modality

    check_unicode(*text, *pair)
    modality = folder_modality(exported_folder(folder) if folder.suffix in EXPORTED else folder)
    texts, kind = modality == "text", "sounds" if modality == "audio" else "images"
    if data is not None:
        return _of_table(folder, None if texts else kind, data, encoding, (inputs, text, pair))
    refuse("there is no --data", {"--encoding": encoding is not None})
    if pair and (inputs or len(pair) != len(text)):
        raise ValueError(f"--pair is given once for each --text, and for no other input, got {len(pair)}")
    if "-" in inputs:
        refuse("- reads every input from standard input", {"--text": bool(text), "other inputs": len(inputs) > 1})
        return Given(_lines())
    if texts and inputs:
        raise ValueError(f"{folder} is a model for texts: give --text, or - for one a line, not {inputs[0]!r}")
    if not texts:
        refuse(f"{folder} is a model for {kind}", {"--text": bool(text), "--pair": bool(pair)})
    if not inputs and not text:
        raise ValueError(f"nothing to predict: give {kind}, --text, --data, or - to read lines from standard input")
    items = text if texts else [file for path in inputs for file in _files(path, kind)]
    return Given(items, pair or None, size=len(items))


def _of_table(folder: Path, kind: str | None, data: Path, encoding: str | None, others: tuple[list[str], ...]) -> Given:
    from sot.data.rows import check_texts, read_rows

    inputs, text, pair = others
    if kind is not None:
        hint = f": give the folder as it is, {data}" if data.is_dir() else ""
        raise ValueError(f"{folder} is a model for {kind}, and --data is a table of texts{hint}")
    refuse("--data is the only input", {repr(each): True for each in inputs[:1]})
    if len(text) > 1 or len(pair) > 1:
        raise ValueError("with --data, --text and --pair name one column each")
    second = pair[0] if pair else None
    column, names, size = check_texts(data, text[0] if text else None, second, encoding)
    # of the rows only those of a batch are kept in memory
    rows, of_texts, *of_pairs = tee(read_rows(data, None, encoding), 2 if second is None else 3)
    pairs = None if second is None else (str(row[second]) for row in of_pairs[0])
    return Given((str(row[column]) for row in of_texts), pairs, rows, names, size)


def _lines() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text is reported, the others read
    lines = (line.rstrip("\n") for line in sys.stdin)
    first = next(lines, None)
    if first is None:
        raise ValueError("nothing to predict: standard input is empty")
    yield first
    yield from lines


def _files(path: str, kind: str) -> list[str]:
    """A file as it is, even if it is not there; of a folder all images or sounds in it, however deep."""
    if not os.path.isdir(path):
        return [path]
    from sot.data.pictures import PICTURE_SUFFIXES
    from sot.data.spec import SOUND_SUFFIXES, files_in

    found = files_in(Path(path), SOUND_SUFFIXES if kind == "sounds" else PICTURE_SUFFIXES)
    if not found:
        raise ValueError(f"{path} holds no {kind}")
    return [str(file) for file in found]


# --- what is predicted -------------------------------------------------------------------------------------


def _predictions(folder: Path, given: Given, top: int, batch_size: int) -> tuple[Iterable[Prediction], Any, int]:
    """The predictions as they are asked for, the model's configuration, and how many tokens it reads."""
    from sot.evaluation.predict import predict_images, predict_texts
    from sot.models.accelerate import accelerate
    from sot.models.folder import load_model

    if folder.suffix in EXPORTED:
        from sot.evaluation.export import load_exported

        model, processor = load_exported(folder)
        if model.config.modality == "audio":
            batch_size = 1  # what was exported may read clips of one length only
    else:
        model, processor = load_model(folder)
        accelerate(model)
    if model.config.modality == "text":
        found = predict_texts(model, processor, given.items, top, batch_size, given.pairs)
        return progress(found, "Predicting", given.size), model.config, processor.model_max_length
    found = predict_images(model, processor, given.items, top, batch_size)
    return progress(found, "Predicting", given.size), model.config, 0


# --- what is shown -----------------------------------------------------------------------------------------


def _count(done: Counter[str], prediction: Prediction) -> None:
    """One more input, that could not be read or was cut, if so."""
    done.update(inputs=1, failed=int(prediction.error is not None), cut=int(prediction.cut))


def _print(predictions: Iterable[Prediction], as_json: bool) -> Counter[str]:
    """Print them as lines of JSON or as tables."""
    done, table = Counter[str](), Table("input", "class", "score")
    for prediction in predictions:
        _count(done, prediction)
        if as_json:
            several = prediction.labels is not None
            typer.echo(
                json.dumps({name: value for name, value in vars(prediction).items() if several or name != "labels"})
            )
            continue
        if prediction.error is not None:
            said = f"Cannot read {_short(prediction.source)}: {prediction.error}"
            errors.print(plain(said), style="yellow", soft_wrap=True)
        _add(table, prediction)
        if done["inputs"] % PAGE == 0:
            console.print(table)
            table = Table("input", "class", "score")
    if table.row_count:
        console.print(table)
    return done


def _add(table: Table, prediction: Prediction) -> None:
    source = "\n".join(_short(text) for text in (prediction.source, prediction.pair) if text is not None)
    for number, (name, score) in enumerate(prediction.classes):
        has = " ✓" if name in (prediction.labels or ()) else ""
        table.add_row(plain(source if number == 0 else ""), plain(name), f"{score:.3f}{has}")


def _short(text: str) -> str:
    """One line of a text, or a path, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def _write(
    output: Path, predictions: Iterable[Prediction], given: Given, top: int, config: Any, limit: int
) -> Counter[str]:
    """Write each input, as it was, with its classes and scores beside it."""
    done, number = Counter[str](), config.problem == "regression"
    count = 1 if number else min(top, config.num_labels)
    new = [name for rank in range(1, count + 1) for name in _names(rank)]
    several = ["labels"] if config.problem == "multi_label_classification" else []
    new = [*several, *(["predicted"] if number else new), "note"]
    inputs = given.names or (["file"] if config.modality != "text" else ["text", *(["pair"] if given.pairs else [])])
    rows: Iterator[Mapping[str, Any]] | None = None if given.rows is None else iter(given.rows)
    with written_atomically(output) as opened:
        keep = _writer(opened, output.suffix, [*(name for name in inputs if name not in new), *new])
        for prediction in predictions:
            _count(done, prediction)
            row = dict(zip(inputs, (prediction.source, prediction.pair))) if rows is None else next(rows)
            keep({**row, **dict.fromkeys(new, ""), **_scores(prediction, number, limit)})
    return done


def _names(rank: int) -> tuple[str, str]:
    return ("predicted", "score") if rank == 1 else (f"predicted_{rank}", f"score_{rank}")


def _scores(prediction: Prediction, number: bool, limit: int) -> dict[str, Any]:
    found: dict[str, Any] = {"note": prediction.error or (f"cut at {limit} tokens" if prediction.cut else "")}
    found |= {} if prediction.labels is None else {"labels": ";".join(prediction.labels)}
    if number:
        return found | dict(zip(["predicted"], [value for _, value in prediction.classes]))
    for rank, (name, score) in enumerate(prediction.classes, 1):
        found |= dict(zip(_names(rank), (name, round(score, 6))))
    return found


def _writer(opened: Any, suffix: str, names: list[str]) -> Any:
    """A function that writes one row, by the ending of the file."""
    if suffix == ".jsonl":
        return lambda row: opened.write(json.dumps(row, ensure_ascii=False) + "\n")
    form: dict[str, Any] = {"lineterminator": "\n", "delimiter": "\t" if suffix == ".tsv" else ","}
    writer = csv.DictWriter(opened, names, **form)
    writer.writeheader()
    return writer.writerow
