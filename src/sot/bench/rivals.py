"""The heads that people choose between, side by side: exact by kernels and by SVD, fast, GCP and efficient probing."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

from sot.bench.cases import EXACT, FAST, HEADS, NUM_CLASSES, SIZES, Case, Size
from sot.bench.head_cost import head_functions
from sot.bench.model_cost import forward_alone, training_step
from sot.bench.references import svd_power
from sot.core.head import HeadConfig, SecondOrderHead
from sot.models.accelerate import accelerate

BY_SVD, GCP, PROBING = "exact by SVD", "GCP", "efficient probing"
EXPONENT = 0.25


class PowerBySVD(nn.Module):
    """What exact svPN takes without kernels and gradient of our own."""

    def forward(self, matrix: Tensor) -> Tensor:
        return svd_power(matrix.flatten(0, -3), EXPONENT).view_as(matrix)


def rival_settings(size: Size) -> dict[str, HeadConfig]:
    """Heads of about as many features."""
    sizes: dict[str, Any] = {"heads": HEADS, "left_dim": size.head_dim, "right_dim": size.head_dim}
    exact = HeadConfig(norm="svpn", exponent=EXPONENT, **sizes)
    return {
        FAST: HeadConfig.paper(**sizes),
        EXACT: exact,
        BY_SVD: exact,
        GCP: HeadConfig.paper(pool="gcp", reduced_dim=size.covariance_dim),
        PROBING: HeadConfig(pool="ep"),
    }


def _prepared(name: str, model: nn.Module, head: SecondOrderHead) -> nn.Module:
    """The model accelerated, with the SVD in its head if it is named so."""
    if name == BY_SVD:
        assert head.pool is not None
        head.pool.norm = PowerBySVD()
    return accelerate(model)


def rival_heads(size: Size) -> dict[str, nn.Module]:
    """Each of them for the tokens of this size."""
    heads = {
        name: SecondOrderHead(size.token_dim, NUM_CLASSES, config) for name, config in rival_settings(size).items()
    }
    return {name: _prepared(name, head, head) for name, head in heads.items()}


def rival_head_cases(sizes: tuple[Size, ...]) -> list[Case]:
    """One case a size: forward and backward, to the tokens and to every parameter; fast is the reference."""
    title = "heads side by side, forward and backward"
    return [Case(f"{size.name}: {title}", head_functions(size, rival_heads(size)), FAST) for size in sizes]


def rival_model_cases(name: str, batch: int, train_batch: int) -> list[Case]:
    """A model of the family with each head: forward, and a step of training."""
    size = next(size for size in SIZES if name.endswith(size.name.lower()))
    image = torch.randn(batch, 3, 224, 224)
    data = torch.randn(train_batch, 3, 224, 224), torch.randint(NUM_CLASSES, (train_batch,))

    def model(title: str, config: HeadConfig) -> nn.Module:
        created = timm.create_model(name, head=config)
        return _prepared(title, created, created.head)

    settings = rival_settings(size).items()
    forwards = {title: forward_alone(model(title, config), image) for title, config in settings}
    steps = {title: training_step(model(title, config), *data) for title, config in settings}
    return [
        Case(f"{name}: heads side by side, forward, batch {batch}", forwards, FAST),
        Case(f"{name}: heads side by side, training step, batch {train_batch}", steps, FAST),
    ]
