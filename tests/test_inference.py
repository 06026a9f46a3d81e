"""Models folded for inference: the same logits from fewer layers."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from sot import HeadConfig, accelerate, equip, optimize_for_inference
from sot.bench.cases import run_case
from sot.bench.model_cost import PublishedModel, model_cases
from sot.models.embedding.dense import DenseBlock, DenseLayer
from sot.models.embedding.token_embed import EMBEDDINGS

HEAD = HeadConfig(heads=2, left_dim=3, right_dim=3)
UGLY = torch.tensor(
    [0.0, -0.0, 1e-30, -1e-30, 1e-42, -3.0, 1e4, 1.0]
)  # of a batch norm: scales that vanish, turn, blow up


def family(**settings):
    settings = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5, "head": HEAD, **settings}
    return timm.create_model("sot_tiny", **settings)


def with_statistics(model):
    """As after training: no batch norm is the identity; a third of the scales are negative, some zero."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight, 0.5, 1.0)
            nn.init.normal_(norm.bias)
            norm.weight.data[::5] = 0
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.2, 3)
    return model.eval()


def logits(model, x):
    with torch.no_grad():
        output = model(x)
    return getattr(output, "logits", output)


def difference(model, x):
    """Largest difference of logits, relative to the largest of them."""
    expected = logits(model, x)
    return float((logits(optimize_for_inference(model), x) - expected).abs().max() / expected.abs().max())


def norms(model):
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-11)])
@pytest.mark.parametrize("embed", EMBEDDINGS)
def test_every_embedding_keeps_its_logits(embed, dtype, tolerance):
    model = with_statistics(family(embed=embed)).to(dtype)
    assert difference(model, torch.randn(3, 3, 32, 32, dtype=dtype)) < tolerance
    left = 2 if embed == "nonlocal" else 0  # its batch norms after a sum
    assert norms(optimize_for_inference(model)) == left


def test_paper_size_keeps_its_logits():
    model = with_statistics(timm.create_model("sot_tiny"))
    assert difference(model, torch.randn(2, 3, 224, 224)) < 1e-4


@pytest.mark.parametrize("scale", UGLY.tolist())
@pytest.mark.parametrize("shift", [-2.0, 0.0, 2.0])
def test_scales_that_vanish_turn_or_blow_up(scale, shift):
    block = DenseBlock(4, num_layers=2, growth=2)
    for layer in block:
        nn.init.constant_(layer.norm1.weight, scale)
        nn.init.constant_(layer.norm1.bias, shift)
    assert difference(nn.Sequential(block).eval(), 10 * torch.randn(2, 4, 6, 6)) < 1e-5


def test_variance_of_zero_and_large_means():
    model = with_statistics(family().double())
    for module in model.modules():
        if isinstance(module, DenseLayer):
            module.norm1.running_var[1::2] = 0
            module.norm2.running_mean += 100
    assert difference(model, torch.randn(2, 3, 32, 32, dtype=torch.float64)) < 1e-9


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_byobnet", "test_vit", "test_nfnet"])
def test_equipped_timm_models(name):
    model = with_statistics(equip(name, 5, HEAD, pretrained=False))
    assert difference(model, torch.randn(2, 3, 160, 160)) < 1e-4
    if norms(model):
        assert norms(optimize_for_inference(model)) == 0


@pytest.mark.parametrize("name", ["resnet18", "resnetv2_50", "densenet121", "mobilenetv3_small_050", "repvgg_a0"])
def test_timm_models_with_norms_before_and_after_convolutions(name):
    model = with_statistics(timm.create_model(name, num_classes=5)).double()
    assert difference(model, torch.randn(1, 3, 64, 64, dtype=torch.float64)) < 1e-9
    assert norms(optimize_for_inference(model)) < norms(model)


def test_the_model_itself_is_left_as_it_was():
    model = with_statistics(family()).train()
    before = copy.deepcopy(model.state_dict())
    folded = optimize_for_inference(model)
    assert model.training and not folded.training and not any(p.requires_grad for p in folded.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(folded, type(model)) and all(p.requires_grad for p in model.parameters())


def test_norms_that_cannot_be_folded_stay():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            once = self.conv(x)
            return self.norm(once) + once

    class Twice(Shared):
        def forward(self, x):
            return self.norm(self.conv(self.norm(self.conv(x))))

    without = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False))
    same = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    for model in (Shared(), Twice(), without, nn.ModuleList([same, same])[0], nn.Sequential(same, same)):
        model = with_statistics(model) if model is not without else model.eval()
        x = torch.randn(2, 3, 4, 4)
        assert torch.allclose(logits(optimize_for_inference(model), x), logits(model, x), atol=1e-5)


def test_folded_models_compile_export_copy_and_change_device():
    model, x = with_statistics(family()), torch.randn(2, 3, 32, 32)
    folded = optimize_for_inference(model)
    expected = logits(folded, x)
    for twin in (copy.deepcopy(folded), pickle.loads(pickle.dumps(folded))):
        assert torch.allclose(logits(twin, x), expected, atol=1e-5)
    torch._dynamo.reset()
    assert torch.allclose(logits(torch.compile(folded, fullgraph=True, backend="aot_eager"), x), expected, atol=1e-5)
    exported = torch.export.export(folded, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=32)},)).module()
    other = torch.randn(5, 3, 32, 32)
    assert torch.allclose(logits(exported, other), logits(folded, other), atol=1e-5)
    assert folded.to("meta")(x.to("meta")).shape == (2, 5)


def test_folding_twice_changes_nothing_more():
    model, x = with_statistics(family()), torch.randn(2, 3, 32, 32)
    once = optimize_for_inference(model)
    assert torch.equal(logits(optimize_for_inference(once), x), logits(once, x))


@pytest.mark.parametrize("embed", ["densenet", "resnet"])
def test_accelerated_models_fold_alike(embed):
    model, x = with_statistics(family(embed=embed)), torch.randn(3, 3, 32, 32)
    expected = logits(optimize_for_inference(model), x)
    folded = optimize_for_inference(accelerate(model))
    assert folded.patch_embed.proj.accelerated and norms(folded) == 0
    assert torch.allclose(logits(folded, x), expected, atol=1e-5)
    assert torch.allclose(logits(accelerate(folded, False), x), expected, atol=1e-5)


def test_only_modules_can_be_optimized():
    with pytest.raises(TypeError, match="takes a torch module, got str"):
        optimize_for_inference("sot_tiny")
    loss = optimize_for_inference(with_statistics(family()))(torch.randn(2, 3, 32, 32)).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_published_formulation_agrees_in_eval_and_training():
    model = with_statistics(timm.create_model("sot_tiny", depth=2)).double()
    published = PublishedModel(model).double().eval()
    x = torch.randn(2, 3, 224, 224, dtype=torch.float64)
    expected = logits(published, x)
    assert (logits(model, x) - expected).abs().max() < 1e-4 * expected.abs().max()  # it adds 1e-5 to a divisor
    model.train()(x).square().sum().backward()
    published.train()(x).square().sum().backward()
    names = ("norm.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc1.weight")
    for name in names:
        actual, wanted = model.get_parameter(name).grad, published.get_parameter(name).grad
        assert (actual - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_cases_of_the_benchmark_run():
    for case in model_cases(batch=1, train_batch=2):
        rows = run_case(case, rounds=1)
        assert [row.name for row in rows] == list(case.functions)
    with pytest.raises(ValueError, match="unknown model 'sot_7'; accepted: sot_tiny, sot_small, sot_base"):
        model_cases("sot_7")
