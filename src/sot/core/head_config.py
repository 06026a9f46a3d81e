"""The settings of a head, validated where they are made. Loads no torch, to refuse mistakes at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from sot.core.checks import check_bool, check_cross_norm, check_exponent, check_num_values, check_positive, is_number
from sot.core.choices import NORMS, POOLS


class Fusion(str, Enum):
    """How the class token and the pooled words make one prediction; the values are the paper's names."""

    SUM = "sum"  # FC(z₀) + FC(pool(Z))
    CONCAT = "concat"  # FC([z₀, pool(Z)])
    AGGR_ALL = "aggr_all"  # FC(pool([z₀, Z]))
    LATE = "late"  # softmax(FC(z₀)) + softmax(FC(pool(Z)))
    CLASS = "class"  # FC(z₀): the conventional head
    WORD = "word"  # FC(pool(Z)): for models without a class token


PAPER_NORMS = {"mgcrp": "svpn_fast", "gcp": "isqrt"}
PAPER_EXPONENT, DEFAULT_EXPONENT = 0.5, 0.25  # the latter scores higher with the exact norm, see docs/results.md
SIZES = {"left_dim": 14, "right_dim": 14, "reduced_dim": 48}
SECOND_ORDER = tuple(PAPER_NORMS)
USED_BY: dict[str, dict[str, tuple[str, ...]]] = {  # settings that only some poolings or norms have
    "pool": {
        **dict.fromkeys(("heads", "left_dim", "right_dim"), ("mgcrp",)),
        "reduced_dim": ("gcp",),
        "num_queries": ("ep",),
        **dict.fromkeys(("norm", "exponent", "num_values", "num_iterations"), SECOND_ORDER),
        **dict.fromkeys(("center", "representation_size"), SECOND_ORDER),
    },
    "norm": {
        "exponent": ("svpn", "svpn_fast", "svpn_matmul", "mpn", "epn"),
        "num_values": ("svpn_fast",),
        "num_iterations": ("svpn_fast", "isqrt"),
    },
}
OVERRIDES: dict[str, tuple[str, ...]] = {  # a change of the first withdraws what was set of the others
    "norm": tuple(USED_BY["norm"]),
    "representation_size": tuple(SIZES),
    **dict.fromkeys(SIZES, ("representation_size",)),
}
UNSET: Any = None  # a field that is not given: `__post_init__` chooses its value


@dataclass(frozen=True)
class HeadConfig:
    """Everything that defines a head but the width of its tokens and the number of classes.

    None means not set. The default normalises exactly (`norm="svpn"`, `exponent=0.25`); `gcp` takes `isqrt`. If you set
    `norm`, `exponent` defaults to 0.5. `num_values` or `num_iterations` alone ask for `svpn_fast`.
    `representation_size` chooses `left_dim = right_dim` (or `reduced_dim`) so that the pooled vector comes close to it.
    `average` puts the mean of the words beside what the pooling makes of them. `class_width` widens the class token of
    the `class` fusion. `pre_norm` puts a LayerNorm before all else; None leaves that to whoever knows the tokens.
    """

    pool: str = "mgcrp"
    fusion: str = "sum"
    heads: int = 6
    left_dim: int = UNSET
    right_dim: int = UNSET
    norm: str | None = None
    exponent: float = UNSET
    num_values: int = 1
    num_iterations: int | None = None
    center: bool = False
    reduced_dim: int = UNSET
    num_queries: int | None = None
    representation_size: int | None = None
    average: bool = False
    class_width: int | None = None
    pre_norm: bool | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        fusion, accepted = getattr(self.fusion, "value", self.fusion), [each.value for each in Fusion]
        if fusion not in accepted:
            raise ValueError(f"unknown fusion {fusion!r}; accepted: {', '.join(accepted)}")
        object.__setattr__(self, "fusion", fusion)
        POOLS.check(self.pool)
        if self.norm is not None:
            NORMS.check(self.norm)
        self._refuse_foreign()
        for name, value in self._missing().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_values()

    def _refuse_foreign(self) -> None:
        """Raise ValueError for a setting that has no effect on such a head, unless it has its default."""
        for name, value in vars(self).items():
            obstacle = None if value in (None, _DEFAULTS[name]) else _obstacle(name, vars(self))
            if obstacle:
                raise ValueError(f"{name}={value!r} is for {obstacle}")

    def _missing(self) -> dict[str, Any]:
        """Values for the fields that are not set."""
        by_default = self.pool == "mgcrp" and self.norm is None and not _asks_for_fast(vars(self))
        exponent = DEFAULT_EXPONENT if by_default else PAPER_EXPONENT
        norm = None if self.fusion == "class" else _norm_of(vars(self))
        return {"norm": norm, "exponent": exponent, **SIZES, **self._chosen_sizes()}

    def _chosen_sizes(self) -> dict[str, int]:
        """The sizes that `representation_size` chooses."""
        size, chosen = self.representation_size, dict[str, int]()
        if size is None:
            return {}
        check_positive(representation_size=size, heads=self.heads)
        if self.pool == "mgcrp":
            if size < self.heads:
                raise ValueError(f"representation_size must be at least heads = {self.heads}, got {size}")
            chosen = dict.fromkeys(("left_dim", "right_dim"), round(math.sqrt(size / self.heads)))
        elif self.pool == "gcp":
            chosen = {"reduced_dim": round((math.sqrt(8 * size + 1) - 1) / 2)}
        for name, value in chosen.items():
            if getattr(self, name) not in (None, value):
                raise ValueError(f"representation_size={size} means {name}={value}, got {name}={getattr(self, name)}")
        return chosen

    def _check_values(self) -> None:
        check_exponent(self.exponent)
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout!r}")
        check_bool(center=self.center, average=self.average, pre_norm=False if self.pre_norm is None else self.pre_norm)
        check_positive(heads=self.heads, num_values=self.num_values, **{name: getattr(self, name) for name in SIZES})
        for name in ("num_iterations", "num_queries", "class_width"):
            if getattr(self, name) is not None:
                check_positive(**{name: getattr(self, name)})
        if self.average and self.fusion == Fusion.CLASS.value:
            raise ValueError("average is of the words, which the fusion 'class' does not read")
        if self.class_width is not None and self.fusion != Fusion.CLASS.value:
            raise ValueError(f"class_width widens the class fusion only, got it with fusion {self.fusion!r}")
        self._check_norm()

    def _check_norm(self) -> None:
        """What our poolings would refuse when they are built."""
        if self.fusion == Fusion.CLASS.value or self.pool not in SECOND_ORDER:
            return
        if self.pool == "mgcrp":
            check_cross_norm(self.norm)
        dims = (self.left_dim, self.right_dim) if self.pool == "mgcrp" else (self.reduced_dim, self.reduced_dim)
        check_num_values(self.num_values, *dims)

    @classmethod
    def paper(cls, **settings: Any) -> HeadConfig:
        """The paper's head: `svpn_fast`, one value, one iteration, exponent 0.5; `isqrt` for `gcp`."""
        given = {name: value for name, value in settings.items() if value is not None}
        norm = None if given.get("fusion") == "class" else PAPER_NORMS.get(str(given.get("pool", "mgcrp")))
        return cls.from_dict({"norm": norm, "exponent": PAPER_EXPONENT, **given})

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> HeadConfig:
        """The head of a saved folder: settings without effect are left out, a null norm is the paper's (0.1.0)."""
        own = applicable(check_head_settings(values))
        return cls.paper(**own) if values.get("norm", "") is None else cls(**own)

    def changed(self, settings: Mapping[str, Any]) -> HeadConfig:
        """The head with other settings; see `merge_head`."""
        return HeadConfig.from_dict(merge_head(self.to_dict(), settings))

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary that `from_dict` and JSON take back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadConfig:
        """The inverse of `to_dict`; missing fields have their defaults, unknown ones are refused."""
        return cls(**check_head_settings(values))


