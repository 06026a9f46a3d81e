"""What every architecture of `sot.paper.peers` has to do."""

import json
from pathlib import Path

import timm
import torch
from timm.layers import get_notrace_functions, get_notrace_modules
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import sot.paper
from sot import HeadConfig
from sot.models.complexity import measure_complexity

HEAD = HeadConfig(heads=2, left_dim=3, right_dim=3)
KEYS = Path(__file__).parent / "peer_keys"


def published_shapes(name):
    """Names and shapes of the weights that the authors publish."""
    for file in KEYS.glob("*.json"):
        known = json.loads(file.read_text())
        if name in known:
            return {key: tuple(shape) for key, shape in known[name].items()}
    raise KeyError(name)


def shapes(model):
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def on_meta(name, **settings):
    with torch.device("meta"):
        return timm.create_model(name, **settings)


def check_figures(name, params, macs):
    """Millions and billions within 1 % and 3 %, the products of attention counted."""
    found = measure_complexity(on_meta(name), (3, 224, 224))
    assert abs(found.params / 1e6 / params - 1) < 0.01 and abs(found.all_macs / 1e9 / macs - 1) < 0.03, found


def check_traced(model, image, expected):
    """A graph of torch.fx computes the same, with what timm says cannot be traced left as calls."""
    leaves = {"leaf_modules": get_notrace_modules(), "autowrap_functions": get_notrace_functions()}
    options = {"tracer_kwargs": {**leaves, "param_shapes_constant": True}, "suppress_diff_warning": True}
    _, nodes = get_graph_node_names(model, **options)
    traced = create_feature_extractor(model, nodes[-1:], **options)
    torch.testing.assert_close(*traced.eval()(image).values(), expected)


def check_timm(name, settings, size, num_features):
    """The API of timm's models, gradients for every weight, tracing, checkpointing."""
    image = torch.randn(2, 3, *size)
    model = timm.create_model(name, num_classes=5, drop_path_rate=0.1, **settings)
    model(image).square().mean().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    model.eval()
    features = model.forward_features(image)
    logits = model(image)
    torch.testing.assert_close(model.forward_head(features), logits)
    assert logits.shape == (2, 5) and model.forward_head(features, pre_logits=True).shape == (2, num_features)
    assert model.num_features == model.head_hidden_size == num_features
    assert "cls_token" in model.no_weight_decay()
    check_traced(model, image, logits)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(image), logits)
    model.reset_classifier(3)
    assert model(image).shape == (2, 3) and model.num_classes == 3
    model.reset_classifier(0, "avg")
    assert model(image).shape == (2, num_features)
    bare = timm.create_model(name, num_classes=0, **settings).eval()
    assert bare(image).shape == (2, num_features)
    weights = model.state_dict()
    for entry in ("mean", "std", "input_size", "classifier"):
        assert model.default_cfg[entry]
    assert model.default_cfg["first_conv"] + ".weight" in weights
    return model


def check_equip(name, settings, size, folder, embed=None):
    """A head, a training step, and the same logits from what was saved."""
    image, labels = torch.randn(2, 3, *size), torch.tensor([0, 2])
    model = sot.equip(name, 3, HEAD, pretrained=False, model_args=settings, embed=embed)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model.train()(image, labels=labels).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    optimizer.step()
    model.save_pretrained(folder)
    loaded = sot.SoTForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(image).logits, model.eval()(image).logits)
    return model
