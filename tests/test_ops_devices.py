"""Who computes exact svPN on which device: on fake tensors, which need no device, and in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from reference import power_of_svd, relative_error
from sot.core.normalize import matrix_power_norm, singular_value_power_norm
from sot.ops import registry, use
from sot.ops.svpn import torch as by_torch
from sot.ops.svpn import triton as by_triton
from sot.ops.svpn.operator import SVPN

HAS_TRITON = registry.HAS_TRITON
ON_GPU = "triton" if HAS_TRITON else "torch"


class Calls(TorchDispatchMode):
    """What was called: copies between devices by where they go, operators of ours by who computes them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and "device" in kwargs:
            self.seen.append(f"to {kwargs['device'].type}")
        elif func.namespace == "sot":
            self.seen.append(args[-1])
        return func(*args, **(kwargs or {}))


def calls(device, *shape, dtype=torch.float32, norm=singular_value_power_norm, exponent=0.25):
    """What normalising matrices of this shape on this device calls."""
    with FakeTensorMode(), torch.no_grad(), Calls() as calls:
        matrix = torch.empty(shape, device=device, dtype=dtype)
        result = norm(matrix, exponent)
        assert result.shape == matrix.shape and result.device == matrix.device and result.dtype == dtype
    return calls.seen


ON_CPU = calls("cpu", 2, 14, 14)
COPIED = ["to cpu", *ON_CPU]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 6, 14, 14), torch.float32, [ON_GPU]),
        ((2, 14, 38), torch.float32, [ON_GPU]),  # wide
        ((0, 14, 14), torch.float32, [ON_GPU]),
        ((2, 14, 14), torch.float16, [ON_GPU]),
        ((2, 200, 32), torch.float32, ["torch"]),  # beyond the kernels: one batched call
        ((2, 65, 65), torch.float32, ["to cpu", "torch", "to cuda"]),
        ((2, 32, 32), torch.float64, ["torch"]),
        ((2, 33, 20), torch.float64, ["to cpu", "torch", "to cuda"]),
    ],
)
def test_cuda(shape, dtype, expected):
    assert calls("cuda", *shape, dtype=dtype) == expected


def test_cuda_without_triton(monkeypatch):
    without = {name: accepts for name, accepts in SVPN.backends.items() if name != "triton"}
    monkeypatch.setattr("sot.ops.svpn.operator.SVPN", registry.Operator(without, SVPN.exported, "torch"))
    assert calls("cuda", 2, 32, 32) == ["torch"]
    assert calls("cuda", 2, 33, 33) == ["to cpu", *calls("cpu", 2, 33, 33), "to cuda"]


