"""Choices by name, to which installed packages and users add their own."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Choice = TypeVar("Choice")


class Choices(dict[str, Choice]):
    """What a setting may name: ours, what is added like to any dictionary, and entry points of installed packages.

    Our names are known before the module that is their `home`, and torch with it, is loaded.
    """

    def __init__(self, what: str, own: Iterable[str], home: str) -> None:
        super().__init__()
        self.what, self.group, self.own, self.home = what, f"sot.{what}s", tuple(own), home

    def check(self, name: Any) -> None:
        """Raise ValueError unless there is a choice of this name; ours are not loaded for that."""
        if name not in self.own:
            self.find(name)

    def find(self, name: str) -> Choice:
        """The choice of this name; that of an installed package is loaded now. ValueError if there is none."""
        if name in self.own:
            import_module(self.home)  # which adds ours
        if name not in [*self]:  # a list, as what is no name may not be hashable
            found = next((entry for entry in entry_points(group=self.group) if entry.name == name), None)
            if found is None:
                accepted = ", ".join(dict.fromkeys([*self.own, *self]))
                hint = f"a {self.what} of somebody's own needs its package installed or its module imported"
                raise ValueError(f"unknown {self.what} {name!r}; accepted: {accepted}; {hint}")
            try:
                self[name] = found.load()
            except (ImportError, AttributeError) as error:
                said = f"the {self.what} {name!r} is to be had from {found.value}, which cannot be loaded: {error}"
                raise ValueError(said) from error
        return self[name]

    def is_foreign(self, name: Any) -> bool:
        """Whether a name is none of ours: nobody here knows which settings such a choice reads."""
        return isinstance(name, str) and name not in self.own


def built_by(home: str, *settings: str) -> Callable[[int, Any], Any]:
    """A pooling that core need not know, as `module:class`, loaded when it is first asked for, with its settings."""
    return lambda dim, config: EntryPoint("", home, "").load()(dim, *(getattr(config, name) for name in settings))
