"""Cases of `sot bench head`: the whole head, against the published one and against its matrix products alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sot.bench.cases import EXACT, FAST, HEADS, NUM_CLASSES, SIZES, Case, Measurement, Size, forward_and_backward
from sot.bench.memory import Memory, measure_memory
from sot.bench.references import PublishedHead
from sot.bench.timing import Progress, Spread, growth_exponent, race
from sot.core.head import HeadConfig, SecondOrderHead
from sot.models.accelerate import accelerate

PUBLISHED = "published"
FLOOR = "matrix products alone"


def head_inputs(size: Size) -> list[Tensor]:
    """Class token and word tokens as a backbone gives them: two slices of one tensor."""
    tokens = torch.randn(size.batch, 1 + size.tokens, size.token_dim)
    return [tokens[:, 0].requires_grad_(), tokens[:, 1:].requires_grad_()]


def our_head(size: Size, num_classes: int = NUM_CLASSES, **settings: Any) -> SecondOrderHead:
    """The default head at this size, unless `settings` say otherwise, accelerated."""
    default: dict[str, Any] = {"norm": "svpn", "exponent": 0.25, "heads": HEADS}
    config = HeadConfig(**{**default, "left_dim": size.head_dim, "right_dim": size.head_dim, **settings})
    return accelerate(SecondOrderHead(size.token_dim, num_classes, config))


def build_heads(size: Size) -> dict[str, nn.Module]:
    """The published head with and without the subtraction of a mean, our default one likewise, and our fast one."""
    return {
        PUBLISHED: PublishedHead(size.token_dim, NUM_CLASSES, HEADS, size.head_dim),
        "published, mean kept": PublishedHead(size.token_dim, NUM_CLASSES, HEADS, size.head_dim, center=False),
        EXACT: our_head(size),
        "ours, mean subtracted": our_head(size, center=True),
        FAST: our_head(size, norm="svpn_fast", exponent=0.5),
    }


def products_alone(size: Size) -> Callable[[], Any]:
    """Every matrix product of the head's forward and backward pass, on operands that lie ready."""
    count, width, features = size.batch * size.tokens, 2 * HEADS * size.head_dim, HEADS * size.head_dim**2
    tokens, weight = torch.randn(count, size.token_dim), torch.randn(width, size.token_dim)
    d_projected = torch.randn(count, width)
    left, right = torch.randn(2, size.batch * HEADS, size.tokens, size.head_dim)
    d_matrix = torch.randn(size.batch * HEADS, size.head_dim, size.head_dim)
    pooled, word_weight = torch.randn(size.batch, features), torch.randn(NUM_CLASSES, features)
    class_token, class_weight = torch.randn(size.batch, size.token_dim), torch.randn(NUM_CLASSES, size.token_dim)
    d_logits = torch.randn(size.batch, NUM_CLASSES)

    def run() -> list[Tensor]:
        projection = [tokens @ weight.T, d_projected @ weight, d_projected.T @ tokens]
        covariance = [left.mT @ right, right @ d_matrix.mT, left @ d_matrix]
        words = [pooled @ word_weight.T, d_logits @ word_weight, d_logits.T @ pooled]
        classes = [class_token @ class_weight.T, d_logits @ class_weight, d_logits.T @ class_token]
        return [*projection, *covariance, *words, *classes]

    return run


def head_functions(size: Size, heads: Mapping[str, nn.Module]) -> dict[str, Callable[[], Any]]:
    """Forward and backward of each head on the same tokens, to these and to every parameter."""
    inputs, grad = head_inputs(size), torch.randn(size.batch, NUM_CLASSES)
    return {name: forward_and_backward(head, inputs, grad, list(head.parameters())) for name, head in heads.items()}


def head_cases(sizes: tuple[Size, ...] = SIZES) -> list[Case]:
    """One case a size: forward and backward, to the tokens and to every parameter."""
    cases = []
    for size in sizes:
        functions = {**head_functions(size, build_heads(size)), FLOOR: products_alone(size)}
        cases.append(Case(f"{size.name}: head, forward and backward", functions, PUBLISHED, floor=FLOOR))
    return cases


def growing_sizes(size: Size) -> dict[str, list[Size]]:
    """The size with 64 to 4096 tokens, and with batches of 4 to 128."""
    return {
        "tokens": [replace(size, batch=8, tokens=count) for count in (64, 256, 1024, 4096)],
        "batch": [replace(size, batch=count) for count in (4, 16, 64, 128)],
    }


def _representation(size: Size) -> tuple[nn.Module, list[Tensor], Tensor]:
    """Our head without its linear layers, whose cost does not depend on the tokens; its inputs; and a gradient."""
    head = our_head(size, 0)
    return head, head_inputs(size), torch.randn(size.batch, head.num_features)


def _growth(kind: str, what: str, counts: list[int], costs: list[float], unit: str) -> Measurement:
    note = ", ".join(f"{count}: {cost:.1f} {unit}" for count, cost in zip(counts, costs))
    return Measurement(f"growth of {kind}", f"with {what}", growth_exponent(counts, costs), "exponent", note=note)


def growth_rows(rounds: int, size: Size = SIZES[0], progress: Progress = iter) -> list[Measurement]:
    """How time grows with tokens and batch: the fitted exponent, 1 for in proportion."""
    rows = []
    for what, sizes in growing_sizes(size).items():
        functions = {}
        for each in sizes:
            head, inputs, grad = _representation(each)
            functions[str(getattr(each, what))] = forward_and_backward(head, inputs, grad, list(head.parameters()))
        result = race(functions, rounds, progress=progress)
        times = [1000 * Spread.of(result.cost[name]).median for name in functions]
        rows.append(_growth("time", what, [int(name) for name in functions], times, "ms"))
    return rows


def memory_rows(sizes: tuple[Size, ...] = SIZES) -> list[Measurement]:
    """Peak of forward and backward, and what is saved between them, beyond inputs and parameters."""
    rows = []
    for size in sizes:
        inputs, grad = head_inputs(size), torch.randn(size.batch, NUM_CLASSES)
        measured = {name: _memory(head, inputs, grad) for name, head in build_heads(size).items()}
        for what in ("peak", "saved"):
            reference = getattr(measured[PUBLISHED], what)
            for name, memory in measured.items():
                cost = getattr(memory, what)
                ratio = Spread.of([cost / reference])
                rows.append(Measurement(f"{size.name}: head, {what}", name, cost / 2**20, "MiB", ratio))
    return rows


def _memory(head: nn.Module, inputs: list[Tensor], grad: Tensor) -> Memory:
    return measure_memory(lambda: head(*inputs), [*inputs, *head.parameters()], grad)


def memory_growth_rows(size: Size = SIZES[0]) -> list[Measurement]:
    """How the peak grows with tokens and batch: the fitted exponent, 1 for in proportion."""
    rows = []
    for what, sizes in growing_sizes(size).items():
        peaks = []
        for each in sizes:
            head, inputs, grad = _representation(each)
            peaks.append(_memory(head, inputs, grad).peak / 2**20)
        rows.append(_growth("memory", what, [getattr(each, what) for each in sizes], peaks, "MiB"))
    return rows
