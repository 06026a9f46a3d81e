"""Training a head on cached tokens: how they are read, and that speed changes nothing."""

import numpy as np
import pytest
import torch
from test_probe import hand_made

from sot.probe import HEADS, Budget, Features
from sot.probe.fitting import Target, train_head, training_batches
from sot.probe.heads import standardising_head, token_statistics


def test_tokens_are_read_the_same_with_and_without_kernels(backend):
    draw = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum([3, 0, 5, 1])])
    words, first = (draw.standard_normal((count, 16)).astype(np.float16) for count in (9, 4))
    norm = torch.nn.LayerNorm(16)
    rows = np.array([2, 9, 1, 9, 0])[::2]
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    expected = torch.from_numpy(np.concatenate([words[3:8], words[:3]])).double() * norm.weight + norm.bias
    for stored in (words, words.astype(np.float32), np.asfortranarray(words)):
        features = Features(first, stored, starts, np.zeros(4))
        class_token, (tokens, places) = features.batch(rows, norm)
        assert places.tolist() == [0, 5, 5, 8]
        torch.testing.assert_close(tokens.double(), expected)
        torch.testing.assert_close(class_token, torch.from_numpy(first[rows]).float() * norm.weight + norm.bias)


@pytest.mark.parametrize("name", ["class", "class+gap", "gcp", "class+mgcrp-exact"])
def test_training_is_that_of_an_optimiser_of_single_parameters(name):
    """One vector of all parameters is for speed: AdamW with decay of matrices, clipped, must do the same."""
    features, rows, budget = hand_made(100, 0), np.arange(100), Budget(epochs=2, least_steps=1)
    ours, plain = (standardising_head(HEADS[name], 2, token_statistics(features)) for _ in range(2))
    train_head(ours, features, rows, Target(2), budget, 1e-2, 0.3, seed=5)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    groups = [{"params": [p], "weight_decay": 0.3 if p.ndim > 1 else 0.0} for p in trained]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    draw, labels = np.random.default_rng(5), torch.from_numpy(features.labels).long()
    for _ in range(2):
        for batch in training_batches(features, draw.permutation(rows), 64, draw):
            class_token, words = features.batch(batch)
            optimizer.zero_grad()
            plain.loss([scaled(plain, class_token, words.padded()[0])], labels[batch]).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
    for one, other in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        assert one.grad is None and one.untyped_storage().nbytes() == one.nbytes


def scaled(head, class_token, words):
    """Logits of tokens that are normalised already."""
    norm, head.norm = head.norm, torch.nn.Identity()
    class_token, words = (part * norm.weight + norm.bias for part in (class_token, words))
    logits = head(class_token, words)
    head.norm = norm
    return logits
