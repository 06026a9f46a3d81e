"""`sot probe`: heads on a frozen backbone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sot.cli.options import (
    DevOption,
    JsonOption,
    LabelOption,
    PairOption,
    RegressionOption,
    TaskOption,
    TextOption,
    console,
    progress,
    text_data,
)


def probe(
    model: Annotated[str, typer.Option(help="A timm name, a Hugging Face hub name, or a folder.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the tables, the picture and the best model.")],
    data: Annotated[str | None, typer.Option(help="As in sot train, or as in sot finetune.")] = None,
    heads: Annotated[str, typer.Option(help="all, or names such as class,class+gap,mgcrp.")] = "all",
    task: TaskOption = None,
    dev: DevOption = None,
    text: TextOption = "sentence",
    pair: PairOption = None,
    label: LabelOption = "label",
    regression: RegressionOption = False,
    max_length: Annotated[int, typer.Option(help="Tokens of a text at most.", min=2)] = 128,
    train_samples: Annotated[int, typer.Option(help="Train on so many, drawn once; 0 is all.", min=0)] = 0,
    test_samples: Annotated[int, typer.Option(help="Score so many, drawn once; 0 is all.", min=0)] = 0,
    seeds: Annotated[int, typer.Option(help="How many times each head is trained.", min=1)] = 3,
    representation: Annotated[
        int | None, typer.Option(help="Numbers that gcp and mgcrp make of the words, about; 1176 by default.", min=1)
    ] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of each training.", min=1)] = 10,
    pretrained: Annotated[bool, typer.Option(help="Load the published weights of a name.")] = True,
    weights: Annotated[Path | None, typer.Option(help="File of weights for a timm name instead.")] = None,
    img_size: Annotated[int | None, typer.Option(help="Build a timm model for pictures of this size.", min=1)] = None,
    depth: Annotated[int | None, typer.Option(help="Keep so many layers of it, from the first.", min=1)] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of the tokens, to share; OUT/cache by default.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads that torch computes with.", min=1)] = None,
    as_json: JsonOption = False,
) -> None:
    """Train every kind of head on a frozen backbone and compare them."""
    if data is None and task is None:
        raise ValueError("name the data: --data, or for texts also --task")
    from sot import probe as probing
    from sot.bench.timing import thread_count
    from sot.training.run import show_bars_on_terminals_only

    names = [name.strip() for name in heads.split(",") if name.strip()]
    probing.check_names(names)
    show_bars_on_terminals_only()
    parts = (train_samples, test_samples)
    backbone = probing.FrozenBackbone(model, pretrained, weights, img_size, depth)
    with thread_count(threads):
        opened = probing.open_backbone(backbone)
        if opened.config.modality == "image":
            if data is None:
                raise ValueError(f"{model} is a model for images: it needs --data")
            _refuse_texts(model, {"--task": task, "--dev": dev, "--pair": pair, "--regression": regression})
            subject = probing.read_images(opened, data, parts)
        else:
            texts, name = text_data(task, data, dev, (text, pair, label), regression=regression)
            subject = probing.read_texts(opened, texts, name, max_length, parts)
        budget = probing.Budget(epochs=epochs)
        options: dict[str, Any] = {"cache": cache, "seeds": seeds, "budget": budget, "progress": progress}
        options["representation"] = representation
        comparison = probing.compare_heads(opened, backbone.title, subject, names, out, **options)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict()))
        return
    console.print(comparison.table())
    console.print(f"Best model: {out / 'best'}. Picture: {out / 'probe.png'}.", soft_wrap=True)


def _refuse_texts(model: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an option of texts that was given with a model for images."""
    for option, given in options.items():
        if given not in (None, False):
            shown = option if given is True else f"{option} {given}"
            raise ValueError(f"{shown} is for texts, and {model} is a model for images")
