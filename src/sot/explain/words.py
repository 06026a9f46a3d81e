"""Influence of the words of a text, pieces merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sot.explain.branches import parts_of, split_logits
from sot.explain.reading import TokenReading
from sot.explain.relevance import global_attentions, token_relevance
from sot.models.from_transformers import position_limit
from sot.models.modeling import SoTForSequenceClassification

TEXT_METHODS = ("relevance", "gradient")
MAX_TOKENS = 512  # of one text, where the model itself knows no limit: a map of attention takes their number squared


@dataclass
class Words:
    """The words of a text (and of its pair): where they stand in it, and which tokens are theirs."""

    texts: list[str]  # what was given, one or two
    spans: list[tuple[int, int, int]]  # of each word: which text, first and last character
    tokens: list[list[int]]  # of each word
    special: list[int]  # tokens that are no word: [CLS], [SEP], …
    encoded: dict[str, Tensor]
    cut: str  # one sentence if the text was longer than the model reads, else empty

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def names(self) -> list[str]:
        """The words themselves."""
        return [self.texts[text][start:end] for text, start, end in self.spans]

    def merge(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Sums over the tokens of each word."""
        return np.array([values[tokens].sum() for tokens in self.tokens], dtype=np.float64)

    def merge_pairs(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Sums over the tokens of each pair of words."""
        rows = np.array([values[tokens].sum(0) for tokens in self.tokens])
        return np.array([rows[:, tokens].sum(1) for tokens in self.tokens], dtype=np.float64).T


def token_limit(model: SoTForSequenceClassification, tokenizer: Any) -> int:
    """How many tokens of a text the model can read."""
    positions = position_limit(model.backbone)
    return int(min(MAX_TOKENS, tokenizer.model_max_length, MAX_TOKENS if positions is None else positions))


def split_words(model: SoTForSequenceClassification, tokenizer: Any, text: str, pair: str | None = None) -> Words:
    """Tokens of a text, cut to what the model reads, and the words they belong to."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} does not say which word a token is from: a fast tokenizer does")
    texts = [text] if pair is None else [text, pair]
    if not any(map(str.strip, texts)):
        raise ValueError("there is no word in the text to explain")
    limit = token_limit(model, tokenizer)
    encoded = tokenizer(*texts, truncation=True, max_length=limit, return_tensors="pt", return_offsets_mapping=True)
    offsets = encoded["offset_mapping"][0].tolist()
    sequences, words = encoded.sequence_ids(0), encoded.word_ids(0)
    found: dict[tuple[int, int], list[int]] = {}
    special = []
    for token, (sequence, word) in enumerate(zip(sequences, words)):
        if sequence is None or word is None:
            special.append(token)
        else:
            found.setdefault((sequence, word), []).append(token)
    spans = [
        (sequence, *_span(texts[sequence], [offsets[t] for t in tokens])) for (sequence, _), tokens in found.items()
    ]
    if not spans:
        raise ValueError("there is no word in the text to explain")
    kept = {name: encoded[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded}
    return Words(texts, spans, list(found.values()), special, kept, _cut(texts, spans, limit))


def _span(text: str, offsets: Sequence[Sequence[int]]) -> tuple[int, int]:
    """First and last character of a word; byte-level tokens count the space before them as theirs."""
    start, end = min(o[0] for o in offsets), max(o[1] for o in offsets)
    word = text[start:end]
    return start + len(word) - len(word.lstrip()), end - len(word) + len(word.rstrip())


def _cut(texts: list[str], spans: list[tuple[int, int, int]], limit: int) -> str:
    read = [max((end for number, _, end in spans if number == index), default=0) for index in range(len(texts))]
    if all(not text[end:].strip() for text, end in zip(texts, read)):
        return ""
    share = f"{sum(read)} of {sum(map(len, texts))} characters"
    return f"The model reads {limit} tokens: {share} were read, the rest was cut off."


def token_influence(
    model: SoTForSequenceClassification, reading: TokenReading, part: str, target: int, method: str
) -> NDArray[np.float64]:
    """Influence `(tokens,)` of every token of a text on the logit of class `target` through a part of the head.

    `relevance` is gradient-weighted attention, never negative; `gradient` is the gradient times the token's embedding,
    negative for a token that lowers the logit.
    """
    if method == "relevance":
        if not global_attentions(reading):
            name = type(model.backbone).__name__
            raise ValueError(f"relevance is not available for {name}: it has no attention maps; accepted: gradient")
        influence = token_relevance(model.classifier, reading, part, target)
    elif method == "gradient":
        logit = split_logits(model.classifier, reading.tokens).of(part)[0, target]
        (slope,) = torch.autograd.grad(logit, reading.inputs, retain_graph=True)
        influence = (slope * reading.inputs)[0].sum(-1)
    else:
        raise ValueError(f"unknown method {method!r} for texts; accepted: {', '.join(TEXT_METHODS)}")
    values: NDArray[np.float64] = influence.detach().double().cpu().numpy()
    return values


def word_influence(
    model: SoTForSequenceClassification, reading: TokenReading, words: Words, target: int, method: str
) -> dict[str, NDArray[np.float64]]:
    """Influence of every word by part of the head, pieces summed."""
    parts = parts_of(model.classifier)
    return {part: words.merge(token_influence(model, reading, part, target, method)) for part in parts}
