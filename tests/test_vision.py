"""The SoT family: counts, token embeddings, and everything timm users rely on."""

import copy
import pickle

import pytest
import timm
import torch
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

import sot
from sot import HeadConfig, SecondOrderHead
from sot.models.complexity import count_parameters, measure_complexity, measure_training
from sot.models.embedding.token_embed import EMBEDDINGS, choose_reduction
from sot.models.vision import sinusoid_positions
from sot.paper.comparison import PAPER_FIGURES, find_models

CLASS = HeadConfig(fusion="class")
# (name, arguments, params in M, MACs in G as the paper counts): measured with the authors' code, None where not known
FAMILY = [
    ("sot_7", {}, 5.45, None),
    ("sot_7", {"head": CLASS}, 4.23, 1.05),
    ("sot_tiny", {}, 7.99, 2.53),
    ("sot_small", {}, 27.02, 5.80),
    ("sot_base", {}, 76.78, 14.54),
    ("sot_7", {"head": CLASS, "embed": "naive"}, 3.99, None),
    ("sot_7", {"head": CLASS, "embed": "resnet"}, 4.29, None),
    ("sot_7", {"head": CLASS, "embed": "inception"}, 4.08, None),
    ("sot_7", {"head": CLASS, "embed": "nonlocal"}, 4.20, None),
    ("sot_7", {"head": HeadConfig(fusion="class", class_width=1280)}, 5.58, None),
    ("sot_7", {"head": HeadConfig(pool="gap")}, 4.49, None),
    ("sot_7", {"head": HeadConfig(pool="gcp")}, 5.42, None),
    ("sot_7", {"head": HeadConfig(pool="gap", fusion="concat")}, 4.74 - 0.257, None),  # without the idle layer
    ("sot_7", {"head": HeadConfig(pool="gcp", fusion="concat")}, 5.68 - 0.257, None),
    ("sot_7", {"head": HeadConfig(fusion="concat")}, 5.71 - 0.257, None),
]
TINY = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}


def tiny(**settings):
    settings = {**TINY, "head": HeadConfig(heads=2, left_dim=3, right_dim=3), **settings}
    return timm.create_model("sot_tiny", **settings).eval()


def image(size=32, channels=3, batch=2):
    return torch.randn(batch, channels, size, size)


@pytest.mark.parametrize("name, arguments, params, macs", FAMILY)
def test_parameters_and_multiply_adds_are_the_papers(name, arguments, params, macs):
    model = timm.create_model(name, **arguments)
    count = measure_complexity(model, model.default_cfg["input_size"])
    assert count.params / 1e6 == pytest.approx(params, rel=5e-3)
    if macs is not None:
        assert count.layer_macs / 1e9 == pytest.approx(macs, rel=5e-3)
    assert count.all_macs > count.layer_macs


def test_accelerated_models_count_alike():
    published, fast = timm.create_model("sot_7"), sot.accelerate(timm.create_model("sot_7"))
    assert measure_complexity(fast, (3, 112, 112)) == measure_complexity(published, (3, 112, 112))


@pytest.mark.parametrize("name, extra", [("sot_7", 0.14), ("sot_tiny", 0.22), ("sot_small", 0.42), ("sot_base", 0.98)])
def test_attention_products_are_counted_apart(name, extra):
    model = timm.create_model(name)
    count = measure_complexity(model, model.default_cfg["input_size"])
    assert (count.all_macs - count.layer_macs) / 1e9 == pytest.approx(extra, abs=6e-3)


def test_family_has_the_heads_of_the_paper():
    sides = {"sot_7": (14, 0.0), "sot_tiny": (14, 0.0), "sot_small": (24, 0.5), "sot_base": (38, 0.7)}
    for name, (side, dropout) in sides.items():
        config = timm.create_model(name).head.config
        assert (config.left_dim, config.right_dim, config.heads, config.dropout) == (side, side, 6, dropout)
        assert (config.pool, config.fusion) == ("mgcrp", "sum")
        assert (config.norm, config.exponent, config.num_iterations) == ("svpn_fast", 0.5, None)


