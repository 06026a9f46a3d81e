"""How far long work is: in lines, for logs and notebooks, where no bar can move; and whether others show bars."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sot.files import in_words


def with_lines(
    items: Iterable[Any], title: str, total: float | None, say: Callable[[str], None], every: float
) -> Iterator[Any]:
    """The items; `say` gets a line after `every` so many seconds, with how long is left if there is a `total`."""
    began = said = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - said >= every:
            left = "" if total is None else f" of {total:.0f}, {in_words((now - began) * (total / number - 1))} left"
            said = now
            say(f"{title}: {number}{left}")


@contextmanager
def bars(are_shown: bool) -> Iterator[None]:
    """Whether transformers shows its own on a terminal, as of loading weights; as before afterwards."""
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    if not (are_shown and sys.stderr.isatty()):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()
