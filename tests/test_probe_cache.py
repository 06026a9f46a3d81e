"""The cache of what a frozen backbone makes of pictures and texts."""

import json
import os
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import numpy as np
import pytest
import torch
from PIL import Image

from sot.bench.timing import thread_count
from sot.data.images import load_images
from sot.data.sources import Subset
from sot.data.texts import TextSplit
from sot.models.equip import equip
from sot.probe import cache_features
from sot.probe.samples import encode, image_samples, text_samples


@pytest.fixture(autouse=True)
def one_thread():
    """Steps this small are slower on several."""
    with thread_count(1):
        yield


def tiny_vit(**arguments):
    torch.manual_seed(0)
    return equip("test_vit", 2, {"pool": "gap", "fusion": "word"}, pretrained=False, model_args=arguments).eval()


@pytest.fixture(scope="module")
def vit():
    return tiny_vit(img_size=32)


@pytest.fixture(scope="module")
def digits():
    return Subset(load_images("digits").train, range(80))  # a whole chunk and a part of one


@pytest.fixture
def passes(vit):
    """Sizes of the batches that went through the backbone."""
    seen = []
    hook = vit.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
    )
    yield seen
    hook.remove()


def normalized(tokens):
    return torch.nn.functional.layer_norm(tokens, tokens.shape[-1:])