def test_positions_are_a_fixed_sinusoid_and_not_a_parameter():
    model = timm.create_model("sot_7")
    table = model.pos_embed[0]
    assert table.shape == (197, 256) and "pos_embed" not in dict(model.named_parameters())
    for position, channel in ((0, 0), (0, 1), (5, 0), (5, 1), (196, 100), (77, 255)):
        angle = torch.tensor(position / 10000 ** (2 * (channel // 2) / 256))
        expected = angle.sin() if channel % 2 == 0 else angle.cos()
        assert torch.isclose(table[position, channel], expected, atol=1e-6)


def test_blocks_are_the_papers():
    model = timm.create_model("sot_tiny")
    block = model.blocks[0]
    assert block.attn.qkv.bias is None and block.attn.proj.bias is not None and block.mlp.fc1.bias is not None
    assert block.mlp.fc1.out_features == 600 and len(model.blocks) == 12 and block.attn.num_heads == 4
    assert 0.01 < model.cls_token.std() < 0.03 and 0.015 < model.head.word_linear.weight.std() < 0.025
    assert isinstance(model.norm, torch.nn.LayerNorm)


@pytest.mark.parametrize("embed", EMBEDDINGS)
@pytest.mark.parametrize("size, channels, patch", [(32, 3, None), (48, 1, 8), (64, 5, 16), (32, 3, 4)])
def test_embeddings_work_for_any_size_they_divide(embed, size, channels, patch):
    model = tiny(embed=embed, img_size=size, in_chans=channels, patch_size=patch).train()
    output = model(image(size, channels))
    output.sum().backward()
    grid = size // (patch or 4)
    assert model.patch_embed.grid_size == (grid, grid) and output.shape == (2, 5)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_embeddings_of_a_rectangle_keep_rows_and_columns_apart():
    model = tiny(img_size=(32, 64))
    assert model.patch_embed.grid_size == (8, 16) and model.pos_embed.shape == (1, 129, 16)
    assert model(torch.randn(2, 3, 32, 64)).shape == (2, 5)


def test_reduction_keeps_about_14_tokens_a_side():
    sizes = {448: 16, 224: 16, 223: 8, 112: 8, 111: 4, 56: 4, 32: 4, (224, 112): 8}
    assert {size: choose_reduction(size) for size in sizes} == sizes
    assert timm.create_model("sot_tiny", img_size=112).patch_embed.grid_size == (14, 14)
    assert timm.create_model("sot_7", img_size=224).patch_embed.grid_size == (14, 14)


def test_large_output_for_hierarchical_backbones():
    model = timm.create_model("sot_tiny", patch_size=4, depth=1)
    assert model.patch_embed(torch.randn(1, 3, 224, 224)).shape == (1, 56 * 56, 240)


def test_forward_is_features_then_head():
    model, x = tiny(), image()
    features = model.forward_features(x)
    assert features.shape == (2, 65, 16) and model.num_features == 16
    assert torch.equal(model.forward_head(features), model(x))
    assert torch.equal(model.head(features[:, 0], features[:, 1:]), model(x))
    pre_logits = model.forward_head(features, pre_logits=True)
    assert pre_logits.shape == (2, 16 + 18) and model.head_hidden_size == 34


def test_resetting_the_classifier():
    model, x = tiny(), image()
    projection = model.head.pool.projection.weight.clone()
    model.reset_classifier(9)
    assert model(x).shape == (2, 9) and model.num_classes == 9 and isinstance(model.get_classifier(), SecondOrderHead)
    assert torch.equal(model.head.pool.projection.weight, projection)
    model.reset_classifier(0)
    assert model(x).shape == (2, model.head_hidden_size)
    model.reset_classifier(0, "")
    assert model(x).shape == (2, 65, 16) and not list(model.head.parameters())
    model.reset_classifier(3)
    assert model(x).shape == (2, 3) and model.head.config.pool == "mgcrp"
    model.double().reset_classifier(4)
    assert model.head.word_linear.weight.dtype == torch.float64


def test_without_classes_it_is_a_backbone_unless_a_head_is_given():
    x = image()
    bare = tiny(num_classes=0, head=None)
    assert torch.equal(bare(x), bare.forward_features(x)[:, 0]) and not list(bare.head.parameters())
    assert tiny(num_classes=0)(x).shape == (2, 34)
    bare.reset_classifier(3)
    assert bare.head.config == HeadConfig.paper() and bare(x).shape == (2, 3)


def test_pooling_by_timms_names():
    x = image()
    average = tiny(global_pool="avg")
    features = average.forward_features(x)
    assert torch.allclose(average.forward_head(features, pre_logits=True), features[:, 1:].mean(1), atol=1e-6)
    assert torch.equal(tiny(global_pool="").forward_head(features), features)
    token = tiny(global_pool="token")
    assert torch.equal(token.forward_head(features, pre_logits=True), features[:, 0])


def test_intermediates_and_features_only():
    model, x = tiny(), image()
    final, maps = model.forward_intermediates(x)
    assert [tuple(m.shape) for m in maps] == [(2, 16, 8, 8)] * 2 and torch.equal(final, model.forward_features(x))
    extractor = timm.create_model("sot_tiny", features_only=True, out_indices=(0, 1), **{**TINY, "num_classes": 0})
    assert [tuple(m.shape) for m in extractor(x)] == [(2, 16, 8, 8)] * 2
    assert extractor.feature_info.reduction() == [4, 4]


def test_gradient_checkpointing_changes_nothing():
    model, x = tiny(), image()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    model.set_grad_checkpointing()
    actual = torch.autograd.grad(model(x).square().sum(), parameters)
    assert all(torch.allclose(a, e, atol=1e-5) for a, e in zip(actual, expected))


def test_weight_decay_and_layer_groups():
    model = tiny()
    decayed = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())[1]["params"]
    names = {id(p): name for name, p in model.named_parameters()}
    assert {"cls_token", "head.pool.norm.start"} <= model.no_weight_decay()
    assert all(p.ndim > 1 and names[id(p)] != "cls_token" for p in decayed)
    groups = param_groups_layer_decay(model, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    scales = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    order = ["patch_embed.proj.stem.0.weight", "blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"]
    order.append("head.word_linear.weight")
    assert [scales[name] for name in order] == [0.125, 0.25, 0.5, 1.0]


def test_stochastic_depth_and_dropout_reach_the_model():
    model = tiny(drop_path_rate=0.5, drop_rate=0.25, proj_drop_rate=0.1)
    assert model.blocks[1].drop_path1.drop_prob == 0.5 and model.head.dropout.p == 0.25


def test_default_cfgs_name_real_parameters():
    for name in ("sot_7", "sot_tiny", "sot_small", "sot_base"):
        model = timm.create_model(name)
        state = model.state_dict()
        assert model.default_cfg["first_conv"] + ".weight" in state
        assert all(classifier + ".weight" in state for classifier in model.default_cfg["classifier"])
        assert model.default_cfg["input_size"] == ((3, 112, 112) if name == "sot_7" else (3, 224, 224))
        config = timm.data.resolve_model_data_config(model)
        assert timm.data.create_transform(**config) is not None


def test_two_models_copies_pickles_and_types():
    first, second, x = tiny(), tiny(), image()
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    for twin in (second, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(twin(x), first(x))
    moved = copy.deepcopy(first).double()
    assert torch.allclose(moved(x.double()).float(), first(x), atol=1e-4)
    assert first.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert moved.to("meta")(x.double().to("meta")).shape == (2, 5)


def test_built_on_the_meta_device_and_filled_later():
    model, x = tiny(), image()
    with torch.device("meta"):
        empty = tiny()
    empty = empty.to_empty(device="cpu")
    reinit_non_persistent_buffers(empty)
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(x), model(x))


def test_image_size_may_change_later_or_with_every_image():
    model, larger = tiny(), image(48)
    fresh = tiny(img_size=48, patch_size=4)
    fresh.load_state_dict(model.state_dict())
    model.set_input_size(img_size=(48, 48))
    assert torch.equal(model(larger), fresh(larger))
    dynamic = tiny(dynamic_img_size=True)
    dynamic.load_state_dict(fresh.state_dict())
    assert torch.allclose(dynamic(larger), fresh(larger), atol=1e-6)
    assert dynamic(torch.randn(2, 3, 24, 40)).shape == (2, 5)


@pytest.mark.parametrize("on", [False, True])
def test_compiles_and_exports_whole(on):
    model, x = sot.accelerate(tiny(), on), image()
    expected = model(x)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected, atol=1e-5)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=32)},)).module()
    other = image(batch=5)
    assert torch.allclose(exported(other), model(other), atol=1e-5)


