"""Explanations: what they hold, and the files they write."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sot.explain.branches import Contributions
from sot.explain.evidence import Evidence, Spectrum
from sot.explain.words import Words
from sot.files import as_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def shortened(text: str, width: int = 60) -> str:
    """One line of a text, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


@dataclass
class Column:
    """What one branch (or one model) looks at: a map or one value a word, and what it predicts by itself."""

    name: str
    values: NDArray[Any]
    predicted: str
    correct: bool | None  # None where the true class is not known

    @property
    def strength(self) -> NDArray[np.float64]:
        """The values scaled to 0…1 as they are drawn; negative ones are zero."""
        positive = np.maximum(self.values, 0).astype(np.float64)
        return positive / max(float(positive.max()), np.finfo(np.float64).tiny)


@dataclass(repr=False, kw_only=True)
class Explanation:
    """What explanations of images, texts and sounds share."""

    labels: list[str]
    predictions: list[tuple[str, float]]  # the likeliest classes and their probabilities
    target: str  # the class that is explained
    truth: str | None
    method: str
    columns: list[Column]
    contributions: Contributions
    spectrum: Spectrum | None
    evidence: Evidence | None
    notes: list[str] = field(default_factory=list)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All values by name, unscaled; `labels` are the classes of the contributions."""
        found: dict[str, NDArray[Any]] = {
            f"map_{column.name.replace(' ', '_')}": column.values for column in self.columns
        }
        found |= {"labels": np.array(self.labels), "target": np.array(self.target)}
        for name in ("class_part", "word_part", "bias", "logits"):
            found[f"contribution_{name}"] = getattr(self.contributions, name)
        if self.spectrum is not None:
            found |= {"spectrum_before": self.spectrum.before, "spectrum_after": self.spectrum.after}
        if self.evidence is not None:
            found["evidence_words"] = self.evidence.words
            if self.evidence.pairs is not None:
                found["evidence_pairs"] = self.evidence.pairs
        return found

    def npz(self) -> bytes:
        """`arrays` as the contents of a file that `numpy.load` opens."""
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **self.arrays())
        return file.getvalue()

    def figure(self) -> Figure:
        """Draw all of it with matplotlib."""
        raise NotImplementedError

    def png(self) -> bytes:
        """The figure as the contents of a file."""
        return as_png(self.figure())

    def _repr_png_(self) -> bytes:
        return self.png()

    def __repr__(self) -> str:
        """What was predicted and by which branch, in a few lines; `arrays` has all that was computed."""
        classes = ", ".join(f"{shortened(name)} {score:.3f}" for name, score in self.predictions[:5])
        known = "" if self.truth is None else f", truth {shortened(self.truth)}"
        lines = [f"{type(self).__name__} of {shortened(self.target)} by {self.method}{known}", f"predicted: {classes}"]
        lines += [f"{column.name}: {shortened(column.predicted)}" for column in self.columns]
        return "\n".join([*lines, *(shortened(note, 200) for note in self.notes[:5])])


@dataclass(repr=False, kw_only=True)
class ImageExplanation(Explanation):
    """An image explained; maps and evidence follow the model's grid of words."""

    picture: NDArray[np.uint8]  # as the model sees it
    grid: tuple[int, int]

    def figure(self) -> Figure:
        from sot.explain.figure import image_figure

        return image_figure(self)


@dataclass(repr=False, kw_only=True)
class TextExplanation(Explanation):
    """A text explained; columns and evidence have one value for each of `words`, pieces summed."""

    words: Words

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {**super().arrays(), "words": np.array(self.words.names)}

    def figure(self) -> Figure:
        from sot.explain.figure import text_figure

        return text_figure(self)

    def html(self, picture: bytes | None = None) -> str:
        """A page that links nowhere: words coloured by influence, and the figure, drawn if not given."""
        from sot.explain.report_page import text_page

        return text_page(self, self.png() if picture is None else picture)

    def _repr_html_(self) -> str:
        from sot.explain.report_page import text_blocks

        return f"<div>{text_blocks(self, self.png())}</div>"
