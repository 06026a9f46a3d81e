"""What blur does to the singular values of a trained model with the default head, and which of its parts suffer.

python docs/results/robust/spectrum.py RUN EVALUATION.json

RUN was evaluated by robust.py on a folder `held`, EVALUATION.json is what that printed. Writes RUN/spectrum.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

RANKS, FEW = (2, 4, 8, 14), 4
Parts = tuple[Tensor, Tensor, Tensor]  # U, λ and Vᵀ of the cross-covariances `(images, 6, 14, 14)`


def pooled(left: Tensor, values: Tensor, right: Tensor) -> Tensor:
    """What the head makes of the matrices, α = ¼."""
    return ((left * values.pow(0.25).unsqueeze(-2)) @ right).flatten(1)


def joined(first: Parts, rest: Parts) -> Tensor:
    """Pooled, the FEW largest singular values and their vectors of one, the others of another."""
    return pooled(*(part * mask for part, mask in zip(first, masks(True)))) + pooled(
        *(part * mask for part, mask in zip(rest, masks(False)))
    )


def masks(first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Ones for the FEW largest, or for the others, to multiply U, λ and Vᵀ with."""
    kept = ((torch.arange(14) < FEW) == first).float()
    return torch.ones(14), kept, torch.ones(14, 1)


def describe(weights: dict[str, Tensor], name: str, read: Any, clean: Any) -> dict[str, Any]:
    """A row: singular values and vectors against those of the clean images, accuracies of whole and parts in %."""
    (classes, parts, labels), usual = read, clean[1]
    shift = parts[1].log().mean((0, 1)) - usual[1].log().mean((0, 1))  # of each rank, over images and heads
    alike = ((parts[0] * usual[0]).sum(-2) * (parts[2] * usual[2]).sum(-1)).abs().mean((0, 1))
    of_class = classes @ weights["class_linear.weight"].T + weights["class_linear.bias"]

    def score(logits: Tensor) -> float:
        return round((logits.argmax(1) == labels).float().mean().item() * 100, 2)

    words = {
        "words": pooled(*parts),
        "words, clean values": pooled(parts[0], usual[1], parts[2]),
        "words, clean vectors": pooled(usual[0], parts[1], usual[2]),
        "words, first four clean": joined(usual, parts),
        "words, others clean": joined(parts, usual),
    }
    words = {key: rows @ weights["word_linear.weight"].T + weights["word_linear.bias"] for key, rows in words.items()}
    values = {"largest": shift[0], **{f"value {rank} of largest": shift[rank - 1] - shift[0] for rank in RANKS}}
    return {
        "corruption": name,
        **{key: round(value.exp().item(), 2) for key, value in values.items()},
        **{f"vectors {rank} alike": round(alike[rank - 1].item(), 2) for rank in (1, *RANKS)},
        "both": score(of_class + words["words"]),
        "class": score(of_class),
        **{key: score(logits) for key, logits in words.items()},
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
        for classes, matrices, labels in torch.load(run / "passes-held.pt", weights_only=True)
    ]
    clean = reads[0][1][1].log().mean((0, 1))
    shares = {f"value {rank} of largest": round((clean[rank - 1] - clean[0]).exp().item(), 4) for rank in RANKS}
    rows = [describe(weights, name, read, reads[0]) for name, read in zip(names, reads, strict=True)]
    found = {"clean spectrum": shares, "rows": rows}
    (run / "spectrum.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