@pytest.mark.parametrize(
    "accelerated, compiler",
    [(True, "eager"), *(pytest.param(on, "inductor", marks=pytest.mark.slow) for on in (False, True))],
)
def test_compiled_for_training_it_is_one_graph_with_the_operators_and_has_the_same_gradients(accelerated, compiler):
    settings = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("sot_7", head=HeadConfig(heads=2, left_dim=5, right_dim=5), **settings).train()
    model, x, found = sot.accelerate(model, accelerated), image(batch=4), set()

    def inner(graph, inputs, **options):
        found.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward) if compiler == "eager" else compile_fx_inner(graph, inputs, **options)

    def backend(graph, inputs):
        if compiler == "inductor":
            return compile_fx(graph, inputs, inner_compile=inner)
        return aot_autograd(fw_compiler=inner, bw_compiler=inner)(graph, inputs)

    torch._dynamo.reset()
    results = []
    for function in (copy.deepcopy(model), torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)):
        logits = function(x)
        logits.square().sum().backward()
        results.append([logits.detach(), *(weight.grad for weight in function.parameters()), *function.buffers()])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()) + 1e-6)
    by_hand = {"cross_covariance", "dense_block"} if accelerated else set()
    wanted = {name + end for name in {"svpn", *by_hand} for end in ("", "_backward")}
    assert {f"sot.{name}.default" for name in wanted} <= found