@pytest.mark.parametrize("device", ["mps", "xpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_devices_copy_to_the_cpu_once_and_back_once(device, dtype):
    assert calls(device, 4, 6, 14, 14, dtype=dtype) == [*COPIED, f"to {device}"]


def test_covariances():
    assert calls("cuda", 2, 32, 32, norm=matrix_power_norm) == ["torch"]
    assert calls("cuda", 2, 48, 48, norm=matrix_power_norm) == ["to cpu", "torch", "to cuda"]
    assert calls("mps", 2, 8, 8, norm=matrix_power_norm) == ["to cpu", "torch", "to mps"]


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_backend_that_was_asked_for_wins():
    with use("torch"):
        assert calls("cuda", 2, 14, 14) == calls("cuda", 2, 65, 65) == calls("mps", 2, 14, 14) == ["torch"]


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize("capability, expected", [((7, 0), "torch"), ((7, 5), "triton"), ((9, 0), "triton")])
def test_gpus_too_old_for_triton_are_left_to_torch(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(by_triton, "AMD", False)

    class OnGPU:
        dtype, device, shape = torch.float32, torch.device("cuda", 0), (2, 14, 14)

    assert SVPN.choose(OnGPU(), 0.5, False) == expected


@pytest.mark.parametrize(  # without CUDA torch switches its autocast off
    ("device", "autocast"), [("cuda", False), ("mps", False), ("xpu", False), ("mps", True), ("xpu", True)]
)
def test_one_graph_under_the_compiler(device, autocast):
    """And under autocast the matrices stay in float32."""
    compiled = torch.compile(lambda x: singular_value_power_norm(x, 0.25), backend="aot_eager", fullgraph=True)
    with FakeTensorMode(), torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
        for batch in (2, 3):
            matrix = torch.empty(batch, 6, 14, 14, device=device).mT  # not contiguous
            result = compiled(matrix)
            assert (result.shape, result.dtype, result.device) == (matrix.shape, torch.float32, matrix.device)


def test_gram_matrices_of_a_gpu_are_computed_as_on_a_cpu():
    """The same lines run there: with rows beyond 32, deficient and not finite."""
    on_gpu = torch.empty(2, 200, 32, device="meta")
    assert by_torch.by_gram(on_gpu, False) and not by_torch.by_gram(torch.empty(2, 33, 33, device="meta"), False)
    matrix = torch.stack([torch.randn(40, 3) @ torch.randn(3, 8), torch.randn(40, 8), torch.full((40, 8), torch.nan)])
    out, _ = by_torch.power(matrix, 0.25, False)
    assert relative_error(out[:2], power_of_svd(matrix[:2].double(), 0.25, 1e-7)) < 1e-5 and out[2].isnan().all()
    shapes = [tuple(part.shape) for part in by_torch.power(on_gpu, 0.25, False)[1]]
    assert shapes == [(2, 200, 32), (2, 32), (2, 32, 32)]


AS_USERS_CALL_IT = """
import torch
from torch.utils.checkpoint import checkpoint
from sot.core.normalize import singular_value_power_norm as norm
from sot.ops import use
from sot.ops.svpn import triton, triton_jacobi, triton_products

triton.DEVICE = "cpu"  # what the interpreter takes
use("triton")
launched = []
for module, names in ((triton_jacobi, ["decompose"]), (triton_products, ["combine", "pull_back"])):
    for name in names:
        class Counted:
            def __init__(self, kernel, name): self.kernel, self.name = kernel, name
            def __getitem__(self, grid): launched.append(self.name); return self.kernel[grid]
        setattr(module, name, Counted(getattr(module, name), name))

def gradient(function, matrix):
    leaf = matrix.detach().clone().requires_grad_()
    out = function(leaf)
    return out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out))[0]

torch.manual_seed(0)
matrix = torch.randn(2, 2, 3)
expected = gradient(lambda x: norm(x, 0.25), matrix)
assert launched == ["decompose", "combine", "pull_back"] and len(launched) == sum(triton.LAUNCHES), launched
same = {
    "strided": (lambda x: norm(x.mT.contiguous().mT, 0.25), matrix),
    "sliced": (lambda x: norm(torch.cat([x, x], -1)[..., :3], 0.25), matrix),
    "compiled": (torch.compile(lambda x: norm(x, 0.25), backend="aot_eager", fullgraph=True), matrix),
    "dynamic": (torch.compile(lambda x: norm(x, 0.25), backend="aot_eager", fullgraph=True, dynamic=True), matrix),
    "checkpoint": (lambda x: checkpoint(lambda y: norm(y, 0.25), x, use_reentrant=False), matrix),
}
for name, (function, given) in same.items():
    for actual, wanted in zip(gradient(function, given), expected):
        assert torch.equal(actual, wanted), name
leaf = matrix.clone().requires_grad_()
out = checkpoint(lambda y: norm(y, 0.25), leaf, use_reentrant=True)
out.sum().backward()
assert torch.equal(out, expected[0]) and torch.equal(leaf.grad, expected[1])
with torch.autocast("cpu", torch.bfloat16):
    out, slope = gradient(lambda x: norm(x, 0.25), matrix)
assert torch.equal(out, expected[0]) and torch.equal(slope, expected[1])
half, slope = gradient(lambda x: norm(x, 0.25), matrix.bfloat16())
assert half.dtype == slope.dtype == torch.bfloat16 and (half - expected[0]).abs().max() < 0.02
launched.clear()
with torch.no_grad():
    assert torch.equal(norm(matrix, 0.25), expected[0])
assert launched == ["decompose", "combine"]
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_the_kernels_are_called_as_users_call_them():
    """Strides, slices, the compiler, gradient checkpoints, autocast and half precision, with the gradient."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when triton is imported
    run = subprocess.run([sys.executable, "-c", AS_USERS_CALL_IT], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
