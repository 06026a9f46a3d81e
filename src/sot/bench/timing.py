"""Timing of several functions in turns: noise that comes and goes meets all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import linear_regression, median, quantiles
from typing import Any

import torch

from sot.bench.devices import CPU, timed

Progress = Callable[[Iterable[int]], Iterable[int]]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The median and quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True)
class Race:
    """Seconds of each call in rounds: by the wall clock, and what it costs, process time or time of an accelerator."""

    wall: Mapping[str, list[float]]
    cost: Mapping[str, list[float]]

    def cost_ratio(self, name: str, reference: str) -> Spread:
        """Cost over that of the reference in the same round."""
        return Spread.of([ours / theirs for ours, theirs in zip(self.cost[name], self.cost[reference])])

    def wall_ratio(self, name: str, reference: str) -> Spread:
        """Wall time over that of the reference in the same round."""
        return Spread.of([ours / theirs for ours, theirs in zip(self.wall[name], self.wall[reference])])


@contextmanager
def thread_count(threads: int | None) -> Iterator[None]:
    """Pin how many threads torch computes with, and undo it; None leaves them as they are."""
    before = torch.get_num_threads()
    wanted = before if threads is None else threads
    if wanted < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def race(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    warm_up: int = 2,
    progress: Progress = iter,
    device: torch.device = CPU,
) -> Race:
    """Call each function once a round, another one first each time."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    names = list(functions)
    for name in names * warm_up:
        functions[name]()
    result = Race({name: [] for name in names}, {name: [] for name in names})
    for number in progress(range(rounds)):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            wall, cost = timed(functions[name], device)
            result.wall[name].append(wall)
            result.cost[name].append(cost)
    return result


def growth_exponent(sizes: list[int], costs: list[float]) -> float:
    """Slope of the line through log cost over log size: 1 for a cost that grows in proportion."""
    return linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs]).slope
