"""Operators as torch sees them, and the one place that chooses who computes them."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sot
from sot.core.head import HeadConfig, SecondOrderHead
from sot.core.normalize import fast_singular_value_power_norm, matrix_square_root, singular_value_power_norm
from sot.ops import registry, use
from sot.ops.cross_covariance import cross_covariance
from sot.ops.svpn.operator import SVPN

SPD = torch.eye(20).expand(2, 20, 20) + 0.1
TOKENS, WEIGHT = torch.linspace(-1, 1, 2 * 9 * 24).view(2, 9, 24).sin(), torch.linspace(-1, 1, 56 * 24).view(56, 24)
MATRIX = torch.linspace(-3, 3, 2 * 7 * 5).view(2, 7, 5).sin()


def calls(backend):
    """Every operator with arguments of an ordinary call."""
    ops = torch.ops.sot
    power, *parts = ops.svpn(MATRIX, 0.25, False, True, backend)
    yield ops.svpn, (MATRIX, 0.25, False, True, backend)
    yield ops.svpn, (MATRIX, 0.3, False, False, backend)
    yield ops.svpn_backward, (power, *parts, 0.25, 1e-5, False, backend)
    yield ops.svpn_backward, (power, *parts, 0.3, 1e-5, False, backend)
    root, kept = ops.matrix_root(SPD, 3, backend)
    yield ops.matrix_root, (SPD, 3, backend)
    yield ops.matrix_root_backward, (SPD, root, kept, 3, backend)
    out, projected = ops.cross_covariance(TOKENS, WEIGHT, None, 2, 14, True, backend)
    yield ops.cross_covariance, (TOKENS, WEIGHT, None, 2, 14, True, backend)
    for wanted in ([True, True], [False, True], [True, False]):
        yield ops.cross_covariance_backward, (TOKENS, WEIGHT, None, projected, out, wanted, backend)
    fast, *parts = ops.svpn_fast(MATRIX, torch.ones(5), 0.5)
    yield ops.svpn_fast, (MATRIX, torch.ones(5), 0.5)
    yield ops.svpn_fast_backward, (fast, MATRIX, torch.ones(5), parts, 0.5)
    rows, grad = torch.randn(3, 5), torch.randn(3, 4)
    yield ops.linear, (rows, torch.randn(4, 5), torch.randn(4))
    yield ops.linear, (grad.mT, rows.mT, None)
    if backend == "torch":
        yield ops.svpn, (SPD, 0.5, True, True, backend)


def test_torch_finds_nothing_wrong_with_any_operator(backend):
    for operator, arguments in calls(backend):
        torch.library.opcheck(operator, arguments)


def test_every_operator_counts_its_multiplications(backend):
    for operator, arguments in calls(backend):
        with FlopCounterMode(display=False) as counter:
            operator(*arguments)
        assert counter.get_total_flops() > 0, operator


def test_a_backend_is_asked_for_at_once_or_for_a_while():
    assert registry.asked() == "auto"
    with use("torch"):
        assert SVPN.choose(MATRIX, 0.5, False) == "torch"
        with use("reference"):
            assert SVPN.choose(MATRIX, 0.5, False) == "reference"
        assert registry.asked() == "torch"
    use("torch")
    assert registry.asked() == "torch"
    use("auto")
    assert registry.asked() == "auto"


def test_unknown_backends_are_refused_by_name(monkeypatch):
    with pytest.raises(
        ValueError, match="the backend must be one of auto, numba, triton, torch, reference, got 'cuda'"
    ):
        use("cuda")
    monkeypatch.setattr(registry, "HAS_NUMBA", False)
    with pytest.raises(ValueError, match="the backend is 'numba', which is not installed: pip install numba"):
        use("numba")


@pytest.mark.parametrize(("value", "said"), [("torch", "torch"), ("", "auto"), ("cuda", "SOT_BACKEND must be one of")])
def test_the_environment_asks_too(value, said):
    code = "from sot.ops import registry; print(registry.asked())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SOT_BACKEND": value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said in result.stdout + result.stderr


def test_the_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(registry, "_logged", set())
    with caplog.at_level(logging.INFO, logger="sot"), use("torch"):
        for _ in range(3):
            singular_value_power_norm(MATRIX)
    assert caplog.messages == ["svpn is computed by torch."]


NORMS = {"exact": {}, "fast": {"norm": "svpn_fast"}, "gcp": {"pool": "gcp", "reduced_dim": 20}}


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_compiled_head_is_one_graph_that_keeps_the_operators(name, accelerated, backend):
    head = sot.accelerate(
        SecondOrderHead(32, 3, HeadConfig(**{"heads": 2} if name != "gcp" else {}, **NORMS[name])), accelerated
    )
    found = set()

    def compiler(graph, inputs):
        found.update(str(node.target) for node in graph.graph.nodes if "sot." in str(node.target))
        return graph.forward

    class_token, words = torch.randn(4, 32), torch.randn(4, 30, 32)
    torch._dynamo.reset()
    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(head, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    results = []
    for function in (compiled, head):
        given = words.clone().requires_grad_()
        output = function(class_token, given)
        results.append([output, *torch.autograd.grad(output.square().sum(), [given, *head.parameters()])])
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
    wanted = {"exact": {"svpn"}, "fast": {"svpn_fast"}, "gcp": {"matrix_root"}}[name]
    wanted |= {"cross_covariance"} if accelerated and name != "gcp" else set()
    assert {f"sot.{operator}.default" for operator in wanted} <= found


def test_shapes_are_known_without_values():
    meta = torch.randn(3, 9, 24, device="meta", requires_grad=True)
    weight = torch.randn(56, 24, device="meta", requires_grad=True)
    matrix = cross_covariance(meta, weight, 2, 14)
    for value in (singular_value_power_norm(matrix), matrix_square_root(matrix)):
        assert value.shape == (3, 2, 14, 14) and value.device.type == "meta"
        torch.autograd.backward(value.sum(), retain_graph=True)
    assert fast_singular_value_power_norm(matrix, torch.ones(14, device="meta")).shape == (3, 2, 14, 14)
    assert meta.grad.shape == meta.shape