_DEFAULTS = {field.name: field.default for field in fields(HeadConfig)} | SIZES | {"exponent": PAPER_EXPONENT}


def merge_head(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a head with others that win over them; None unsets one.

    A change withdraws what contradicts it: sizes and `representation_size` replace each other, another `norm` or `pool`
    starts with settings of its own.
    """
    before = base.get("pool", "mgcrp")
    pool = (changes["pool"] or "mgcrp") if "pool" in changes else before
    gone = {other for name in changes for other in OVERRIDES.get(name, ())}
    if base.get("representation_size") is not None:
        gone |= set(SIZES)  # it chose them
    if pool != before:
        gone |= {"norm", *USED_BY["norm"], *(name for name in base if _obstacle(name, {"pool": pool}))}
    merged = {**{name: value for name, value in base.items() if name not in gone}, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def applicable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that have no effect on a head of this pooling and norm."""
    return {name: value for name, value in values.items() if not _obstacle(name, values)}


def check_head_settings(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings themselves, or ValueError for what is no dictionary of fields of HeadConfig."""
    if not isinstance(values, Mapping):
        raise ValueError(f"a head is given by HeadConfig or a dictionary of its fields, got {values!r}")
    unknown = [name for name in values if name not in _DEFAULTS]
    if unknown:
        raise ValueError(f"unknown head setting {', '.join(map(repr, unknown))}; accepted: {', '.join(_DEFAULTS)}")
    return values


def _norm_of(values: Mapping[str, Any]) -> str | None:
    """The norm that these settings name or ask for; None of poolings that have none."""
    pool, norm = values.get("pool", "mgcrp"), values.get("norm")
    if norm is None and pool == "mgcrp" and not _asks_for_fast(values):
        return "svpn"
    return norm or PAPER_NORMS.get(str(pool))


def _asks_for_fast(values: Mapping[str, Any]) -> bool:
    return values.get("num_values", 1) != 1 or values.get("num_iterations") is not None


def _obstacle(name: str, values: Mapping[str, Any]) -> str | None:
    """Why a setting has no effect beside these, or None; the class token alone takes any."""
    if values.get("fusion") == "class" or POOLS.is_foreign(values.get("pool", "mgcrp")):
        return None
    for kind, got in (("pool", values.get("pool", "mgcrp")), ("norm", _norm_of(values))):
        accepted = USED_BY[kind].get(name)
        if accepted and got not in accepted and not (kind == "norm" and NORMS.is_foreign(got)):
            *others, last = accepted
            names = f"{', '.join(others)} and {last}" if others else last
            return f"{names} only, got {kind} {got!r}"
    return None
