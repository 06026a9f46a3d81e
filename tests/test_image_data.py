"""Every kind of image source, on files made here: what is read, in which order, and how it is refused."""

import json
import shutil
import struct
import sys
import tarfile

import datasets
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from safetensors.torch import load_file
from test_cli import sot
from transformers import EvalPrediction

from sot.data.images import LEFT_OUT, ImageSet, ImageStream, TrainingStream, evaluation_set, load_images
from sot.data.sources import Pictures, Stream
from sot.explain import open_upload
from sot.training.train_images import image_metrics

datasets.disable_progress_bars()
CLASSES = ["blue", "green", "red"]
COUNTS = {"train": 16, "val": 4}
SMALL = ["epochs=2", "batch_size=8", "img_size=32", "head={heads: 2, left_dim: 3, right_dim: 3}"]


def picture(label, number):
    """Noise of one colour, another for every number."""
    noise = np.random.default_rng([label, number]).integers(0, 80, (20, 24, 3), dtype=np.uint8)
    noise[..., 2 - label] += 120
    return Image.fromarray(noise)


def samples(split):
    start = 0 if split == "train" else 1000
    return [(picture(label, start + i), label) for i in range(COUNTS[split]) for label in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("Folder")
    for split in COUNTS:
        for number, (image, label) in enumerate(samples(split)):
            (root / split / CLASSES[label]).mkdir(parents=True, exist_ok=True)
            image.save(root / split / CLASSES[label] / f"{number}.png")
    return root


def write_hub_set(root, splits, names=CLASSES, columns=("image", "kind")):
    """A folder of parquet files as on the hub, under column names that timm would not find."""
    kinds = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features({columns[0]: datasets.Image(), columns[1]: kinds})
    for name, rows in splits.items():
        half = len(rows) // 2
        for part, chosen in enumerate((rows[:half], rows[half:])):
            table = {columns[0]: [image for image, _ in chosen], columns[1]: [label for _, label in chosen]}
            (root / "data").mkdir(exist_ok=True)
            file = root / "data" / f"{name}-{part:05d}-of-00002.parquet"
            datasets.Dataset.from_dict(table, features=features).to_parquet(file)
    return root


def write_card(root, counts):
    """The size of each split, which a set on the hub states in its README."""
    lines = [f"  - name: {name}\n    num_examples: {count}\n    num_bytes: 1" for name, count in counts.items()]
    (root / "README.md").write_text("---\ndataset_info:\n  splits:\n" + "\n".join(lines) + "\n---\n")


@pytest.fixture(scope="module")
def hub_set(tmp_path_factory):
    root = tmp_path_factory.mktemp("Hub")
    write_card(root, {"train": 48, "test": 12})
    return write_hub_set(root, {"train": samples("train"), "test": samples("val")})


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root, splits = tmp_path_factory.mktemp("shards"), {}
    for split, count in (("train", 4), ("validation", 2)):
        rows = samples("train" if split == "train" else "val")
        files, lengths = [], []
        for part in range(count):
            files.append(f"{split}-{part:04d}.tar")
            lengths.append(len(rows[part::count]))
            with webdataset.TarWriter(str(root / files[-1])) as writer:
                for number, (image, label) in enumerate(rows[part::count]):
                    writer.write({"__key__": f"{part}-{number}", "png": image, "cls": label})
        splits[split] = {"name": split, "num_samples": len(rows), "filenames": files, "shard_lengths": lengths}
    (root / "_info.json").write_text(json.dumps({"splits": splits, "label_names": CLASSES}))
    return root


def same_pictures(found, expected):
    def key(item):
        return item[1], np.asarray(item[0]).tobytes()

    return sorted(map(key, found)) == sorted(map(key, expected))


def read(source):
    return list(source.read(None, 0, 1)) if isinstance(source, Stream) else [source[i] for i in range(len(source))]


def test_every_source_gives_the_same_pictures_and_classes(folder, hub_set, shards, tmp_path):
    cache = tmp_path / "cache"
    for spec in (
        str(folder),
        f"torch/image_folder@{folder}",
        f"hfds/{hub_set}@{cache}",
        f"hfids/{hub_set}@{cache}",
        f"hfds/{folder}@{cache}",
        f"wds/colours@{shards}",
    ):
        data = load_images(spec)
        assert data.labels == CLASSES, spec
        assert same_pictures(read(data.train), samples("train")) and same_pictures(read(data.val), samples("val")), spec


def test_a_tar_file_is_split_and_its_pictures_named(folder, tmp_path):
    file = tmp_path / "images.tar"
    with tarfile.open(file, "w") as archive:
        archive.add(folder / "train", ".")
    data = load_images(str(file), val_share=0.25)
    assert data.labels == CLASSES and (len(data.train), len(data.val)) == (36, 12)
    assert same_pictures(read(data.train) + read(data.val), samples("train"))
    assert data.val.filename(0).endswith(".png")
    assert len(load_images(str(file), val_share=1).val) == 48


def test_torchvisions_files_are_read_without_download_and_in_rgb(tmp_path, caplog):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 20), ("t10k", 10)):
        pixels = np.random.default_rng(0).integers(0, 255, (count, 28, 28), dtype=np.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, count, 28, 28) + pixels.tobytes())
        labels = bytes(i % 10 for i in range(count))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, count) + labels)
    data = load_images(f"torch/mnist@{tmp_path}")
    image, label = data.val[3]
    assert (len(data.train), len(data.val), image.mode, label) == (20, 10, "RGB", 3)
    assert len(data.labels) == 10 and "Downloading" not in caplog.text


