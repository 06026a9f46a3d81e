"""The head: its settings, its six fusions, and what compilers and exporters make of it."""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F

from sot import POOLS, Fusion, HeadConfig, SecondOrderHead
from sot.core.packed import Packed

DIM, CLASSES = 16, 5
SMALL = {"heads": 2, "left_dim": 3, "right_dim": 4, "reduced_dim": 5}
FUSIONS = [fusion.value for fusion in Fusion]


def build(num_classes=CLASSES, **settings):
    """A small head; of the sizes it has its own, and `norm` None is the paper's."""
    return SecondOrderHead(DIM, num_classes, HeadConfig.from_saved({**SMALL, **settings})).eval()


def inputs(batch=3, length=7):
    mask = torch.rand(batch, length) > 0.3
    mask[:, 0] = True
    return torch.randn(batch, DIM), torch.randn(batch, length, DIM), mask


@pytest.mark.usefixtures("threads")
def test_fusions_are_the_papers_formulae():
    class_token, words, mask = inputs()
    head = build(fusion="sum")
    expected = head.class_linear(class_token) + head.word_linear(head.pool(words, mask))
    assert torch.equal(head(class_token, words, mask), expected)
    head = build(fusion="concat")
    expected = head.word_linear(torch.cat([class_token, head.pool(words, mask)], dim=1))
    assert torch.equal(head(class_token, words, mask), expected)
    head = build(fusion="aggr_all")
    everything = torch.cat([class_token[:, None], words], dim=1)
    expected = head.word_linear(head.pool(everything, torch.cat([torch.ones(3, 1).bool(), mask], dim=1)))
    assert torch.equal(head(class_token, words, mask), expected)
    head = build(fusion="class")
    assert torch.equal(head(class_token, None), head.class_linear(class_token))
    head = build(fusion="class", class_width=20)
    assert torch.equal(head(class_token, words), head.class_linear(head.widen(class_token)))
    head = build(fusion="word")
    assert torch.equal(head(None, words, mask), head.word_linear(head.pool(words, mask)))


@pytest.mark.parametrize("fusion", ["word", "sum", "concat", "aggr_all"])
def test_the_average_of_the_words_stands_beside_what_they_are_pooled_to(fusion):
    class_token, words, mask = inputs()
    head = build(fusion=fusion, average=True)
    assert head.word_features == head.pool.out_features + DIM
    if fusion == "aggr_all":
        words, mask = torch.cat([class_token[:, None], words], dim=1), torch.cat([mask[:, :1], mask], dim=1)
    mean = torch.stack([each[kept].mean(0) for each, kept in zip(words, mask)])
    pooled = head(class_token, *inputs_after(fusion, words, mask), pre_logits=True)[:, -head.word_features :]
    expected = torch.cat([head.pool(words, mask), mean], dim=1)
    torch.testing.assert_close(pooled, expected)
    kept = Packed(words[mask], torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)]))
    if fusion != "aggr_all":
        torch.testing.assert_close(head(class_token, kept), head(class_token, words, mask))
    with pytest.raises(ValueError, match="average is of the words"):
        build(fusion="class", average=True)


def inputs_after(fusion, words, mask):
    """Without the class token, which the head puts in front."""
    return (words[:, 1:], mask[:, 1:]) if fusion == "aggr_all" else (words, mask)


def test_late_fusion_returns_log_probabilities_of_the_mean_score():
    head, (class_token, words, mask) = build(fusion="late"), inputs()
    first, second = head.class_linear(class_token), head.word_linear(head.pool(words, mask))
    output = head(class_token, words, mask)
    assert torch.allclose(output.softmax(-1), (first.softmax(-1) + second.softmax(-1)) / 2)
    assert torch.allclose(output.exp().sum(-1), torch.ones(3))


def test_late_fusion_trains_both_branches_on_their_own_cross_entropy():
    head, (class_token, words, mask) = build(fusion="late"), inputs()
    target = torch.tensor([0, 3, 1])
    branches = head.branches(*head.represent(class_token, words, mask))
    loss = head.loss(branches, target, label_smoothing=0.1)
    expected = sum(F.cross_entropy(branch, target, label_smoothing=0.1) for branch in branches)
    assert len(branches) == 2 and torch.allclose(loss, expected)
    soft = F.one_hot(target, CLASSES).float()
    assert torch.allclose(head.loss(branches, soft), head.loss(branches, target))
    loss.backward()
    assert head.class_linear.weight.grad.norm() > 0 and head.word_linear.weight.grad.norm() > 0


@pytest.mark.parametrize("fusion", [fusion for fusion in FUSIONS if fusion != "late"])
def test_loss_of_the_other_fusions_is_plain_cross_entropy(fusion):
    head, (class_token, words, mask) = build(fusion=fusion), inputs()
    branches = head.branches(*head.represent(class_token, words, mask))
    target = torch.tensor([0, 3, 1])
    assert torch.allclose(head.loss(branches, target), F.cross_entropy(head(class_token, words, mask), target))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("pool", POOLS)
