"""The program `sot` parses before it loads a library; `import sot` registers our models with whoever is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sot

SCRIPT = "import sys; from sot.cli.main import main; sys.argv[0] = 'sot'; main()"  # what the console script does
HEAVY = {"torch", "timm", "transformers", "matplotlib", "sklearn", "numpy"}


def start(*arguments):
    silent = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=silent)


def run(*lines):
    """What a fresh process prints that runs these lines, which must not fail or warn."""
    result = start("-c", "\n".join(lines))
    assert result.returncode == 0 and not result.stderr, result.stderr
    return result.stdout


def loaded(result):
    """Top-level modules that Python with `-X importtime` says it imported."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return {line.split("|")[-1].strip().split(".")[0] for line in lines}


# --- the program -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [("-m", "sot"), ("-msot",), ("-c", SCRIPT)], ids=["module", "short", "script"])
@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["convert", "--help"], 0),
        (["bench", "head", "--help"], 0),
        (["modles"], 2),
        (["train", "--nope"], 2),
        (["convert", "a", "b", "--fusion", "add"], 2),
    ],
)
def test_help_and_mistyped_commands_load_no_torch(program, arguments, code):
    result = start("-X", "importtime", *program, *arguments)
    assert result.returncode == code and {"sot", "typer"} <= loaded(result)
    assert not HEAVY & loaded(result)


@pytest.mark.parametrize("program, name", [(("-m", "sot"), "sot_7"), (("-c", SCRIPT), "t2t_vit_7")])
def test_a_command_knows_the_registered_models(program, name):
    result = start(*program, "models", f"{name}*", "--json")
    assert result.returncode == 0 and f'"model": "{name}"' in result.stdout, result.stderr
    assert not result.stderr


# --- the package -------------------------------------------------------------------------------------------


def test_importing_the_package_loads_and_prints_nothing():
    new = "{name.split('.')[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names"
    assert run("import sys; before = {*sys.modules}; import sot", f"print({new})") == "{'sot'}\n"


def test_public_names_are_listed_and_loaded_when_asked_for():
    assert dir(sot) == sorted(sot.__all__) and {"equip", "HeadConfig", "__version__"} <= set(dir(sot))
    assert all(getattr(sot, name) is not None for name in dir(sot))
    assert sot.core.__name__ == "sot.core"
    with pytest.raises(AttributeError, match="module 'sot' has no attribute 'nothing'"):
        _ = sot.nothing


USE = """
assert timm.create_model("sot_7", num_classes=3).num_classes == 3
for kind in ("sot", "second-order-transformer"):
    assert transformers.AutoConfig.for_model(kind).model_type == "second-order-transformer"
assert "sot.models.modeling" in sys.modules
from transformers import AutoModelForImageClassification
assert "SoTConfig" in {config.__name__ for config in AutoModelForImageClassification._model_mapping._extra_content}
"""


@pytest.mark.parametrize("order", ["sot, timm, transformers", "sot, transformers, timm", "transformers, sot, timm"])
def test_both_libraries_know_the_models_in_any_order_of_imports(order):
    run(f"import sys, {order}", USE)


def test_a_saved_folder_opens_by_the_auto_classes_and_in_a_pipeline(tmp_path):
    from PIL import Image

    sot.equip("test_vit", labels=["a", "b"], pretrained=False).save_pretrained(tmp_path / "model")
    Image.new("RGB", (40, 40)).save(tmp_path / "x.png")
    found = run(
        "import sot",
        "from transformers import AutoModelForImageClassification, pipeline",
        f"print(type(AutoModelForImageClassification.from_pretrained({str(tmp_path / 'model')!r})).__name__)",
        f"found = pipeline('image-classification', {str(tmp_path / 'model')!r})({str(tmp_path / 'x.png')!r})",
        "print(sorted(each['label'] for each in found))",
    )
    assert found.splitlines() == ["SoTForImageClassification", "['a', 'b']"]


HIDE = """
import sys, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # what torch says without it
HIDDEN = {"timm", "transformers", "accelerate", "huggingface_hub", "tokenizers", "safetensors", "torchvision", "PIL"}
HIDDEN |= {"numba", "llvmlite", "numpy", "scipy", "sklearn", "matplotlib", "tensorboard", "rich", "typer", "yaml"}
sys.modules.update(dict.fromkeys(HIDDEN))  # as if they were not installed
"""


