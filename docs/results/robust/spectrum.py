"""What blur does to the singular values of a trained model with the default head, and which of its parts suffer.

python docs/results/robust/spectrum.py RUN EVALUATION.json

RUN was evaluated by robust.py, EVALUATION.json is what that printed. Writes RUN/spectrum.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

RANKS = (2, 4, 8, 14)
Parts = tuple[Tensor, Tensor, Tensor]  # U, λ and Vᵀ of the cross-covariances `(images, 6, 14, 14)`


def pooled(parts: Parts) -> Tensor:
    """What the head makes of the matrices, α = ¼."""
    left, values, right = parts
    return ((left * values.pow(0.25).unsqueeze(-2)) @ right).flatten(1)


def describe(weights: dict[str, Tensor], name: str, read: Any, clean: Any) -> dict[str, Any]:
    """A row: singular values against those of the clean images, accuracies of whole and parts in %."""
    classes, parts, labels = read
    shift = parts[1].log().mean((0, 1)) - clean[1][1].log().mean((0, 1))  # of each rank, over images and heads
    of_class = classes @ weights["class_linear.weight"].T + weights["class_linear.bias"]

    def score(logits: Tensor) -> float:
        return round((logits.argmax(1) == labels).float().mean().item() * 100, 2)

    def of_words(*changed: Tensor) -> Tensor:
        return pooled(changed) @ weights["word_linear.weight"].T + weights["word_linear.bias"]

    words = {
        "words": of_words(*parts),
        "words, clean values": of_words(parts[0], clean[1][1], parts[2]),
        "words, clean vectors": of_words(clean[1][0], parts[1], clean[1][2]),
        "words, mean shift undone": of_words(parts[0], parts[1] * (-shift).exp(), parts[2]),
    }
    values = {"largest": shift[0], **{f"value {rank} of largest": shift[rank - 1] - shift[0] for rank in RANKS}}
    return {
        "corruption": name,
        **{key: round(value.exp().item(), 3) for key, value in values.items()},
        "both": score(of_class + words["words"]),
        "class": score(of_class),
        **{key: score(logits) for key, logits in words.items()},
        "both, mean shift undone": score(of_class + words["words, mean shift undone"]),
    }


@torch.inference_mode()
def main(run: Path, evaluation: Path) -> None:
    """Describe every pass."""
    torch.set_num_threads(1)
    names = ["clean", *(row["corruption"] for row in json.loads(evaluation.read_text())["rows"])]
    weights = load_file(run / "model.safetensors")
    weights = {key.removeprefix("classifier."): value for key, value in weights.items() if "_linear" in key}
    reads = [
        (classes, torch.linalg.svd(matrices, full_matrices=False), labels)
        for classes, matrices, labels in torch.load(run / "passes.pt", weights_only=True)
    ]
    clean = reads[0][1][1].log().mean((0, 1))
    shares = {f"value {rank} of largest": round((clean[rank - 1] - clean[0]).exp().item(), 4) for rank in RANKS}
    rows = [describe(weights, name, read, reads[0]) for name, read in zip(names, reads, strict=True)]
    found = {"clean spectrum": shares, "rows": rows}
    (run / "spectrum.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
