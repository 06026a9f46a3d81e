"""Options that commands share, as fields of dataclasses: a command takes the group, people type its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

Command = Callable[..., None]


def options_of(group: Any) -> list[inspect.Parameter]:
    """A parameter for every field of a dataclass; those without a default are required."""
    hints = get_type_hints(group, include_extras=True)
    defaults = inspect.signature(group).parameters
    kind = inspect.Parameter.KEYWORD_ONLY
    return [defaults[field.name].replace(kind=kind, annotation=hints[field.name]) for field in fields(group)]


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function, by name only and with their types, not the names of these."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]


def with_parameters(command: Command, parameters: Sequence[inspect.Parameter]) -> Command:
    """A function of any keywords, as one of these parameters for who asks what it takes."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def grouped(function: Command) -> Command:
    """A command of one whose parameters may be groups: it has an option for every field of each."""
    own = parameters_of(function)
    groups: dict[str, Any] = {each.name: each.annotation for each in own if is_dataclass(each.annotation)}

    @wraps(function)
    def command(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        function(**given)

    parameters = [
        option for each in own for option in (options_of(groups[each.name]) if each.name in groups else [each])
    ]
    return with_parameters(command, parameters)
