"""Backbones with several branches, each of which classifies (Conformer): a second-order head for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from sot.core.head import HeadConfig, SecondOrderHead
from sot.models.tokens import Layout


class BranchedHead(SecondOrderHead):
    """The head of the first branch, with those of the `others` inside; logits add up, losses are averaged."""

    def __init__(self, num_classes: int, config: HeadConfig, layouts: Sequence[Layout]) -> None:
        super().__init__(layouts[0].dim, num_classes, config)
        self.others = nn.ModuleList(
            SecondOrderHead(layout.dim, num_classes, fit_branch(config, layout)) for layout in layouts[1:]
        )


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
