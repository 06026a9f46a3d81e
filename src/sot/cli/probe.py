"""`sot probe`: heads on a frozen backbone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sot.cli.groups import grouped
from sot.cli.options import (
    DevOption,
    EncodingOption,
    JsonOption,
    LabelOption,
    PairOption,
    RegressionOption,
    TaskOption,
    TextOption,
    console,
    of_data,
    of_output,
    of_start,
    of_training,
    progress,
    refuse,
)
from sot.cli.runs import check_weights
from sot.cli.texts import TextOptions


@dataclass(frozen=True)
class SampleOptions:
    """Which columns and how many samples are read."""

    task: TaskOption = None
    dev: DevOption = None
    text: TextOption = "sentence"
    pair: PairOption = None
    label: LabelOption = "label"
    fold_column: Annotated[str | None, of_data(help="Column that names the fold of each sound to score in turn.")] = (
        None
    )
    regression: RegressionOption = False
    encoding: EncodingOption = None
    max_length: Annotated[int, of_data(help="Cut texts to this many tokens.", min=2)] = 128
    train_samples: Annotated[int, of_data(help="Train on this many samples, drawn once. 0: all.", min=0)] = 0
    test_samples: Annotated[int, of_data(help="Score this many samples, drawn once. 0: all.", min=0)] = 0

    def check(self, data: str | None) -> None:
        """Refuse what no model can read, before there is one to ask what it reads."""
        from sot.data.glue import check_task
        from sot.data.rows import SUFFIXES, check_table
        from sot.data.spec import check_pictures

        if self.task is not None:
            check_task(self.task)
        elif data is not None and data != "tones":
            if Path(data).suffix in SUFFIXES:
                check_table(Path(data), self.encoding)
            else:
                check_pictures(data)

    def read(self, opened: Any, model: str, data: str | None) -> Any:
        """What the backbone, called `model`, is probed on."""
        from sot import probe as probing

        parts = (self.train_samples, self.test_samples)
        kind = {"image": "images", "audio": "sounds"}.get(opened.config.modality)
        fold_column = {"--fold-column": kind != "sounds" and self.fold_column is not None}
        refuse("--fold-column is for tables of sounds", fold_column)
        if kind is None:
            columns = self.text, self.pair, self.label
            texts, name = TextOptions(self.task, data, self.dev, *columns, self.regression, self.encoding).read()
            return probing.read_texts(opened, texts, name, self.max_length, parts)
        if data is None:
            raise ValueError(f"{model} is a model for {kind}: it needs --data")
        given = {f"--{name}": getattr(self, name) for name in ("task", "dev", "pair", "regression", "encoding")}
        for option, value in given.items():
            if value not in (None, False):
                shown = option if value is True else f"{option} {value}"
                raise ValueError(f"{shown} is for texts, and {model} is a model for {kind}")
        if kind == "images":
            return probing.read_images(opened, data, parts)
        return probing.read_sounds(opened, data, parts, self.label, self.fold_column)


@dataclass(frozen=True)
class FitOptions:
    """How heads are fitted, and what is chosen from."""

    labels: Annotated[str, of_training(help="Labels per class, drawn anew for each seed, e.g. 8,32,all.")] = "all"
    seeds: Annotated[int | None, of_training(help="Fits of each head. Default: 10 with few labels, else 3.", min=1)] = (
        None
    )
    representation: Annotated[
        int | None, of_training(help="Approximate pooled size of gcp and mgcrp. Default: 1176.", min=1)
    ] = None
    epochs: Annotated[int, of_training(help="Epochs of each training, at least.", min=1)] = 10
    rates: Annotated[str, of_training(help="Learning rates to choose from.")] = "1e-3,3e-3,1e-2,3e-2"
    decays: Annotated[str, of_training(help="Weight decays to choose from.")] = "0.01,0.3"
    search_folds: Annotated[
        int | None,
        of_training(help="Folds of five that choose settings. Default: 5, from 2,000 samples on 1.", min=1, max=5),
    ] = None

    def read(self) -> dict[str, Any]:
        """As `compare_heads` takes them; what is no list of numbers is refused, before torch is loaded."""
        from sot.probe import Budget

        labels, rates, decays = _labels(self.labels), _numbers("--rates", self.rates), _numbers("--decays", self.decays)
        budget = Budget(epochs=self.epochs, learning_rates=rates, weight_decays=decays, search_folds=self.search_folds)
        return {"labels": labels, "budget": budget, "seeds": self.seeds, "representation": self.representation}


@grouped
def probe(
    *,
    model: Annotated[str, typer.Option(help="A timm name, a Hugging Face hub name, or a folder.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the tables, the picture and the best model.")],
    data: Annotated[str | None, typer.Option(help="As in sot train, or as in sot finetune.")] = None,
    heads: Annotated[str, typer.Option(help="Names such as sot,class+gap,mhc3,majority, or all.")] = "all",
    samples: SampleOptions,
    fit: FitOptions,
    pretrained: Annotated[bool, of_start(help="Load the published weights of a name.")] = True,
    weights: Annotated[Path | None, of_start(help="Weights of a timm model, from a file.")] = None,
    img_size: Annotated[int | None, of_start(help="Image size of a timm model.", min=1)] = None,
    depth: Annotated[int | None, of_start(help="Keep this many layers, from the first.", min=1)] = None,
    cache: Annotated[Path | None, of_output(help="Folder of the tokens, to share. Default: OUT/cache.")] = None,
    threads: Annotated[int | None, of_output(help="Threads of torch.", min=1)] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit heads on a frozen backbone and compare them."""
    if data is None and samples.task is None:
        raise ValueError("name the data: --data, or for texts also --task")
    from sot import probe as probing

    names = [name.strip() for name in heads.split(",") if name.strip()]
    probing.check_names(names)
    options = fit.read()
    check_weights(weights)
    samples.check(data)
    from sot.bench.timing import thread_count
    from sot.models.folder import show_bars_on_terminals_only

    show_bars_on_terminals_only()
    backbone = probing.FrozenBackbone(model, pretrained, weights, img_size, depth)
    with thread_count(threads):
        opened = probing.open_backbone(backbone)
        subject = samples.read(opened, model, data)
        options |= {"cache": cache, "progress": progress}
        comparison = probing.compare_heads(opened, backbone.title, subject, names, out, **options)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict()))
        return
    console.print(comparison.table())
    best = "" if comparison.best is None else f"Best model: {out / 'best'}. "
    console.print(f"{best}Picture: {out / 'probe.png'}.", soft_wrap=True)


def _labels(text: str) -> list[int | None]:
    """Numbers of labels in order, all of them last."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if part != "all" and not (part.isdecimal() and int(part) >= 2)]
    if wrong or not parts:
        raise ValueError(f"--labels takes numbers from 2 on, or all, with commas between them; got {text!r}")
    numbers: list[int | None] = [*sorted({int(part) for part in parts if part != "all"})]
    return numbers + ([None] if "all" in parts else [])


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{option} takes numbers above 0 with commas between them; got {text!r}")
    return numbers
