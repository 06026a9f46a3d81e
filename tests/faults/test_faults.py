"""Kills, full disks, damaged files, wrong clocks and second writers, at random by a seed, and a table of figures.

`make test-faults` runs it, two at a time. SOT_FAULT_SECONDS is the time it takes, on a busy machine more: of each
fault there are as many as LEAST says. SOT_FAULT_SEED chooses other moments.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from fault_runs import Command, Place, report, try_out
from PIL import Image

from sot.files import digest
from sot.lock import LOCK

pytestmark = pytest.mark.faults
HEAD = "head={heads: 2, left_dim: 3, right_dim: 3}"
RECIPE = ("epochs=3", "min_steps=0", "batch_size=16", "img_size=32", "ema=0.9", "mixup=0.8", HEAD)
ROOM = 40 * 2**20  # bytes that a run needs, and more


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Images, and a run that nothing happened to."""
    root, draw = tmp_path_factory.mktemp("faults"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        for number, name in enumerate(("red", "green", "blue")):
            (root / "images" / split / name).mkdir(parents=True)
            for index in range(count):
                noise = draw.integers(0, 80, (20, 24, 3), dtype=np.uint8)
                noise[..., number] += 120
                Image.fromarray(noise).save(root / "images" / split / name / f"{index}.png")
    command = Command(*train(root, root / "whole"), log=root / "log")
    seen = command.wait_for_files(root / "whole")
    ended = command.ended()
    assert ended.code == 0, ended.said
    yield Place(root, ended.seconds, len(seen))
    report()


def train(root, out, *more, seed=42, logger="none"):
    settings = [part for setting in (*RECIPE, f"seed={seed}") for part in ("--set", setting)]
    command = ["train", "--model", "test_vit", "--data", root / "images", "--out", out, "--logger", logger]
    return [*command, "--recipe", "scratch", *settings, *more]


def leftovers(out):
    """Parts of files that were never finished."""
    names = [str(path.relative_to(out)) for path in out.rglob("*")]
    return [name for name in names if ".partial" in name or "unfinished" in name or name.endswith(LOCK)]


def compare(tally, root, out, why):
    """Whether a run ended with the bits of one that nothing happened to."""
    for name in ("model.safetensors", "metrics.json", "config.json"):
        same = (out / name).is_file() and digest(out / name) == digest(root / "whole" / name)
        tally.expect(same, f"{why}: {name} differs")
    tally.expect(not leftovers(out), f"{why}: left {leftovers(out)}")


def wait(command, out, place, draw):
    """Until it has computed for some time, or while it writes files; which of them."""
    if draw.random() < 0.5:
        command.wait_for(seconds := draw.uniform(0, 1.05 * place.seconds))
        return f"{seconds:.2f} s"
    command.wait_for_files(out, number := draw.randint(1, place.files))
    time.sleep(draw.uniform(0, 0.02))
    return f"{number} files"


def kill(tally, place, draw):
    root, own = place.root, place.own()
    out, moments = own / "killed", []
    shutil.rmtree(out, ignore_errors=True)
    for _ in range(draw.randint(1, 3)):
        started = (out / "run.json").is_file()
        command = Command(*train(root, out, *(["--resume"] if started else [])), log=own / "log")
        moments.append(wait(command, out, place, draw))
        with_signal = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        os.kill(command.pid, with_signal)
        ended = command.ended()
        tally.expect(ended.code != 2, f"kill {moments}: refused: {ended.said[-300:]}")
        if ended.code in (0, 2):
            tally.seen["ended first"] += 1
            break
        saving = leftovers(out) and leftovers(out) != [LOCK]
        after = "while saving" if saving else f"after {len(list(out.glob('checkpoint-*')))} checkpoints"
        tally.seen[f"killed {after}"] += 1
        tally.expect("Traceback" not in ended.said, f"kill {moments}: {ended.said[-200:]}")
        for path in out.rglob("*") if out.exists() else ():  # and the clock goes wrong
            os.utime(path, (stamp := draw.uniform(0, 4e9), stamp))
    more = ["--resume"] if (out / "run.json").is_file() else []
    ended = Command(*train(root, out, *more), log=own / "log").ended()
    tally.expect(ended.code == 0, f"kill {moments}: {ended.code} {ended.said[-300:]}")
    compare(tally, root, out, f"kill {moments}")


def test_killed_runs_end_with_the_same_bits(place):
    try_out("kill", kill, place)


def small_disk(folder, size):
    """A file system of its own of so many bytes, or False where nobody may make one."""
    folder.mkdir(exist_ok=True)
    how = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    return os.geteuid() == 0 and subprocess.run(how, capture_output=True).returncode == 0


def fill(tally, place, draw):
    root, own = place.root, place.own()
    disk = own / "disk"
    size, out = int(2 ** draw.uniform(14, 24)), disk / "run"
    logger = draw.choice(("none", "tensorboard"))
    mounted = small_disk(disk, size)
    tally.seen["tmpfs" if mounted else "limit of a file"] += 1
    try:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        ended = Command(*train(root, out, logger=logger), log=own / "log").ended()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        tally.seen["went on" if ended.code == 0 else "refused"] += 1
        tally.expect(ended.fair, f"disk of {size}: {ended.code} {ended.said[-400:]}")
        tally.expect(not leftovers(disk), f"disk of {size}: left {leftovers(disk)}")
        if ended.code == 2:
            tally.expect("/" in ended.said, f"disk of {size}: no file is named: {ended.said[-200:]}")
            if mounted:
                subprocess.run(["mount", "-o", f"remount,size={ROOM}", disk], check=True)
            more = ["--resume"] if (out / "run.json").is_file() else []
            ended = Command(*train(root, out, *more, logger=logger), log=own / "log").ended()
            tally.expect(ended.code == 0, f"disk of {size}, resumed: {ended.said[-300:]}")
            compare(tally, root, out, f"disk of {size}, resumed")
    finally:
        if mounted:
            subprocess.run(["umount", disk], check=True)
        shutil.rmtree(disk, ignore_errors=True)


def test_full_disks_cost_files_and_not_runs(place):
    try_out("full disk", fill, place)


def damage(draw, file):
    """Flip a bit, cut the file, empty it, take it away, or put another in its place."""
    how, content = draw.choice(("flip", "cut", "empty", "remove", "garbage")), file.read_bytes()
    if how == "remove":
        file.unlink()
    elif how == "flip" and content:
        place = draw.randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
    else:
        new = {"cut": content[: draw.randrange(len(content) + 1)], "garbage": draw.randbytes(200)}
        file.write_bytes(new.get(how, b""))
    return how


def use_damaged(tally, place, draw):
    root, own = place.root, place.own()
    out, picture = own / "damaged", next((root / "images").rglob("*.png"))
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(root / "whole", out)
    file = draw.choice(sorted(path for path in out.rglob("*") if path.is_file()))
    how = damage(draw, file)
    commands = {
        "predict": ("predict", out, picture),
        "evaluate": ("evaluate", out, "--data", root / "images"),
        "resume": train(root, out, "--resume"),
    }
    for name, command in commands.items():
        ended = Command(*command, log=own / "log").ended()
        tally.seen["went on" if ended.code == 0 else "refused"] += 1
        tally.expect(ended.fair, f"{how} {file.relative_to(out)}, {name}: {ended.code} {ended.said[-400:]}")


def test_damage_is_refused_or_mended(place):
    try_out("damage", use_damaged, place)


def write_twice(tally, place, draw):
    root, own = place.root, place.own()
    out, pair = own / "pair", {}
    shutil.rmtree(out, ignore_errors=True)
    for seed in (1, 2):
        pair[seed] = Command(*train(root, out, seed=seed), log=own / f"log{seed}")
        if draw.random() < 0.5:
            pair[seed].wait_for(draw.uniform(0, 0.9 * place.seconds))
    ends = {seed: command.ended() for seed, command in pair.items()}
    winners = [seed for seed, end in ends.items() if end.code == 0]
    tally.seen["refused"] += sum(end.code == 2 for end in ends.values())
    tally.expect(len(winners) == 1 and all(end.fair for end in ends.values()), f"{[e.code for e in ends.values()]}")
    for seed in winners:
        known = json.loads((out / "run.json").read_text())["recipe"], (out / "recipe.yaml").read_text()
        tally.expect(all(f"seed: {seed}\n" in text for text in known), f"a mixture of two runs: {known}")


def test_of_two_writers_one_writes(place):
    try_out("two writers", write_twice, place)
