"""Recipes: every number that defines a training run, as YAML shipped with the package or written by the user.

Loads no torch, to refuse mistakes at once.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from sot.core.head_config import HeadConfig, applicable, merge_head
from sot.errors import SettingError

CHOICES = {
    "task": ("image", "text", "audio"),
    "schedule": ("cosine", "linear", "constant"),
    "precision": ("float32", "bfloat16", "float16"),
}
LEAST = {"epochs": 1, "batch_size": 1, "evaluate_every": 1, "max_length": 1, "img_size": 1, "seconds": 0.1}
NOT_NEGATIVE = (
    *("cooldown_epochs", "lr", "warmup_epochs", "warmup_lr", "adam_epsilon", "weight_decay", "max_grad_norm"),
    *("layer_decay", "head_lr_multiplier", "train_samples", "mixup", "cutmix", "color_jitter", "seed"),
    *("min_steps", "patience", "lora"),
)
METRICS = (  # auto is the task's own; a task has some of the others
    *("auto", "accuracy", "macro_f1", "mcc", "loss", "calibration_error", "f1", "top5"),
    *("micro_f1", "map", "subset_accuracy", "pearson", "spearman"),
)
AUGMENTATION: dict[str, type] = {"m": int, "n": int, "p": float, "mstd": float, "mmax": int, "inc": int}  # of timm
SHARES = ("erasing", "flip", "label_smoothing", "drop_path", "ema")


@dataclass(frozen=True)
class Recipe:
    """One training run. Rates of zero switch a thing off; `grid` lists the values the paper chose from."""

    about: str = ""
    task: str = "image"
    # optimisation
    epochs: int = 10
    min_steps: int = 0  # more epochs where data are so few that these have fewer steps
    cooldown_epochs: int = 0  # after `epochs`, at the final rate
    batch_size: int = 64  # over all processes and accumulation steps
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_epochs: float = 0.0
    warmup_lr: float = 0.0
    schedule: str = "cosine"
    betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0  # of matrices only
    max_grad_norm: float = 0.0
    layer_decay: float = 1.0
    head_lr_multiplier: float = 1.0
    ema: float = 0.0
    label_smoothing: float = 0.0
    tune_thresholds: bool = (
        False  # of several labels a sample: for each the one with the best F1 on the development set
    )
    balance: bool = False  # weigh classes in the loss so that each counts as much, however many samples it has
    evaluate_every: int = 1  # epochs; and after the last
    metric: str | None = None  # keep the evaluation that is best by this score; auto is the task's own, null the last
    patience: int = 0  # stop after so many evaluations without a better one
    seed: int = 0
    precision: str = "float32"  # of autocast; the head's matrices stay in float32
    compile: bool = False  # torch.compile: pays off in long runs
    # the model
    freeze: bool = False  # train the head alone
    lora: int = 0  # rank of low-rank adapters, trained in place of the backbone
    head: dict[str, Any] = field(default_factory=dict)
    drop_path: float = 0.0
    embed: str | None = None  # token embedding in place of the timm model's own
    model_args: dict[str, Any] = field(default_factory=dict)  # further arguments of the timm model
    # the data
    train_samples: int = 0  # train on that many, drawn once for all seeds; 0 is all
    # images
    img_size: int | None = None
    mixup: float = 0.0  # alpha of the beta distribution
    cutmix: float = 0.0  # likewise; with both, each batch takes one of them with equal chance
    erasing: float = 0.0
    rand_augment: str | None = None
    color_jitter: float = 0.0
    flip: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)  # share of the image's area in a random crop
    # text
    max_length: int = 128
    group_by_length: bool = False  # texts of like length share a batch: less padding
    # sounds
    seconds: float | None = None  # read of each at most; null is the window of the model, or ten
    # what the paper searched
    grid: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, accepted in CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        _check_numbers(self)
        if self.metric not in (None, *METRICS):
            raise SettingError("{metric} must be one of {}, got {!r}", ", ".join(METRICS), self.metric)
        if self.patience and self.metric is None:
            raise ValueError(f"patience {self.patience} needs a metric that could get better, got metric null")
        if self.freeze and self.lora:
            raise ValueError(f"freeze leaves the backbone as it is, and lora {self.lora} adapts it: set one of them")
        if self.rand_augment is not None:
            _check_augmentation(self.rand_augment)
        if self.head:
            HeadConfig.from_dict(self.head)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values; unknown names and values of another kind are refused by name."""
        hints = typing.get_type_hints(cls)
        unknown = [name for name in values if name not in hints]
        if unknown:
            raise ValueError(f"unknown recipe key {', '.join(map(repr, unknown))}; accepted: {', '.join(hints)}")
        return cls(**{name: _convert(name, value, hints[name]) for name, value in values.items()})

    def changed(self, settings: Iterable[str], fit_head: bool = False) -> Recipe:
        """The recipe with `key=value` settings applied; values are YAML, `head.dropout=0.5` reaches into the head.

        With `fit_head`, settings without effect on its head are left out instead of refused.
        """
        values, head = dict[str, Any](), dict[str, Any]()
        for setting in settings:
            name, value = parse_setting(setting)
            if name.startswith("head."):
                head[name.removeprefix("head.")] = value
            elif name.startswith("model_args."):
                before = values.get("model_args", self.model_args)
                values["model_args"] = {**before, name.removeprefix("model_args."): value}
            else:
                values[name] = value
        if values.get("task", self.task) != self.task:
            raise ValueError(f"this recipe is for task {self.task}, got task={values['task']}: choose another recipe")
        if head:
            merged = merge_head(_convert("head", values.get("head", self.head), dict), head)
            values["head"] = applicable(merged) if fit_head else merged
        return self.with_values(values)

    def with_values(self, values: Mapping[str, Any]) -> Recipe:
        """The recipe with some values replaced.

        Fewer epochs leave the warm-up its share of them, where it would be more than half and is not set itself.
        """
        replaced = {**asdict(self), **values}
        if "epochs" in values and "warmup_epochs" not in values:
            epochs = _convert("epochs", values["epochs"], int)
            if 2 * self.warmup_epochs > epochs < self.epochs:
                replaced["warmup_epochs"] = self.warmup_epochs * epochs / self.epochs
        return Recipe.from_dict(replaced)

    def with_head(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with settings of its head changed; see `merge_head`."""
        return replace(self, head=merge_head(self.head, settings))

    def for_samples(self, samples: int) -> Recipe:
        """The recipe for so many samples: with more epochs, about ten of them evaluated, up to `min_steps`.

        Of 0, which is unknown, it stays as it is.
        """
        epochs = math.ceil(self.min_steps / math.ceil(samples / self.batch_size)) if samples else 0
        if epochs <= self.epochs:
            return self
        warmup, evaluate_every = self.warmup_epochs * epochs / self.epochs, max(self.evaluate_every, epochs // 10)
        return replace(self, epochs=epochs, warmup_epochs=warmup, evaluate_every=evaluate_every)

    def to_yaml(self) -> str:
        """The recipe as it stands, every key of it."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def parse_setting(text: str) -> tuple[str, Any]:
    """Name and value of `key=value`, the value read as YAML."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"a setting has the form key=value, got {text!r}")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"the value of {text!r} is not valid YAML") from None


def _check_numbers(recipe: Recipe) -> None:
    for name, smallest in {**LEAST, **dict.fromkeys(NOT_NEGATIVE, 0)}.items():
        value = getattr(recipe, name)
        if value is not None and not smallest <= value < math.inf:
            raise ValueError(f"{name} must be at least {smallest}, got {value}")
    for name in SHARES:
        if not 0 <= getattr(recipe, name) <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {getattr(recipe, name)}")
    _check_rate(recipe)
    if not all(0 <= beta < 1 for beta in recipe.betas):
        raise ValueError(f"betas must be at least 0 and below 1, got {list(recipe.betas)}")
    if not 0 < recipe.scale[0] <= recipe.scale[1] <= 1:
        raise ValueError(f"scale must be the smallest and the largest share of a crop, got {list(recipe.scale)}")


def _check_rate(recipe: Recipe) -> None:
    if recipe.warmup_epochs > recipe.epochs:
        raise ValueError(f"warmup_epochs must be at most epochs ({recipe.epochs}), got {recipe.warmup_epochs:g}")
    if not 0 <= recipe.min_lr <= recipe.lr or recipe.lr == 0:
        raise ValueError(f"lr must be above 0, min_lr must be between 0 and lr, got {recipe.lr} and {recipe.min_lr}")


def _check_augmentation(name: str) -> None:
    """Refuse what timm cannot read, or would not: a part without a number that names no set of changes."""
    first, *parts = name.split("-")
    try:
        if first != "rand":
            raise ValueError
        for key, number in (re.split(r"(?=\d)", part, maxsplit=1) for part in parts if not part.startswith("t")):
            AUGMENTATION[key](number)
    except (ValueError, KeyError):
        raise ValueError(
            f"rand_augment must be as timm writes it, such as rand-m9-mstd0.5-inc1, got {name!r}"
        ) from None


def _exactly(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return value

    return check


def _pair(value: Any) -> tuple[float, float]:
    first, second = value
    return float(first), float(second)


KINDS: dict[type, tuple[str, Callable[[Any], Any]]] = {  # YAML reads 1e-3 as text and 1 as a whole number
    float: ("a number", float),
    int: ("a whole number", _exactly(int)),
    bool: ("true or false", _exactly(bool)),
    str: ("text", _exactly(str)),
    dict: ("a mapping", _exactly(dict)),
    tuple: ("a pair of numbers", _pair),
}


def _convert(name: str, value: Any, hint: Any) -> Any:
    """The value as its field declares it."""
    options = typing.get_args(hint)
    if type(None) in options:
        if value is None:
            return None
        hint = options[0]
    what, convert = KINDS[typing.get_origin(hint) or hint]
    try:
        return convert(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {what}, got {value!r}") from None


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("sot.training") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name: str) -> Recipe:
    """A recipe by its name, or from a YAML file of the user's."""
    return Recipe.from_dict(_read(name))


def _read(name: str) -> dict[str, Any]:
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise FileNotFoundError(f"no such recipe file: {name}")
        text = Path(name).read_text()
    elif name in recipe_names():
        text = (resources.files("sot.training") / "recipes" / f"{name}.yaml").read_text()
    else:
        raise ValueError(f"unknown recipe {name!r}; accepted: {', '.join(recipe_names())}, or a .yaml file")
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name} must hold a mapping of recipe keys, got {type(values).__name__}")
    return values
