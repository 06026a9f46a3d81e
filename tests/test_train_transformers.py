"""`sot train` with the vision models of Hugging Face, from folders."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from test_cli import sot
from transformers import (
    BertConfig,
    BertModel,
    BitImageProcessor,
    MobileViTImageProcessor,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from sot.bench.timing import thread_count
from sot.core.head import HeadConfig
from sot.training.engine import SoTTrainer
from sot.training.image_model import build_model, data_config
from sot.training.recipe import Recipe, load_recipe

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


def train(model, out, *options, epochs=3):
    few = [*("--set", f"epochs={epochs}"), *("--set", "train_samples=64"), *("--set", "batch_size=32")]
    done = sot("train", "--model", model, "--data", "digits", "--out", out, *few, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_vision_model_of_hugging_face_is_trained_and_evaluated(vit, tmp_path):
    trained = train(vit, tmp_path, "--set", "layer_decay=0.8", "--head", "none", epochs=1)
    evaluated = sot("evaluate", tmp_path, "--data", "digits", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    scored = json.loads(evaluated.stdout)
    for name in ("accuracy", "loss"):
        assert trained[f"eval_{name}"] == pytest.approx(scored[name])
    assert "Head: fusion class" in (tmp_path / "README.md").read_text()
    assert sot("export", tmp_path, "--to", "torch").returncode == 0


def test_interrupted_and_resumed_it_ends_with_the_same_bits(vit, tmp_path, monkeypatch):
    """Of these backbones transformers writes other names than it trains with."""
    metrics = train(vit, tmp_path / "run")
    weights = load_file(tmp_path / "run" / "model.safetensors")
    start = ViTModel.from_pretrained(vit).state_dict()
    assert not torch.equal(weights["backbone.layers.0.mlp.fc1.weight"], start["layers.0.mlp.fc1.weight"])
    monkeypatch.chdir(vit.parent)  # the same model by another name
    for interrupted in (False, True):
        if interrupted:
            shutil.rmtree(tmp_path / "run" / "checkpoint-6")
        assert train("vit", tmp_path / "run", "--resume") == metrics
        again = load_file(tmp_path / "run" / "model.safetensors")
        assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in again)


def test_a_relative_name_means_the_model_it_meant(vit, tmp_path, monkeypatch):
    monkeypatch.chdir(vit.parent)
    train("vit", tmp_path / "run", epochs=1)
    shutil.copytree(vit, tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    result = sot("train", "--model", "vit", "--data", "digits", "--out", tmp_path / "run", *QUICK, "--resume")
    assert result.returncode == 2 and f"is a run of model '{vit}', not '{tmp_path / 'vit'}'" in result.stderr


def test_a_checkpoint_without_all_weights_is_not_resumed():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    check = SoTTrainer._issue_warnings_after_load
    check(SimpleNamespace(model=model), SimpleNamespace(missing_keys=["1.weight"]))  # there by another name
    with pytest.raises(ValueError, match=r"the checkpoint lacks 1 weight, first 1\.bias"):
        check(SimpleNamespace(model=model), SimpleNamespace(missing_keys=["1.weight", "1.bias"]))


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


def test_the_size_of_pictures_is_the_processors_unless_the_user_sets_it(tmp_path):
    ViTModel(ViTConfig(**SMALL, image_size=16, patch_size=8)).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    for recipe in ("digits", "sot_tiny"):  # for images of 32 and of 224 pixels
        few = ["--set", "drop_path=0", "--set", "cooldown_epochs=0"]
        train(tmp_path / "vit", tmp_path / recipe, "--recipe", recipe, *few, epochs=1)
        assert load_recipe(str(tmp_path / recipe / "recipe.yaml")).img_size is None
    train(tmp_path / "vit", tmp_path / "equal", "--set", "img_size=16", epochs=1)
    (tmp_path / "mine.yaml").write_text(load_recipe("digits").to_yaml())
    for options in (["--set", "img_size=32"], ["--recipe", tmp_path / "mine.yaml"]):
        command = ["train", "--model", tmp_path / "vit", "--data", "digits", "--out", tmp_path / "run", *options]
        result = sot(*command)
        message = f"img_size must be null, as {tmp_path / 'vit'} reads images of 16×16 pixels, got 32"
        assert result.returncode == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "run").exists()


def test_a_recipe_sizes_the_pictures_of_timm_models(tmp_path):
    timm.models.save_for_hf(timm.create_model("test_vit", img_size=32), tmp_path / "vit", safe_serialization=True)
    for model in ("test_vit", tmp_path / "vit"):
        train(model, tmp_path / "run", "--overwrite", epochs=1)
        assert load_recipe(str(tmp_path / "run" / "recipe.yaml")).img_size == 32


def test_what_a_model_of_hugging_face_cannot_do_is_refused(vit, tmp_path):
    for settings, message in (
        ({"img_size": 64}, "img_size must be null, as .* reads images of 32×32 pixels, got 64"),
        ({"drop_path": 0.1}, "drop_path is for timm models, and .* is none, got drop_path=0.1"),
        ({"embed": "densenet"}, "embed is for timm models"),
        ({"model_args": {"depth": 3}}, "model_args is for timm models"),
    ):
        with pytest.raises(ValueError, match=message):
            build(vit, **settings)
    BertModel(BertConfig(**SMALL, vocab_size=10)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="is no model of images: fine-tune it on texts with sot finetune"):
        build(tmp_path / "bert")
    ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="has no image processor beside it"):
        build(tmp_path / "vit")


@pytest.mark.parametrize(
    "processor, model, message",
    [
        (
            MobileViTImageProcessor(size={"shortest_edge": 32}, crop_size=32),
            {},
            "scales or orders colours",
        ),
        (
            ViTImageProcessor(size={"height": 32, "width": 32}, do_rescale=False),
            {},
            "scales or orders colours",
        ),
        (
            BitImageProcessor(size={"shortest_edge": 32}, do_center_crop=False),
            {},
            "gives images various sizes: it needs",
        ),
        (
            ViTImageProcessor(size={"height": 48, "width": 48}),
            {},
            r"cannot read images of \(3, 48, 48\), which its im",
        ),
        (ViTImageProcessor(size={"height": 32, "width": 32}), {"num_channels": 1}, "cannot read images of"),
    ],
)
def test_processors_that_do_not_fit_are_refused_before_there_is_a_run(processor, model, message, tmp_path):
    ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8, **model)).save_pretrained(tmp_path / "vit")
    processor.save_pretrained(tmp_path / "vit")
    command = ["train", "--model", tmp_path / "vit", "--data", "digits", "--out", tmp_path / "run", *QUICK]
    result = sot(*command)
    assert result.returncode == 2 and re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "run").exists()


def test_probing_refuses_pictures_of_various_sizes(tmp_path):
    ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)).save_pretrained(tmp_path / "vit")
    BitImageProcessor(size={"shortest_edge": 32}, do_center_crop=False).save_pretrained(tmp_path / "vit")
    result = sot("probe", "--model", tmp_path / "vit", "--data", "digits", "--out", tmp_path / "out")
    assert result.returncode == 2 and "gives images various sizes: it needs a crop_size" in result.stderr
