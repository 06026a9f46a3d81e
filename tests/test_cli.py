"""The command line, as people type it."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from test_convert import build, official

from sot.cli.main import COMMANDS, main


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


def sot(*arguments, cwd=None):
    """What a command prints and returns, run in this process: importing torch anew for each would take minutes."""
    before, output, errors, code = os.getcwd(), io.StringIO(), io.StringIO(), 0
    os.chdir(cwd or before)
    try:
        with redirect_stdout(output), redirect_stderr(errors), patch.object(sys, "argv", ["sot", *map(str, arguments)]):
            main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        os.chdir(before)
    return Result(code, output.getvalue(), errors.getvalue())


def test_it_runs_as_a_program():
    result = subprocess.run([sys.executable, "-m", "sot", "--help"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and all(f"─ {panel} ─" in result.stdout for panel in COMMANDS)


def test_help_leads_to_every_command():
    result = sot("--help")
    assert result.returncode == 0
    for command in ("models", "backbones", "convert", "train", "finetune", "evaluate", "predict", "recipes"):
        assert command in result.stdout and sot(command, "-h").returncode == 0


def test_models_prints_counts_and_the_papers_figures():
    result = sot("models", "sot_*")
    assert result.returncode == 0, result.stderr
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in result.stdout.splitlines() if "│" in line}
    assert [cell.strip() for cell in rows["sot_small"]] == ["27.02", "26.9", "5.80", "5.8", "6.21"]
    records = [json.loads(line) for line in sot("models", "sot_7", "--json").stdout.splitlines()]
    assert records[0]["params"] == 5449854 and records[0]["paper_macs"] == pytest.approx(1.06e9)


def test_convert_reports_every_key_and_writes_the_file(tmp_path):
    state = official(build())
    torch.save(state, tmp_path / "theirs.pth")
    result = sot("convert", "theirs.pth", "ours.safetensors", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"{len(state) - 1} keys used, 1 not used" in result.stdout and "for sot_7" in result.stdout
    assert (tmp_path / "ours.safetensors").is_file()


TRAIN = ("train", "--model", "vit_tiny_patch16_224", "--data", "digits", "--out", "run")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["models", "nothing_*"], "no model matches 'nothing_*'"),
        (["convert", "missing.pth", "out.safetensors"], "no such file: missing.pth"),
        (["convert", "missing.pth", "out.bin"], "must end in .safetensors, got out.bin"),
        (["convert", "a", "b", "--fusion", "add"], "add"),
        (["modles"], "modles"),
        ([*TRAIN, "--set", "model_args={foo: 1}"], "cannot be built with {'foo': 1}"),
        ([*TRAIN, "--set", "img_size=15"], "cannot be built with {'img_size': 15}"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(arguments, message, tmp_path):
    result = sot(*arguments, cwd=tmp_path)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
