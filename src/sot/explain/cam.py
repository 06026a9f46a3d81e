"""Class activation maps by the grad-cam library, through one branch of the head."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sot.explain.branches import BOTH, CLASS, WORDS, split_head, split_logits
from sot.explain.reading import explaining, read_image
from sot.extras import install_hint
from sot.models.modeling import SoTForImageClassification

METHODS = {  # ours, and the library's name
    "gradcam": "GradCAM",
    "gradcam++": "GradCAMPlusPlus",
    "xgradcam": "XGradCAM",
    "hirescam": "HiResCAM",
    "layercam": "LayerCAM",
    "elementwise": "GradCAMElementWise",
    "scorecam": "ScoreCAM",
    "ablationcam": "AblationCAM",
}


def word_grid(grid: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of the words, or ValueError if they are no grid."""
    if grid is None:
        raise ValueError("the words of this model form no grid, so there is no map to draw")
    return grid


class _Passage(nn.Module):
    """Pixels to what one branch adds to the logits; the words pass `gate` as a map `(batch, dim, rows, columns)`.

    They pass it where the branch reads them: as input of `attention`, or without it as the head pools them.
    """

    def __init__(self, model: SoTForImageClassification, part: str, attention: nn.Module | None, grid: tuple[int, int]):
        super().__init__()
        self.model, self.part, self.grid = model, part, grid
        self.attention = [attention]  # a list: it has its place in the model already
        self.gate: nn.Module = nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        (attention,), hooks = self.attention, []
        if attention is not None:
            hooks.append(attention.register_forward_pre_hook(self._enter, with_kwargs=True))
        try:
            tokens = read_image(self.model, pixels).tokens
        finally:
            for hook in hooks:
                hook.remove()
        if attention is None:
            tokens.word_tokens = self._pass(tokens.word_tokens)
        return split_logits(self.model.classifier, tokens).of(self.part)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = first_sequence(args, kwargs)
        if isinstance(name, int):
            return (*args[:name], self._pass(args[name]), *args[name + 1 :]), kwargs
        return args, {**kwargs, name: self._pass(kwargs[name])}

    def _pass(self, sequence: Tensor) -> Tensor:
        count = self.grid[0] * self.grid[1]
        sequence = sequence.detach()  # what comes before needs no gradient
        words = sequence[:, -count:].mT.reshape(len(sequence), -1, *self.grid).float()
        words = self.gate(words.requires_grad_()).flatten(2).mT.to(sequence.dtype)
        return torch.cat([sequence[:, :-count], words], dim=1)


def first_sequence(args: Any, kwargs: Any) -> int | str | None:
    """Which argument of a module is the tokens `(batch, tokens, dim)`."""
    named = [*enumerate(args), *kwargs.items()]
    return next((name for name, value in named if isinstance(value, Tensor) and value.ndim == 3), None)


def last_attention(model: SoTForImageClassification, pixels: Tensor) -> nn.Module:
    """The module through which the class token, which the head reads, reads the words for the last time.

    What the words become afterwards has no part in what the class token says: a map of it would be blank.
    """
    calls: list[tuple[nn.Module, Tensor]] = []

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        name = first_sequence(args, kwargs)
        if name is not None:
            calls.append((module, args[name] if isinstance(name, int) else kwargs[name]))

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in model.body.modules()]
    try:
        reading = read_image(model, pixels[:1])
    finally:
        for hook in hooks:
            hook.remove()
    class_part = split_logits(model.classifier, reading.tokens).of(CLASS)
    count = reading.tokens.word_tokens.shape[1]
    calls = [(m, x) for m, x in calls if x.shape[1] in (count, count + reading.num_prefix) and x.requires_grad]
    slopes = torch.autograd.grad(class_part.square().sum(), [x for _, x in calls], allow_unused=True)
    read = [x for (_, x), slope in zip(calls, slopes) if slope is not None and slope[:, -count:].any()]
    return next(module for module, x in calls if x is read[-1])  # the first to be given it: queries, keys and values


