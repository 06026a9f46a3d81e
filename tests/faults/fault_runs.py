"""Commands in processes of their own, two at a time, and what came of them."""

import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Loaded once: every run is a fork of this process.
import sot.evaluation.evaluate
import sot.figures
import sot.ops.svpn.numba
import sot.training.train_images  # noqa: F401
from sot.cli.main import main

SECONDS = float(os.environ.get("SOT_FAULT_SECONDS", "840"))
SEED = int(os.environ.get("SOT_FAULT_SEED", "0"))
SHARES = {"kill": 0.45, "full disk": 0.25, "damage": 0.2, "two writers": 0.1}
LEAST = {"kill": 20, "full disk": 10, "damage": 12, "two writers": 6}
AT_ONCE = 2


@dataclass
class Tally:
    """What came of one kind of fault."""

    tried: int = 0
    seen: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds, what):
        if not holds:
            self.wrong.append(what)

    def add(self, other):
        self.tried += other.tried
        self.seen += other.seen
        self.wrong += other.wrong


TALLIES = {kind: Tally() for kind in SHARES}


@dataclass
class Ended:
    """How a command ended: its exit code, or minus the signal, what it said, and the seconds that it computed."""

    code: int
    said: str
    seconds: float

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

    def runs(self):
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def computed(self):
        """Seconds, which a busy machine does not make more of."""
        return sum(psutil.Process(self.pid).cpu_times()[:2])

    def wait_for(self, seconds):
        """Until it has computed for so long, or it ended."""
        while self.runs() and (left := seconds - self.computed()) > 0:
            time.sleep(min(left, 0.1))  # it cannot compute that much sooner

    def wait_for_files(self, out, number=float("inf")):
        """Until so many new files were seen, or it ended; all that were seen."""
        before, seen = files_in(out), set()
        while self.runs() and len(seen) < number:
            time.sleep(0.003)
            seen |= files_in(out) - before
        return seen

    def ended(self):
        _, status, used = os.wait4(self.pid, 0)
        said = self.log.read_text(errors="replace")
        return Ended(os.waitstatus_to_exitcode(status), said, used.ru_utime + used.ru_stime)


def files_in(folder):
    """All files, though they come and go."""
    return {os.path.join(inner, name) for inner, _, names in os.walk(folder) for name in names}


@dataclass
class Place:
    """Where it happens, and of a run that nothing happens to the seconds that it computes and the files it writes."""

    root: Path
    seconds: float = 0
    files: int = 0

    def own(self):
        """A folder of this process, for what it runs beside the others."""
        folder = self.root / str(os.getpid())
        folder.mkdir(exist_ok=True)
        return folder


def try_out(kind, happen: Callable, place):
    """Let it happen, with one generator of random numbers a turn, until the share of the time is over."""
    end = time.monotonic() + SECONDS * SHARES[kind]
    with multiprocessing.get_context("fork").Pool(AT_ONCE) as pool:
        work = [(kind, happen, place, end, first) for first in range(AT_ONCE)]
        for tally in pool.starmap(turns, work):
            TALLIES[kind].add(tally)
    assert not TALLIES[kind].wrong, TALLIES[kind].wrong


def turns(kind, happen, place, end, number):
    """Every AT_ONCE-th turn."""
    tally = Tally()
    while time.monotonic() < end or number < LEAST[kind]:
        tally.tried += 1
        happen(tally, place, random.Random(f"{SEED} {kind} {number}"))
        number += AT_ONCE
    return tally


def report():
    """The table of figures."""
    print(f"\n\nseed {SEED}\n{'fault':<14}{'tried':>6}{'wrong':>7}  seen")
    for kind, tally in TALLIES.items():
        seen = ", ".join(f"{count} {what}" for what, count in sorted(tally.seen.items()))
        print(f"{kind:<14}{tally.tried:>6}{len(tally.wrong):>7}  {seen}")
    for wrong in (wrong for tally in TALLIES.values() for wrong in tally.wrong):
        print(f"- {wrong}")
