"""What is searched: a recipe's grid, and settings with values or ranges of the user's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sot.errors import SettingError
from sot.training.recipe import Recipe, parse_setting

if TYPE_CHECKING:
    from sot.core.head_config import HeadConfig

OF_CLASS_TOKEN = ("fusion", "class_width", "pre_norm")  # what a head without words has
FORMS = "lr=1e-5..1e-3:log, epochs=3..10 or head.dropout=0.5,0.8"


@dataclass(frozen=True)
class Range:
    """Numbers between two, both included; whole ones if both are."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}{':log' * self.log}"


Choices = Sequence[Any] | Range
Space = dict[str, Choices]
Trained = tuple[Recipe, "HeadConfig | None"]
SAMPLERS, USUAL_TRIALS = ("grid", "random", "tpe"), 20


def check_sampler(name: str) -> None:
    """Refuse a sampler that there is not."""
    if name not in SAMPLERS:
        raise SettingError("{sampler} must be one of {}, got {!r}", ", ".join(SAMPLERS), name)


def parse_search(text: str) -> tuple[str, Choices]:
    """A setting and its values, as in `lr=1e-5..1e-3:log` or `epochs=3,5,10`."""
    name, separator, values = text.partition("=")
    if not separator or not values.strip():
        raise SettingError("{search} has the form key=values, such as {}, got {!r}", FORMS, text)
    name, low, high = name.strip(), *values.partition("..")[::2]
    if ".." not in values:
        return name, [_number(value) for value in parse_setting(f"{name}=[{values}]")[1]]
    high, _, scale = high.partition(":")
    ends = [_number(parse_setting(f"{name}={end}")[1]) for end in (low, high)]
    if scale not in ("", "log") or not all(type(end) in (int, float) and math.isfinite(end) for end in ends):
        raise SettingError("a range of {search} is low..high or low..high:log, as in {}, got {!r}", FORMS, text)
    if ends[0] >= ends[1] or (scale and ends[0] <= 0):
        least = "above 0 and " if scale else ""
        raise SettingError("the low end of {search} {!r} must be {}below the high one", text, least)
    return name, Range(ends[0], ends[1], bool(scale))


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def search_space(
    trained: Trained, searches: Sequence[str], pinned: Collection[str] = ()
) -> tuple[Space, dict[str, Choices]]:
    """What is searched, and what is left out because the head has no use for it.

    The recipe's grid without what is `pinned`, with `searches` added or in its place; every value is tried on the
    recipe, so that a wrong one is refused before the first trial.
    """
    recipe, head = trained
    space: Space = {name: values for name, values in recipe.grid.items() if name not in pinned}
    space |= dict(map(parse_search, searches))
    words = "head.fusion" in space or (head is not None and head.fusion != "class")
    idle = {
        name: values
        for name, values in space.items()
        if not words and name.startswith("head.") and name.removeprefix("head.") not in OF_CLASS_TOKEN
    }
    space = {name: values for name, values in space.items() if name not in idle}
    if not space:
        raise SettingError("there is nothing to search: the recipe has no grid for such a head, give {search}")
    for name, values in space.items():
        _check(trained, name, values)
    return space, idle


def _check(trained: Trained, name: str, values: Choices) -> None:
    if name in ("task", "seed", "grid", "about", "head"):
        raise SettingError("{search} cannot vary {}", name)
    if not isinstance(values, Range) and (not isinstance(values, list) or not values):
        raise SettingError("{search} needs a list of values for {}, got {!r}", name, values)
    for value in (values.low, values.high) if isinstance(values, Range) else values:
        if value is not None and not isinstance(value, str | int | float):
            raise SettingError("{search} takes numbers and names, got {}={!r}", name, value)
        settle(trained, {name: value})


def settle(trained: Trained, values: Mapping[str, Any]) -> Trained:
    """The recipe and head of one trial; the recipe has all of the head's settings, and no grid."""
    from sot.core.head_config import HeadConfig

    recipe, head = trained
    own = {name: value for name, value in values.items() if not name.startswith("head.")}
    changes = {name.removeprefix("head."): value for name, value in values.items() if name not in own}
    if changes:
        head = (head or HeadConfig(fusion="class")).changed(changes)
    settings = {"fusion": "class"} if head is None else head.to_dict()
    named = {name: value for name, value in settings.items() if value is not None}
    return replace(recipe.with_values({**own, "head": named}), grid={}), head


def size(space: Space) -> int | None:
    """How many combinations there are, None if that is no number."""
    lists = [values for values in space.values() if not isinstance(values, Range)]
    return math.prod(map(len, lists)) if len(lists) == len(space) else None


def choose_sampler(space: Space, sampler: str | None, trials: int | None) -> tuple[str, int]:
    """The sampler, and how many trials it makes; None leaves a choice to it."""
    combinations = size(space)
    sampler = sampler or ("grid" if combinations is not None and trials is None else "tpe")
    check_sampler(sampler)
    if sampler != "grid":
        return sampler, trials or USUAL_TRIALS
    if combinations is None:
        ranges = next(f"{name}={values}" for name, values in space.items() if not isinstance(values, list))
        raise SettingError("a grid has no ranges, got {}: list values, or choose {sampler} random or tpe", ranges)
    return sampler, min(combinations, trials or combinations)
