"""The time line of a sound: what its moments contribute to the logit of a class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from sot.data.sound_sets import encode_sounds, reading_of
from sot.data.sounds import Samples, Waveform, as_sound
from sot.explain.branches import parts_of, split_logits
from sot.explain.explanation import branch_columns, check_method, common_parts
from sot.explain.figure import AGAINST, FOR, draw_contributions, draw_spectrum, mark
from sot.explain.reading import TokenReading, check_model, explaining
from sot.explain.result import Explanation
from sot.figures import SMALL, WIDTH, Drawing, clean
from sot.models.audio import AST, word_seconds

if TYPE_CHECKING:
    from sot.models.audio import SoTForAudioClassification
    from sot.models.tokens import Tokens

SOUND_METHODS = ("evidence", "gradient")


@dataclass(repr=False, kw_only=True)
class SoundExplanation(Explanation):
    """The moments of a sound: the values of its column are what each contributes, `edges` when they begin and end."""

    samples: Samples
    rate: int
    edges: NDArray[np.float64]  # seconds, one more than moments

    def spans(self, count: int = 20) -> list[tuple[float, float, float]]:
        """Begin, end and contribution of `count` parts of equal length, moments summed."""
        values = self.columns[0].values
        limits = np.linspace(0, len(values), min(count, len(values)) + 1).round().astype(int)
        return [
            (float(self.edges[first]), float(self.edges[last]), float(values[first:last].sum()))
            for first, last in pairwise(limits.tolist())
        ]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As of others, and the times of the moments in seconds."""
        return {**super().arrays(), "edges": self.edges}

    def figure(self) -> Figure:
        """The waveform, the time line below it; then contributions and spectrum."""
        return sound_figure(self)


def explain_sound(
    model: SoTForAudioClassification,
    processor: Any,
    sound: str | Path | Waveform | Any,
    *,
    method: str | None = None,
    target: str | int | None = None,
    truth: str | int | None = None,
    top: int = 5,
) -> SoundExplanation:
    """Explain the prediction for a sound: what its moments add to the logit through the words.

    Args:
        model: An audio model with a second-order head.
        processor: Its feature extractor.
        sound: A file, samples with their rate, or samples at the rate of the model.
        method: evidence, which sums to the words' part of the logit, or gradient (times token), for any pooling; by
            default evidence where the pooling has it.
        target: The class to explain, by name or number; by default the one that is predicted.
        truth: The true class, by which the column is marked right or wrong.
        top: How many classes `predictions` has.
    """
    check_model(model)
    check_method(method, SOUND_METHODS, "sounds")
    reading = reading_of(model, processor)
    samples = reading(as_sound(sound, reading.rate))
    inputs: dict[str, Any] = {
        name: value.to(model.device) for name, value in encode_sounds(processor, [samples]).items()
    }
    with explaining(model):
        tokens = _of_clip(model.tokens(**inputs).to(next(model.classifier.parameters()).dtype))
        read = TokenReading(tokens, 0, None, [], tokens.word_tokens)
        common = common_parts(model, read, target, truth, top)
        if method == "evidence" and common["evidence"] is None:
            raise ValueError(f"{common['notes'][-1]}; accepted method: gradient")
        method = method or ("gradient" if common["evidence"] is None else "evidence")
        index = common["labels"].index(common["target"])
        values = common["evidence"].words if method == "evidence" else _gradient(model, tokens, index)
        rows, columns = tokens.grid or (1, tokens.word_tokens.shape[1])
        moments = np.asarray(values, dtype=np.float64)[: rows * columns].reshape(rows, columns).sum(0)
        column = branch_columns(model, read, {parts_of(model.classifier)[-2:][0]: moments}, common["truth"])
    step = word_seconds(model, processor, len(samples), columns)
    edges = np.arange(columns + 1) * step
    if model.config.backbone_config.model_type == AST:
        common["notes"].append("the moments are those of the whole window, which silence fills after the sound")
    rest: dict[str, Any] = {"method": method, "samples": samples, "rate": reading.rate, "edges": edges}
    return SoundExplanation(columns=column, **rest, **common)


def _of_clip(tokens: Tokens) -> Tokens:
    """The tokens of one clip without those of its padding, so that pairs are those of its words."""
    if tokens.mask is None:
        return tokens
    count = int(tokens.mask[0].sum())
    return replace(tokens, word_tokens=tokens.word_tokens[:, :count], mask=None, grid=(1, count))


def _gradient(model: Any, tokens: Tokens, target: int) -> NDArray[np.float64]:
    words = tokens.word_tokens.detach().requires_grad_()
    part = parts_of(model.classifier)[-2:][0]
    logit = split_logits(model.classifier, replace(tokens, word_tokens=words)).of(part)[0, target]
    (slope,) = torch.autograd.grad(logit, words)
    found: NDArray[np.float64] = (slope * words)[0].sum(-1).detach().double().cpu().numpy()
    return found


def sound_figure(explanation: SoundExplanation) -> Figure:
    """The waveform over its time line; below them contributions and spectrum."""
    figure = Drawing(figsize=(WIDTH, 6.5), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[3, 2])
    wave, line = parts[0].subplots(2, 1, sharex=True)
    seconds = np.arange(len(explanation.samples)) / explanation.rate
    wave.plot(seconds, explanation.samples, color="0.3", linewidth=0.5)
    (name, score), truth = explanation.predictions[0], explanation.truth
    said = f"it is {clean(truth, 24)}; predicted " if truth else ""
    wave.set_title(f"{said}{clean(name, 24)} {score:.2f}", fontsize=10, parse_math=False)
    wave.set_ylabel("sample", fontsize=SMALL)
    column = explanation.columns[0]
    shades = [FOR if value > 0 else AGAINST for value in column.values]
    line.bar(explanation.edges[:-1], column.values, np.diff(explanation.edges), align="edge", color=shades)
    line.axhline(0, color="black", linewidth=0.8)
    line.set(xlabel="seconds", xlim=(0, explanation.edges[-1]))
    title = f"{column.name}, {explanation.method} for {clean(explanation.target, 24)}{mark(column)}"
    line.set_title(title, fontsize=10, parse_math=False)
    below = parts[1].subplots(1, 2)
    draw_contributions(below[0], explanation)
    draw_spectrum(below[1], explanation)
    return figure
