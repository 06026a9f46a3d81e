"""`sot explain`: what the class token and the words look at."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from sot.cli.options import JsonOption, console, errors, plain, progress, refuse
from sot.files import as_png, check_folder, write_atomically

if TYPE_CHECKING:
    from sot.explain import Explanation

CAMS = ("gradcam", "gradcam++", "xgradcam", "hirescam", "layercam", "elementwise", "scorecam", "ablationcam")
METHODS = {  # as sot.explain has them, without torch
    "images": (*CAMS, "relevance"),
    "texts": ("relevance", "gradient"),
    "sounds": ("evidence", "gradient"),
}
METHOD_HELP = (
    f"Images: relevance, or one of the grad-cam library: {', '.join(CAMS)}. Texts: relevance, gradient. "
    "Sounds: evidence, gradient. Default: relevance (hirescam where attention is not available), evidence for sounds."
)
MAX_ROWS = 100  # images in columns.png


def explain(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    images: Annotated[list[Path] | None, typer.Argument(help="Images or sounds.")] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the figures (.png), raw values (.npz) and pages (.html).")
    ] = ...,  # type: ignore[assignment]
    text: Annotated[str | None, typer.Option(help="A text, for a text model.")] = None,
    pair: Annotated[str | None, typer.Option(help="The second text of a pair.")] = None,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="True class: one for all, or one per image. Default: the image's folder, if it is a class."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Class to explain. Default: the predicted one.")] = None,
    class_model: Annotated[Path | None, typer.Option(help="Another model for the class token's column.")] = None,
    word_model: Annotated[Path | None, typer.Option(help="Another model for the words' column.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what drives each branch: maps, contributions, spectrum, pairs of words."""
    from sot.saved import class_index, class_names, folder_modality

    folders = {"model": folder, "class_model": class_model, "word_model": word_model}
    kind = {"text": "texts", "audio": "sounds"}.get(folder_modality(folder), "images")
    texts, sounds = kind == "texts", kind == "sounds"
    _check_inputs(folder, kind, images or [], text, pair, method)
    alone = {"--class-model": class_model is not None and sounds, "--word-model": word_model is not None and sounds}
    refuse("sounds are explained by one model", alone)
    _check_out(out)
    names = class_names(folder)
    for other in (class_model, word_model):
        if other is not None and (folder_modality(other) != folder_modality(folder) or class_names(other) != names):
            raise ValueError(f"{other} has not the same inputs and classes as {folder}")
    if target is not None:
        class_index(names, target, "target")
    truths = _truths(label or [], images or [], names)
    if kind == "images":
        _check_pictures(images or [], out)
    from sot.models.folder import load_model

    out.mkdir(parents=True, exist_ok=True)
    opened = {name: load_model(path) for name, path in folders.items() if path is not None}
    (model, processor), options = opened.pop("model"), {**opened, "target": target}
    if method is not None:
        options["method"] = method
    if texts:
        _explain_text(model, processor, (text or "", pair), {**options, "truth": truths[0]}, out, as_json)
    elif sounds:
        _explain_sounds(model, processor, images or [], truths, options, out, as_json)
    else:
        _explain_images(model, processor, images or [], truths, options, out, as_json)


def _check_inputs(
    folder: Path, kind: str, images: list[Path], text: str | None, pair: str | None, method: str | None
) -> None:
    from sot.data.rows import check_unicode

    check_unicode(text, pair)
    if method not in (None, *METHODS[kind]):
        raise ValueError(f"unknown method {method!r} for {kind}; accepted: {', '.join(METHODS[kind])}")
    texts = kind == "texts"
    if texts and images:
        raise ValueError(f"{folder} is a model for texts: give --text, not images")
    if texts and text is None:
        raise ValueError(f"{folder} is a model for texts: give --text")
    if not texts and (text is not None or pair is not None):
        raise ValueError(f"{folder} is a model for {kind}: give {kind}, not --text")
    if not texts and not images:
        raise ValueError(f"{folder} is a model for {kind}: give at least one")


def _check_out(out: Path) -> None:
    if out.suffix in (".png", ".html", ".npz") and not out.is_dir():
        raise ValueError(f"--out is a folder of several files, got {out}: leave out {out.suffix}")
    check_folder(out)


def _check_pictures(images: list[Path], out: Path) -> None:
    from sot.data.pictures import open_picture

    figures = {(out / f"{name}.png").resolve() for name in ("columns", *_file_names(images))}
    for path in images:
        open_picture(path)
        if path.resolve() in figures:
            raise ValueError(f"a figure in {out} would replace the image {path}: choose another --out")


def _truths(given: list[str], images: list[Path], names: list[str]) -> list[str | None]:
    """The true class of each input, where it is known."""
    from sot.saved import class_index

    for name in given:
        class_index(names, name, "label")
    count = max(1, len(images))
    if len(given) > 1 and len(given) != count:
        raise ValueError(f"--label must be given once, or once for each of the {count} images, got {len(given)}")
    if given:
        return [*given] if len(given) == count else [given[0]] * count
    folders = [path.resolve().parent.name for path in images] or [""]
    return [name if name in names else None for name in folders]