class _Zero(nn.Module):
    """What AblationCAM puts in place of the gate: one channel of each sample is zero.

    The library's own sets it to -10⁷ where activations may be negative, which no LayerNorm survives.
    """

    def activations_to_be_ablated(self, activations: Any, ratio: float) -> NDArray[np.int64]:
        self.indices = np.arange(activations.shape[0])
        return self.indices

    def set_next_batch(self, input_batch_index: int, activations: Tensor, num_channels_to_ablate: int) -> None:
        self.activations = activations[input_batch_index].repeat(num_channels_to_ablate, 1, 1, 1)

    def forward(self, words: Tensor) -> Tensor:
        ablated = self.activations.clone()
        ablated[range(len(ablated)), self.indices[: len(ablated)]] = 0
        return ablated


class _Unscaled:
    """The library's maps as they are on the grid of words: signed, neither cut at zero nor stretched."""

    def compute_cam_per_layer(self: Any, inputs: Tensor, targets: Any, eigen_smooth: bool) -> Any:
        activations = self.activations_and_grads.activations[0].numpy()
        slopes = [slope.numpy() for slope in self.activations_and_grads.gradients]
        return self.get_cam_image(
            inputs, self.target_layers[0], targets, activations, slopes[0] if slopes else None, eigen_smooth
        )

    def aggregate_multi_layers(self, maps: Any) -> Any:
        return maps


def _library() -> Any:
    try:
        import pytorch_grad_cam
    except ImportError as error:
        wanted = install_hint("explain")
        raise ValueError(f"class activation maps need the grad-cam package ({wanted}); relevance does not") from error
    return pytorch_grad_cam


def activation_maps(
    model: SoTForImageClassification, pixels: Tensor, target: int, method: str = "gradcam"
) -> dict[str, NDArray[np.float32]]:
    """Maps by part: where in one image `(1, channels, height, width)` the evidence for class `target` is.

    The maps are signed and have the rows and columns of the model's words. Through the class token they show the words
    that its last attention reads, through the words those that the head pools; the map of both is their sum, weighted
    by what each branch adds to the logit: one and one, but for late fusion. Of a backbone with several branches they
    are those of the first.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; accepted: {', '.join(METHODS)}")
    kind = type(method, (_Unscaled, getattr(_library(), METHODS[method])), {})
    with explaining(model):
        tokens = read_image(model, pixels).tokens
        grid, branches = word_grid(tokens.grid), split_head(model.classifier, tokens)
        found: dict[str, nn.Module | None] = {}
        if branches.class_part is not None:
            found[CLASS] = last_attention(model, pixels)
        if branches.word_part is not None:
            found[WORDS] = None  # as the head pools them
        maps = {part: _map(kind, _Passage(model, part, place, grid), pixels, target) for part, place in found.items()}
        slopes = torch.autograd.grad(branches.logits[0, target], [branches.of(part) for part in found])
    both: NDArray[np.float32] = np.add.reduce([maps[p] * np.float32(s[0, target]) for p, s in zip(found, slopes)])
    return {BOTH: both} if len(found) == 1 else {**maps, BOTH: both}


def _map(kind: Any, passage: _Passage, pixels: Tensor, target: int) -> NDArray[np.float32]:
    with torch.no_grad():
        now = passage(pixels)[0, target]
    cam = kind(passage, [passage.gate], **({"ablation_layer": _Zero()} if "ablation" in kind.__name__ else {}))
    try:
        with redirect_stderr(io.StringIO()):  # its progress bars
            # shifted to 1, so that what AblationCAM divides by is positive and its weights are drops
            found: NDArray[np.float32] = cam.forward(pixels, [lambda output: output[target] - now + 1])[0]
    finally:
        cam.activations_and_grads.release()
    return found.astype(np.float32)
