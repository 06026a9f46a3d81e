"""Gradient-weighted attention relevance (Chefer, Gur and Wolf, ICCV 2021), for a head that reads all tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sot.core.head import SecondOrderHead
from sot.explain.branches import parts_of, split_logits
from sot.explain.cam import METHODS, word_grid
from sot.explain.reading import TokenReading, explaining, read_image
from sot.models.modeling import SoTForImageClassification


def global_attentions(reading: TokenReading) -> list[Tensor]:
    """The last layers in which every token attends to every other; empty if attention is elsewhere only in windows."""
    words = reading.tokens.word_tokens
    batch, count = words.shape[0], words.shape[1] + reading.num_prefix
    if any(attention.ndim != 4 or attention.shape[0] != batch for attention in reading.attentions):
        return []
    found: list[Tensor] = []
    for attention in reversed(reading.attentions):
        if attention.shape[-2:] != (count, count):
            break
        found.insert(0, attention)
    return found


def token_relevance(head: SecondOrderHead, reading: TokenReading, part: str, target: int) -> Tensor:
    """Relevance `(tokens,)` of each token before the first global layer for class `target` through a part of the head.

    R starts as the identity and gains `mean over heads of (A ∘ ∂logit/∂A)⁺ R` in each layer. Chefer et al. read the row
    of the class token. This head reads more: the rows are summed, each weighted by the share that its token has in the
    logit, gradient times token, positive ones only.
    """
    attentions = global_attentions(reading)
    tokens = reading.tokens
    logit = split_logits(head, tokens).of(part)[0, target]
    leaves = [tokens.word_tokens] + ([] if tokens.class_token is None else [tokens.class_token])
    slopes = torch.autograd.grad(logit, [*attentions, *leaves], allow_unused=True, retain_graph=True)
    shares = torch.zeros(attentions[0].shape[-1], dtype=torch.float64, device=logit.device)
    for leaf, slope in zip(leaves, slopes[len(attentions) :]):
        if slope is None:
            continue
        share = (leaf[0] * slope[0]).sum(-1).double()
        if leaf is tokens.word_tokens:
            shares[reading.num_prefix :] += share
        else:
            shares[reading.class_index] += share
    shares = shares.clamp_min(0) if shares.amax() > 0 else shares.abs()
    relevance = torch.eye(len(shares), dtype=torch.float64, device=logit.device)
    for attention, slope in zip(attentions, slopes):
        if slope is not None:
            flow = (attention[0] * slope[0]).clamp_min(0).mean(0).double()  # (tokens, tokens)
            relevance = relevance + flow @ relevance
    return ((shares / shares.sum().clamp_min(torch.finfo(torch.float64).tiny)) @ relevance).detach()


def relevance_maps(
    model: SoTForImageClassification, pixels: Tensor, target: int
) -> tuple[dict[str, NDArray[np.float32]], str]:
    """Relevance of every word of one image by part, and a note on the layers it went through."""
    with explaining(model):
        reading = read_image(model, pixels, attentions=True)
        used, total = len(global_attentions(reading)), len(reading.attentions)
        if not used:
            why = f"relevance is not available for {type(model.body).__name__}, whose words do not attend to all others"
            raise ValueError(f"{why}; accepted: {', '.join(METHODS)}")
        grid = word_grid(reading.tokens.grid)
        maps = {}
        for part in parts_of(model.classifier):
            relevance = token_relevance(model.classifier, reading, part, target)
            maps[part] = relevance[reading.num_prefix :].view(grid).cpu().numpy().astype(np.float32)
    return maps, f"relevance through the last {used} of {total} attention layers" if used < total else ""
