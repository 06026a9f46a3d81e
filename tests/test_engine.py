"""The parts of training: schedule, groups of parameters, averaged weights, scores."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import matthews_corrcoef, top_k_accuracy_score

from sot.evaluation.metrics import calibration_error, cross_entropy, text_scores, top_k
from sot.models.equip import equip
from sot.training.engine import Average
from sot.training.keeping import KeepLoss
from sot.training.rates import learning_rate_factor, parameter_groups
from sot.training.recipe import Recipe, load_recipe


def test_schedule_warms_up_follows_the_cosine_and_stays_at_the_end():
    recipe = load_recipe("sot_tiny")
    factor = learning_rate_factor(recipe, steps_per_epoch=10)
    rates = [recipe.lr * factor(step) for step in range(3100)]
    assert rates[0] == pytest.approx(1e-6) and rates[50] == pytest.approx(1e-3)
    assert rates[50 + (3000 - 50) // 2] == pytest.approx((1e-3 + 1e-5) / 2, rel=1e-3)
    assert rates[3000:] == [pytest.approx(1e-5)] * 100
    linear = learning_rate_factor(Recipe(schedule="linear", epochs=2, lr=1.0), 5)
    assert [linear(step) for step in (0, 5, 10)] == [1.0, 0.5, 0.0]


def test_decay_falls_on_matrices_only_and_rates_follow_depth_and_head():
    head = {"heads": 2, "left_dim": 3, "right_dim": 3, "norm": "svpn_fast"}
    model = equip("test_vit", 3, head, pretrained=False)
    recipe = Recipe(lr=1.0, weight_decay=0.1, layer_decay=0.5, head_lr_multiplier=10)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in parameter_groups(model, recipe) for p in g["params"]}
    assert len(found) == len(names)
    assert found["classifier.word_linear.weight"] == (10.0, 0.1) and found["classifier.pool.norm.start"] == (10.0, 0.0)
    assert found["backbone.timm_model.pos_embed"][1] == found["backbone.timm_model.cls_token"][1] == 0.0
    rates = [found[f"backbone.timm_model.blocks.{i}.attn.qkv.weight"][0] for i in range(2)]
    assert rates[0] == rates[1] / 2 < 1


def test_average_follows_its_formula_and_gives_the_model_back():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    average, start = Average(model, 0.9), model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    average.update(model)
    assert torch.allclose(average.values["0.weight"], start + 0.1)
    with average.worn_by(model):
        assert torch.allclose(model[0].weight, start + 0.1)
    assert torch.allclose(model[0].weight, start + 1)


def test_metrics_are_scikit_learns():
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(200, 7)), draw.integers(0, 7, 200)
    for k in (1, 5):
        assert top_k(logits, labels, k) == pytest.approx(top_k_accuracy_score(labels, logits, k=k))
    expected = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(labels))
    assert cross_entropy(logits, labels) == pytest.approx(float(expected))
    sure = np.where(np.eye(7)[labels] > 0, 50.0, 0.0)
    assert calibration_error(sure, labels) == pytest.approx(0, abs=1e-6)
    assert calibration_error(sure, (labels + 1) % 7) == pytest.approx(1, abs=1e-6)
    binary, truth = draw.normal(size=(50, 2)), draw.integers(0, 2, 50)
    assert text_scores("mcc", binary, truth)["mcc"] == pytest.approx(matthews_corrcoef(truth, binary.argmax(1)))


def test_an_interrupted_epoch_keeps_the_loss_of_its_steps():
    before = SimpleNamespace(_globalstep_last_logged=3, _tr_loss=torch.tensor(1.5))
    after = SimpleNamespace(_globalstep_last_logged=4, _tr_loss=torch.tensor(0.0))
    state = SimpleNamespace(global_step=4, stateful_callbacks={"KeepLoss": KeepLoss(before).state()})
    KeepLoss(after).on_train_begin(None, state, None)
    assert (after._globalstep_last_logged, float(after._tr_loss)) == (3, 1.5)
