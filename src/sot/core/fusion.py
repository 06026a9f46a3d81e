"""How class token and words are fused: by name, without torch, for the command line to know before it is loaded."""

from __future__ import annotations

from enum import Enum


class Fusion(str, Enum):
    """How the class token and the pooled words make one prediction; the values are the paper's names."""

    SUM = "sum"  # FC(z₀) + FC(pool(Z))
    CONCAT = "concat"  # FC([z₀, pool(Z)])
    AGGR_ALL = "aggr_all"  # FC(pool([z₀, Z]))
    LATE = "late"  # softmax(FC(z₀)) + softmax(FC(pool(Z)))
    CLASS = "class"  # FC(z₀): the conventional head
    WORD = "word"  # FC(pool(Z)): for models without a class token
