"""Training a head on cached tokens, and choosing how on a held-out part of the training set."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sot.core.head import HeadConfig, SecondOrderHead
from sot.evaluation.metrics import text_scores
from sot.probe.budget import Budget
from sot.probe.choice import FOLDS, draw_folds, held_out_means, within_one_error
from sot.probe.features import Array, Batch, Features, clock
from sot.probe.heads import norm_taken_out, read_for, standardising_head

BATCHES_SORTED = 16  # batches whose samples are sorted by length together
Seconds = tuple[float, float]  # by `clock`, of a whole training and of its median epoch


@dataclass(frozen=True)
class Target:
    """What is predicted: so many classes, or with one output a number; and how it is scored."""

    num_outputs: int
    metric: str = "accuracy"
    multi_label: bool = False

    @property
    def link(self) -> str:
        """What turns logits into what is predicted."""
        if self.multi_label:
            return "sigmoid"
        return "identity" if self.num_outputs == 1 else "softmax"

    def targets(self, labels: Array) -> Tensor:
        """What `loss` takes of the labels of a cache; those of samples that could not be read are of no meaning."""
        numbers = torch.from_numpy(labels)
        return numbers.nan_to_num().long() if self.link == "softmax" else numbers.float()

    @property
    def is_balanced(self) -> bool:
        """Whether classes count alike in the metric, however many samples they have."""
        return self.metric in ("mcc", "f1")

    def one_hot(self, labels: Array) -> Tensor:
        """Targets `(samples, outputs)` of labels."""
        targets = self.targets(labels)
        if self.link == "softmax":
            return torch.eye(self.num_outputs)[targets]
        return targets.view(len(targets), -1)

    def loss(self, head: SecondOrderHead, tokens: Batch, targets: Tensor) -> Tensor:
        """Cross-entropy, of several labels that of each, or the squared error of a number."""
        logits, branches = head(*tokens, with_branches=True)
        if self.link == "sigmoid":
            return F.binary_cross_entropy_with_logits(logits, targets)
        return F.mse_loss(logits[:, 0], targets) if self.link == "identity" else head.loss(branches, targets)


@dataclass(frozen=True)
class Choice:
    """The settings of a head that cross-validation chose, and how well they did on what was held out.

    A head that is solved, not trained, has a learning rate of 0, and its penalty for a weight decay.
    """

    learning_rate: float
    weight_decay: float
    score: float
    loss: float


def train_head(
    head: SecondOrderHead,
    features: Features,
    rows: Array,
    target: Target,
    budget: Budget,
    learning_rate: float,
    weight_decay: float,
    seed: int,
) -> Seconds:
    """AdamW with a cosine schedule and clipped gradients; matrices decay, vectors do not."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    trained.sort(key=lambda parameter: parameter.ndim <= 1)
    whole = _join(trained)
    matrices = whole.detach()[: sum(parameter.numel() for parameter in trained if parameter.ndim > 1)]
    optimizer = torch.optim.Adam([whole], lr=learning_rate, fused=True)
    epochs = budget.epochs_of(len(rows))
    steps = epochs * -(-len(rows) // budget.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draw, labels = np.random.default_rng(seed), target.targets(features.labels)
    seconds = []
    head.train()
    with norm_taken_out(head) as norm:
        for _ in range(epochs):
            began = clock()
            for batch in training_batches(features, draw.permutation(rows), budget.batch_size, draw):
                loss = target.loss(head, read_for(head, features, batch, norm), labels[batch])
                optimizer.zero_grad(set_to_none=False)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(whole, 1.0)
                matrices.mul_(1 - schedule.get_last_lr()[0] * weight_decay)  # as AdamW, which would decay all of it
                optimizer.step()
                schedule.step()
            seconds.append(clock() - began)
    head.eval()
    for parameter in trained:  # each has a memory of its own again
        parameter.data, parameter.grad = parameter.data.clone(), None
    return sum(seconds), statistics.median(seconds)


def _join(parameters: list[nn.Parameter]) -> nn.Parameter:
    """One that they and their gradients become parts of: an optimiser's step costs more by tensors than by numbers."""
    whole = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    whole.grad, sizes = torch.zeros_like(whole), [parameter.numel() for parameter in parameters]
    for parameter, data, grad in zip(parameters, torch.split(whole.detach(), sizes), torch.split(whole.grad, sizes)):
        parameter.data, parameter.grad = data.view_as(parameter), grad.view_as(parameter)
    return whole


def training_batches(features: Features, rows: Array, size: int, draw: np.random.Generator) -> list[Array]:
    """Batches in a random order; of texts like lengths, among some hundreds of them, so that little is padded."""
    if features.is_uniform:
        return _slices(rows, size)
    groups = _slices(rows, size * BATCHES_SORTED)
    batches = [
        batch for group in groups for batch in _slices(group[np.argsort(features.lengths[group], kind="stable")], size)
    ]
    return [batches[number] for number in draw.permutation(len(batches))]


def _slices(rows: Array, size: int) -> list[Array]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@torch.inference_mode()
def head_outputs(head: SecondOrderHead, features: Features, rows: Array, batch_size: int) -> Tensor:
    """Logits of some samples."""
    with norm_taken_out(head) as norm:
        return torch.cat([head(*read_for(head, features, batch, norm)) for batch in _slices(rows, batch_size)])


def score_head(
    head: SecondOrderHead, features: Features, rows: Array, target: Target, batch_size: int
) -> tuple[float, float]:
    """Score and loss on some samples; a head that diverged has the worst of both."""
    return score_outputs(head_outputs(head, features, rows, batch_size).numpy(), features.labels[rows], target)


def score_outputs(logits: Array, labels: Array, target: Target) -> tuple[float, float]:
    """Score and loss of logits."""
    if not np.isfinite(logits).all():
        return -np.inf, np.inf
    scores = text_scores(target.metric, logits, labels.astype(float if target.num_outputs == 1 else int))
    return scores[target.metric], scores["loss"]


def choose_settings(
    config: HeadConfig,
    features: Features,
    rows: Array,
    norm: tuple[Tensor, Tensor],
    target: Target,
    budget: Budget,
) -> Choice:
    """Try every learning rate and weight decay by cross-validation, with one fold where there are many samples.

    Of settings within one standard error of the best score, that of the smallest loss is chosen.
    """
    targets = target.one_hot(features.labels[rows])
    classes = features.labels[rows] if target.link == "softmax" else None
    drawn = draw_folds(classes, len(rows), groups=features.folds_of(rows))
    folds = torch.from_numpy(drawn[: budget.search_folds or FOLDS])
    settings = list(itertools.product(budget.learning_rates, budget.weight_decays))
    outputs = torch.zeros(len(settings), len(folds), *targets.shape)
    for number, (rate, decay) in enumerate(settings):
        for fold, fitted in enumerate(folds.numpy()):
            head = standardising_head(config, target.num_outputs, norm)
            train_head(head, features, rows[fitted], target, budget, rate, decay, seed=0)
            outputs[number, fold, ~fitted] = head_outputs(head, features, rows[~fitted], budget.batch_size)
    chosen = within_one_error(outputs, targets, folds, target.link, target.is_balanced)
    means = held_out_means(outputs.movedim(-1, 0), folds).movedim(0, -1)[chosen]
    held_out = (~folds).any(0).numpy()
    return Choice(*settings[chosen], *score_outputs(means.numpy(), features.labels[rows][held_out], target))


def rank(choice: Choice) -> tuple[float, float]:
    """Better is larger: the score, and of equal scores the loss."""
    score = choice.score if np.isfinite(choice.score) else -np.inf
    return score, -choice.loss
