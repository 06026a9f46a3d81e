"""Weights laid out like the authors' code."""

import re
from typing import get_args

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from sot import Fusion, HeadConfig
from sot.cli.convert import Fusions
from sot.models.vision import sinusoid_positions
from sot.paper.convert import convert, convert_state_dict, read_weights, write_weights

# Ours, theirs: written out apart from the package's own table, so that a slip there shows here.
THEIRS = (
    (r"^patch_embed\.proj\.stem\.0", "visual_tokens.tokens.stem.0"),
    (r"^patch_embed\.proj\.stages", "visual_tokens.tokens.stage"),
    (r"^patch_embed\.proj\.out", "visual_tokens.tokens.transition"),
    (r"^patch_embed\.proj\.(weight|bias)$", r"visual_tokens.tokens.proj.\1"),
    (r"^head\.pool\.projection\.weight", "classifier.representation.wr.weight"),
    (r"^head\.pool\.norm\.start", "classifier.representation.norm.weight"),
    (r"^head\.pool\.norm\.(weight|bias)", r"classifier.representation.norm.\1"),
    (r"^head\.word_linear", "classifier.visual_fc"),
    (r"^head\.class_linear", "classifier.cls_fc"),
    (r"^head\.widen", "classifier.dim"),
)


def official(model, gcp=False):
    """The state dict their code would have for this model, with its position table and an idle class-token layer."""
    state = {}
    for key, value in model.state_dict().items():
        for ours, theirs in THEIRS:
            key = re.sub(ours, theirs, key)
        state[key.replace("representation.wr", "dr") if gcp else key] = value
    state["pos_embed"] = sinusoid_positions(model.pos_embed.shape[1], model.embed_dim)
    state.setdefault("classifier.cls_fc.weight", torch.randn(model.num_classes, model.embed_dim))
    state.setdefault("classifier.cls_fc.bias", torch.randn(model.num_classes))
    return state


def build(**arguments):
    return timm.create_model("sot_7", num_classes=10, **arguments).eval()


@pytest.mark.parametrize(
    "arguments, fusion",
    [
        ({}, "sum"),
        ({"embed": "resnet"}, "sum"),
        ({"embed": "inception"}, "sum"),
        ({"embed": "nonlocal"}, "sum"),
        ({"embed": "naive"}, "sum"),
        ({"head": HeadConfig(fusion="concat", norm="ln")}, "concat"),
        ({"head": HeadConfig.paper(fusion="late", heads=2, left_dim=24, right_dim=24)}, "late"),
        ({"head": HeadConfig(fusion="aggr_all", pool="gap")}, "aggr_all"),
        ({"head": HeadConfig(fusion="class", class_width=1280)}, "class"),
        ({"head": HeadConfig(norm="none")}, "sum"),
    ],
)
def test_round_trip_gives_equal_logits(arguments, fusion):
    model, x = build(**arguments), torch.randn(2, 3, 112, 112)
    converted = convert(official(model), fusion).eval()
    assert torch.equal(converted(x), model(x))


def test_every_key_is_reported_once():
    state = official(build())
    state["classifier.extra"] = torch.zeros(1)
    result = convert_state_dict(state)
    assert sorted([*result.used, *result.unused]) == sorted(state)
    assert result.unused == {"pos_embed": "computed here, equal", "classifier.extra": "no counterpart"}
    assert result.used["classifier.representation.wr.weight"] == "head.pool.projection.weight"
    state["pos_embed"] += 1
    assert "DIFFERENT" in convert_state_dict(state).unused["pos_embed"]


def test_idle_class_layer_is_left_out_and_said():
    model = build(head=HeadConfig.paper(fusion="concat"))
    unused = convert_state_dict(official(model), "concat").unused
    assert unused["classifier.cls_fc.weight"] == "never read by fusion concat"


def test_covariance_scaled_by_channels_is_scaled_back():
    """Their GCP divides by 48 channels where ours divides by 196 tokens; the root of it is in the next layer."""
    model = build(head=HeadConfig(pool="gcp", num_iterations=3))
    state = official(model, gcp=True)
    state["classifier.dr.bias"] = state.pop("head.pool.projection.bias")
    converted = convert(state).eval()
    assert torch.allclose(converted.head.word_linear.weight, model.head.word_linear.weight * (196 / 48) ** 0.5)
    assert converted.head.config.num_iterations == 3


def test_learned_scale_becomes_its_logarithm():
    model, x = build(head=HeadConfig(norm="scale")), torch.randn(2, 3, 112, 112)
    state = official(model)
    state["classifier.representation.norm.factor"] = state.pop("head.pool.norm.log_scale").exp()
    assert torch.allclose(convert(state).eval()(x), model(x), atol=1e-6)
    state["classifier.representation.norm.factor"] *= -1
    with pytest.raises(ValueError, match="must be positive"):
        convert(state)


def test_reads_checkpoints_and_writes_safetensors_for_timm(tmp_path):
    model, x = build(), torch.randn(2, 3, 112, 112)
    state = official(model)
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "checkpoint.pth")
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "weights.safetensors")
    for name in ("checkpoint.pth", "weights.safetensors"):
        write_weights(convert(read_weights(tmp_path / name)), tmp_path / "ours.safetensors")
        loaded = build(checkpoint_path=str(tmp_path / "ours.safetensors"))
        assert torch.equal(loaded(x), model(x))
    assert set(load_file(tmp_path / "ours.safetensors")) == set(model.state_dict())
    assert len(list(tmp_path.iterdir())) == 3  # no partial file is left


class Evil:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_bad_files_and_weights_are_refused(tmp_path, capsys):
    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match="holds no plain weights"):
        read_weights(tmp_path / "evil.pth")
    assert "must not run" not in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_weights(tmp_path / "none.pth")
    state = official(build())
    del state["blocks.3.norm1.weight"]
    with pytest.raises(ValueError, match=r"missing \['blocks.3.norm1.weight'\]"):
        convert(state)
    with pytest.raises(ValueError, match="no cls_token"):
        convert({"weight": torch.zeros(1)})
    small = {"cls_token": torch.zeros(1, 1, 8), "blocks.0.norm1.weight": torch.zeros(8)}
    with pytest.raises(ValueError, match="width×depth 8×1; accepted: 256×7, 240×12"):
        convert(small)


def test_the_command_knows_every_fusion():
    assert get_args(Fusions) == tuple(fusion.value for fusion in Fusion)
