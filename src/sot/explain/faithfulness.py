"""Is an explanation true? What it calls important is deleted first, and the score of the class has to fall."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sot.evaluation.predict import probabilities

AT_A_TIME = 64


@torch.no_grad()
def delete_patches(model: Any, pixels: Tensor, importance: NDArray[Any], target: int) -> NDArray[np.float64]:
    """Probability of class `target` with the 0, 1, 2, … most important patches of one picture deleted.

    A patch is a cell of the map `importance (rows, columns)`; deleted, it has the mean colour of the picture.
    """
    rank = _ranks(importance.reshape(-1)).reshape(importance.shape)
    size = pixels.shape[-2:]
    cells = F.interpolate(torch.from_numpy(rank).float()[None, None], size=size, mode="nearest")[0, 0].to(pixels.device)
    deleted = torch.arange(rank.size + 1, device=pixels.device)[:, None, None] > cells  # (steps, height, width)
    blank = pixels.mean((-2, -1), keepdim=True)
    return _scores(model, lambda piece: {"pixel_values": torch.where(piece[:, None], blank, pixels)}, deleted, target)


@torch.no_grad()
def delete_words(
    model: Any, encoded: Mapping[str, Tensor], words: list[list[int]], importance: NDArray[Any], target: int, blank: int
) -> NDArray[np.float64]:
    """Probability of class `target` with the 0, 1, 2, … most important words of one text replaced by token `blank`.

    `words` has the tokens of each word, as `Words.tokens` has them.
    """
    rank = np.full(encoded["input_ids"].shape[1], len(words))
    for tokens, place in zip(words, _ranks(importance)):
        rank[tokens] = place
    deleted = torch.arange(len(words) + 1)[:, None] > torch.from_numpy(rank)
    deleted = deleted.to(model.device)
    inputs = {name: value.to(model.device) for name, value in encoded.items()}

    def batch(piece: Tensor) -> dict[str, Tensor]:
        same = {name: value.expand(len(piece), -1) for name, value in inputs.items()}
        return {**same, "input_ids": same["input_ids"].masked_fill(piece, blank)}

    return _scores(model, batch, deleted, target)


def _ranks(importance: NDArray[Any]) -> NDArray[np.int64]:
    """0 for the most important; of equals the first goes first."""
    ranks: NDArray[np.int64] = np.empty(len(importance), dtype=np.int64)
    ranks[np.argsort(-importance, kind="stable")] = np.arange(len(importance))
    return ranks


def _scores(model: Any, batch: Any, deleted: Tensor, target: int) -> NDArray[np.float64]:
    logits = (model(**batch(piece)).logits.double() for piece in torch.split(deleted, AT_A_TIME))
    config = getattr(model, "config", None)  # any model that gives logits will do
    pieces = [(piece.softmax(-1) if config is None else probabilities(config, piece))[:, target] for piece in logits]
    scores: NDArray[np.float64] = torch.cat(pieces).cpu().numpy()
    return scores
