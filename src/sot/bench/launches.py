"""How many kernels a head or its exact norm launches on an accelerator, counted on shapes: no device is needed.

Counted are torch's operators that write something, and what our own launch. A product of cuBLAS or a decomposition
counts as one, whatever it launches itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sot.bench.cases import EXACT, HEADS, NUM_CLASSES, SIZES, Size
from sot.bench.head_cost import PUBLISHED, head_inputs
from sot.bench.references import PublishedHead
from sot.bench.rivals import rival_heads
from sot.core.normalize import singular_value_power_norm
from sot.ops.library import COMPUTE
from sot.ops.svpn import export
from sot.ops.svpn.torch import BATCHED
from sot.ops.svpn.triton import LAUNCHES

WITHOUT_TRITON = "ours, without Triton"
NOTHING_WRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view")
SVPN = torch.ops.sot.svpn.default, torch.ops.sot.svpn_backward.default
BY_TRITON = dict(zip(SVPN, LAUNCHES))
COPIED = dict.fromkeys(SVPN, 2)  # to the CPU and back


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is launched by name, also inside of our operators, but for those that `known` has counts of."""

    def __init__(self, known: Mapping[Any, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.known:
            self.launches[str(func)] += self.known[func]
        elif func in COMPUTE or func._can_decompose():  # such as `matmul`, which may copy
            with self:
                return COMPUTE.get(func, func.decompose)(*args, **kwargs)
        elif func.namespace == "aten" and not _only_looks(func):
            self.launches[str(func)] += 1
        return func(*args, **kwargs)


def _only_looks(func: Any) -> bool:
    """Whether an operator makes views or room, and writes nothing."""
    aliases = [result.alias_info for result in func._schema.returns]
    views = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    return views or func._schema.name.removeprefix("aten::") in NOTHING_WRITTEN


@dataclass(frozen=True)
class Launches:
    """Launches of one head or norm; `inside` names the operators, forward and backward together."""

    size: str
    name: str
    forward: int
    backward: int
    inside: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def both(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward


def count_launches(
    head: Callable[..., Tensor], inputs: list[Tensor], known: Mapping[Any, int] = BY_TRITON
) -> tuple[Counter[str], Counter[str]]:
    """Forward, and backward to the inputs and to every parameter."""
    wanted = [*inputs, *(head.parameters() if isinstance(head, nn.Module) else ())]
    with LaunchCounter(known) as forward:
        out = head(*inputs)
    grad = torch.empty_like(out)
    with LaunchCounter(known) as backward:
        torch.autograd.grad(out, wanted, grad)
    return forward.launches, backward.launches


def _launches(size: Size, name: str, *counted: Any) -> Launches:
    forward, backward = count_launches(*counted)
    return Launches(size.name, name, forward.total(), backward.total(), forward + backward)


def head_launches(sizes: tuple[Size, ...] = SIZES) -> list[Launches]:
    """Of the published head, and of ours, as `accelerate` sets them."""
    rows = []
    for size in sizes:
        with torch.device("meta"):
            inputs = head_inputs(replace(size, batch=max(2, size.batch)))
            published: nn.Module = PublishedHead(size.token_dim, NUM_CLASSES, HEADS, size.head_dim)
            ours = rival_heads(size)
        for name, head in {PUBLISHED: published, **ours, WITHOUT_TRITON: ours[EXACT]}.items():
            without = COPIED if size.head_dim > BATCHED else {}
            rows.append(_launches(size, name, head, inputs, without if name == WITHOUT_TRITON else BY_TRITON))
    return rows


def norm_launches(sizes: tuple[Size, ...] = SIZES) -> list[Launches]:
    """Exact svPN on its own: each way that is taken on some device, and matrix products, which are taken on none."""
    exact, products = (partial(power, exponent=0.25) for power in (singular_value_power_norm, export.power))
    rows = []
    for size in sizes:
        single, double = (
            torch.empty(HEADS, size.head_dim, size.head_dim, device="meta", dtype=dtype, requires_grad=True)
            for dtype in (torch.float32, torch.float64)
        )
        rows.append(_launches(size, "Triton", exact, [single], BY_TRITON))
        if size.head_dim <= BATCHED:
            rows.append(_launches(size, "eigh of QᵀQ", exact, [single], {}))
            rows.append(_launches(size, "SVD, float64", exact, [double], {}))
        rows.append(_launches(size, "copied to the CPU", exact, [single], COPIED))
        rows.append(_launches(size, "matrix products only", products, [single], {}))
    return rows
