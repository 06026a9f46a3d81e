"""Work shared by threads: those of torch where they can be had, others where not."""

import subprocess
import sys
import threading

import pytest
import torch

from sot.bench.timing import thread_count
from sot.ops import use
from sot.ops._numba import threads
from sot.ops.cross_covariance import cross_covariance


@pytest.fixture(params=["those of torch", "others"])
def team(request, monkeypatch):
    if request.param == "others":
        monkeypatch.setattr(threads, "_team", None)
    elif threads._team is None:
        pytest.skip("torch is linked to another OpenMP runtime here")


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("items", [0, 1, 7, 40])
def test_every_item_is_done_once_and_results_come_in_order(items, count):
    with thread_count(count):
        parts = threads.on_threads(lambda part: list(range(*part)), items)
    assert [item for part in parts for item in part] == list(range(items))
    assert len(parts) == max(1, min(count, items // 4))


@pytest.mark.usefixtures("team")
def test_parts_are_done_at_the_same_time():
    both = threading.Barrier(2, timeout=20)
    with thread_count(2):
        assert sorted(threads.on_threads(lambda part: both.wait(), 8)) == [0, 1]


@pytest.mark.usefixtures("team")
def test_an_error_of_a_thread_is_raised():
    def fail(part):
        if part[1] == 8:
            raise OverflowError("too much")

    with thread_count(2), pytest.raises(OverflowError, match="too much"):
        threads.on_threads(fail, 8)


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_are_the_same_bits_in_every_run(count):
    tokens, weight = torch.randn(13, 30, 24), torch.randn(56, 24, requires_grad=True)
    with thread_count(count), use("auto"):
        gradients = [
            torch.autograd.grad(cross_covariance(tokens, weight, 2, 14).square().sum(), weight)[0] for _ in range(5)
        ]
    assert all(torch.equal(gradients[0], other) for other in gradients)


FORKED = """
import os, torch
from sot.ops._numba.threads import on_threads
torch.set_num_threads(2)
torch.ones(300, 300) @ torch.ones(300, 300)
assert on_threads(lambda part: part, 8) == [(0, 4), (4, 8)]
child = os.fork()
if child == 0:
    os._exit(int(on_threads(lambda part: part, 8) != [(0, 4), (4, 8)]))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="nothing forks there")
def test_a_forked_process_does_not_wait_for_threads_it_has_not_got():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=120)