def test_a_set_without_validation_is_split_and_numbers_can_name_classes(tmp_path):
    write_hub_set(tmp_path, {"train": samples("val")}, names=None, columns=("image", "label"))
    data = load_images(f"hfds/{tmp_path}@{tmp_path / 'cache'}", val_share=0.25)
    assert data.labels == ["0", "1", "2"] and (len(data.train), len(data.val)) == (9, 3)


def test_numbers_or_imagenets_synsets_name_the_classes_of_shards(shards, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    info = json.loads((copy / "_info.json").read_text())
    del info["label_names"]
    (copy / "_info.json").write_text(json.dumps(info))
    assert load_images(f"wds/imagenet-1k-wds@{copy}").labels[0] == "n01440764"
    with pytest.raises(ValueError, match="does not say the classes: give label_names or num_classes"):
        load_images(f"wds/colours@{copy}")
    (copy / "_info.json").write_text(json.dumps({**info, "num_classes": 3}))
    assert load_images(f"wds/colours@{copy}").labels == ["0", "1", "2"]


@pytest.mark.parametrize("kind", ["wds", "hfids"])
def test_a_stream_is_shuffled_by_seed_and_epoch_alone_and_divided_without_overlap(kind, shards, hub_set, tmp_path):
    spec = f"wds/colours@{shards}" if kind == "wds" else f"hfids/{hub_set}@{tmp_path / 'cache'}"
    source = load_images(spec).train

    def epoch(number, process=(0, 1), batch_size=8, seed=3):
        stream = TrainingStream(source, lambda image: torch.tensor(np.asarray(image)), seed, batch_size, 0, process)
        stream.set_epoch(number)
        items = list(stream)
        assert len(items) == len(stream)
        return [item["pixel_values"].numpy().tobytes() for item in items]

    first = epoch(0)
    assert epoch(0) == first and len(set(first)) == 48
    assert epoch(1) != first != epoch(0, seed=4) and set(epoch(1)) == set(first)
    assert len(epoch(0, batch_size=20)) == 60  # whole batches: some images come again
    halves = [epoch(0, process=(rank, 2)) for rank in range(2)]
    assert [len(half) for half in halves] == [24, 24] and set(halves[0]).isdisjoint(halves[1])


def test_workers_read_every_picture_of_a_stream_once(shards):
    source = load_images(f"wds/colours@{shards}").val
    stream = evaluation_set(source, lambda image: torch.tensor(np.asarray(image)))
    assert isinstance(stream, ImageStream)
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2)
    found = [(Image.fromarray(item["pixel_values"].numpy()), item["labels"]) for item in loader]
    assert same_pictures(found, samples("val"))


