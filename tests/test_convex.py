"""Linear classifiers solved to their optimum, and how mixtures and penalties are chosen."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from test_probe import hand_made

from sot.probe.choice import FEW, choose, draw_folds, held_out_means, told_apart
from sot.probe.convex import Blocks, solve
from sot.probe.features import Features
from sot.probe.fitting import Target, head_outputs
from sot.probe.second_order import MIXTURES, Representation, fit_second_order, is_better, lean, whitening

ALL = torch.ones(1, 1, dtype=torch.bool)


def problem(samples, width, classes=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, width, generator=draw) * torch.logspace(0, -1, width) + 1
    labels = ((features - 1) @ torch.randn(width, classes, generator=draw)).argmax(1)
    return features, labels


@pytest.mark.parametrize("samples", [40, 300], ids=["fewer samples", "fewer features"])
def test_the_optimum_is_that_of_scikit_learn(samples):
    features, labels = problem(samples, 60)
    blocks = Blocks([features[:, :20], features[:, 20:]])
    assert blocks.is_dual == (samples < 60)
    mixture, penalties = (0.3, 0.7), [0.1, 0.003]
    targets = torch.eye(3)[labels]
    folds = torch.rand(2, samples) < 0.8
    logits, coefficients, bias = solve(blocks, mixture, targets, folds, penalties, tolerance=1e-5)
    mixed = torch.cat(blocks.groups, dim=1) * blocks.factors(mixture)
    for number, penalty in enumerate(penalties):
        for fold, fitted in enumerate(folds):
            strength = 1 / (penalty * int(fitted.sum()))
            expected = LogisticRegression(C=strength, tol=1e-8, max_iter=5000).fit(mixed[fitted], labels[fitted])
            found = logits[number, fold].softmax(-1).numpy()
            assert found == pytest.approx(expected.predict_proba(mixed), abs=2e-3)
        weight, shift = blocks.linear(mixture, coefficients[number, :, 0], bias[number, 0, 0])
        torch.testing.assert_close(features @ weight.T + shift, logits[number, 0], atol=1e-4, rtol=1e-3)


def test_several_labels_and_numbers_have_their_optima_too():
    features, labels = problem(200, 10)
    blocks, folds = Blocks([features]), ALL.expand(1, 200)
    several = torch.stack([labels == 0, labels > 0], dim=1).float()
    logits = solve(blocks, (1.0,), several, folds, [0.01], "sigmoid", 1e-5)[0][0, 0]
    for column in range(2):
        expected = LogisticRegression(C=1 / 2, tol=1e-8, max_iter=5000).fit(blocks.groups[0], several[:, column])
        assert logits[:, column].numpy() == pytest.approx(expected.decision_function(blocks.groups[0]), abs=2e-2)
    number = features[:, :1] * 3 + 5
    values = solve(blocks, (1.0,), number, folds, [0.01], "identity", 1e-6)[0][0, 0]
    expected = Ridge(alpha=2.0).fit(blocks.groups[0], number)
    assert values[:, 0].numpy() == pytest.approx(expected.predict(blocks.groups[0].numpy()).ravel(), abs=1e-2)


def test_folds_are_stratified_and_drawn_again_where_samples_are_few():
    for count, folds in ((20, 20), (200, 10), (1000, 5), (3000, 1)):
        classes = np.arange(count) % 4
        fitted = draw_folds(classes, count)
        assert fitted.shape == (folds, count) and (~fitted).sum(1).max() <= -(-count // 5) + 3
        held_out = [np.bincount(classes[~fold], minlength=4) for fold in fitted]
        assert np.ptp(held_out) <= 1
    assert draw_folds(np.array([0, 1]), 2).shape[1] == 2  # one of each class
    assert draw_folds(None, 7).shape == (20, 7)
    with pytest.raises(ValueError, match="1 training samples are too few"):
        draw_folds(None, 1)


def test_scores_are_those_of_the_folds_that_a_sample_was_held_out_of():
    folds = torch.tensor([[True, False, True], [False, True, True], [False, False, True]])
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [8.0, 10.0, 12.0]])
    assert held_out_means(values, folds).tolist() == [6.0, 6.0]  # the last sample was never held out


def test_the_usual_mixture_is_left_for_one_that_is_better_by_some_standard_errors():
    features, labels = problem(120, 30, classes=2)
    noise = torch.randn(120, 30, generator=torch.Generator().manual_seed(9))
    blocks, folds = Blocks([features, noise]), torch.from_numpy(draw_folds(labels.numpy(), 120))
    mixtures = {"noise": (0.0, 1.0), "both": (0.5, 0.5), "signal": (1.0, 0.0)}
    chosen = choose(blocks, mixtures, torch.eye(2)[labels], folds, "softmax")
    assert chosen.mixture == "signal" and chosen.score > 0.8 and chosen.settings == 21
    usual = choose(blocks, dict(reversed(mixtures.items())), torch.eye(2)[labels], folds, "softmax")
    assert usual.mixture == "signal"
    alike = choose(blocks, {"both": (0.5, 0.5), "nearly": (0.501, 0.499)}, torch.eye(2)[labels], folds, "softmax")
    assert alike.mixture == "both", "what cannot be told apart stays as usual"
    nothing = choose(blocks, {"noise": (0.0, 1.0)}, torch.eye(2)[labels], folds, "softmax")
    assert nothing.penalty >= 1e-2, "where nothing is known, the strong penalties"


@pytest.mark.parametrize("samples", [FEW - 4, FEW])
def test_of_few_samples_losses_tell_mixtures_apart(samples):
    targets = torch.eye(2)[torch.zeros(samples, dtype=torch.long)]
    sure, folds = torch.zeros(samples, 2), torch.zeros(1, samples, dtype=torch.bool)
    sure[:, 0] = 1  # as often right as one that is just right, with a smaller loss
    lucky = 0.01 * sure
    lucky[: samples // 4] *= -1  # a usual one that is wrong a quarter of the time, by next to nothing
    outputs = torch.stack([lucky, 0.01 * sure, sure])[:, None]
    assert told_apart(outputs[1:], targets, folds, "softmax", False) == (1 if samples < FEW else 0)
    assert told_apart(outputs, targets, folds, "softmax", False) == (2 if samples < FEW else 1)
    coin = sure.clone()
    coin[samples // 2 :] *= -1  # loses in the mean what it wins
    assert told_apart(torch.stack([lucky, coin])[:, None], targets, folds, "softmax", False) == 0


def test_smaller_penalties_are_tried_where_the_smallest_is_the_best():
    features, labels = problem(600, 8, classes=4)
    easy = Blocks([features + 3 * torch.nn.functional.one_hot(labels, 8)])
    folds = torch.from_numpy(draw_folds(labels.numpy(), 600))
    target = torch.eye(4)[labels]
    assert choose(easy, {"all": (1.0,)}, target, folds, "softmax", (0.1, 1e-4)).penalty < 1e-4
    noise = Blocks([torch.randn(600, 300, generator=torch.Generator().manual_seed(1))])
    strong = choose(noise, {"all": (1.0,)}, target, folds, "softmax", (0.1, 1e-4))
    assert (strong.penalty, strong.settings) == (0.1, 2)


# --- the head ------------------------------------------------------------------------------------------------


def test_whitened_words_have_unit_variance():
    features = hand_made(200, 0)
    norm = torch.zeros(16), torch.ones(16)
    projection = whitening(features, norm, np.arange(200), 8)
    words = torch.from_numpy(features.words).float() @ projection.T
    assert projection.shape == (8, 16)
    covariance = words.T @ words / len(words)
    assert covariance.diagonal().min() > 0.85 and covariance.diagonal().max() < 1.1  # it shrinks by a tenth
    assert (covariance - covariance.diagonal().diag()).abs().max() < 1e-3


@pytest.mark.parametrize("class_tokens", [True, False])
def test_every_mixture_becomes_a_head_with_the_logits_of_its_optimum(class_tokens):
    features = hand_made(60, 1, class_tokens=class_tokens)
    targets, rows = torch.eye(2)[torch.from_numpy(features.labels).long()], np.arange(60)
    representation = Representation(features, rows, 2)
    mixtures = representation.mixtures()
    assert len(mixtures) == (6 if class_tokens else 3)
    for name, shares in mixtures.items():
        head = representation.fit(targets, "softmax", name, 1e-3)
        expected = solve(representation.blocks, shares, targets, ALL.expand(1, 60), [1e-3], tolerance=1e-3)[0][0, 0]
        torch.testing.assert_close(head_outputs(head, features, rows, 16), expected, atol=2e-3, rtol=1e-2)
        used = [head.class_features > 0, head.config.pool == "gcp" and head.word_features > 0]
        assert used == [MIXTURES[name][0] > 0, MIXTURES[name][1] > 0]


@pytest.mark.parametrize("samples, expected", [(16, (0.0, 0.25, 0.75)), (64, (0.0, 0.5, 0.5)), (5000, (0.0, 0.5, 0.5))])
def test_the_second_order_yields_to_the_average_as_labels_vanish(samples, expected):
    assert lean(MIXTURES["second order + average"], samples) == pytest.approx(expected)
    of_class = lean(MIXTURES["second order + class"], samples)
    assert of_class == pytest.approx((expected[2], expected[1], 0.0))
    for name in ("class", "average", "class + average", "second order"):  # nothing yields where nothing is beside it
        assert lean(MIXTURES[name], samples) == pytest.approx(MIXTURES[name])
    features = hand_made(16, 1)
    shares = Representation(features, np.arange(16), 2).mixtures(["second order + average"])
    assert shares["second order + average"][-2:] == pytest.approx((0.25, 0.75))


@pytest.mark.parametrize("count", [16, 80])
def test_few_labels_tell_second_order_statistics_apart(count):
    train, test = hand_made(count, 1), hand_made(300, 2)
    targets = torch.eye(2)[torch.from_numpy(train.labels).long()]
    fitted = fit_second_order(train, train.rows, targets, Target(2))
    assert fitted.chosen.mixture.startswith("second order") and not fitted.is_trained
    right = head_outputs(fitted.head, test, test.rows, 64).argmax(1).numpy() == test.labels
    assert right.mean() > (0.9 if count > 50 else 0.75)


@pytest.mark.parametrize("modality, usual", [("image", "class"), ("text", "average"), ("audio", "average")])
def test_what_is_usual_depends_on_what_backbones_are_trained_by(modality, usual):
    draw = np.random.default_rng(0)
    noise = draw.standard_normal((200 * 24, 16)).astype(np.float16)
    features = replace(hand_made(200, 1), words=noise, modality=modality)
    targets = torch.eye(2)[torch.from_numpy(features.labels).long()]
    assert fit_second_order(features, features.rows, targets, Target(2)).chosen.mixture == f"second order + {usual}"


def test_many_labels_train_all_of_it_if_that_is_better():
    draw = np.random.default_rng(0)
    train = hand_made(600, 1)
    # what tells the classes apart lies in directions of little variance, which whitening alone leaves out
    words = train.words.astype(np.float32)
    loud = draw.standard_normal((len(words), 48)).astype(np.float32) * 4
    features = Features(None, np.concatenate([loud, words], axis=1).astype(np.float16), train.starts, train.labels)
    targets = torch.eye(2)[torch.from_numpy(train.labels).long()]
    fitted = fit_second_order(features, features.rows, targets, Target(2))
    again = fit_second_order(features, features.rows, targets, Target(2), adapted=features)
    assert again.chosen == fitted.chosen and again.is_trained == fitted.is_trained
    same = again.head.state_dict()
    assert all(torch.equal(value, same[name]) for name, value in fitted.head.state_dict().items())
    plain = Representation(features, features.rows, 2).projection
    assert fitted.is_trained == (not torch.equal(fitted.head.pool.projection.weight.data, plain))
    before, after = torch.zeros(50, 2), torch.zeros(50, 2)
    wanted = torch.eye(2)[torch.ones(50, dtype=torch.long)]
    after[:, 1] = 1
    assert is_better(after, before, wanted, "softmax") and not is_better(before, after, wanted, "softmax")
    assert not is_better(after, after, wanted, "softmax")
