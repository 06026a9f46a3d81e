"""What a benchmark is: functions to time in turns, one of them the reference, at the sizes of the paper's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sot.bench.timing import Progress, Spread, race

HEADS = 6
NUM_CLASSES = 1000


@dataclass(frozen=True)
class Size:
    """Shapes of one model of the paper; `covariance_dim` gives GCP about as many features as MGCrP has."""

    name: str
    token_dim: int
    head_dim: int
    covariance_dim: int
    batch: int = 64
    tokens: int = 196


SIZES = (Size("Tiny", 240, 14, 48), Size("Small", 384, 24, 83), Size("Base", 528, 38, 131))


@dataclass(frozen=True)
class Row:
    """One measurement: what it costs, in process time or bytes, and its ratio to the reference of its case."""

    case: str
    name: str
    cost: float
    unit: str
    ratio: Spread | None = None
    wall_ratio: Spread | None = None
    goal: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """Functions that do the same work; `goals` has the ratio to the reference that each should not exceed.

    `floor` names a function that does less, the part that cannot be avoided; `notes` has what else was found out.
    """

    title: str
    functions: Mapping[str, Callable[[], Any]]
    reference: str
    goals: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    floor: str | None = None


def run_case(case: Case, rounds: int, progress: Progress = iter) -> list[Row]:
    """Time the functions of a case in turns: one row each."""
    result = race(case.functions, rounds, progress=progress)
    rows = []
    for name in case.functions:
        note = case.notes.get(name, "")
        if case.floor is not None and name != case.floor:
            note = f"{result.cpu_ratio(name, case.floor)} × floor"
        ratio, wall_ratio = result.cpu_ratio(name, case.reference), result.wall_ratio(name, case.reference)
        cost = 1000 * Spread.of(result.cpu[name]).median
        rows.append(Row(case.title, name, cost, "ms", ratio, wall_ratio, case.goals.get(name), note))
    return rows


def forward_and_backward(
    function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, parameters: list[Tensor] | None = None
) -> Callable[[], Any]:
    """A call of `function(*inputs)` with the gradients of its inputs and parameters."""
    wanted = [*inputs, *(parameters or [])]
    return lambda: torch.autograd.grad(function(*inputs), wanted, grad)
