"""Accelerated token embeddings, in pieces and trained by hand: what the layers give when called one after another."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainingArguments

from sot import accelerate, equip
from sot.models.embedding import norm_training, stem
from sot.models.embedding.dense import DenseBlock, Transition
from sot.models.embedding.dense_training import DenseBlockFunction
from sot.models.embedding.token_embed import STAGES, ConvolutionalEmbedding
from sot.training.engine import SoTTrainer
from sot.training.recipe import Recipe


def randomized(module):
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
            norm.weight.data[::4] = 0
    return module.double().train()


def image(*shape, requires_grad=True):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(requires_grad)


def assert_same(module, x):
    """The same result, gradients and running statistics of the module as it is and of an accelerated copy."""
    expected, module = module, accelerate(copy.deepcopy(module))
    assert module.accelerated and not expected.accelerated
    result, wanted = module(x), expected(x)
    assert torch.allclose(result, wanted, atol=1e-12)
    grad = torch.randn_like(wanted)
    parameters = [p for p in module.parameters() if p.requires_grad]
    inputs = [x] if x.requires_grad else []
    actual = torch.autograd.grad(result, [*inputs, *parameters], grad)
    theirs = [p for p in expected.parameters() if p.requires_grad]
    for a, e in zip(actual, torch.autograd.grad(wanted, [*inputs, *theirs], grad)):
        assert a.shape == e.shape and torch.allclose(a, e, rtol=1e-8, atol=1e-9)
    for name, value in expected.state_dict().items():
        assert torch.allclose(module.state_dict()[name], value, atol=1e-12), name


@pytest.fixture
def by_hand(monkeypatch):
    """Names of the functions with a gradient of their own that ran, in pieces smaller than the tests' images."""
    ran = []
    monkeypatch.setattr(norm_training, "CELLS_IN_CACHE", 50)
    monkeypatch.setattr(norm_training, "MAP_IN_CACHE", 100)
    monkeypatch.setattr(stem, "PIXELS_IN_CACHE", 32 * 32)
    for function in (DenseBlockFunction, norm_training.PooledNormFunction, stem.StemFunction):
        original = function.forward

        def forward(*args, original=original, name=function.__name__):
            ran.append(name)
            return original(*args)

        monkeypatch.setattr(function, "forward", staticmethod(forward))
    return ran


@pytest.mark.parametrize("shape", [(3, 8, 10, 7), (1, 8, 12, 12), (5, 8, 2, 2), (2, 8, 1, 1)])
def test_dense_block(shape, by_hand):
    assert_same(randomized(DenseBlock(8, num_layers=3, growth=4)), image(*shape))
    assert by_hand == ["DenseBlockFunction"]


def test_dense_block_passes_gradcheck(by_hand):
    block = accelerate(randomized(DenseBlock(3, num_layers=2, growth=2)))
    assert torch.autograd.gradcheck(lambda x: block(x)[:, ::2], image(2, 3, 3, 3))


@pytest.mark.parametrize("shape, pooled_first", [((3, 8, 10, 6), True), ((3, 8, 9, 6), False)])
def test_transition(shape, pooled_first, by_hand):
    module = randomized(Transition(8, 5, 2))
    assert_same(module, image(*shape))
    assert bool(by_hand) == pooled_first
    assert_same(module.eval(), image(*shape))


def test_a_transition_is_what_was_published_until_it_is_accelerated():
    module, called = Transition(8, 5, 2).eval(), []
    for name, layer in module.named_children():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    module(torch.randn(1, 8, 4, 4))
    module.train()(torch.randn(1, 8, 4, 4))
    assert called == ["norm", "conv", "pool"] * 2


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("channels, size", [(3, (64, 48)), (1, (33, 35))])
def test_whole_embedding_in_training(kind, channels, size, by_hand):
    module = randomized(ConvolutionalEmbedding(kind, channels, 6, 4))
    assert_same(module, image(3, channels, *size))
    assert_same(module, image(3, channels, *size, requires_grad=False))
    assert "StemFunction" in by_hand


@pytest.mark.parametrize("kind", STAGES)
def test_whole_embedding_in_eval_image_by_image(kind, by_hand):
    module = randomized(ConvolutionalEmbedding(kind, 3, 6, 4))
    module(image(4, 3, 48, 40))
    assert_same(module.eval(), image(5, 3, 48, 40))
    calls = []
    module.out.register_forward_hook(lambda *_: calls.append(_))
    module(image(5, 3, 48, 40))
    assert len(calls) == 1
    assert accelerate(module)(image(0, 3, 48, 40)).shape == (0, 6, 12, 10)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layout_of_the_image_does_not_matter(layout):
    module = randomized(ConvolutionalEmbedding("densenet", 3, 6, 4)).eval()
    x = image(2, 3, 32, 32)
    assert torch.equal(module(x.contiguous(memory_format=layout)), module(x))