def stop_after_one(items, title):
    yield items[0]
    raise KeyboardInterrupt


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*/*.npy"))}


def test_the_cache_holds_the_tokens_of_the_model_in_half_precision(vit, digits, tmp_path):
    features = cache_features(vit, image_samples(vit, digits, "digits"), tmp_path)
    rows = np.array([70, 3, 77])
    pixels = vit.processor([digits[row][0] for row in rows], return_tensors="pt")["pixel_values"]
    direct, cached = encode(vit, {"pixel_values": pixels}), features.batch(rows)
    words, mask = cached.words.padded()
    torch.testing.assert_close(words, normalized(direct.word_tokens), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(cached.class_token, normalized(direct.class_token), rtol=1e-3, atol=1e-4)
    assert mask is None and words.dtype == torch.float32
    assert features.words.dtype == np.float16 and isinstance(features.words.base, np.memmap)
    assert features.labels.tolist() == [label for _, label in (digits[row] for row in range(80))]
    assert features.seconds > 0 and features.batch(rows, with_words=False).words is None


def test_a_picture_that_cannot_be_read_is_left_out_and_named(vit, tmp_path, caplog):
    for number in range(100):
        file = tmp_path / "data" / "train" / "ab"[number % 2] / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(file)
    file.write_bytes(b"no picture")
    (tmp_path / "data" / "val").symlink_to("train")
    pictures = load_images(str(tmp_path / "data")).train
    for _ in range(2):  # computed, and read again
        caplog.clear()
        features = cache_features(vit, image_samples(vit, pictures, "data train"), tmp_path / "cache")
        assert len(features) == 100 and features.rows.tolist() == list(range(99))
        assert "1 of 100 samples of data train cannot be read and are left out." in caplog.text


def test_an_interrupted_cache_goes_on_where_it_was(vit, digits, passes, tmp_path):
    samples = image_samples(vit, digits, "digits")
    cache_features(vit, samples, tmp_path / "whole")
    passes.clear()
    with pytest.raises(KeyboardInterrupt):
        cache_features(vit, samples, tmp_path / "parts", stop_after_one)
    assert passes == [1, 64]  # one picture tells how many words there are
    passes.clear()
    cache_features(vit, samples, tmp_path / "parts")
    assert passes == [16]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    passes.clear()
    cache_features(vit, samples, tmp_path / "parts")
    assert passes == []


def damage_a_number(folder):
    with (folder / "words.npy").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\x42")


def cut_off(folder):
    file = folder / "words.npy"
    file.write_bytes(file.read_bytes()[:-1000])


def edit_record(folder, **changed):
    file = folder / "cache.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


@pytest.mark.parametrize(
    "damage, again",
    [
        (damage_a_number, [16]),
        (cut_off, [16]),
        (lambda folder: (folder / "class.npy").unlink(), [1, 64, 16]),
        (lambda folder: (folder / "labels.npy").write_bytes(b"nothing"), [1, 64, 16]),
        (lambda folder: (folder / "cache.json").write_text("{"), [1, 64, 16]),
        (lambda folder: (folder / "cache.json").write_text("[]"), [1, 64, 16]),
        (lambda folder: (folder / "cache.json").write_bytes(b"\xff"), [1, 64, 16]),
        (partial(edit_record, words=7), [1, 64, 16]),
        (partial(edit_record, words="9"), [1, 64, 16]),
        (partial(edit_record, words=7, checksums=[None, None]), [1, 64, 16]),
        (partial(edit_record, seconds=[None, 1.0]), [1, 64, 16]),
        (partial(edit_record, checksums=["12", 3]), [1, 64, 16]),
    ],
)
def test_what_is_damaged_is_computed_again_with_a_warning(damage, again, vit, digits, passes, tmp_path, caplog):
    samples = image_samples(vit, digits, "digits")
    cache_features(vit, samples, tmp_path)
    before = contents(tmp_path)
    (folder,) = tmp_path.iterdir()
    damage(folder)
    passes.clear()
    cache_features(vit, samples, tmp_path)
    assert passes == again and contents(tmp_path) == before
    assert "damaged" in caplog.text
    passes.clear()
    assert cache_features(vit, samples, tmp_path).seconds > 0 and passes == []


@contextmanager
def shared():
    """A folder that others may read, which pytest's own are not."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def only_reading(folder):
    """As a user who may read a folder and not write to it, which root always may."""
    paths = {path: path.is_dir() for path in [folder, *folder.rglob("*")]}
    for path, is_folder in paths.items():
        path.chmod(0o555 if is_folder else 0o444)
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)
        for path, is_folder in paths.items():
            path.chmod(0o755 if is_folder else 0o644)


@pytest.fixture
def cache():
    with shared() as folder:
        yield folder / "cache"


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="permissions of another kind")
def test_a_complete_cache_is_read_where_it_cannot_be_written(vit, digits, passes, cache, caplog):
    samples = image_samples(vit, digits, "digits")
    first = cache_features(vit, samples, cache)
    passes.clear()
    with only_reading(cache):
        again = cache_features(vit, samples, cache)
    assert np.array_equal(again.words, first.words) and again.key == first.key and passes == []
    (folder,) = cache.iterdir()
    damage_a_number(folder)
    before = contents(cache)
    with only_reading(cache), pytest.raises(ValueError, match=f"the cache {folder} is not complete and cannot be"):
        cache_features(vit, samples, cache)
    with only_reading(cache), pytest.raises(ValueError, match=r"cannot be written \(Permission denied\): choose anot"):
        cache_features(vit, image_samples(vit, Subset(digits, range(3)), "few"), cache)
    assert contents(cache) == before and passes == [] and "damaged" not in caplog.text


def test_of_two_that_share_a_cache_one_waits_for_the_other(vit, digits, passes, tmp_path, caplog):
    samples, found = image_samples(vit, digits, "digits"), []
    other = Thread(target=lambda: found.append(cache_features(vit, samples, tmp_path)))

    def start_another(items, title):
        other.start()
        while "waiting for it" not in caplog.text and other.is_alive():
            time.sleep(0.01)
        yield from items

    first = cache_features(vit, samples, tmp_path, start_another)
    other.join()
    assert passes == [1, 64, 16] and np.array_equal(found[0].words, first.words)
    assert "damaged" not in caplog.text


def test_another_model_data_or_transform_is_another_cache(vit, digits, tmp_path):
    def key(model, source):
        return cache_features(model, image_samples(model, source, "digits"), tmp_path).key

    few = Subset(digits, range(3))
    first = key(vit, few)
    assert key(tiny_vit(img_size=32), few) == first and len(list(tmp_path.iterdir())) == 1
    weights, size, transform = tiny_vit(img_size=32), tiny_vit(img_size=48), tiny_vit(img_size=32)
    with torch.no_grad():
        weights.backbone.timm_model.blocks[0].mlp.fc1.bias[0] += 1e-3
    transform.processor.image_mean = [0.1, 0.2, 0.3]
    for model, source, part in (
        (weights, few, "model"),
        (size, few, "model"),
        (transform, few, "transform"),
        (vit, Subset(digits, range(1, 4)), "data"),
    ):
        other = key(model, source)
        assert other[part] != first[part]
    assert len(list(tmp_path.iterdir())) == 5
    (recorded,) = [f for f in tmp_path.glob("*/cache.json") if json.loads(f.read_text())["key"] == first]
    assert recorded.parent.name in {folder.name for folder in tmp_path.iterdir()}