def _file_names(images: list[Path]) -> list[str]:
    """Names without ending, numbered where two are the same, again if need be; `columns` is taken."""
    often = Counter(path.stem.lower() for path in images)
    names: list[str] = []
    taken = {"columns"}
    for number, path in enumerate(images, 1):
        name = path.stem if often[path.stem.lower()] == 1 else f"{number}-{path.stem}"
        while name.lower() in taken:
            name = f"{number}-{name}"
        names.append(name)
        taken.add(name.lower())
    return names


def _explain_images(
    model: Any, processor: Any, images: list[Path], truths: list[str | None], options: Any, out: Path, as_json: bool
) -> None:
    from sot.explain import ImageExplanation, columns_figure, explain_image, open_upload
    from sot.explain.figure import mark

    found: list[ImageExplanation] = []
    for path, name, truth in progress(list(zip(images, _file_names(images), truths)), "Explaining"):
        explanation = explain_image(model, processor, open_upload(path), truth=truth, **options)
        write_atomically(out / f"{name}.png", explanation.png())
        write_atomically(out / f"{name}.npz", explanation.npz())
        found.append(explanation)
        if as_json:
            typer.echo(json.dumps({"source": str(path), "file": str(out / f"{name}.png"), **_record(explanation)}))
    if len(found) <= MAX_ROWS:
        write_atomically(out / "columns.png", as_png(columns_figure(found)))
    if as_json:
        return
    table = Table("image", "predicted", *(column.name for column in found[0].columns), "true")
    for path, explanation in zip(images, found):
        name, score = explanation.predictions[0]
        cells = [column.predicted + mark(column) for column in explanation.columns]
        table.add_row(*map(plain, (str(path), f"{name} {score:.3f}", *cells, explanation.truth or "")))
    console.print(table)
    _print_notes({note: None for explanation in found for note in explanation.notes}, found[0].method, out)


def _explain_sounds(
    model: Any, processor: Any, files: list[Path], truths: list[str | None], options: Any, out: Path, as_json: bool
) -> None:
    from sot.explain import SoundExplanation, explain_sound

    found: list[SoundExplanation] = []
    for path, name, truth in progress(list(zip(files, _file_names(files), truths)), "Explaining"):
        explanation = explain_sound(model, processor, path, truth=truth, **options)
        write_atomically(out / f"{name}.png", explanation.png())
        write_atomically(out / f"{name}.npz", explanation.npz())
        found.append(explanation)
        spans = [dict(zip(("begin", "end", "words"), span)) for span in explanation.spans()]
        if as_json:
            about = {"source": str(path), "file": str(out / f"{name}.png")}
            typer.echo(json.dumps({**about, **_record(explanation), "spans": spans}))
            continue
        (label, score), target = explanation.predictions[0], explanation.target
        table = Table("seconds", f"for {target}", title=plain(f"{path}: {label} {score:.3f}"))
        for span in spans:
            table.add_row(f"{span['begin']:.2f} to {span['end']:.2f}", f"{span['words']:+.3f}")
        console.print(table)
    if not as_json:
        _print_notes({note: None for explanation in found for note in explanation.notes}, found[0].method, out)


def _explain_text(
    model: Any, tokenizer: Any, texts: tuple[str, str | None], options: Any, out: Path, as_json: bool
) -> None:
    from sot.explain import explain_text

    explanation = explain_text(model, tokenizer, *texts, **options)
    picture = explanation.png()
    write_atomically(out / "text.png", picture)
    write_atomically(out / "text.html", explanation.html(picture))
    write_atomically(out / "text.npz", explanation.npz())
    if as_json:
        words = [
            {"word": word, **{c.name: float(c.values[i]) for c in explanation.columns}}
            for i, word in enumerate(explanation.words.names)
        ]
        typer.echo(json.dumps({"file": str(out / "text.html"), **_record(explanation), "words": words}))
        return
    name, score = explanation.predictions[0]
    table = Table("word", *(column.name for column in explanation.columns), title=plain(f"{name} {score:.3f}"))
    for number, word in enumerate(explanation.words.names[:60]):
        table.add_row(plain(word), *(f"{column.strength[number]:.2f}" for column in explanation.columns))
    console.print(table)
    _print_notes(dict.fromkeys(explanation.notes), explanation.method, out)


def _record(explanation: Explanation) -> dict[str, Any]:
    parts = explanation.contributions
    index = explanation.labels.index(explanation.target)
    added = {"class token": parts.class_part, "words": parts.word_part, "bias": parts.bias, "logit": parts.logits}
    return {
        "predictions": explanation.predictions,
        "target": explanation.target,
        "truth": explanation.truth,
        "method": explanation.method,
        "contributions": {name: float(values[index]) for name, values in added.items()},
        "columns": [{"name": c.name, "predicted": c.predicted, "correct": c.correct} for c in explanation.columns],
        "notes": explanation.notes,
    }


def _print_notes(notes: dict[str, None], method: str, out: Path) -> None:
    for note in notes:
        errors.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    console.print(f"By {method}. Figures and raw values: {out}", soft_wrap=True, highlight=False, markup=False)
