"""`sot train` with the vision models of Hugging Face, from folders."""

import json

import pytest
import torch
from PIL import Image
from test_cli import sot
from transformers import (
    BertConfig,
    BertModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from sot.bench.timing import thread_count
from sot.core.head import HeadConfig
from sot.recipe import Recipe
from sot.train import build_model, data_config

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 32}
QUICK = [*("--set", "epochs=1"), *("--set", "train_samples=64"), *("--set", "batch_size=32")]


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are slower on several."""
    with thread_count(1):
        yield


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "vit"
    torch.manual_seed(0)
    ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}, resample=2).save_pretrained(folder)
    return folder


def build(folder, head=None, **settings):
    return build_model(str(folder), ["a", "b"], Recipe(**settings), head, pretrained=True)


def test_a_vision_model_of_hugging_face_is_trained_and_evaluated(vit, tmp_path):
    out = tmp_path / "run"
    command = ["train", "--model", vit, "--pretrained", "--data", "digits", "--out", out, *QUICK, "--json"]
    done = sot(*command, "--set", "layer_decay=0.8")
    assert done.returncode == 0, done.stderr
    evaluated = sot("evaluate", out, "--data", "digits", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    trained, scored = json.loads(done.stdout), json.loads(evaluated.stdout)
    for name in ("accuracy", "loss"):
        assert trained[f"eval_{name}"] == pytest.approx(scored[name])
    assert sot(*command, "--set", "layer_decay=0.8", "--resume").returncode == 0


def test_training_reads_pictures_as_its_image_processor_does(vit):
    model = build(vit)
    config = data_config(model)
    assert config["input_size"] == (3, 32, 32) and config["interpolation"] == "bilinear"
    assert list(config["mean"]) == list(model.processor.image_mean)
    model.processor.do_normalize = False
    assert data_config(model)["std"] == (1.0, 1.0, 1.0)
    white = model.processor(Image.new("RGB", (9, 9), "white"), return_tensors="pt")["pixel_values"]
    assert white.max() == 1  # so that mean 0 and deviation 1 are right


def test_the_conventional_head_is_the_average_where_there_is_no_class_token(tmp_path):
    config = SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
    SwinModel(config).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    assert build(tmp_path).config.head["pool"] == "gap"
    assert build(tmp_path, HeadConfig(pool="max", fusion="word")).config.head["pool"] == "max"


def test_what_a_model_of_hugging_face_cannot_do_is_refused(vit, tmp_path):
    for settings, message in (
        ({"img_size": 64}, "reads pictures of 32 pixels: img_size must be 32 or null, got 64"),
        ({"drop_path": 0.1}, "drop_path is for timm models, and .* is none, got drop_path=0.1"),
        ({"embed": "densenet"}, "embed is for timm models"),
        ({"model_args": {"depth": 3}}, "model_args is for timm models"),
    ):
        with pytest.raises(ValueError, match=message):
            build(vit, **settings)
    BertModel(BertConfig(**SMALL, vocab_size=10)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="is no model of pictures: fine-tune it on texts with sot finetune"):
        build(tmp_path / "bert")
    ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="has no image processor beside it"):
        build(tmp_path / "vit")