def test_core_works_with_torch_alone():
    shape = run(
        HIDE,
        "import torch, sot",
        "from sot.core import HeadConfig, SecondOrderHead",
        "for pool in sot.POOLS.own:",
        "    head = SecondOrderHead(32, 3, HeadConfig(pool=pool))",
        "    logits = head(torch.randn(2, 32), torch.randn(2, 9, 32))",
        "    logits.sum().backward()",
        "    print(tuple(logits.shape), all(p.grad is not None for p in head.parameters()))",
    )
    assert shape == "(2, 3) True\n" * len(sot.POOLS.own)


# --- peers of the paper ------------------------------------------------------------------------------------


def test_peers_are_registered_when_one_is_named(tmp_path):
    found = run(
        "import sot, timm",
        "print(timm.is_model('sot_7'), timm.is_model('t2t_vit_7'))",
        "model = sot.equip('t2t_vit_7', 2, pretrained=False, model_args={'img_size': 32})",
        f"model.save_pretrained({str(tmp_path)!r})",
        "print(timm.is_model('t2t_vit_7'), 'sot.training' in __import__('sys').modules)",
    )
    assert found == "True False\nTrue False\n"
    found = run(
        "import sot",
        "from transformers import AutoModelForImageClassification",
        f"model = AutoModelForImageClassification.from_pretrained({str(tmp_path)!r})",
        "print(model.config.backbone_config.architecture)",
    )
    assert found == "t2t_vit_7\n"


def test_the_names_of_all_peers_are_known():
    import timm

    import sot.paper.peers
    from sot.models.variants import PEER_PREFIXES

    folder = sot.paper.peers.__name__
    peers = {name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith(folder)}
    assert len(peers) == 23 and all(name.startswith(PEER_PREFIXES) for name in peers)
    theirs = {name for name in timm.list_models() if name.startswith(PEER_PREFIXES)}
    assert theirs == peers


# --- the little things -------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [("-m", "sot"), ("-c", SCRIPT)], ids=["module", "script"])
def test_the_version_is_printed_without_torch(program):
    result = start("-X", "importtime", *program, "--version")
    assert (result.returncode, result.stdout) == (0, f"sot {sot.__version__}\n") and not HEAVY & loaded(result)


def test_the_shell_completes_commands_and_options(tmp_path):
    """What Bash gets after the line that `--show-completion` prints was evaluated."""
    program = tmp_path / "sot"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m sot "$@"\n')
    program.chmod(0o755)
    ask = '_sot_completion sot; echo "${COMPREPLY[@]}"'
    script = f'eval "$(sot --show-completion bash)"; COMP_WORDS=(sot pre); COMP_CWORD=1; {ask}'
    script += f"; COMP_WORDS=(sot predict --ba); COMP_CWORD=2; {ask}"
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, env=path)
    assert result.stdout == "predict\n--batch-size\n", result.stderr


# --- hints how to install ----------------------------------------------------------------------------------


def test_hints_name_libraries_of_an_extra_and_else_the_checkout(monkeypatch):
    from importlib import metadata

    from sot.extras import install_hint, need

    written = [
        "torch>=2.7",
        "gradio>=6.31; extra == 'ui'",
        'onnx>=1.21; extra == "export"',
        "onnxruntime; extra == 'export'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: written)
    assert install_hint("ui") == "pip install 'gradio>=6.31'"
    assert install_hint("export") == "pip install 'onnx>=1.21' 'onnxruntime'"
    assert install_hint("new") == "pip install -e '.[new]' in the checkout of second-order-transformer"
    with pytest.raises(ValueError, match=r"the page needs the library gradioo: pip install 'gradio>=6\.31'"):
        need("gradioo", "the page", "ui")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install_hint("ui") == "pip install -e '.[ui]' in the checkout of second-order-transformer"


def test_hints_and_pages_name_extras_that_there_are():
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    root = Path(sot.__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = "".join(page.read_text() for page in [root / "README.md", *(root / "docs").glob("*.md")])
    assert "pip install 'second-order-transformer" not in pages  # which works after a release only
    named = {name for found in re.findall(r"pip install (?:-e )?'\.\[([\w,]+)\]'", pages) for name in found.split(",")}
    assert {"ui", "data", "export"} <= named <= set(extras)


def test_long_work_says_how_far_it_is_where_there_is_no_terminal(monkeypatch, capsys):
    from sot.cli import options

    monkeypatch.setattr(options, "SECONDS_A_LINE", 0)
    assert list(options.progress([1, 2, 3], "Fitting")) == [1, 2, 3]
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == "Fitting: 1 of 3, 0 s left" and said.out == ""
    assert list(options.progress((letter for letter in "ab"), "Reading")) == ["a", "b"]
    assert capsys.readouterr().err.splitlines() == ["Reading: 1", "Reading: 2"]
