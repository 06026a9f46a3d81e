"""Operators of ours among torch's: `torch.ops.sot.*`, so that compilers, fake tensors and FLOP counters know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

LIBRARY = torch.library.Library("sot", "FRAGMENT")  # type: ignore[no-untyped-call]
COMPUTE: dict[Any, Callable[..., Any]] = {}  # what each operator calls: for whoever counts what happens inside


def define(schema: str, compute: Callable[..., Any], fake: Callable[..., Any], flops: Callable[..., int]) -> Any:
    """Register an operator without a gradient of its own, which belongs to an `autograd.Function` outside of it.

    `fake` makes results of the right shapes, `flops` counts as torch's counter does: two for each multiply-add.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"sot::{name}", fake, lib=LIBRARY)
    packet = getattr(torch.ops.sot, name)
    register_flop_formula(packet)(flops)
    COMPUTE[packet.default] = compute
    return packet.default
