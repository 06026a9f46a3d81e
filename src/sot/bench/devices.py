"""Where `sot bench` measures: finding a device, and timing a call on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from sot.errors import SettingError

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