def test_a_file_of_the_data_that_changes_makes_another_cache(vit, tmp_path):
    for name in ("a", "b"):
        for number in range(5):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    first = image_samples(vit, load_images(str(tmp_path)).train, "folder").identity["data"]
    assert image_samples(vit, load_images(str(tmp_path)).train, "folder").identity["data"] == first
    for file in tmp_path.glob("*/*.png"):
        Image.new("RGB", (9, 8), (9, 9, 9)).save(file)
    assert image_samples(vit, load_images(str(tmp_path)).train, "folder").identity["data"] != first


@pytest.fixture(scope="module")
def bert(stand_ins):
    return equip(stand_ins["google-bert/bert-base-uncased"], 2, {"pool": "gap", "fusion": "word"}).eval()


def sentences(count):
    draw = np.random.default_rng(0)
    words = ["the", "cat", "cats", "sleep", "sleeps"]
    return [" ".join(draw.choice(words, size=draw.integers(1, 9))) for _ in range(count)]


def test_texts_are_stored_and_come_back_without_padding(bert, tmp_path):
    texts = sentences(100)
    split = TextSplit(texts, None, [float(len(text.split()) % 2) for text in texts])
    samples = text_samples(bert, split, "texts", 6, regression=False)
    features = cache_features(bert, samples, tmp_path)
    lengths = [min(6, len(text.split())) for text in texts]  # this tokenizer adds no special tokens
    assert np.diff(features.starts).tolist() == sorted(length - 1 for length in lengths)
    assert len(features.words) == sum(lengths) - 100
    rows = np.array([99, 0, 50])
    batch = features.batch(rows)
    for position, row in enumerate(rows):
        direct = encode(bert, samples.batch([row]))  # alone, so without padding
        kept = batch.words.tokens[batch.words.starts[position] : batch.words.starts[position + 1]]
        torch.testing.assert_close(kept, normalized(direct.word_tokens[direct.mask]), rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(batch.class_token[position], normalized(direct.class_token[0]), rtol=1e-3, atol=2e-3)
    assert features.key["transform"]["max_length"] == 6
    with pytest.raises(ValueError, match="the texts of one have one token each"):
        text_samples(bert, TextSplit(["cat", "the"], None, [0.0, 1.0]), "one", 6, regression=False)
    with pytest.raises(ValueError, match="none is empty"):
        text_samples(bert, TextSplit([], None, []), "none", 6, regression=False)


def test_what_unsorted_texts_would_take_is_measured_on_some_of_them(bert, tmp_path, monkeypatch):
    read = [0]  # tokens so far, padding among them, in place of the time they take

    def count(module, args, kwargs):
        read[0] += kwargs["input_ids"].numel()

    monkeypatch.setattr("sot.probe.cache.clock", lambda: float(read[0]))
    hook = bert.backbone.register_forward_pre_hook(count, with_kwargs=True)
    texts = [*sentences(64 * 5), "the cat " * 20]
    samples = text_samples(bert, TextSplit(texts, None, [0.0] * 321), "texts", 50, regression=False)
    features = cache_features(bert, samples, tmp_path)
    read_once = read[0]
    again = cache_features(bert, samples, tmp_path)
    hook.remove()
    longest = [max(len(text.split()) for text in texts[start : start + 64]) for start in (0, 128, 256)]
    assert features.unsorted_seconds == pytest.approx(sum(longest) * 64 / 192 * 321)
    assert features.seconds == read_once - sum(longest) * 64 < features.unsorted_seconds
    assert again.unsorted_seconds == features.unsorted_seconds and read[0] == read_once
