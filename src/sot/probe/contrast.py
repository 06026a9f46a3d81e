"""Training a backbone for texts by contrast of like and unlike labels: the one place for sentence-transformers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor

from sot.models.equip import Equipped
from sot.probe.adapt import BATCH, Adaptation, trainer_arguments


def contrast(model: Equipped, texts: Sequence[Any], targets: Tensor, settings: Adaptation) -> Equipped:
    """A copy of the model whose backbone puts texts of a class close together."""
    rows = balanced_batches(targets, settings.steps, settings.seed)
    columns = {"text": [texts[row] for row in rows], "label": targets[rows].tolist()}
    with tempfile.TemporaryDirectory() as folder:
        model.backbone.save_pretrained(folder)
        model.processor.save_pretrained(folder)
        words = Transformer(folder, max_seq_length=settings.max_length)
        encoder = SentenceTransformer(modules=[words, Pooling(model.config.hidden_size)], device=str(model.device))
        order = {"train_sampling_strategy": "sequential"}
        args = SentenceTransformerTrainingArguments(**trainer_arguments(folder, settings), **order)
        data = Dataset.from_dict(columns)
        SentenceTransformerTrainer(encoder, args, train_dataset=data, loss=AllPairs(encoder)).train()
    adapted = copy.deepcopy(model)
    own = adapted.backbone.state_dict()
    trained = words.auto_model.state_dict()
    adapted.backbone.load_state_dict({name: trained[name] for name in own})
    return adapted.eval()


class AllPairs(CosineSimilarityLoss):
    """`CosineSimilarityLoss` of all pairs in a batch: 1 with a label in common, else 0; both kinds count alike.

    Each text is read once for all of its pairs.
    """

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        (texts,) = sentence_features
        found = self.model(texts)["sentence_embedding"]
        alike = (labels @ labels.T > 0).triu(1), (labels @ labels.T == 0).triu(1)
        losses = []
        for goal, kind in zip((1.0, 0.0), alike):
            left, right = kind.nonzero(as_tuple=True)
            if len(left):
                goals = torch.full_like(found[left, 0], goal)
                losses.append(self.compute_loss_from_embeddings([found[left], found[right]], goals))
        return torch.stack(losses).mean()


def balanced_batches(targets: Tensor, count: int, seed: int) -> list[int]:
    """Rows of `count` batches: some classes in each, of the same size; no text of a class again before all have been.

    `targets` is `(samples, classes)`.
    """
    draw = np.random.default_rng(seed)
    of_class = [rows for column in targets.T if len(rows := column.nonzero()[:, 0].numpy())]
    if not of_class:
        raise ValueError('y gives no sample a label, and adapt="contrastive" compares them by their labels')
    left: list[list[int]] = [[] for _ in of_class]
    rows = []
    for _ in range(count):
        for number in np.resize(draw.permutation(len(of_class))[: BATCH // 2], BATCH):
            left[number] = left[number] or draw.permutation(of_class[number]).tolist()
            rows.append(left[number].pop())
    return rows
