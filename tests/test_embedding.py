"""Token embeddings in pieces and trained by hand: what the layers give when they are called one after another."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sot.models.embedding import dense_training, stem
from sot.models.embedding.dense import DenseBlock, Transition
from sot.models.embedding.token_embed import STAGES, ConvolutionalEmbedding


def randomized(module):
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
            norm.weight.data[::4] = 0
    return module.double().train()


def watched(module):
    """A copy whose layers are called one after another, with the whole batch, as a hook waits for it."""
    module = copy.deepcopy(module)
    for part in module.modules():
        part.register_forward_hook(lambda *_: None)
    return module


def image(*shape, requires_grad=True):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(requires_grad)


def assert_same(module, x, layer_by_layer=None):
    """The same result, gradients and running statistics."""
    expected = layer_by_layer or watched(module)
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
    monkeypatch.setattr(dense_training, "CELLS_IN_CACHE", 50)
    monkeypatch.setattr(dense_training, "MAP_IN_CACHE", 100)
    monkeypatch.setattr(stem, "PIXELS_IN_CACHE", 32 * 32)
    for function in (dense_training.DenseBlockFunction, dense_training.PooledNormFunction, stem.StemFunction):
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
    block = randomized(DenseBlock(3, num_layers=2, growth=2))
    assert torch.autograd.gradcheck(lambda x: block(x)[:, ::2], image(2, 3, 3, 3))


@pytest.mark.parametrize("shape, pooled_first", [((3, 8, 10, 6), True), ((3, 8, 9, 6), False)])
def test_transition(shape, pooled_first, by_hand):
    module = randomized(Transition(8, 5, 2))
    assert_same(module, image(*shape))
    assert bool(by_hand) == pooled_first
    module.eval()
    published = module.pool(module.conv(module.norm(x := image(*shape))))
    assert torch.allclose(module(x), published, atol=1e-12)


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
    assert module(image(0, 3, 48, 40)).shape == (0, 6, 12, 10)


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


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "norm1", nn.SyncBatchNorm(8).double()),
        lambda layer: setattr(layer.norm2, "momentum", None),
        lambda layer: setattr(layer, "norm1", nn.BatchNorm2d(8, affine=False).double()),
        lambda layer: setattr(layer, "norm1", nn.BatchNorm2d(8, track_running_stats=False).double()),
        lambda layer: layer.conv2.register_full_backward_hook(lambda *_: None),
        lambda layer: layer.register_forward_pre_hook(lambda *_: None),
        lambda layer: weight_norm(layer.conv1),
    ],
)
def test_changed_layers_are_called(change, by_hand):
    block = randomized(DenseBlock(8, num_layers=2, growth=4))
    change(block.denselayer1)
    if not isinstance(block.denselayer1.norm1, nn.SyncBatchNorm):  # which runs on a GPU alone
        block(image(2, 8, 4, 4))
    assert not block._can_train_by_hand(image(2, 8, 4, 4)) and not by_hand


def test_mixed_precision_is_left_to_autocast(by_hand):
    module = ConvolutionalEmbedding("densenet", 3, 6, 4).train()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(2, 3, 32, 32)).dtype == torch.bfloat16
    assert module.bfloat16()(torch.randn(2, 3, 32, 32).bfloat16()).dtype == torch.bfloat16 and not by_hand


def test_one_cell_has_no_statistics():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        DenseBlock(8).train()(torch.randn(1, 8, 1, 1))