@pytest.mark.parametrize("kind, workers", [("wds", 0), ("hfids", 0), ("wds", 2)])
def test_training_on_a_stream_evaluates_every_picture_and_resumes_to_the_same_bits(
    kind, workers, shards, hub_set, tmp_path
):
    data = f"wds/colours@{shards}" if kind == "wds" else f"hfids/{hub_set}@{tmp_path / 'cache'}"
    out, settings = tmp_path / "run", [word for setting in SMALL for word in ("--set", setting)]
    command = ["train", "--model", "test_vit", "--data", data, "--out", out, "--logger", "none", "--workers", workers]
    command += ["--recipe", "digits"]
    result = sot(*command, *settings, "--set", "mixup=0.5")
    assert result.returncode == 0, result.stderr
    rows = json.loads((out / "metrics.json").read_text())
    assert [row["epoch"] for row in rows] == [1, 2] and (out / "checkpoint-12").is_dir()
    first = load_file(out / "model.safetensors")
    shutil.rmtree(out / "checkpoint-12")
    (out / "model.safetensors").unlink()
    result = sot(*command, *settings, "--set", "mixup=0.5", "--resume")
    assert result.returncode == 0, result.stderr
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in first.items())
    result = sot("evaluate", out, "--data", data, "--json")
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)
    assert scores["accuracy"] == pytest.approx(rows[-1]["eval_accuracy"], abs=1 / 12 + 1e-6)
    assert sum(samples for _, samples, *_ in scores["classes"]) == 12


def test_what_cannot_be_read_in_an_archive_is_counted_as_in_a_folder(folder, tmp_path, caplog):
    broken = tmp_path / "broken" / "red"
    broken.mkdir(parents=True)
    (broken / "x.png").write_bytes(b"no image")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(folder / "val", ".")
        archive.add(broken, "red")
    data = load_images(str(tmp_path / "a.tar"), val_share=1)
    found = [evaluation_set(data.val, lambda image: image)[i]["labels"] for i in range(13)]
    assert found.count(LEFT_OUT) == 1 and "red/x.png" in caplog.text


