"""The same command on two processes: the weights and scores of one, whole or sharded, also when it is resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_cli import sot
from test_train import one_thread, pictures  # noqa: F401

from sot.training.keeping import StopOnSignal
from sot.training.run_folder import checkpoints, is_whole

SETTINGS = [
    *("epochs=2", "batch_size=16", "img_size=32", "lr=1e-3", "ema=0.9", "erasing=0.5", "weight_decay=0.05"),
    "head={heads: 2, left_dim: 3, right_dim: 3}",
    # Attention does not depend on the bias of its keys, whose gradient is rounding alone: Adam takes steps of full size
    # in random directions along it.
    "model_args={qkv_bias: false}",
]
SHARDED = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_machines": 1,
    "num_processes": 2,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block,SecondOrderHead",  # the head is called, so it can be a unit
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}


def arguments(data, out, *more):
    options = [option for setting in SETTINGS for option in ("--set", setting)]
    return [
        "train",
        "--model",
        "test_vit",
        "--data",
        data,
        "--out",
        out,
        "--logger",
        "none",
        "--recipe",
        "digits",
        *options,
        *more,
    ]


def launch(launcher, *words):
    """Two processes of one thread each that meet on the loopback."""
    module = [sys.executable, "-m", *map(str, launcher), *map(str, words)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(module, capture_output=True, text=True, env=environment, timeout=600)


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def alone(pictures, tmp_path_factory):  # noqa: F811
    """A run of one process; the last picture of the validation set is missing, so that two cannot share it equally."""
    root = tmp_path_factory.mktemp("scale")
    shutil.copytree(pictures, root / "pictures")
    (root / "pictures" / "val" / "red" / "3.png").unlink()
    result = sot(*arguments(root / "pictures", root / "alone"))
    assert result.returncode == 0, result.stderr
    return root


def farthest(first, second):
    """Largest difference between the weights of two files."""
    first, second = load_file(first), load_file(second)
    assert first.keys() == second.keys()
    return max((first[name].float() - second[name].float()).abs().max().item() for name in first)


def check_same(one, other):
    assert farthest(one / "model.safetensors", other / "model.safetensors") < 1e-6
    histories = [json.loads((folder / "metrics.json").read_text()) for folder in (one, other)]
    assert len(histories[0]) == len(histories[1]) == 2
    for ours, theirs in zip(*histories):
        assert ours == pytest.approx(theirs, rel=5e-6, abs=2e-6)  # the loss and accuracy of 11 pictures, not of 12


def test_two_processes_end_with_the_weights_of_one_and_resume(alone):
    out = alone / "two"
    command = ["sot", *arguments(alone / "pictures", out)]
    result = launch([*TORCHRUN, "-m"], *command)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("accuracy") == 1  # one process speaks
    check_same(alone / "alone", out)

    again = launch([*TORCHRUN, "-m"], *command)
    assert again.returncode != 0 and "exists: continue it with --resume" in again.stderr

    shutil.rmtree(checkpoints(out)[0])
    (out / "model.safetensors").unlink()
    result = launch([*TORCHRUN, "-m"], *command, "--resume")
    assert result.returncode == 0, result.stderr
    check_same(alone / "alone", out)


def test_a_signal_to_one_of_two_processes_stops_both_with_a_checkpoint(alone, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", *TORCHRUN, "-m", "sot", *arguments(alone / "pictures", out, "--set", "epochs=500")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=environment)
        try:
            while not checkpoints(out):
                assert launcher.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
            os.kill(max(children(launcher.pid)), signal.SIGTERM)
            assert launcher.wait(300) != 0
        finally:
            launcher.kill()
    said = (tmp_path / "log").read_text()
    assert f"Stopped. Saved: {checkpoints(out)[0]}" in said and said.count("Continue with: sot train") == 1
    assert is_whole(checkpoints(out)[0]) and not (out / "model.safetensors").exists()


def test_a_signal_that_comes_while_processes_agree_is_told_at_the_next_step(monkeypatch):
    stop, args = StopOnSignal(), SimpleNamespace(world_size=2, device="cpu")

    def stopped():
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        stop.on_step_end(args, None, control)
        return control.should_save and control.should_training_stop

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with stop.listening():
        assert not stopped()  # the others do not know of it yet
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    assert stopped() and stop.received == signal.SIGTERM


def children(process):
    """Processes that a process started."""
    files = Path(f"/proc/{process}/task").glob("*/children")
    return [int(number) for file in files for number in file.read_text().split()]


def test_sharded_weights_end_as_whole_ones_and_resume(alone, tmp_path):
    out, config = tmp_path / "sharded", tmp_path / "fsdp.yaml"
    config.write_text(yaml.safe_dump(SHARDED))
    launcher = ["accelerate.commands.launch", "--config_file", config, Path(__file__).parent / "fsdp_worker.py"]
    result = launch(launcher, *arguments(alone / "pictures", out))
    assert result.returncode == 0, result.stderr
    assert all(list(path.glob("pytorch_model_fsdp*/*.distcp")) for path in checkpoints(out))  # it was sharded indeed
    check_same(alone / "alone", out)

    shutil.rmtree(checkpoints(out)[0])
    (out / "model.safetensors").unlink()
    result = launch(launcher, *arguments(alone / "pictures", out, "--resume"))
    assert result.returncode == 0, result.stderr
    check_same(alone / "alone", out)


def test_fsdp_1_is_refused_before_training(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # what accelerate launch sets, as for its version
    monkeypatch.setenv("FSDP_VERSION", "1")
    result = sot(*arguments(alone / "pictures", tmp_path / "out"))
    assert result.returncode == 2 and "set fsdp_version: 2" in result.stderr and not (tmp_path / "out").exists()


def test_evaluation_on_two_processes_counts_every_picture_once(alone, tmp_path):
    words = ["evaluate", alone / "alone", "--data", alone / "pictures", "--batch-size", "2", "--json"]
    result = launch([*TORCHRUN, "-m"], "sot", *words, "--confusion", tmp_path / "confusion.png")
    assert result.returncode == 0, result.stderr
    shared, one = json.loads(result.stdout), json.loads(sot(*words).stdout)
    assert shared["classes"] == one["classes"] and sum(row[1] for row in one["classes"]) == 11
    assert shared["loss"] == pytest.approx(one["loss"]) and (tmp_path / "confusion.png").is_file()


def test_the_model_that_is_saved_is_the_average(alone):
    checkpoint = checkpoints(alone / "alone")[0]
    assert farthest(alone / "alone" / "model.safetensors", checkpoint / "ema.safetensors") == 0
    assert farthest(alone / "alone" / "model.safetensors", checkpoint / "model.safetensors") > 1e-4


def test_a_batch_that_cannot_be_divided_is_refused(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    result = sot(*arguments(alone / "pictures", tmp_path / "out"))
    assert result.returncode == 2
    assert "batch_size 16 cannot be divided among 3 processes × 1 accumulation steps" in result.stderr


def test_accumulated_batches_take_the_steps_of_whole_ones(alone, tmp_path):
    result = sot(*arguments(alone / "pictures", tmp_path / "out", "--accumulation", "4", "--resume"))  # from nothing
    assert result.returncode == 0, result.stderr
    check_same(alone / "alone", tmp_path / "out")