def test_every_head_trains_and_leaves_no_parameter_without_gradient(pool, fusion):
    head, (class_token, words, mask) = build(pool=pool, fusion=fusion).train(), inputs()
    logits = head(class_token, words, mask)
    logits.square().sum().backward()
    assert logits.shape == (3, CLASSES)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
    representation = head(class_token, words, mask, pre_logits=True)
    assert representation.shape == (3, head.num_features)
    bare = copy.deepcopy(head)
    bare.reset(0)
    assert torch.equal(bare(class_token, words, mask), representation)
    bare.reset(9)
    assert bare(class_token, words, mask).shape == (3, 9)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("fusion", FUSIONS)
def test_padding_batch_and_order_do_not_matter(fusion):
    head, (class_token, words, mask) = build(fusion=fusion).double(), inputs()
    class_token, words = class_token.double(), words.double()
    expected = head(class_token, words, mask)
    junk = torch.full((3, 4, DIM), float("nan"), dtype=words.dtype)
    longer = torch.cat([mask, torch.zeros(3, 4).bool()], dim=1)
    assert torch.allclose(head(class_token, torch.cat([words, junk], dim=1), longer), expected, atol=1e-12)
    order = torch.randperm(7)
    assert torch.allclose(head(class_token, words[:, order], mask[:, order]), expected, atol=1e-12)
    one = torch.cat([head(class_token[i : i + 1], words[i : i + 1], mask[i : i + 1]) for i in range(3)])
    assert torch.allclose(one, expected, atol=1e-12)


@pytest.mark.usefixtures("threads")
def test_not_a_number_stays_in_its_sample():
    head, (class_token, words, _) = build(), inputs()
    expected = head(class_token, words)
    for poison in (float("nan"), float("inf"), -float("inf")):
        poisoned = words.clone()
        poisoned[1, 2, 3] = poison
        result = head(class_token, poisoned)
        assert result[1].isnan().all() and torch.equal(result[[0, 2]], expected[[0, 2]])


def test_dropout_falls_on_the_pooled_words_only():
    head, (class_token, words, _) = build(dropout=0.5).train(), inputs()
    class_part, word_part = head.represent(class_token, words)
    assert torch.equal(class_part, class_token) and (word_part == 0).float().mean() > 0.2
    head.eval()
    assert torch.equal(head.represent(class_token, words)[1], head.pool(words))


@pytest.mark.parametrize("pool, norm", [(pool, None) for pool in POOLS] + [("mgcrp", "svpn"), ("gcp", "mpn")])
@pytest.mark.parametrize("fusion", ["sum", "aggr_all", "late"])
def test_one_graph_for_the_compiler_forwards_and_backwards(pool, norm, fusion):
    torch._dynamo.reset()
    head, (class_token, words, mask) = build(pool=pool, norm=norm, fusion=fusion), inputs()
    compiled = torch.compile(copy.deepcopy(head), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (7, 9):
        class_token, words, mask = inputs(length=length)
        expected = head(class_token, words, mask)
        actual = compiled(class_token, words, mask)
        assert torch.allclose(actual, expected, atol=1e-5)
    expected.square().sum().backward()
    actual.square().sum().backward()
    for ours, theirs in zip(head.parameters(), compiled.parameters()):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4)


@pytest.mark.parametrize("pool, norm", [(pool, None) for pool in POOLS] + [("mgcrp", "svpn"), ("gcp", "mpn")])
@pytest.mark.parametrize("masked", [True, False])
def test_exports_with_dynamic_batch_and_token_count(pool, norm, masked):
    head, (class_token, words, mask) = build(pool=pool, norm=norm), inputs()
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=512)
    shapes = [{0: batch}, {0: batch, 1: length}, {0: batch, 1: length}]
    arguments = (class_token, words, mask) if masked else (class_token, words)
    exported = torch.export.export(head, arguments, dynamic_shapes=tuple(shapes[: len(arguments)])).module()
    for size in ((3, 7), (2, 1), (5, 33)):
        others = inputs(*size)[: len(arguments)]
        assert torch.allclose(exported(*others), head(*others), atol=1e-5)


def test_matrix_part_stays_in_float32_under_autocast():
    head, arguments = build(), inputs()
    seen = []
    head.pool.norm.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(*arguments)
    assert seen == [torch.float32] and logits.dtype == torch.bfloat16
    assert torch.allclose(logits.float(), head(*arguments), atol=0.05)


