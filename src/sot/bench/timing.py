"""Where `sot bench` measures, and timing of several functions in turns: noise that comes and goes meets all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import linear_regression, median, quantiles
from typing import Any

import torch

from sot.errors import SettingError

Progress = Callable[[Iterable[int]], Iterable[int]]
DEVICES = ("cpu", "cuda", "mps", "xpu")
CPU = torch.device("cpu")


def find_device(name: str) -> torch.device:
    """The device of this name, such as `cuda` or `cuda:1`; SettingError if this machine has none."""
    kind, _, index = name.partition(":")
    if kind not in DEVICES or (index and not index.isdecimal()):
        raise SettingError("{device} must be one of {}, got {!r}", ", ".join(DEVICES), name)
    if kind != "cpu" and (found := _accelerator()) != kind:
        here = f"it has cpu and {found}" if found else "it has cpu only"
        raise SettingError("{device} is {!r}, which torch does not find on this machine: {}", name, here)
    if index and int(index) >= (1 if kind == "cpu" else torch.accelerator.device_count()):
        raise SettingError("{device} is {!r}, and this machine has fewer of them", name)
    return torch.device(name)


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def device_name(device: torch.device) -> str:
    """What an accelerator calls itself."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else str(name(device))


def timed(function: Callable[[], Any], device: torch.device = CPU) -> tuple[float, float]:
    """Seconds of a call by the wall clock, and of the process or, on an accelerator, by its own timer.

    The time of a process counts threads that spin for work: with several of them the wall clock is taken instead.
    """
    if device.type == "cpu":
        wall, cost = time.perf_counter(), time.process_time()
        function()
        wall, cost = time.perf_counter() - wall, time.process_time() - cost
        return wall, cost if torch.get_num_threads() == 1 else wall
    before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize(device)
    wall = time.perf_counter()
    before.record()
    function()
    after.record()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - wall, before.elapsed_time(after) / 1000


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
