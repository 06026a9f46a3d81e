"""Fit the last linear layers of a trained model anew to other functions of its singular values.

python docs/results/robust/refit.py RUN EVALUATION.json

RUN was evaluated by robust.py on the folders `train` (its training images) and `held`, of which EVALUATION.json is what
was printed. Backbone and projections stay as they are, so this only screens. Writes RUN/refit.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS, BATCH, RATE = 1000, 200, 3e-3


def floored(share: float) -> Callable[[Tensor], Tensor]:
    """λ^¼ down to this share of the largest value, proportional to λ below."""
    return lambda s: s * (s.square() + (share * s[..., :1]).square()).pow(-0.375)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "class token alone": None,
    "fast, α = 0.5": lambda s: s * s[..., :1].pow(-0.5),
    "α = 0.7": lambda s: s.pow(0.7),
    "α = 0.5": lambda s: s.pow(0.5),
    "α = 0.25": lambda s: s.pow(0.25),
    "α = 0.25, floor 0.03": floored(0.03),
    "α = 0.25, floor 0.1": floored(0.1),
    "α = 0.25, floor 0.3": floored(0.3),
    "α = 0.25, length 1 before": lambda s: (s / s.norm(dim=-1, keepdim=True)).pow(0.25),
}


def features(read: tuple[Tensor, Tensor, Tensor], change: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Class tokens, and beside them the matrices with changed values."""
    classes, (left, values, right), _ = read
    if change is None:
        return classes
    words = ((left * change(values.clamp_min(1e-12)).unsqueeze(-2)) @ right).flatten(1)
    return torch.cat([classes, words], dim=1)


def fit(rows: Tensor, labels: Tensor) -> torch.nn.Linear:
    """A linear classifier."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(rows.shape[1], 10)
    optimizer = torch.optim.AdamW(layer.parameters(), RATE, weight_decay=0.03)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(len(rows), (BATCH,))
        loss = F.cross_entropy(layer(rows[chosen]), labels[chosen], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return layer


def main(run: Path, evaluation: Path) -> None:
    """Fit every function once."""
    torch.set_num_threads(1)
    names = ["clean", *(row["corruption"] for row in json.loads(evaluation.read_text())["rows"])]
    train, *held = (
        (classes.clone(), torch.linalg.svd(matrices, full_matrices=False), labels)
        for name in ("train", "held")
        for classes, matrices, labels in torch.load(run / f"passes-{name}.pt", weights_only=True)
    )
    found = []
    for name, change in FUNCTIONS.items():
        rows = features(train, change)
        layer = fit(rows, train[2].long())
        with torch.inference_mode():
            said = [layer(features(read, change)).argmax(1) for read in held]
        scores = {key: (each == read[2]).float().mean().item() for key, each, read in zip(names, said, held)}
        found.append({"head": name} | {key: round(100 * value, 2) for key, value in scores.items()})
        (run / "refit.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
