"""Poolings and norms that are not ours: by an installed package, by an imported module, and missing."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from ddp_worker import SIZE
from PIL import Image
from test_cli import sot

import sot as package
from sot.core import NORMS, POOLS, HeadConfig, SecondOrderHead
from sot.models.folder import load_model

PAGE = Path(__file__).parent.parent / "docs" / "plug-in-your-own.md"
CODE = re.search(r"```python\n(.*?)POOLS\[", PAGE.read_text(), flags=re.DOTALL)[1]  # the classes of the page
ENTRIES = "\n".join(re.search(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[1].splitlines())
ENTRIES = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", ENTRIES).replace('"', "")


@pytest.fixture
def clean(monkeypatch):
    """Our own names only, whatever a test before has added; what is added here is gone afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = [(choices, dict(choices)) for choices in (POOLS, NORMS)]
    for choices in (POOLS, NORMS):
        for name in [name for name in choices if choices.is_foreign(name)]:
            del choices[name]
    yield monkeypatch
    for choices, kept in before:
        choices.clear()
        choices.update(kept)
    sys.modules.pop("my_heads", None)


@pytest.fixture
def installed(clean, tmp_path):
    """A distribution with the page's entry points, as pip leaves it."""
    site = tmp_path / "site"
    info = site / "my_heads-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-heads\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES + "\n")
    (site / "my_heads.py").write_text(CODE)
    clean.syspath_prepend(site)
    return site


def save(folder, **head):
    options = {"pretrained": False, "model_args": {"img_size": SIZE}}
    package.equip("test_vit", labels=["a", "b"], head=head, **options).save_pretrained(folder)
    Image.new("RGB", (SIZE, SIZE), "orange").save(folder / "x.png")


def test_an_installed_package_adds_a_pooling_and_a_norm(installed, tmp_path):
    assert "my_heads" not in sys.modules
    head = SecondOrderHead(16, 3, HeadConfig(pool="deviation", heads=3, dropout=0.1))  # it may read any setting
    tokens = torch.randn(2, 9, 16)
    expected = tokens.var(1, unbiased=False).sqrt()
    torch.testing.assert_close(head.pool(tokens), expected, rtol=1e-4, atol=1e-5)
    assert HeadConfig(norm="half", exponent=0.3).exponent == 0.3
    matrix = torch.randn(2, 3, 4, 5)
    norm = NORMS.find("half")(type("Settings", (), {"exponent": 0.3}))
    length = matrix.flatten(-2).norm(dim=-1)[..., None, None]
    torch.testing.assert_close(norm(matrix), matrix / length**0.7)
    save(tmp_path / "model", pool="deviation")
    model, _ = load_model(tmp_path / "model")
    assert type(model.classifier.pool).__name__ == "StandardDeviationPool"


def test_commands_see_what_is_installed(installed, tmp_path):
    save(tmp_path / "model", norm="half", left_dim=3, right_dim=3, heads=2)
    result = sot("predict", tmp_path / "model", tmp_path / "model" / "x.png", "--json")
    assert result.returncode == 0 and len(json.loads(result.stdout)["classes"]) == 2, result.stderr
    words = ["train", "--model", "test_vit", "--data", "digits", "--out", tmp_path / "run", "--logger", "none"]
    settings = ["--set", "epochs=1", "--set", "train_samples=32", "--set", "batch_size=16", "--set", "img_size=32"]
    result = sot(*words, "--recipe", "digits", "--head", "pool=deviation,fusion=word", *settings)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["head"]["pool"] == "deviation"


def test_a_module_is_imported_by_name_for_any_command(clean, tmp_path):
    added = 'POOLS["deviation"] = StandardDeviationPool\n'
    (tmp_path / "my_heads.py").write_text(CODE + added)
    POOLS["deviation"] = lambda dim, config: POOLS["gap"](dim, config)  # to save a model that names it
    save(tmp_path / "model", pool="deviation")
    del POOLS["deviation"]
    words = ["predict", "model", "model/x.png", "--json"]
    result = sot(*words, cwd=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "unknown pool 'deviation'; accepted: mgcrp, gcp," in result.stderr
    assert "a pool of somebody's own needs its package installed or its module imported" in result.stderr
    result = sot("--import", "my_heads", *words, cwd=tmp_path)
    assert result.returncode == 0 and json.loads(result.stdout)["classes"], result.stderr
    del POOLS["deviation"], sys.modules["my_heads"]
    clean.setenv("SOT_IMPORT", "my_heads")
    assert sot(*words, cwd=tmp_path).returncode == 0


def test_the_probe_knows_heads_of_foreign_poolings(clean):
    from sot.probe.names import HEADS, check_names

    POOLS["gap2"] = POOLS["gap"]
    check_names(["gap2", "class+gap2"])
    assert HEADS.pop("gap2").fusion == "word" and HEADS.pop("class+gap2").fusion == "sum"
    with pytest.raises(ValueError, match="unknown head 'gap3'"):
        check_names(["gap3"])


@pytest.mark.parametrize("code, says", [("", "failed: No module named 'my_"), ("1 / 0", "failed: division by zero")])
def test_a_module_that_cannot_be_imported_is_one_sentence(code, says, clean, tmp_path):
    if code:
        (tmp_path / "my_heads.py").write_text(code)
    result = sot("--import", "my_heads", "recipes", cwd=tmp_path)
    assert result.returncode == 2 and f"--import my_heads {says}" in result.stderr, result.stderr


def test_a_package_that_is_damaged_is_named(installed):
    (installed / "my_heads.py").write_text("")
    with pytest.raises(ValueError, match=r"'deviation' is to be had from my_heads:Stand.*, which cannot be loaded"):
        HeadConfig(pool="deviation")
