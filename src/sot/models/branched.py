"""Backbones with several branches, each of which classifies (Conformer): a second-order head for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from sot.core.head import HeadConfig, SecondOrderHead
from sot.core.packed import Packed
from sot.models.layout import Layout


class BranchedHead(SecondOrderHead):
    """The head of the first branch, with those of the `others` inside; logits add up, losses are averaged.

    `pre_logits` and `num_features` are those of the first branch.
    """

    def __init__(self, num_classes: int, config: HeadConfig, layouts: Sequence[Layout]) -> None:
        super().__init__(layouts[0].dim, num_classes, config)
        self.others = nn.ModuleList(
            SecondOrderHead(layout.dim, num_classes, fit_branch(config, layout)) for layout in layouts[1:]
        )

    @property
    def num_branches(self) -> int:
        """How many classifiers all heads have together."""
        return super().num_branches + sum(head.num_branches for head in heads_of(self)[1:])

    def forward(
        self,
        class_token: Tensor | None,
        word_tokens: Tensor | Packed | None,
        mask: Tensor | None = None,
        pre_logits: bool = False,
        with_branches: bool = False,
        others: Sequence[tuple[Tensor | None, Tensor]] = (),
    ) -> Any:
        """Sum of the logits of all heads; `others` has the class token and the words of each further branch."""
        if pre_logits or self.num_classes == 0:
            return super().forward(class_token, word_tokens, mask, pre_logits)
        if len(others) != len(self.others):
            raise ValueError(f"expected the tokens of {len(self.others)} further branches, got {len(others)}")
        parts: list[Any] = [super().forward(class_token, word_tokens, mask, with_branches=True)]
        parts += [head(*tokens, with_branches=True) for head, tokens in zip(self.others, others)]
        logits = torch.stack([part for part, _ in parts]).sum(0)
        return (logits, [branch for _, branches in parts for branch in branches]) if with_branches else logits

    def loss(self, branches: list[Tensor], target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Mean over the heads of the loss of each."""
        rest, losses = iter(branches), []
        for count in (super().num_branches, *(head.num_branches for head in heads_of(self)[1:])):
            losses.append(super().loss(list(islice(rest, count)), target, label_smoothing))
        return torch.stack(losses).mean()


def fit_branch(head: HeadConfig, layout: Layout) -> HeadConfig:
    """The same head on another branch; the average of its words stands for a class token where there is none."""
    head = replace(head, pre_norm=layout.needs_norm)
    if layout.has_class_token or head.fusion == "word":
        return head
    if head.fusion == "class":
        return head.changed({"fusion": "word", "pool": "gap", "class_width": None})
    return replace(head, fusion="word")


def build_head(dim: int, num_classes: int, config: HeadConfig, layout: Layout | None) -> SecondOrderHead:
    """The classifier of a backbone: a head, or one for each branch."""
    if layout is None or not layout.branches:
        return SecondOrderHead(dim, num_classes, config)
    return BranchedHead(num_classes, config, [layout, *layout.branches])


def heads_of(classifier: SecondOrderHead) -> list[SecondOrderHead]:
    """The heads in the order of the branches."""
    return [classifier, *getattr(classifier, "others", [])]
