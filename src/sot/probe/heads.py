"""The heads that are compared: all are `SecondOrderHead`s, behind the same frozen standardisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sot.core.head import HeadConfig, SecondOrderHead
from sot.data.images import seeded
from sot.errors import SettingError
from sot.models.accelerate import accelerate
from sot.probe.features import Array, Batch, Features
from sot.probe.names import HEADS, check_names, is_second_order

LEAST_DEVIATION = 0.1  # of channels that hardly vary: dividing by less would show the rounding of half precision
ROWS_AT_A_TIME, ROWS_REPRESENTED = 64, 256  # for statistics, and through a head


def choose_heads(
    names: Sequence[str], dim: int, has_class_token: bool, representation: int | None = None
) -> dict[str, HeadConfig | None]:
    """The heads of these names; `all` are those that a backbone with such tokens can have.

    `representation` is the size that second-order poolings come as close to as they can.
    """
    check_names(names)
    possible = {name: config for name, config in HEADS.items() if not _obstacle(config, dim, has_class_token)}
    if "all" in names:
        return _sized(possible, dim, representation)
    for name in names:
        if name not in possible:
            obstacle = _obstacle(HEADS[name], dim, has_class_token)
            raise ValueError(f"head {name!r} {obstacle}; accepted: {', '.join(possible)}")
    return _sized({name: possible[name] for name in dict.fromkeys(names)}, dim, representation)


def _sized(heads: dict[str, HeadConfig | None], dim: int, representation: int | None) -> dict[str, HeadConfig | None]:
    second_order = {name: config for name, config in heads.items() if config is not None and is_second_order(config)}
    if representation is None:
        return heads
    if not second_order:
        raise SettingError("{representation} {} is for gcp and mgcrp, and no head is one of them", representation)
    least, most = HeadConfig().heads, dim * (dim + 1) // 2
    if not least <= representation <= most:
        said = "{representation} must be between {} and {} for tokens {} wide, got {}"
        raise SettingError(said, least, most, dim, representation)
    size = {"representation_size": representation}
    return heads | {name: config.changed(size) for name, config in second_order.items()}


def _obstacle(config: HeadConfig | None, dim: int, has_class_token: bool) -> str | None:
    if config is None:
        return None
    if config.fusion != "word" and not has_class_token:
        return "needs a class token, and this backbone has none"
    if config.pool == "ep" and dim % (config.num_queries or 1):
        return f"needs a token width that {config.num_queries} divides, and this backbone has {dim}"
    return None


def standardising_head(
    config: HeadConfig, num_outputs: int, statistics: tuple[Tensor, Tensor], seed: int = 0
) -> SecondOrderHead:
    """A new head whose LayerNorm standardises the tokens and is not trained, so that all heads read the same."""
    mean, deviation = statistics
    with seeded(seed):
        head = SecondOrderHead(len(mean), num_outputs, config)
    head.norm.load_state_dict({"weight": 1 / deviation, "bias": -mean / deviation})
    head.norm.requires_grad_(False)
    return accelerate(head)


@contextmanager
def norm_taken_out(head: SecondOrderHead) -> Iterator[nn.LayerNorm]:
    """The LayerNorm of a head that does without it meanwhile: tokens pass it as they are read, which costs less."""
    norm = head.norm
    assert isinstance(norm, nn.LayerNorm)
    head.norm = nn.Identity()
    try:
        yield norm
    finally:
        head.norm = norm


def read_for(head: SecondOrderHead, features: Features, rows: Array, norm: nn.LayerNorm) -> Batch:
    """What a head takes of some samples: those that read the class token alone get no words."""
    return features.batch(rows, norm, with_words=head.pool is not None)


@torch.inference_mode()
def representations(head: SecondOrderHead, features: Features, rows: Array) -> Tensor:
    """What the linear layers of a head read of some samples."""
    parts = []
    with norm_taken_out(head) as norm:
        order = np.argsort(features.lengths[rows], kind="stable")  # like lengths together: little is padded
        for start in range(0, len(rows), ROWS_REPRESENTED):
            batch = read_for(head, features, rows[order[start : start + ROWS_REPRESENTED]], norm)
            parts.append(head(*batch, pre_logits=True))
    sorted_rows = torch.cat(parts)
    return torch.empty_like(sorted_rows).index_copy_(0, torch.from_numpy(order), sorted_rows)


def token_statistics(features: Features, rows: Array | None = None) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of the layer-normalised tokens; class tokens weigh as much as all words."""
    rows = np.arange(len(features)) if rows is None else rows
    moments = torch.zeros(2, 2, features.dim, dtype=torch.float64)  # (class or words, power, dim)
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        class_token, words = features.batch(rows[start : start + ROWS_AT_A_TIME])
        for kind, part in enumerate((class_token, None if words is None else words.tokens)):
            if part is not None:
                moments[kind] += torch.stack([part.double().sum(0), part.double().square().sum(0)])
    counts = torch.tensor([0 if features.class_tokens is None else len(rows), int(features.lengths[rows].sum())])
    mean, square = (moments / counts.clamp_min(1)[:, None, None]).sum(0) / (counts > 0).sum()
    deviation = (square - mean.square()).clamp_min(0).sqrt().clamp_min(LEAST_DEVIATION)
    return mean.float(), deviation.float()


def count_macs(head: SecondOrderHead, words: int) -> int:
    """Multiply-adds for one sample of so many words: all matrix products, but no decomposition of a matrix."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        head(torch.randn(1, head.dim), torch.randn(1, words, head.dim))
    return counter.get_total_flops() // 2