def test_not_a_number_stays_in_its_image():
    model, x = tiny(), image()
    poisoned = x.clone()
    poisoned[1, 0, 3, 3] = float("nan")
    result = model(poisoned)
    assert result[1].isnan().all() and torch.allclose(result[0], model(x)[0], atol=1e-6)


def test_sinusoid_agrees_between_lengths():
    assert torch.equal(sinusoid_positions(10, 16), sinusoid_positions(50, 16)[:, :10])


def test_catalogue_lists_the_paper_first_and_any_timm_model():
    assert find_models(None) == list(PAPER_FIGURES)
    assert find_models("sot_*") == ["sot_7", "sot_tiny", "sot_small", "sot_base"]
    assert "resnet18" in find_models("resnet1*")
    assert count_parameters(timm.create_model("sot_7")) == 5449854


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"embed": "vgg"}, "unknown embed 'vgg'; accepted: densenet, resnet, inception, nonlocal, naive"),
        ({"img_size": 30}, r"multiple of the reduction 4×4, got \(30, 30\)"),
        ({"img_size": 224, "patch_size": 14}, "patch_size must be one of 16, 8, 4 for densenet, got 14"),
        ({"global_pool": "map"}, "unknown global_pool 'map'; accepted: '', token, avg, max"),
        ({"head": {"pools": "gap"}}, "unknown head setting 'pools'"),
        ({"num_classes": -2}, "num_classes must be an integer >= 0, got -2"),
        ({"drop_rate": 1.5}, "dropout must be in"),
    ],
)
def test_bad_input_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny(**settings)


def test_package_exports_what_people_need():
    assert set(sot.__all__) <= set(dir(sot))


def test_cost_of_training_is_counted_forward_and_backward_for_one_more_picture():
    class Layer(torch.nn.Linear):
        def forward(self, image):
            return super().forward(image.flatten(1)).exp()

    cost = measure_training(Layer(3 * 4 * 4, 10, bias=False), (3, 4, 4))
    assert cost.macs == 2 * 480  # the product, and the gradient of the weight: nothing asks for that of the image
    assert cost.saved_bytes == 4 * (48 + 10)  # the image for the gradient of the weight, the result for that of exp
    assert cost.state_bytes == 5 * 4 * 480
    whole = measure_training(timm.create_model("sot_7"), (3, 112, 112))
    forward = measure_complexity(timm.create_model("sot_7"), (3, 112, 112)).all_macs
    assert 2.8 < whole.macs / forward < 3 and 55e6 < whole.saved_bytes < 65e6
