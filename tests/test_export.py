"""Exported models: checked at other sizes, run by `sot predict` as the originals are, and never trusted."""

import io
import json
import subprocess
import sys
import zipfile

import pytest
import torch
from ddp_worker import HEAD, SIZE
from PIL import Image
from test_cli import sot

import sot as package
from sot.core.head import HeadConfig, SecondOrderHead
from sot.core.head_config import merge_head
from sot.evaluation.export import export_model, load_exported


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "image"
    labels = ["a", "b", "c"]
    model = package.equip("test_vit", labels=labels, head=HEAD, pretrained=False, model_args={"img_size": SIZE})
    model.save_pretrained(folder)
    for number in range(3):
        noise = torch.randint(0, 255, (40, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        Image.fromarray(noise.numpy()).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def text_model(stand_ins, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "text"
    model = package.equip(stand_ins["google-bert/bert-base-uncased"], labels=["no", "yes"], head=HEAD)
    model.save_pretrained(folder)
    return folder


def scores(*words):
    result = sot("predict", *words, "--json")
    assert result.returncode == 0, result.stderr
    return [(row["source"], dict(row["classes"])) for row in map(json.loads, result.stdout.splitlines())]


@pytest.mark.parametrize("to", ["onnx", "torch"])
@pytest.mark.parametrize("kind", ["image", "text"])
def test_an_exported_file_predicts_as_its_model(kind, to, image_model, text_model, tmp_path):
    folder = image_model if kind == "image" else text_model
    file = tmp_path / f"exported{'.onnx' if to == 'onnx' else '.pt2'}"
    result = sot("export", folder, "--to", to, "--out", file, "--json")
    assert result.returncode == 0, result.stderr
    differences = json.loads(result.stdout)["differences"]
    assert list(differences) == ["1", "2", "5"] and max(differences.values()) < 1e-4
    if kind == "image":
        given = sorted(folder.glob("*.png"))
    else:
        given = ["--text", "the cats sleep", "--text", "the cat", "--text", "cat"]
    for (name, expected), (other, found) in zip(scores(folder, *given), scores(file, *given), strict=True):
        assert name == other and found == pytest.approx(expected, abs=1e-4)


def test_the_file_goes_beside_the_model_unless_told_otherwise(image_model):
    before = (image_model / "config.json").read_bytes()
    result = sot("export", image_model, "--to", "torch")
    assert result.returncode == 0 and "largest difference" in result.stdout, result.stderr
    assert (image_model / "model.pt2").is_file() and (image_model / "config.json").read_bytes() == before
    assert not list(image_model.glob(".export-*"))


@pytest.mark.parametrize(
    ("head", "to", "message"),
    [
        ({"norm": "svpn"}, "onnx", None),  # by products: no SVD in ONNX
        ({"norm": "svpn"}, "torch", None),
        ({"norm": "svpn", "exponent": 0.25}, "onnx", None),
        ({"norm": "svpn", "exponent": 0.7}, "onnx", "exponents 0.5 and 0.25, got 0.7"),
        ({"pool": "gcp", "norm": "mpn", "reduced_dim": 6}, "onnx", "mpn has no form in ONNX"),
    ],
)
def test_exact_normalisation_is_exported_or_refused(head, to, message, tmp_path):
    arguments = {"pretrained": False, "model_args": {"img_size": SIZE}}
    model = package.equip("test_vit", labels=["a", "b"], head=merge_head(HEAD, head), **arguments)
    model.save_pretrained(tmp_path / "model")
    if message is None:
        assert max(export_model(tmp_path / "model", to).differences.values()) < 1e-4
    else:
        with pytest.raises(ValueError, match=message):
            export_model(tmp_path / "model", to)


@pytest.mark.parametrize("exponent", [0.5, 0.25])
def test_spectra_as_steep_as_those_of_trained_heads_are_exported(exponent, tmp_path):
    head = {**HEAD, "norm": "svpn", "exponent": exponent}
    model = package.equip("test_vit", labels=["a", "b"], head=head, pretrained=False, model_args={"img_size": SIZE})
    pool = model.classifier.pool
    with torch.no_grad():
        left = pool.projection.weight[: pool.heads * pool.left_dim].view(pool.heads, pool.left_dim, -1)
        left *= torch.logspace(0, -4, pool.left_dim)[:, None]
    model.save_pretrained(tmp_path / "model")
    assert max(export_model(tmp_path / "model", "onnx").differences.values()) < 1e-5


ALONE = """
import sys
sys.modules["sot"] = None
import torch
how, program, given = sys.argv[1:]
run = torch.export.load(program).module() if how == "export" else torch._inductor.aoti_load_package(program)
inputs, expected = torch.load(given)
torch.testing.assert_close(run(*inputs), expected, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("how", ["export", pytest.param("AOTInductor", marks=pytest.mark.slow)])
def test_programs_run_where_this_package_is_not_installed(how, tmp_path):
    head = package.accelerate(SecondOrderHead(32, 3200, HeadConfig(heads=2))).eval()
    inputs, file = (torch.randn(2, 32), torch.randn(2, 30, 32)), str(tmp_path / "head.pt2")
    program = torch.export.export(head, inputs)
    assert not any("sot" in str(node.target) for node in program.graph.nodes if node.op == "call_function")
    if how == "export":
        torch.export.save(program, file)
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=file)
    torch.save((inputs, head(*inputs).detach()), tmp_path / "given.pt")
    subprocess.run([sys.executable, "-c", ALONE, how, file, str(tmp_path / "given.pt")], check=True, timeout=300)


def test_mistakes(image_model, tmp_path):
    for words, message in (
        (["export", image_model, "--to", "keras"], "unknown format 'keras'; accepted: onnx, torch"),
        (["export", image_model, "--out", tmp_path / "model.pt2"], "must end in .onnx for onnx"),
        (["export", tmp_path], "is not a"),
        (["predict", tmp_path / "none.onnx", "x.png"], "no such file"),
    ):
        result = sot(*words)
        assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_a_difference_is_an_error_and_leaves_nothing(image_model, tmp_path, monkeypatch):
    monkeypatch.setattr("sot.evaluation.export.TOLERANCE", -1.0)
    with pytest.raises(ValueError, match=r"differs by .* on 1 samples: nothing was written"):
        export_model(image_model, "torch", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("place", ["constants/opaque_obj_0", "sample_inputs/model.pt"])
def test_a_torch_program_that_would_run_code_is_refused(place, image_model, tmp_path):
    export_model(image_model, "torch", tmp_path / "good.pt2")
    sprung, bad, poison = tmp_path / "sprung", tmp_path / "bad.pt2", io.BytesIO()
    torch.save(Trap(sprung), poison)
    with zipfile.ZipFile(tmp_path / "good.pt2") as good, zipfile.ZipFile(bad, "w") as archive:
        names = good.namelist()
        for name in names:
            archive.writestr(name, poison.getvalue() if name.endswith(place) else good.read(name))
        if not any(name.endswith(place) for name in names):
            archive.writestr(f"{names[0].split('/')[0]}/data/{place}", poison.getvalue())
    with pytest.raises(ValueError, match="was not made by sot export"):
        load_exported(bad)
    assert not sprung.exists()


def test_files_that_are_no_models(image_model, tmp_path):
    for name in ("model.onnx", "model.pt2"):
        (image_model / name).write_bytes(b"not a model")
        result = sot("predict", image_model / name, image_model / "0.png")
        assert result.returncode == 2 and "is damaged or was not made by sot export" in result.stderr
        assert "Traceback" not in result.stderr
        (image_model / name).unlink()