def test_frozen_parts(by_hand):
    module = randomized(ConvolutionalEmbedding("densenet", 3, 6, 4))
    module.stem.requires_grad_(False)
    module.stages[0].denselayer2.requires_grad_(False)
    assert_same(module, image(2, 3, 32, 32, requires_grad=False))
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()  # as in fine-tuning with fixed statistics
    by_hand.clear()
    assert_same(module, image(2, 3, 32, 32))
    assert by_hand == ["StemFunction"]


CHANGES = {
    "another layer": lambda layer: setattr(layer, "conv1", Scaled(8, 8, 1, bias=False).double()),
    "another type of weight": lambda layer: setattr(layer.conv1, "weight", nn.Parameter(Tagged(layer.conv1.weight))),
    "weight norm": lambda layer: weight_norm(layer.conv1),
    "hook on a convolution": lambda layer: layer.conv2.register_full_backward_hook(lambda *_: None),
    "hook on a layer": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
}
NORMS = {
    "synchronised": lambda layer: setattr(layer, "norm1", nn.SyncBatchNorm(8).double()),
    "cumulative": lambda layer: setattr(layer.norm2, "momentum", None),
    "without weights": lambda layer: setattr(layer, "norm1", nn.BatchNorm2d(8, affine=False).double()),
    "untracked": lambda layer: setattr(layer, "norm1", nn.BatchNorm2d(8, track_running_stats=False).double()),
}


class Tagged(torch.Tensor):
    """As quantized and sharded weights are tensors of a type of their own."""