def test_a_picture_that_cannot_be_read_is_replaced_in_training_and_left_out_of_evaluation():
    class Source:
        def __len__(self):
            return 150

        def __getitem__(self, index):
            if index == 7:
                raise OSError("truncated")
            return Image.new("RGB", (4, 4)), 1

    def labels(kind):
        data = kind(Source(), lambda image: torch.zeros(3, 4, 4))
        return [data[index]["labels"] for index in (6, 7, 8)]

    assert labels(ImageSet) == [1, 1, 1] and labels(evaluation_set) == [1, LEFT_OUT, 1]
    logits = np.array([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    scores = image_metrics(EvalPrediction(logits, np.array(labels(evaluation_set))))
    assert scores["accuracy"] == 1 and scores["loss"] == pytest.approx(0, abs=1e-3)


def fill(root, *files):
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / file)


def found_in(root):
    data = load_images(str(root), val_share=1)
    return {(data.labels[data.val[i][1]], data.val.filename(i)[len(str(root)) + 1 :]) for i in range(len(data.val))}


def test_pictures_of_every_accepted_format_are_found_and_the_first_folder_is_the_class(tmp_path, caplog):
    files = ["cat/a.webp", "cat/indoor/b.GIF", "cat/outdoor/c.bmp", "dog/indoor/d.tiff", "fish/e.jpeg", "fish/f.ppm"]
    fill(tmp_path, *files)
    assert found_in(tmp_path) == {(file.split("/")[0], file) for file in files} and not caplog.text
    fill(tmp_path, "cover.png", ".thumbs/x.png", "cat/.cache/y.png")
    (tmp_path / "dog" / "._d.png").write_bytes(b"what macOS leaves behind")
    assert found_in(tmp_path) == {(file.split("/")[0], file) for file in files}
    assert "Left out 1 image in no folder of a class, first" in caplog.text and "cover.png" in caplog.text


def test_a_class_may_be_called_train(tmp_path):
    files = ["bus/a.png", "car/b.png", "train/c.png"]
    fill(tmp_path / "classes", *files)
    assert found_in(tmp_path / "classes") == {(file.split("/")[0], file) for file in files}
    fill(tmp_path / "flat", "train/a.png", "val/b.png")
    with pytest.raises(ValueError, match="flat needs one folder for each class in train and val"):
        load_images(str(tmp_path / "flat"))


def test_torchvisions_folders_are_read_as_any_other(tmp_path):
    wide = Image.fromarray(np.full((2, 3), 25700, np.uint16))
    exif = Image.Exif()
    exif[274] = 6  # turned
    for split in ("train", "val"):
        fill(tmp_path, f"{split}/a/x.png", f"{split}/b/x.png")
        wide.save(tmp_path / split / "a" / "x.png", exif=exif)
    image, _ = load_images(f"torch/folder@{tmp_path}").train[0]
    assert image.size == (2, 3) and image.getpixel((0, 0)) == (100, 100, 100)


def many(folder, tmp_path):
    """Calls that must be refused, by what the sentence says."""
    only, empty, one = tmp_path / "only", tmp_path / "empty", tmp_path / "one"
    for path in (only, empty, one):
        path.mkdir()
    write_hub_set(only, {"extra": samples("val")}, columns=("image", "label"))
    Image.new("RGB", (4, 4)).save(one / "x.png")
    for name, source in (("empty.tar", empty), ("one.tar", one)):
        with tarfile.open(tmp_path / name, "w") as archive:
            archive.add(source, "one")
    (tmp_path / "damaged.tar").write_bytes(b"no archive")
    (tmp_path / "text").mkdir()
    datasets.Dataset.from_dict({"sentence": ["a"], "label": [1]}).to_parquet(tmp_path / "text" / "train.parquet")
    cache = tmp_path / "cache"
    return [
        ("", "unknown data ''; accepted: digits, a folder"),
        ("tfds/mnist", "unknown data 'tfds/mnist'; accepted: digits, a folder"),
        (tmp_path / "nowhere", "unknown data"),
        (tmp_path / "empty.tar", "is not a .tar file with one folder of images for each class"),
        (tmp_path / "damaged.tar", "is not a .tar file with one folder"),
        (tmp_path / "one.tar", "at least two classes"),
        ("torch/mnist", "needs the folder of its files: torch/mnist@FOLDER"),
        (f"torch/nothing@{folder}", "Unknown torchvision dataset nothing"),
        (f"torch/folder@{folder / 'val'}", "has no folder to validate on: it needs train and val"),
        ("wds/colours", "needs the folder of its shards"),
        (f"wds/colours@{empty}", "needs an _info.json that lists its splits"),
        (f"hfds/no/such-set@{cache}", "datasets cannot open 'no/such-set'"),
        (f"hfds/{only}@{cache}", r"has no split to train on: it has extra; accepted names: train, training"),
        (f"hfids/{only}@{cache}", r"has no split to train on: it has extra"),
        (f"hfds/{tmp_path / 'text'}@{cache}", "needs a column of images and one of classes; it has sentence, label"),
    ]


def test_bad_sources_are_refused_in_one_sentence(folder, tmp_path):
    for spec, message in many(folder, tmp_path):
        with pytest.raises(ValueError, match=message) as caught:
            load_images(str(spec))
        assert "\n" not in str(caught.value), spec


def test_streams_say_what_they_lack(shards, tmp_path):
    write_hub_set(tmp_path, {"train": samples("val"), "test": samples("val")}, columns=("image", "label"))
    spec = f"hfids/{tmp_path}@{tmp_path / 'cache'}"
    with pytest.raises(ValueError, match="does not say how many images train has: open it as hfds/"):
        load_images(spec)
    assert same_pictures(read(load_images(spec, val_share=1).val), samples("val"))  # enough to evaluate
    command = ["train", "--model", "test_vit", "--recipe", "digits", "--data", f"wds/x@{shards}", "--workers", 5]
    result = sot(*command, "--out", tmp_path / "run")
    assert result.returncode == 2 and "the data has 4 shards, too few for 1 processes × 5 workers" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("library, spec", [("datasets", "hfds/x"), ("datasets", "hfids/x"), ("webdataset", "wds/x@y")])
def test_a_missing_library_is_named(library, spec, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=f"needs the library {library}: pip install .*'{library}>="):
        load_images(spec)


def test_pictures_may_be_images_or_files(folder):
    file = next((folder / "val" / "red").iterdir())
    image = Image.open(file)
    from_file, from_image = Pictures([(file, 2)])[0], Pictures([(image, np.int64(2))])[0]
    assert np.array_equal(from_file[0], from_image[0]) and from_file[1] == from_image[1] == 2


def test_formats_that_would_start_a_program_are_not_opened(tmp_path):
    """Pillow hands EPS files to Ghostscript, whatever they are called."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    for read in (open_upload, lambda file: Pictures([(file, 0)])[0]):
        with pytest.raises(ValueError, match="no image that can be read"):
            read(tmp_path / "a.png")
