"""Deleting what an explanation calls important lowers the score of the class faster than deleting at random."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from test_explain_text import make_bert, make_gpt, make_tokenizer

from sot.data.acceptability import THIRD_PERSON, VERBS, acceptability
from sot.explain import (
    BOTH,
    CLASS,
    IMAGE_METHODS,
    WORDS,
    activation_maps,
    delete_patches,
    delete_words,
    explain_text,
    relevance_maps,
    split_words,
)
from sot.models.equip import equip

FORMS = {form: number for number, verb in enumerate(VERBS) for form in (verb, THIRD_PERSON.get(verb, verb + "s"))}


def fit(model, batches, rate, steps):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps + 1)
    for _ in range(steps):
        loss = model(**next(batches)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@pytest.fixture(scope="module")
def digits():
    """A transformer of two layers that tells digits apart by 4×4 patches, and 40 pictures it was not trained on."""
    torch.manual_seed(0)
    data = load_digits()
    pixels = F.interpolate(torch.tensor(data.images / 16 - 0.5).float()[:, None].expand(-1, 3, -1, -1), size=16)
    labels = torch.tensor(data.target)
    size = {"img_size": 16, "patch_size": 4, "embed": "naive", "depth": 2, "embed_dim": 48, "num_heads": 4}
    head = {"heads": 3, "left_dim": 8, "right_dim": 8}
    model = equip("sot_7", 10, head, pretrained=False, model_args=size)

    def batches():
        while True:
            for batch in torch.randperm(1500).split(64)[:-1]:
                yield {"pixel_values": pixels[batch], "labels": labels[batch]}

    fit(model, batches(), 3e-3, 230)
    with torch.no_grad():
        right = model(pixels[1500:]).logits.argmax(1) == labels[1500:]
    assert right.float().mean() > 0.8
    return model, pixels[1500:][right][:40]


def deletion_curves(model, pictures, methods):
    """Probability of the class while patches are deleted in the order of each map: the less, the truer."""
    draw, curves = np.random.default_rng(0), {}
    for picture in pictures.split(1):
        with torch.no_grad():
            target = int(model(picture).logits.argmax())
        orders = {("random", BOTH): draw.random((4, 4))}
        for method in methods:
            if method == "relevance":
                maps, _ = relevance_maps(model, picture, target)
            else:
                maps = activation_maps(model, picture, target, method)
            orders |= {(method, part): maps[part] for part in (CLASS, WORDS, BOTH)}
            orders[f"least by {method}", BOTH] = -maps[BOTH]
        for name, order in orders.items():
            curves.setdefault(name, []).append(delete_patches(model, picture, order, target))
    return curves


def areas_of(curves):
    return {name: float(np.mean(found)) for name, found in curves.items()}


def test_deleting_relevant_patches_lowers_the_score_faster_than_random_ones(digits):
    model, pictures = digits
    curves = deletion_curves(model, pictures[:20], ["relevance", "hirescam"])
    assert all(len(curve) == 17 and curve[0] > curve[-1] for found in curves.values() for curve in found)
    areas = areas_of(curves)
    chance = areas["random", BOTH]
    for name in (("relevance", BOTH), ("relevance", CLASS), ("relevance", WORDS), ("hirescam", BOTH)):
        assert areas[name] < chance - 0.05, areas
    assert areas["least by relevance", BOTH] > chance, areas


@pytest.mark.slow
def test_no_method_is_much_truer_than_the_default(digits):
    """Prints the table of docs/explain.md (`pytest -m slow -s`)."""
    areas = areas_of(deletion_curves(*digits, IMAGE_METHODS))
    parts = (CLASS, WORDS, BOTH)
    print(f"\nrandom: {areas['random', BOTH]:.2f}\n\n| | {' | '.join(parts)} |\n|---|---|---|---|")
    for method in sorted(IMAGE_METHODS, key=lambda method: areas[method, BOTH]):
        print(f"| {method} | {' | '.join(f'{areas[method, part]:.2f}' for part in parts)} |")
    for part in parts:
        assert areas["relevance", part] < min(areas[method, part] for method in IMAGE_METHODS) + 0.05, areas


def sentences(count):
    """Bundled sentences with one verb of the end, whose number in the list is odd or even: all the rest is idle."""
    rows = []
    for sentence, _ in acceptability(3 * count, 2, seed=1)["train"]:
        verbs = [word for word in sentence.split() if word in FORMS]
        if len(verbs) == 1:
            rows.append((sentence, FORMS[verbs[0]] % 2, sentence.split().index(verbs[0])))
    return rows[:count]


@pytest.mark.parametrize("make", [make_bert, make_gpt])
def test_deleting_influential_words_lowers_the_score_faster_than_random_ones(make):
    torch.manual_seed(0)
    rows = sentences(520)
    tokenizer = make_tokenizer([sentence for sentence, *_ in rows])
    model = equip(make(tokenizer), labels=["even", "odd"], head={"heads": 3, "left_dim": 8, "right_dim": 8})
    encoded = tokenizer([sentence for sentence, *_ in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([label for _, label, _ in rows])

    def batches():
        while True:
            for batch in torch.randperm(480).split(32):
                ids = encoded["input_ids"][batch].clone()
                ids[(torch.rand(ids.shape) < 0.1) & (ids > 4)] = tokenizer.mask_token_id  # so that a mask means nothing
                yield {"input_ids": ids, "attention_mask": encoded["attention_mask"][batch], "labels": labels[batch]}

    fit(model, batches(), 5e-3, 200)
    draw, areas, hits = np.random.default_rng(0), [], []
    for sentence, label, verb in rows[480:]:
        words = split_words(model, tokenizer, sentence)
        found = {
            method: explain_text(model, tokenizer, sentence, method=method, target=label).columns[-1].values
            for method in ("relevance", "gradient")
        }
        found["random"] = draw.random(len(words))
        hits.append(found["relevance"].argmax() == verb)
        blank = tokenizer.mask_token_id
        areas.append([delete_words(model, words.encoded, words.tokens, v, label, blank).mean() for v in found.values()])
    relevance, gradient, random = np.mean(areas, axis=0)
    print(relevance, gradient, random, np.mean(hits))
    assert relevance < random - 0.03  # gradient is not asserted: it is there to compare
    assert np.mean(hits) > 0.4  # chance is a fifth


def test_deletion_deletes_the_patch_it_says():
    """A stand-in that scores the brightness of one cell: the curve drops when that cell goes, and only then."""

    class Cell(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, pixel_values):
            bright = pixel_values[:, 0, 2:4, 4:6].mean((1, 2))
            return type("Output", (), {"logits": torch.stack([bright, torch.zeros_like(bright)], dim=1)})

    importance = np.arange(6, dtype=float).reshape(2, 3)
    pixels = torch.zeros(1, 1, 4, 6)
    pixels[..., 2:4, 4:6] = 6.0
    curve = delete_patches(Cell(), pixels, importance, 0)
    assert curve[0] > 0.99 and curve[1:] == pytest.approx(curve[1], abs=1e-6) and curve[1] < 0.8
    late = delete_patches(Cell(), pixels, -importance, 0)
    assert late[:6] == pytest.approx(curve[0]) and late[6] < 0.8
