"""What can be wrong with what a user gave, as types: who catches an error does not read its text.

All are ValueErrors. The library names settings as its functions do; the command line shows them as its options.
"""

from __future__ import annotations

from collections.abc import Callable
from string import Formatter


class SettingError(ValueError):
    """A setting cannot be as it is given, in a sentence such as "{out} must be a file, and {} is a folder".

    Args:
        sentence: `{name}` stands for the setting of this name, `{}` for the next of `values`.
        *values: What is filled in, by `str.format`.
    """

    def __init__(self, sentence: str, *values: object) -> None:
        super().__init__(sentence, *values)
        self.sentence, self.values = sentence, values

    @property
    def settings(self) -> list[str]:
        """Names of the settings that it speaks of."""
        return [name for _, name, _, _ in Formatter().parse(self.sentence) if name and name.isidentifier()]

    def worded(self, name: Callable[[str], str]) -> str:
        """The sentence with every setting called as `name` has it."""
        return self.sentence.format(*self.values, **{setting: name(setting) for setting in self.settings})

    def __str__(self) -> str:
        return self.worded(str)


class NoClassTokenError(ValueError):
    """A head needs a class token, and the backbone has none."""


class PictureError(ValueError):
    """An image cannot be read, for a `reason`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"cannot read {self.name}: {self.reason}"


class SoundError(PictureError):
    """A sound cannot be read, for a `reason`."""


class Interrupted(Exception):
    """A training was stopped by a signal; `checkpoint` is what was saved, if anything."""

    def __init__(self, number: int, checkpoint: object) -> None:
        super().__init__(number, checkpoint)
        self.number, self.checkpoint = number, checkpoint
