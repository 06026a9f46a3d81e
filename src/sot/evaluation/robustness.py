"""How a model bears corrupted images: noise, blur, weather and compression, as in ImageNet-C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sot.evaluation.evaluate import open_images
from sot.extras import need

SEVERITIES = range(1, 6)
SMALLEST = 32  # pixels a side, of an image to corrupt


@dataclass(frozen=True)
class Corrupted:
    """Accuracy under one corruption of one severity; 0 is none."""

    corruption: str
    severity: int
    accuracy: float


def corruption_names(wanted: str) -> list[str]:
    """`common` (the fifteen of ImageNet-C), `all`, `noise`, `blur`, `weather`, `digital`, or names of corruptions."""
    need("imagecorruptions", "a corruption", "robustness")
    from imagecorruptions import get_corruption_names

    groups = ("common", "all", "noise", "blur", "weather", "digital")
    if wanted in groups:
        return list(get_corruption_names(wanted))
    names = [name.strip() for name in wanted.split(",")]
    known = get_corruption_names("all")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown corruption {unknown[0]!r}; accepted: {', '.join([*groups, *known])}")
    return names


def corruption(name: str, severity: int) -> Callable[[Image.Image], Image.Image]:
    """What does this to an image."""
    from imagecorruptions import corrupt

    def apply(image: Image.Image) -> Image.Image:
        if min(image.size) < SMALLEST:
            raise ValueError(f"an image to corrupt must be at least {SMALLEST} pixels a side, got {image.size}")
        return Image.fromarray(corrupt(np.asarray(image), severity=severity, corruption_name=name))

    return apply


def evaluate_corrupted(
    folder: Path,
    data: str,
    names: Sequence[str],
    severities: Sequence[int],
    batch_size: int = 64,
    samples: int = 0,
    progress: Any = iter,
) -> list[Corrupted]:
    """Accuracy on clean images, then under every corruption of every severity; `progress` is given these."""
    wrong = [severity for severity in severities if severity not in SEVERITIES]
    if wrong:
        raise ValueError(f"a severity must be from {SEVERITIES[0]} to {SEVERITIES[-1]}, got {wrong[0]}")
    work: list[tuple[str, int]] = [("clean", 0), *((name, severity) for name in names for severity in severities)]
    test, found = open_images(folder, data, samples), []
    for name, severity in progress(work):
        change = corruption(name, severity) if severity else None
        scores = test.evaluate(batch_size, iter, change=change).scores
        found.append(Corrupted(name, severity, scores["accuracy"]))
    return found


def mean_accuracy(found: Sequence[Corrupted]) -> float:
    """Over the corruptions, the clean images left out."""
    return float(np.mean([each.accuracy for each in found if each.severity]))
