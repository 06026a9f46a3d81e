"""What each branch of the head adds to every logit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from sot.core.head import SecondOrderHead
from sot.models.branched import heads_of
from sot.models.tokens import Tokens

CLASS, WORDS, BOTH = "class token", "words", "both"
FUSED = ("sum", "concat", "late")  # fusions in which both branches can be told apart
NOTES = {
    "sum": "logit = class token + words + bias, exactly; the bias reads no token and belongs to neither",
    "concat": "logit = class token + words + bias, exactly: the linear layer has columns for either",
    "late": "each branch has logits of its own; the prediction is their mean probability, which is no sum of the two",
    "aggr_all": "class token and words are pooled together: no logit can be divided among them",
    "class": "the head reads the class token only: logit = class token + bias",
    "word": "the head reads the words only: logit = words + bias",
}


@dataclass
class Branches:
    """Logits `(batch, classes)` with their graph; a branch's part is without the bias that it is trained with."""

    class_part: Tensor | None
    word_part: Tensor | None
    class_bias: Tensor
    word_bias: Tensor
    logits: Tensor

    def of(self, part: str) -> Tensor:
        """What a part adds to the logits, or for both the logits themselves."""
        chosen = {CLASS: self.class_part, WORDS: self.word_part}.get(part, self.logits)
        if chosen is None:
            raise ValueError(f"the head has no branch for the {part}")
        return chosen

    def votes(self, part: str) -> Tensor:
        """Logits with which a branch alone would predict: its part and its bias."""
        if part == BOTH:
            return self.logits
        return self.of(part) + (self.class_bias if part == CLASS else self.word_bias)


@dataclass(frozen=True)
class Contributions:
    """Of one input, by class: what the class token, the words and the bias add to the logit.

    `exact` says that the three sum to the logit; `note` says what holds for this fusion.
    """

    class_part: NDArray[np.float64]
    word_part: NDArray[np.float64]
    bias: NDArray[np.float64]
    logits: NDArray[np.float64]
    exact: bool
    note: str


def parts_of(head: SecondOrderHead) -> tuple[str, ...]:
    """The parts that can be looked at one by one; a head that reads one kind of token has only `both`."""
    return (CLASS, WORDS, BOTH) if head.fusion in FUSED else (BOTH,)


def name_of(head: SecondOrderHead, part: str) -> str:
    """A part in words: `both` of a head with one branch is that branch."""
    if part != BOTH or head.fusion in FUSED:
        return part
    return {"class": CLASS, "word": WORDS}.get(head.fusion, "all tokens")


def split_logits(head: SecondOrderHead, tokens: Tokens) -> Branches:
    """The logits of a head and their parts; the heads of a backbone's further branches add to those of the first."""
    first, *others = (
        split_head(each, own) for each, own in zip(heads_of(head), (tokens, *tokens.branches), strict=True)
    )
    for other in others:
        for name, value in vars(other).items():  # of a head with one branch the other is None
            if value is not None:
                own = getattr(first, name)
                setattr(first, name, value if own is None else own + value)
    return first


def split_head(head: SecondOrderHead, tokens: Tokens) -> Branches:
    """Of one head, the first of several. Half of the one bias of `concat` goes with either branch's own vote."""
    class_features, word_features = head.represent(tokens.class_token, tokens.word_tokens, tokens.mask)
    class_part = word_part = None
    class_bias = word_bias = torch.zeros(head.num_classes, dtype=word_features.dtype, device=word_features.device)
    if head.fusion == "concat":
        weight, bias = _weight_and_bias(head.word_linear)
        class_part = F.linear(class_features, weight[:, : head.class_features])
        word_part = F.linear(word_features, weight[:, head.class_features :])
        class_bias = word_bias = bias / 2
    else:
        if head.class_features:
            weight, class_bias = _weight_and_bias(head.class_linear)
            class_part = F.linear(class_features, weight)
        if head.word_features:
            weight, word_bias = _weight_and_bias(head.word_linear)
            word_part = F.linear(word_features, weight)
    votes = [part + bias for part, bias in ((class_part, class_bias), (word_part, word_bias)) if part is not None]
    logits = head.merge(votes) if head.fusion == "late" else torch.stack(votes).sum(0)
    return Branches(class_part, word_part, class_bias, word_bias, logits)


def _weight_and_bias(linear: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(linear.weight, Tensor) and isinstance(linear.bias, Tensor)
    return linear.weight, linear.bias


@torch.no_grad()
def branch_contributions(head: SecondOrderHead, tokens: Tokens) -> Contributions:
    """What the branches add to every logit of the first sample."""
    branches = split_logits(head, tokens)
    logits = branches.logits[0]
    parts = [
        torch.zeros_like(logits) if part is None else part[0] for part in (branches.class_part, branches.word_part)
    ]
    values = (*parts, branches.class_bias + branches.word_bias, logits)
    class_part, word_part, bias, logit = (value.double().cpu().numpy() for value in values)
    return Contributions(class_part, word_part, bias, logit, exact=head.fusion != "late", note=NOTES[head.fusion])
