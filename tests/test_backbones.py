"""Backbones of timm: where their tokens are, against timm's own answer; training, saving and loading; the survey."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from test_cli import sot as run
from torch import nn
from transformers import AutoModelForImageClassification

import sot
from sot.models.layout import Layout
from sot.models.survey import families, find_backbones, markdown, survey
from sot.models.tokens import REFUSED, guess_grid, split

PAGE = Path(__file__).parent.parent / "docs/backbones.md"
HEAD = {"heads": 2, "left_dim": 4, "right_dim": 4}


@dataclass
class Case:
    """A small model of a family, and what is known of its tokens."""

    model: str
    words: int
    prefix: int = 0
    class_token: bool = False
    size: tuple[int, int] = (64, 64)
    args: dict[str, Any] = field(default_factory=dict)
    other_size: tuple[int, int] | None = None
    norm: str | None = None
    needs_norm: bool = False

    def build(self) -> tuple[nn.Module, sot.SoTForImageClassification]:
        source = timm.create_model(self.model, num_classes=0, **self.args).eval()
        with torch.no_grad():  # norms that differ from the identity, so that a forgotten one shows
            for name, parameter in source.named_parameters():
                if "norm" in name or "bn" in name:
                    parameter.add_(0.2 * torch.rand_like(parameter))
        return source, sot.equip(source, 3, HEAD, model_args=self.args)


VIT = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}
AVERAGE = {"class_token": False, "global_pool": "avg"}
SWIN = {"img_size": 64, "window_size": 2, "embed_dim": 24, "depths": (2, 1, 1, 1), "num_heads": (1, 2, 2, 4)}
ANY_SIZE = {"strict_img_size": False, "dynamic_mask": True}
NAFLEX = {"depth": 2, "embed_dim": 48, "num_heads": 3}
FULL = (224, 224)
CASES = {
    "deit": Case("deit_tiny_patch16_224", 16, 1, True, args=VIT),
    "deit distilled": Case("deit_tiny_distilled_patch16_224", 16, 2, True, args=VIT),
    "vit": Case("vit_tiny_patch16_224", 16, 1, True, args=VIT | {"dynamic_img_size": True}, other_size=(48, 80)),
    "vit without class token": Case("vit_tiny_patch16_224", 16, args=VIT | AVERAGE, norm="fc_norm"),
    "dinov2 registers": Case("vit_small_patch14_reg4_dinov2", 16, 5, True, (56, 56), VIT | {"img_size": 56}),
    "dinov3": Case("vit_small_patch16_dinov3", 16, 5, True, args=VIT, other_size=(32, 96)),
    "siglip": Case("vit_base_patch16_siglip_224", 16, args=VIT),
    "swin": Case("swin_tiny_patch4_window7_224", 4, args=SWIN | ANY_SIZE, other_size=(64, 96)),
    "swin v2": Case("swinv2_tiny_window8_256", 4, args=SWIN),
    "pit": Case("pit_ti_224", 4, 1, True, args={"img_size": 64, "depth": (1, 1, 1)}),
    "pvt v2": Case("pvt_v2_b0", 4, args={"depths": (1, 1, 1, 1)}, other_size=(64, 96)),
    "beit": Case("beit_base_patch16_224", 16, 1, True, args=VIT, norm="fc_norm"),
    "eva02": Case("eva02_tiny_patch14_224", 16, 1, True, (56, 56), VIT | {"img_size": 56}, norm="fc_norm"),
    "cait": Case("cait_xxs24_224", 16, 1, True, args=VIT | {"depth_token_only": 1}),
    "xcit": Case("xcit_nano_12_p16_224", 16, 1, True, args=VIT, other_size=(48, 80)),
    "convit": Case("convit_tiny", 16, 1, True, args=VIT | {"local_up_to_layer": 1}),
    "tnt": Case("tnt_s_patch16_224", 196, 1, True, FULL, {"depth": 2}),
    "twins": Case("twins_svt_small", 4, args={"img_size": 64, "depths": (1, 1, 1, 1)}),
    "mvit v2": Case("mvitv2_tiny", 4, args={"img_size": 64}),
    "hiera": Case("hiera_tiny_224", 49, size=FULL, args={"stages": (1, 1, 1, 1)}, norm="head.norm"),
    "levit": Case("levit_128s", 16, size=FULL, args={"depth": (1, 1, 1)}, needs_norm=True),
    "davit": Case("davit_tiny", 4, args={"depths": (1, 1, 1, 1)}, norm="head.norm", other_size=(64, 96)),
    "maxvit": Case("maxvit_rmlp_pico_rw_256", 64, size=(256, 256), args={"depths": (1, 1, 1, 1)}),
    "coatnet": Case(
        "coatnet_0_224", 49, size=FULL, args={"depths": (1, 1, 1, 1), "embed_dim": (16, 32, 64, 96)}, norm="head.norm"
    ),
    "tinyvit": Case("tiny_vit_5m_224", 4, args={"depths": (1, 1, 1, 1)}, norm="head.norm"),
    "nest": Case("nest_tiny", 16, args={"img_size": 64}),
    "coat lite": Case("coat_lite_tiny", 49, 1, True, FULL),
    "visformer": Case("visformer_tiny", 49, size=FULL, args={"depth": (1, 1, 1)}),
    "mobilevit": Case("mobilevit_xxs", 4, other_size=(64, 96)),
    "naflexvit": Case("naflexvit_base_patch16_gap", 16, 4, args=NAFLEX, norm="fc_norm"),
    "resnet": Case("resnet10t", 4, other_size=(64, 96)),
    "convnext": Case("convnext_atto", 4, args={"depths": (1, 1, 1, 1)}, norm="head.norm", other_size=(64, 96)),
    "convnext with rms norm": Case("convnext_atto_rms", 4, args={"depths": (1, 1, 1, 1)}, norm="head.norm"),
    "efficientvit": Case("efficientvit_m0", 16, size=FULL, needs_norm=True),
    "sot": Case("sot_7", 196, 1, True, (112, 112), {"depth": 2}),
}


def grid_of(case: Case, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns: words are spread over an image as over the case's own."""
    side = case.size[0] / case.words**0.5
    return round(size[0] / side), round(size[1] / side)