def test_a_head_in_bfloat16_returns_it():
    head, (class_token, words, mask) = build().to(torch.bfloat16), inputs()
    logits = head(class_token.bfloat16(), words.bfloat16(), mask)
    logits.sum().backward()
    assert logits.dtype == torch.bfloat16 and head.pool.projection.weight.grad.isfinite().all()


def test_copies_and_pickles_give_equal_logits():
    head, arguments = build(), inputs()
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(twin(*arguments), head(*arguments)) and twin.config == head.config


def test_config_goes_through_json_and_back():
    config = HeadConfig(pool="gcp", fusion=Fusion.LATE, norm="mpn", dropout=0.3)
    assert HeadConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert HeadConfig.from_dict({}) == HeadConfig() and config.fusion == "late"


@pytest.mark.parametrize(
    "size, heads, side", [(4000, 1, 63), (1000, 6, 13), (6000, 1, 77), (1176, 6, 14), (8664, 6, 38)]
)
def test_representation_size_chooses_the_sides(size, heads, side):
    config = HeadConfig(representation_size=size, heads=heads)
    assert (config.left_dim, config.right_dim) == (side, side)
    head = SecondOrderHead(96, 2, config)
    assert head.word_features == heads * side**2 and abs(head.word_features - size) <= heads * (side + 1)
    assert HeadConfig.from_dict(config.to_dict()) == config


def test_representation_size_of_covariance_pooling():
    assert HeadConfig(pool="gcp", representation_size=1176).reduced_dim == 48


def test_moving_between_types_and_resetting_keeps_them():
    head = build().to(torch.float64)
    head.reset(7)
    assert head.class_linear.weight.dtype == head.word_linear.weight.dtype == torch.float64
    assert head.to("meta").class_linear.weight.device.type == "meta"


def test_resetting_keeps_the_mode():
    head = build().eval()
    head.reset(7)
    assert not any(module.training for module in head.modules())


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: HeadConfig(pool="avg"), "unknown pool 'avg'; accepted: mgcrp, gcp, gap, max, attn, ep"),
        (lambda: HeadConfig(fusion="add"), "unknown fusion 'add'; accepted: sum, concat, aggr_all, late, class, word"),
        (lambda: HeadConfig(norm="svd"), "unknown norm 'svd'"),
        (lambda: HeadConfig(exponent=0), "exponent must be"),
        (lambda: HeadConfig(exponent="abc"), r"exponent must be in \(0, 1\], got 'abc'"),
        (lambda: HeadConfig(exponent=True), r"exponent must be in \(0, 1\], got True"),
        (lambda: HeadConfig(dropout="abc"), r"dropout must be in \[0, 1\), got 'abc'"),
        (lambda: HeadConfig(center="maybe"), "center must be true or false, got 'maybe'"),
        (lambda: HeadConfig(pre_norm="maybe"), "pre_norm must be true or false, got 'maybe'"),
        (lambda: HeadConfig(heads=0), "heads must be an integer >= 1, got 0"),
        (lambda: HeadConfig(left_dim=-1), "left_dim"),
        (lambda: HeadConfig(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
        (lambda: HeadConfig(num_iterations=0), "num_iterations"),
        (lambda: HeadConfig(class_width=1280), "class_width widens the class fusion only"),
        (lambda: HeadConfig(representation_size=3), "at least heads = 6, got 3"),
        (lambda: HeadConfig(representation_size=100, pool="gap"), "mgcrp and gcp only, got pool 'gap'"),
        (lambda: HeadConfig.from_dict({"polling": "gap"}), "unknown head setting 'polling'; accepted: pool, fusion"),
        (lambda: SecondOrderHead(DIM, -1), "num_classes must be an integer >= 0, got -1"),
        (lambda: SecondOrderHead(0, 3), "dim must be an integer >= 1, got 0"),
        (lambda: build()(None, torch.randn(2, 5, DIM)), "fusion 'sum' needs a class token"),
        (lambda: build()(torch.randn(2, DIM), None), "fusion 'sum' needs word tokens"),
        (lambda: build()(torch.randn(2, DIM + 1), torch.randn(2, 5, DIM)), r"\(batch, 16\), got \(2, 17\)"),
        (lambda: build()(torch.randn(2, DIM), torch.randn(3, 5, DIM)), "same batch size, got 2 and 3"),
        (lambda: build()(torch.randn(2, DIM), torch.randn(2, 5, DIM), torch.ones(2, 6).bool()), "mask must have shape"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_exact_normalisation_is_exported_without_a_decomposition():
    head = SecondOrderHead(16, 3, HeadConfig(norm="svpn", heads=2, left_dim=3, right_dim=3)).eval()
    tokens = torch.randn(2, 16), torch.randn(2, 9, 16)
    program = torch.export.export(head, tokens)
    assert not any(word in str(node.target) for node in program.graph.nodes for word in ("linalg", "svd"))
    torch.testing.assert_close(program.module()(*tokens), head(*tokens))
