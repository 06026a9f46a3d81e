"""The settings of a head, validated where they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from sot.core.checks import check_bool, check_exponent, check_positive, is_number
from sot.core.fusion import Fusion
from sot.core.normalizers import NORMS

POOL_NAMES = ("mgcrp", "gcp", "gap", "max", "attn", "ep")


@dataclass(frozen=True)
class HeadConfig:
    """Everything that defines a head but the width of its tokens and the number of classes.

    `norm` and `num_iterations` of None are the pooling's own default (`svpn_fast` with 1 iteration for `mgcrp`, `isqrt`
    with 5 for `gcp`). `representation_size` chooses `left_dim = right_dim` (or `reduced_dim`) so that the pooled
    vector comes as close to it as it can. `class_width` widens the class token of the `class` fusion first. `pre_norm`
    puts a LayerNorm before all else, for tokens that come without one; None leaves that to whoever knows the tokens.
    """

    pool: str = "mgcrp"
    fusion: str = "sum"
    heads: int = 6
    left_dim: int = 14
    right_dim: int = 14
    norm: str | None = None
    exponent: float = 0.5
    num_values: int = 1
    num_iterations: int | None = None
    center: bool = False
    reduced_dim: int = 48
    num_queries: int | None = None
    representation_size: int | None = None
    class_width: int | None = None
    pre_norm: bool | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "fusion", _choice("fusion", self.fusion, [f.value for f in Fusion]))
        _choice("pool", self.pool, list(POOL_NAMES))
        if self.norm is not None:
            _choice("norm", self.norm, list(NORMS))
        check_exponent(self.exponent)
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout!r}")
        check_bool(center=self.center, pre_norm=False if self.pre_norm is None else self.pre_norm)
        names = ("heads", "left_dim", "right_dim", "num_values", "reduced_dim")
        check_positive(**{name: getattr(self, name) for name in names})
        for name in ("num_iterations", "num_queries", "representation_size", "class_width"):
            if getattr(self, name) is not None:
                check_positive(**{name: getattr(self, name)})
        if self.class_width is not None and self.fusion != Fusion.CLASS.value:
            raise ValueError(f"class_width widens the class fusion only, got it with fusion {self.fusion!r}")
        if self.representation_size is not None:
            self._choose_dims(self.representation_size)

    def _choose_dims(self, size: int) -> None:
        if self.pool == "mgcrp":
            if size < self.heads:
                raise ValueError(f"representation_size must be at least heads = {self.heads}, got {size}")
            side = round(math.sqrt(size / self.heads))
            object.__setattr__(self, "left_dim", side)
            object.__setattr__(self, "right_dim", side)
        elif self.pool == "gcp":
            object.__setattr__(self, "reduced_dim", round((math.sqrt(8 * size + 1) - 1) / 2))
        else:
            raise ValueError(f"representation_size chooses the size of mgcrp and gcp only, got pool {self.pool!r}")

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary that `from_dict` and JSON take back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadConfig:
        """The inverse of `to_dict`; missing fields have their defaults, unknown ones are refused."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a head is given by HeadConfig or a dictionary of its fields, got {values!r}")
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(f"unknown head setting {', '.join(map(repr, unknown))}; accepted: {', '.join(known)}")
        return cls(**values)


def _choice(what: str, value: Any, accepted: list[str]) -> str:
    name = value.value if isinstance(value, Enum) else value
    if name not in accepted:
        raise ValueError(f"unknown {what} {name!r}; accepted: {', '.join(accepted)}")
    return str(name)
