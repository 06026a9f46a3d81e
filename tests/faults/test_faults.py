"""Kills, full disks, damaged files, wrong clocks and second writers, at random by a seed, and a table of figures.

`make test-faults` runs it. SOT_FAULT_SECONDS is the time it takes, SOT_FAULT_SEED chooses other moments.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from PIL import Image

import sot.training.train_images  # noqa: F401  loaded once: every run is a fork of this process
from sot.cli.main import main
from sot.files import digest
from sot.lock import LOCK

pytestmark = pytest.mark.faults
SECONDS = float(os.environ.get("SOT_FAULT_SECONDS", "840"))
SEED = int(os.environ.get("SOT_FAULT_SEED", "0"))
SHARES = {"kill": 0.45, "full disk": 0.25, "damage": 0.2, "two writers": 0.1}
HEAD = "head={heads: 2, left_dim: 3, right_dim: 3}"
RECIPE = ("epochs=3", "min_steps=0", "batch_size=16", "img_size=32", "ema=0.9", "mixup=0.8", HEAD)
ROOM = 40 * 2**20  # bytes that a run needs, and more


@dataclass
class Tally:
    """What came of one kind of fault."""

    tried: int = 0
    seen: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds, what):
        if not holds:
            self.wrong.append(what)


TALLIES = {kind: Tally() for kind in SHARES}


@dataclass
class Ended:
    """How a command ended: its exit code, or minus the signal, and what it said."""

    code: int
    said: str

    @property
    def fair(self):
        """Whether it did its work, or refused it in a sentence."""
        return "Traceback" not in self.said and (self.code == 0 or (self.code == 2 and "Error: " in self.said))


class Command:
    """`sot …` in a process of its own."""

    def __init__(self, *arguments, log):
        self.log = log
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1)
                os.dup2(file, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                sys.argv = ["sot", *map(str, arguments)]
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                sys.stdout.flush()
                os._exit(code)

    def ended(self):
        _, status = os.waitpid(self.pid, 0)
        return Ended(os.waitstatus_to_exitcode(status), self.log.read_text(errors="replace"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Images, a run that nothing happened to, and how long it took."""
    root, draw = tmp_path_factory.mktemp("faults"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        for number, name in enumerate(("red", "green", "blue")):
            (root / "images" / split / name).mkdir(parents=True)
            for index in range(count):
                noise = draw.integers(0, 80, (20, 24, 3), dtype=np.uint8)
                noise[..., number] += 120
                Image.fromarray(noise).save(root / "images" / split / name / f"{index}.png")
    began = time.monotonic()
    ended = Command(*train(root, root / "whole"), log=root / "log").ended()
    assert ended.code == 0, ended.said
    yield root, time.monotonic() - began
    report()


def train(root, out, *more, seed=42, logger="none"):
    settings = [part for setting in (*RECIPE, f"seed={seed}") for part in ("--set", setting)]
    command = ["train", "--model", "test_vit", "--data", root / "images", "--out", out, "--logger", logger]
    return [*command, "--recipe", "scratch", *settings, *more]


def turns(kind):
    """Random numbers, one generator a turn, until the share of the time is over."""
    end = time.monotonic() + SECONDS * SHARES[kind]
    number = 0
    while time.monotonic() < end or number < 2:
        TALLIES[kind].tried += 1
        yield random.Random(f"{SEED} {kind} {number}")
        number += 1


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


def test_killed_runs_end_with_the_same_bits(place):
    root, seconds = place
    tally = TALLIES["kill"]
    for draw in turns("kill"):
        out, moments = root / "killed", []
        shutil.rmtree(out, ignore_errors=True)
        for attempt in range(draw.randint(1, 3)):
            moments.append(draw.uniform(0, 1.1 * seconds))
            started = (out / "run.json").is_file()
            command = Command(*train(root, out, *(["--resume"] if started else [])), log=root / "log")
            time.sleep(moments[-1])
            with_signal = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            os.kill(command.pid, with_signal)
            ended = command.ended()
            tally.seen["ended first" if ended.code in (0, 2) else "killed"] += 1
            if ended.code == 0:
                break
            tally.expect("Traceback" not in ended.said, f"kill {moments} attempt {attempt}: {ended.said[-200:]}")
            for path in out.rglob("*") if out.exists() else ():  # and the clock goes wrong
                os.utime(path, (stamp := draw.uniform(0, 4e9), stamp))
        started = (out / "run.json").is_file()
        ended = Command(*train(root, out, *(["--resume"] if started else [])), log=root / "log").ended()
        tally.expect(ended.code == 0, f"kill {moments}: {ended.code} {ended.said[-300:]}")
        compare(tally, root, out, f"kill {moments}")
    assert not tally.wrong, tally.wrong


def small_disk(folder, size):
    """A file system of its own of so many bytes, or False where nobody may make one."""
    folder.mkdir(exist_ok=True)
    how = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    return os.geteuid() == 0 and subprocess.run(how, capture_output=True).returncode == 0


def test_full_disks_cost_files_and_not_runs(place):
    root, _ = place
    tally, disk = TALLIES["full disk"], root / "disk"
    for draw in turns("full disk"):
        size, out = int(2 ** draw.uniform(14, 24)), disk / "run"
        logger = draw.choice(("none", "tensorboard"))
        mounted = small_disk(disk, size)
        tally.seen["tmpfs" if mounted else "limit of a file"] += 1
        try:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            if not mounted:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            ended = Command(*train(root, out, logger=logger), log=root / "log").ended()
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            tally.seen["went on" if ended.code == 0 else "refused"] += 1
            tally.expect(ended.fair, f"disk of {size}: {ended.code} {ended.said[-400:]}")
            tally.expect(not leftovers(disk), f"disk of {size}: left {leftovers(disk)}")
            if ended.code == 2:
                tally.expect("/" in ended.said, f"disk of {size}: no file is named: {ended.said[-200:]}")
                if mounted:
                    subprocess.run(["mount", "-o", f"remount,size={ROOM}", disk], check=True)
                more = ["--resume"] if (out / "run.json").is_file() else []
                ended = Command(*train(root, out, *more, logger=logger), log=root / "log").ended()
                tally.expect(ended.code == 0, f"disk of {size}, resumed: {ended.said[-300:]}")
                compare(tally, root, out, f"disk of {size}, resumed")
        finally:
            if mounted:
                subprocess.run(["umount", disk], check=True)
            shutil.rmtree(disk, ignore_errors=True)
    assert not tally.wrong, tally.wrong


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


def test_damage_is_refused_or_mended(place):
    root, _ = place
    tally, out = TALLIES["damage"], root / "damaged"
    picture = next((root / "images").rglob("*.png"))
    for draw in turns("damage"):
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
            ended = Command(*command, log=root / "log").ended()
            tally.seen["went on" if ended.code == 0 else "refused"] += 1
            tally.expect(ended.fair, f"{how} {file.relative_to(out)}, {name}: {ended.code} {ended.said[-400:]}")
    assert not tally.wrong, tally.wrong


def test_of_two_writers_one_writes(place):
    root, _ = place
    tally, out = TALLIES["two writers"], root / "pair"
    for draw in turns("two writers"):
        shutil.rmtree(out, ignore_errors=True)
        pair = {}
        for seed in (1, 2):
            pair[seed] = Command(*train(root, out, seed=seed), log=root / f"log{seed}")
            time.sleep(draw.choice((0, 0, 0.01, 0.2)))
        ends = {seed: command.ended() for seed, command in pair.items()}
        winners = [seed for seed, end in ends.items() if end.code == 0]
        tally.seen["refused"] += sum(end.code == 2 for end in ends.values())
        tally.expect(len(winners) == 1 and all(end.fair for end in ends.values()), f"{[e.code for e in ends.values()]}")
        for seed in winners:
            known = json.loads((out / "run.json").read_text())["recipe"], (out / "recipe.yaml").read_text()
            tally.expect(all(f"seed: {seed}\n" in text for text in known), f"a mixture of two runs: {known}")
    assert not tally.wrong, tally.wrong


def report():
    """The table of figures."""
    print(f"\n\nseed {SEED}\n{'fault':<14}{'tried':>6}{'wrong':>7}  seen")
    for kind, tally in TALLIES.items():
        seen = ", ".join(f"{count} {what}" for what, count in sorted(tally.seen.items()))
        print(f"{kind:<14}{tally.tried:>6}{len(tally.wrong):>7}  {seen}")
    for wrong in (wrong for tally in TALLIES.values() for wrong in tally.wrong):
        print(f"- {wrong}")