def words_of_timm(source: Any, features: torch.Tensor, layout: Layout, index: int) -> torch.Tensor:
    """A word as timm's own classifier sees it: its pooling and norm, with this word as the only one."""
    if features.ndim == 4:
        columns = features.shape[2] if layout.format == "NHWC" else features.shape[3]
        row, column = divmod(index, columns)
        rows, columns = slice(row, row + 1), slice(column, column + 1)
        alone = features[:, rows, columns] if layout.format == "NHWC" else features[:, :, rows, columns]
    else:
        place = layout.num_prefix_tokens + index
        alone = torch.cat([features[:, : layout.num_prefix_tokens], features[:, place : place + 1]], dim=1)
    if hasattr(getattr(source, "head", None), "pre_logits"):
        source.head.pre_logits = nn.Identity()
    return source.forward_head(alone, pre_logits=True)


def check_tokens(source: Any, model: Any, case: Case, size: tuple[int, int]) -> None:
    """Words, class token and grid are what timm itself makes of the same image."""
    image = torch.randn(2, 3, *size)
    with torch.no_grad():
        tokens = model.eval().tokens(image)
        features = source.forward_features(image)
        rows, columns = grid_of(case, size)
        averages = not case.class_token or getattr(source, "global_pool", "") == "avg"  # of the words, in timm
        assert tokens.grid == (rows, columns) and tokens.word_tokens.shape == (2, rows * columns, model.layout.dim)
        if case.model.startswith("pit"):  # timm returns the class token alone: its words are checked on their own
            torch.testing.assert_close(tokens.class_token, features[:, 0])
        elif "siglip" in case.model:  # timm pools by attention
            torch.testing.assert_close(tokens.word_tokens, features)
        elif averages:
            for index in {0, columns - 1, rows * columns // 2, rows * columns - 1}:
                expected = words_of_timm(source, features, model.layout, index)
                torch.testing.assert_close(tokens.word_tokens[:, index], expected.flatten(1))
        else:
            torch.testing.assert_close(tokens.word_tokens, features[:, case.prefix :])
        if case.class_token and not averages:
            torch.testing.assert_close(tokens.class_token, features[:, 0])
            if "distilled" not in case.model:  # timm averages both of its tokens there
                torch.testing.assert_close(tokens.class_token, source.forward_head(features, pre_logits=True))


def check_training_and_loading(model: Any, size: tuple[int, int], folder: Path) -> None:
    """Every trainable parameter gets a finite gradient; what is saved loads again with the same logits."""
    image, labels = torch.randn(2, 3, *size), torch.tensor([0, 2])
    model.train()(image, labels=labels).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
    model.eval().save_pretrained(folder)
    # weights mapped from a file lie at any address, by which some kernels round: a copy lies as the original does
    again = copy.deepcopy(AutoModelForImageClassification.from_pretrained(folder)).eval()
    with torch.no_grad():
        logits = model(image).logits
        assert logits.shape == (2, 3) and logits.isfinite().all() and torch.equal(again(image).logits, logits)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_family(case, tmp_path):
    torch.set_num_threads(1)
    source, model = case.build()
    layout = model.layout
    found = (layout.has_class_token, layout.num_prefix_tokens, layout.norm, layout.needs_norm)
    assert found == (case.class_token, case.prefix, case.norm, case.needs_norm)
    assert model.eval().tokens(torch.randn(2, 3, *case.size)).word_tokens.shape[1] == case.words
    check_tokens(source, model, case, case.size)
    if case.other_size is not None:
        check_tokens(source, model, case, case.other_size)
    check_training_and_loading(model, case.size, tmp_path)


def test_words_average_to_timms_pooling():
    for name in ("swin", "swin v2", "pvt v2", "resnet", "twins"):
        source, model = CASES[name].build()
        image = torch.randn(2, 3, *CASES[name].size)
        with torch.no_grad():
            expected = source.forward_head(source.forward_features(image), pre_logits=True)
            torch.testing.assert_close(model.eval().tokens(image).word_tokens.mean(1), expected)


def test_words_of_pit_pass_the_norm_of_its_class_token():
    source, model = CASES["pit"].build()
    seen = {}
    source.transformers.register_forward_hook(lambda module, inputs, output: seen.update(words=output[0]))
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        source.forward_features(image)
        tokens = model.eval().tokens(image)
    torch.testing.assert_close(tokens.word_tokens, source.norm(seen["words"].flatten(2).transpose(1, 2)))


def test_gemma_features_are_those_of_timm():
    args = {"depth": 2, "embed_dim": 48, "num_heads": 3, "head_dim": 16, "intermediate_size": 64, "img_size": 96}
    args |= {"position_embedding_size": 64}
    source = timm.create_model("gemma4_vit_167m", num_classes=0, **args).eval()
    model = sot.equip(source, 3, HEAD, model_args=args).eval()
    image = torch.rand(2, 3, 48, 80)
    with torch.no_grad():
        tokens = model.tokens(image)
        torch.testing.assert_close(tokens.word_tokens, source.norm(source.forward_features(image)))
    assert tokens.grid == (3, 5) and model.layout.norm == "norm"


@pytest.mark.parametrize(
    "name, reason",
    [
        ("crossvit_tiny_240", "CrossVit has no word tokens to pool: it returns two token sequences"),
        ("coat_tiny", "CoaT has no word tokens to pool: its parallel stages .* CoaT-lite works"),
        ("efficientvim_m1", "EfficientViM has no word tokens to pool: it returns one token sequence for each stage"),
    ],
)
def test_refusals_say_why(name, reason):
    with pytest.raises(ValueError, match=reason):
        sot.equip(name, 3, pretrained=False)
    backbone = survey(name)
    assert backbone.layout is None and re.match(reason, backbone.reason)


@pytest.mark.parametrize(
    "size, grid", [((64, 64), (4, 4)), ((64, 96), (4, 6)), ((96, 64), (6, 4)), ((16, 112), (1, 7))]
)
def test_grid_is_that_of_the_patches(size, grid):
    words = grid[0] * grid[1]
    assert guess_grid(words, size) == grid
    cells = torch.arange(words).view(1, *grid, 1).float()
    by_row = cells.flatten()
    for features, format in ((cells, "NHWC"), (cells.permute(0, 3, 1, 2), "NCHW"), (cells.flatten(1, 2), "NLC")):
        tokens = split(features, Layout(1, format), None, size)
        assert tokens.grid == grid and torch.equal(tokens.word_tokens.flatten(), by_row)
    assert guess_grid(7, (64, 64)) is None and guess_grid(0, size) is None  # words that are no grid


def test_page_holds_what_the_command_prints():
    page = PAGE.read_text()
    few = [
        name for name in find_backbones(None) if families()[name] in ("pit", "swin_transformer", "crossvit", "levit")
    ]
    assert len(few) == 4
    for line in markdown(map(survey, few)).splitlines():
        assert line in page
    assert all(f"`{name}`" in page for name in find_backbones(None))


def test_command_prints_a_table_json_or_markdown():
    result = run("backbones", "pit_ti*")
    table = result.stdout
    assert result.returncode == 0 and "pit_ti_distilled_224" in table and "2 work, 0 refused" in table
    records = [json.loads(line) for line in run("backbones", "crossvit_9_*", "--json").stdout.splitlines()]
    assert [record["works"] for record in records] == [False, False] and "two token" in records[0]["reason"]
    assert "CrossVit has no word tokens to pool: it returns two" in run("backbones", "crossvit_9_240").stdout
    assert run("backbones", "pit_ti_224", "--markdown").stdout.strip() == markdown([survey("pit_ti_224")])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing_*"], "no architecture of timm matches 'nothing_*'"),
        (["pit*", "--all"], "exclude each other"),
        (["--json", "--markdown"], "exclude each other"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message):
    result = run("backbones", *arguments)
    assert result.returncode == 2 and not result.stdout and result.stderr.startswith("Error: ")
    assert message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", find_backbones(None))
def test_every_family(name, tmp_path):
    torch.set_num_threads(1)
    backbone = survey(name)
    if backbone.layout is None:
        assert "has no word tokens to pool" in backbone.reason
        return
    with torch.device("meta"):
        outline = timm.create_model(name, num_classes=0)
    size = outline.pretrained_cfg["input_size"][1:]
    if sum(parameter.numel() for parameter in outline.parameters()) > 60e6 or max(size) > 256:
        return  # the probe above is all that fits a small machine
    model = sot.equip(name, 3, HEAD, pretrained=False)
    assert model.layout == backbone.layout
    check_training_and_loading(model, size, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", find_backbones("*"))
def test_every_architecture_works_or_is_refused_for_a_reason(name):
    backbone = survey(name)
    assert backbone.layout is not None or backbone.reason.split(": ")[1] in REFUSED.values()
