"""What a benchmark is: functions to time in turns, one of them the reference, at the sizes of the paper's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sot.bench.timing import CPU, Progress, Race, Spread, race

HEADS = 6
NUM_CLASSES = 1000
EXACT, FAST = "ours", "ours, fast"  # the default head or norm, and the paper's


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
class Measurement:
    """One measurement: what it costs, in time or bytes, and its ratio to the reference of its case."""

    case: str
    name: str
    cost: float
    unit: str
    ratio: Spread | None = None
    wall_ratio: Spread | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """Functions that do the same work, one of them the reference.

    `floor` names a function that does less, the part that cannot be avoided; `notes` has what else was found out.
    """

    title: str
    functions: Mapping[str, Callable[[], Any]]
    reference: str
    notes: Mapping[str, str] = field(default_factory=dict)
    floor: str | None = None


def run_case(case: Case, rounds: int, progress: Progress = iter, device: torch.device = CPU) -> list[Measurement]:
    """Time the functions of a case in turns: one measurement each."""
    result = race(case.functions, rounds, progress=progress, device=device)
    notes = dict(case.notes)
    if case.floor is not None:
        rest = (name for name in case.functions if name != case.floor)
        notes |= {name: f"{result.cost_ratio(name, case.floor)} × floor" for name in rest}
    return measurements_of(result, case.title, case.reference, notes)


def measurements_of(
    result: Race, title: str, reference: str, notes: Mapping[str, str] | None = None
) -> list[Measurement]:
    """What was timed in turns, one measurement a function."""
    measurements = []
    for name, times in result.cost.items():
        ratio, wall_ratio = result.cost_ratio(name, reference), result.wall_ratio(name, reference)
        cost, note = 1000 * Spread.of(times).median, (notes or {}).get(name, "")
        measurements.append(Measurement(title, name, cost, "ms", ratio, wall_ratio, note))
    return measurements


def forward_and_backward(
    function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, parameters: list[Tensor] | None = None
) -> Callable[[], Any]:
    """A call of `function(*inputs)` with the gradients of its inputs and parameters."""
    wanted = [*inputs, *(parameters or [])]
    return lambda: torch.autograd.grad(function(*inputs), wanted, grad)
