"""Cases of `sot bench model --runtimes` and `--compiled`: one model eager, folded, compiled, in int8, and in ONNX."""

from __future__ import annotations

import copy
import io
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import timm
import torch
from torch import Tensor, nn

from sot.bench.cases import NUM_CLASSES, Case
from sot.bench.model_cost import forward_alone, training_step
from sot.core.head import HeadConfig
from sot.models.accelerate import accelerate
from sot.models.inference import optimize_for_inference
from sot.models.variants import ensure_registered
from sot.models.vision import VARIANTS
from sot.training.train_images import can_compile

Runtime = Callable[[nn.Module, Tensor], Callable[[], Any]]
BATCHES = (1, 16)  # latency, throughput
EAGER, COMPILED = "eager", "compiled"


def folded(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    """Without batch norms."""
    return forward_alone(optimize_for_inference(model), image)


def compiled(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    """By torch.compile, folded before."""
    return forward_alone(torch.compile(optimize_for_inference(model)), image)  # type: ignore[arg-type]


def int8(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    """Linear layers with weights in int8, by torchao, folded before."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantized = optimize_for_inference(model)
    quantize_(quantized, Int8WeightOnlyConfig())
    return forward_alone(accelerate(quantized), image)  # again, as other weights are not for every faster way


def onnx(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    """In onnxruntime, with as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        with redirect_stdout(io.StringIO()):
            torch.onnx.export(copy.deepcopy(model), (image,), file.name, dynamo=True, external_data=False)
        session = onnxruntime.InferenceSession(file.name, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: image.numpy()}
    return lambda: session.run(None, inputs)


def available_runtimes() -> dict[str, Runtime]:
    """Those for which everything is installed."""
    found: dict[str, Runtime] = {EAGER: forward_alone, "folded": folded}
    if can_compile():
        found[COMPILED] = compiled
    if find_spec("torchao"):
        found["int8 weights"] = int8
    if find_spec("onnxruntime") and find_spec("onnxscript"):
        found["onnxruntime"] = onnx
    return found


def runtime_cases(name: str) -> list[Case]:
    """One picture, and a batch of them; what preparing took, with the first call, is noted."""
    ensure_registered(name)
    model = accelerate(timm.create_model(name)).eval()
    cases = []
    for batch in BATCHES:
        image = torch.randn(batch, *model.default_cfg["input_size"])
        functions: dict[str, Callable[[], Any]] = {}
        notes: dict[str, str] = {}
        for title, runtime in available_runtimes().items():
            began = time.perf_counter()
            functions[title] = runtime(model, image)
            functions[title]()
            notes[title] = f"ready after {time.perf_counter() - began:.1f} s"
        cases.append(Case(f"{name}, batch {batch}", functions, EAGER, notes=notes))
    return cases


def compiled_cases(name: str, batch: int, train_batch: int) -> list[Case]:
    """A model of the family with the exact norm, eager and compiled as one graph: forward, and a step of training."""
    if name not in VARIANTS:
        raise ValueError(f"unknown model {name!r}; accepted: {', '.join(VARIANTS)}")
    if torch.get_default_device().type == "cpu" and not can_compile():
        raise ValueError("torch.compile needs a C++ compiler on a CPU, and none was found")
    paper, exact = VARIANTS[name].get("default_head", HeadConfig.paper()), HeadConfig()
    head = replace(paper, norm=exact.norm, exponent=exact.exponent)
    model = accelerate(timm.create_model(name, head=head))
    size = model.default_cfg["input_size"]
    image, images = torch.randn(batch, *size), torch.randn(train_batch, *size)
    targets = torch.randint(NUM_CLASSES, (train_batch,))
    forwards, steps = {}, {}
    for title in (EAGER, COMPILED):
        runner, learner = copy.deepcopy(model), copy.deepcopy(model)
        if title == COMPILED:
            runner, learner = (torch.compile(one, fullgraph=True) for one in (runner, learner))
        forwards[title], steps[title] = forward_alone(runner, image), training_step(learner, images, targets)
    return [
        Case(f"{name}: forward, batch {batch}", forwards, EAGER),
        Case(f"{name}: training step, batch {train_batch}", steps, EAGER),
    ]
