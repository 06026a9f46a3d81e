"""The program `sot` parses before it loads torch, timm and transformers; `import sot` registers everything at once."""

import subprocess
import sys

import pytest

SCRIPT = "import sys; from sot_program import main; sys.argv[0] = 'sot'; main()"  # what the console script does
HEAVY = {"torch", "timm", "transformers", "matplotlib", "sklearn", "numpy"}


def start(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


def loaded(result):
    """Top-level modules that Python with `-X importtime` says it imported."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return {line.split("|")[-1].strip().split(".")[0] for line in lines}


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


@pytest.mark.parametrize("program, name", [(("-m", "sot"), "sot_7"), (("-c", SCRIPT), "ps_vit_ti_14")])
def test_a_command_knows_the_registered_models(program, name):
    result = start(*program, "models", name, "--json")
    assert result.returncode == 0 and f'"model": "{name}"' in result.stdout, result.stderr


REGISTERED = """
import sys
import sot
assert {"torch", "timm", "transformers"} <= sys.modules.keys()
import timm, transformers
assert {"sot_7", "sot_tiny", "ps_vit_b_14", "conformer_ti"} <= set(timm.list_models())
assert transformers.AutoConfig.for_model("sot").model_type == "sot"
assert sot.SoTConfig in transformers.AutoModelForImageClassification._model_mapping
assert all(hasattr(sot, name) for name in sot.__all__)
"""


@pytest.mark.parametrize("command", [("-c", REGISTERED), ("-m", "theirs", "-m", "sot")], ids=["script", "module"])
def test_import_registers_the_family_in_every_other_program(command, tmp_path, monkeypatch):
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text(REGISTERED)
    (package / "__main__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    result = start(*command)
    assert result.returncode == 0, result.stderr


def test_names_are_there_in_the_program_for_code_that_it_loads():
    result = start("-c", "import sot_program, sot; print(sot.HeadConfig(), sot.equip); sot.nothing")
    assert "HeadConfig(pool='mgcrp'" in result.stdout and "no attribute 'nothing'" in result.stderr
