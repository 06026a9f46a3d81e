"""One writer at a time: locks, and what they are for."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_cli import sot

from sot.errors import SettingError
from sot.files import write_atomically
from sot.lock import LOCK, only_writer
from sot.training.recipe import Recipe
from sot.training.run import write_beside
from sot.training.run_folder import open_run

HOLD = """
import sys, time
from pathlib import Path
from sot.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(600)
"""
IDENTITY = {"command": "train", "model": "m", "data": "d"}


@pytest.fixture
def other(tmp_path):
    """Another process that writes to a folder, and the folder."""
    folder = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "has it\n"
        yield process, folder
        process.kill()


def test_a_second_writer_is_refused_and_told_who_is_the_first(other):
    process, folder = other
    told = f"process {process.pid} on .* writes to {folder}: wait until it ends"
    with pytest.raises(SettingError, match=told), only_writer(folder):
        pass
    for options in ({"resume": True}, {"overwrite": True}, {}):
        given = {"resume": False, "overwrite": False, **options}
        with pytest.raises(SettingError, match=told), open_run(folder, IDENTITY, Recipe(), **given):
            pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (folder / LOCK).exists()
    with only_writer(folder):  # the system has ended the lock with the process
        assert str(os.getpid()) in (folder / LOCK).read_text()
    assert not any(folder.iterdir())


def test_who_waits_gets_it(other):
    process, folder = other
    watcher = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"])
    began = time.monotonic()
    with only_writer(folder, wait=True):
        assert time.monotonic() - began > 0.2
    watcher.wait()


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--model", "test_vit", "--data", "digits", "--set", "img_size=32", "--out", "{}"),
        ("train", "--model", "test_vit", "--data", "digits", "--set", "img_size=32", "--out", "{}", "--resume"),
        ("finetune", "--model", "{bert}", "--task", "acceptability", "--set", "max_length=16", "--out", "{}"),
        ("tune", "test_vit", "--data", "digits", "--search", "lr=1e-4,1e-3", "--out", "{}"),
        ("reproduce", "3a", "--data", "digits", "--out", "{}", "--report"),
        ("export", "{image}", "--to", "torch", "--out", "{}/model.pt2"),
    ],
)
def test_no_command_writes_beside_another(other, stand_ins, tmp_path, command):
    import sot as package

    process, folder = other
    if command[0] == "export":
        head = {"heads": 2, "left_dim": 3, "right_dim": 3}
        package.equip("test_vit", 2, head=head, pretrained=False).save_pretrained(tmp_path / "image")
    bert = stand_ins["google-bert/bert-base-uncased"]
    result = sot(*(part.format(folder, bert=bert, image=tmp_path / "image") for part in command))
    assert result.returncode == 2 and f"process {process.pid} on" in result.stderr, result.stderr
    assert "choose another --out" in result.stderr and [path.name for path in folder.iterdir()] == [LOCK]


def test_a_search_that_runs_is_not_replaced(tmp_path):
    out = tmp_path / "search"
    with open_run(out, IDENTITY, Recipe(), resume=False, overwrite=False):
        pass
    replaced = open_run(out, IDENTITY, Recipe(), resume=False, overwrite=True)
    with only_writer(out / "trials" / "3"), pytest.raises(SettingError, match=r"writes to .*trials/3"), replaced:
        pass
    assert json.loads((out / "run.json").read_text())["model"] == "m"


RACE = """
import sys, time
from pathlib import Path
from sot.training.recipe import Recipe
from sot.training.run_folder import open_run
print("ready", flush=True); sys.stdin.readline()
with open_run(Path(sys.argv[1]), {"model": sys.argv[2]}, Recipe(seed=int(sys.argv[2])), False, False):
    print("won", flush=True)
    time.sleep(0.5)
"""


@pytest.mark.slow
def test_of_two_that_start_at_once_one_has_the_folder(tmp_path):
    for turn in range(3):
        command, options = [sys.executable, "-c", RACE, tmp_path / str(turn)], {"text": True, "stdin": subprocess.PIPE}
        pair = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, **options) for n in (1, 2)]
        for process in pair:
            process.stdout.readline()
        for process in pair:
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=60)[0] for process in pair]
        assert sorted(said) == ["", "won\n"]
        winner = str(1 + said.index("won\n"))
        assert json.loads((tmp_path / str(turn) / "run.json").read_text())["model"] == winner
        assert f"seed: {winner}" in (tmp_path / str(turn) / "recipe.yaml").read_text()


def test_a_full_disk_is_named_and_leaves_no_part(tmp_path, caplog):
    script = """
import resource, sys
from pathlib import Path
from sot.files import write_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomically(Path(sys.argv[1]), b"x" * 5000)
except OSError as error:
    print(error)
"""
    file = tmp_path / "metrics.csv"
    said = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, timeout=60)
    assert said.stdout == f"cannot write {file}: File too large\n" and not any(tmp_path.iterdir())
    write_beside(tmp_path / "none" / "curves.png", b"")
    assert "curves.png: No such file or directory; the run goes on" in caplog.text
    with pytest.raises(OSError, match=r"cannot write .*x: No such file"):
        write_atomically(tmp_path / "none" / "x", "")