class Scaled(nn.Conv2d):
    """Computes something else with its weight."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layers_are_left_as_they_are(change, by_hand):
    block = randomized(DenseBlock(8, num_layers=2, growth=4))
    CHANGES[change](block.denselayer1)
    both = nn.Sequential(block, randomized(DenseBlock(16, num_layers=2, growth=4)))
    x = image(2, 8, 4, 4)
    expected = both(x)
    assert [part.accelerated for part in accelerate(both)] == [False, True]
    assert torch.allclose(both(x), expected, atol=1e-12) and by_hand == ["DenseBlockFunction"]


@pytest.mark.parametrize("change", NORMS)
def test_norms_that_train_in_another_way_are_called(change, by_hand):
    block = accelerate(randomized(DenseBlock(8, num_layers=2, growth=4)))
    NORMS[change](block.denselayer1)
    block(image(2, 8, 4, 4))
    assert not by_hand


def test_mixed_precision_is_left_to_autocast(by_hand):
    module = accelerate(ConvolutionalEmbedding("densenet", 3, 6, 4).train())
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(2, 3, 32, 32)).dtype == torch.bfloat16
    assert module.bfloat16()(torch.randn(2, 3, 32, 32).bfloat16()).dtype == torch.bfloat16 and not by_hand


@pytest.mark.parametrize("on", [False, True])
def test_one_cell_has_no_statistics(on):
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        accelerate(DenseBlock(8).train(), on)(torch.randn(1, 8, 1, 1))


# --- what is asked for, and no more ---------------------------------------------------------------------------


def test_hooks_inside_fire_until_somebody_accelerates():
    module = randomized(ConvolutionalEmbedding("densenet", 3, 6, 4))
    assert not any(getattr(part, "accelerated", False) for part in module.modules())
    fired = set()
    x = image(2, 3, 32, 32)

    def watch():
        parts = {part: name for name, part in module.named_modules() if not list(part.children())}
        return [part.register_forward_hook(lambda part, *_: fired.add(parts[part])) for part in parts]

    handles = watch()
    module(x)
    assert len(fired) == len(handles) == 102 and "stages.0.denselayer1.norm1" in fired
    for handle in handles:
        handle.remove()
    accelerate(module)
    watch()
    fired.clear()
    module(x)
    assert fired == {"out", "stages.1.conv", "stages.3.conv", "stages.3.norm", "stages.3.pool"} | {
        f"stages.5.{name}" for name in ("conv", "norm", "pool")
    }
    accelerate(module, False)(x)
    assert len(fired) == 102


def test_undone_it_is_what_it_was(by_hand):
    module, x = randomized(ConvolutionalEmbedding("densenet", 3, 6, 4)), image(2, 3, 32, 32)
    plain = copy.deepcopy(module)
    names = list(module.state_dict())
    assert accelerate(module) is module and list(module.state_dict()) == names
    twin = copy.deepcopy(module)
    assert twin.accelerated and twin.stages[0].accelerated
    twin.load_state_dict(plain.state_dict())
    result = accelerate(module, False)(x)
    assert not by_hand and torch.equal(result, plain(x))
    twin(x)
    assert len(by_hand) == 5  # the stem, three blocks, and the pooled norm of the first transition


def test_torch_finds_nothing_wrong_with_the_operators():
    ops, block = torch.ops.sot, DenseBlock(4, num_layers=2, growth=4)
    x = torch.randn(2, 5, 6, 4)
    layers, eps = [layer for half in block._halves() for layer in half], [1e-5] * 4
    parameters = [weight.detach() for layer in layers for weight in layer.parameters()]
    made = ops.dense_block(x, parameters, eps)
    grad = torch.randn(2, 5, 6, made[0].shape[2])
    picture, weight = torch.randn(2, 9, 8, 3), torch.randn(4, 3, 3, 3)
    pooled, places = ops.stem(picture, weight, torch.randn(4))
    given = picture, weight, places, torch.randn_like(pooled)
    calls = [(ops.dense_block, (x, parameters, eps)), (ops.dense_block_backward, (grad, parameters, eps, *made))]
    calls += [(ops.stem, (picture, weight, torch.randn(4)))]
    calls += [(ops.stem_backward, (*given, of_image)) for of_image in (True, False)]
    norm = x[:, :4], torch.randn(4), torch.randn(4)
    pooled, *kept = ops.pooled_norm(*norm, 1e-5, 2)
    calls += [
        (ops.pooled_norm, (*norm, 1e-5, 2)),
        (ops.pooled_norm_backward, (pooled, norm[0].flatten(1, 2), norm[1], *kept, 1e-5, 2)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, tuple(arguments), test_utils=("test_schema", "test_faketensor"))
        with FlopCounterMode(display=False) as counter:
            operator(*arguments)
        assert (counter.get_total_flops() > 0) == ("norm" not in str(operator))


def test_compiled_in_training_it_keeps_the_operators():
    module = accelerate(randomized(ConvolutionalEmbedding("densenet", 3, 6, 4)).float())
    x, found = torch.randn(3, 3, 32, 32), set()

    def compiler(graph, inputs):
        found.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    results = []
    for function in (module, compiled):
        output = function(x)
        output.square().sum().backward()
        results.append([output.detach(), *(weight.grad for weight in function.parameters()), *function.buffers()])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    names = [name + end for name in ("stem", "dense_block", "pooled_norm") for end in ("", "_backward")]
    assert {f"sot.{name}.default" for name in names} <= found


def test_compiled_in_eval_mode_its_stem_alone_is_an_operator(monkeypatch):
    module = accelerate(randomized(ConvolutionalEmbedding("densenet", 3, 6, 4)).float().eval())
    x, found = torch.randn(5, 3, 32, 32, requires_grad=True), set()
    monkeypatch.setattr(stem, "PIXELS_IN_CACHE", 2 * 32 * 32)  # pieces of two, two and one

    def compiler(graph, inputs):
        found.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    for result, expected in zip(*((y, *torch.autograd.grad(y.square().sum(), x)) for y in (compiled(x), module(x)))):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
    assert {name for name in found if name.startswith("sot.")} == {"sot.stem.default", "sot.stem_backward.default"}


def test_compiled_and_exported_it_is_one_graph():
    module = accelerate(ConvolutionalEmbedding("densenet", 3, 6, 4))
    x = torch.randn(2, 3, 32, 32)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    state = copy.deepcopy(module.state_dict())
    result = compiled(x)
    result.sum().backward()
    compiled_state = copy.deepcopy(module.state_dict())
    module.load_state_dict(state)
    assert torch.allclose(result, module(x), atol=1e-4)
    assert all(torch.allclose(compiled_state[name], value, atol=1e-5) for name, value in module.state_dict().items())
    module.eval()
    shapes = ({0: torch.export.Dim("batch", max=8)},)
    exported = torch.export.export(module, (x,), dynamic_shapes=shapes).module()
    assert torch.allclose(exported(x[:1]), module(x[:1]), atol=1e-4)


def test_training_accelerates_the_model_itself(tmp_path):
    model = equip(
        "sot_7", 2, pretrained=False, model_args={"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2}
    )
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    embedding = model.body.patch_embed.proj
    assert not embedding.accelerated
    assert SoTTrainer(Recipe(), model=model, args=arguments).model is model
    assert embedding.accelerated and embedding.stages[0].accelerated


def test_only_modules_can_be_accelerated(caplog):
    with pytest.raises(TypeError, match="accelerate takes a torch module, got str"):
        accelerate("sot_tiny")
    with caplog.at_level("DEBUG", "sot"):
        accelerate(nn.Linear(2, 2))
    assert "0 of 0 modules of Linear" in caplog.text
