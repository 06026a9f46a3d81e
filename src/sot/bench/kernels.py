"""What the Triton kernels of exact svPN take of a GPU, found by compiling them ahead of time: no GPU is needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sot.errors import SettingError
from sot.ops.registry import HAS_TRITON
from sot.ops.svpn import triton as by_triton

KERNELS = ("decompose", "combine", "pull_back")
COLUMNS = (14, 24, 32, 38)
ARCHITECTURES = ("sm_80", "sm_90", "gfx942")
FLOAT32 = re.compile(r"\bF(FMA|MUL|ADD)\b|\bFSEL\b|\bFMNMX\b")


@dataclass(frozen=True)
class Kernel:
    """A kernel for matrices of so many rows and columns, compiled: registers of a thread, bytes of stack and shared."""

    name: str
    columns: int
    architecture: str
    registers: int
    stack: int
    shared: int
    warps: int
    code: tuple[str, ...] = ()  # instructions of NVIDIA's machine code, each with its address


def compile_kernel(name: str, columns: int, architecture: str) -> Kernel:
    """Compile for matrices `(columns, columns)` and α = ¼; ValueError without Triton."""
    if not HAS_TRITON:
        raise ValueError("the kernels are compiled by Triton, which is not installed: pip install triton")
    binary, settings = _compiled(name, columns, architecture)
    code: tuple[str, ...] = ()
    if architecture.startswith("sm_"):
        found = dict(re.findall(r"(REG|STACK):(\d+)", _cuobjdump(binary, "-res-usage")))
        registers, stack = found["REG"], found["STACK"]
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", _cuobjdump(binary, "-sass"))
        code = tuple(f"{address} {instruction.strip()}" for address, instruction in lines)
    else:
        found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", binary.asm["amdgcn"]))
        registers, stack = found["vgpr_count"], found["private_segment_fixed_size"]
    used = int(registers), int(stack), binary.metadata.shared, settings["num_warps"]
    return Kernel(name, columns, architecture, *used, code)


def check_architecture(name: str) -> str:
    """The name itself, or SettingError for one that names no GPU of NVIDIA or AMD."""
    if not re.fullmatch(r"sm_\d+|gfx[0-9a-f]+", name):
        raise SettingError("{architecture} must be one such as {}, got {!r}", ", ".join(ARCHITECTURES), name)
    return name


def _compiled(name: str, columns: int, architecture: str) -> tuple[Any, dict[str, Any]]:
    import triton
    from triton.backends.compiler import GPUTarget

    from sot.ops.svpn import triton_jacobi, triton_products

    amd = not architecture.startswith("sm_")
    target = GPUTarget("hip", architecture, 64) if amd else GPUTarget("cuda", int(architecture[3:]), 32)
    if name == "decompose":
        function, settings = triton_jacobi.decompose, by_triton.decomposition_settings(columns, columns, amd)
    else:
        function, settings = getattr(triton_products, name), by_triton.product_settings(columns, columns, amd)
        settings["ROOTS"] = by_triton.ROOTS[0.25]
    constants = {key: value for key, value in settings.items() if key in function.arg_names}
    options = {key: value for key, value in settings.items() if key not in constants}
    types = {"batch": "i32", "eps": "fp32", **dict.fromkeys(constants, "constexpr")}
    signature = {argument: types.get(argument, "*fp32") for argument in function.arg_names}
    aligned = {  # as tensors of torch are
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind == "*fp32"
    }
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=target, options=options), settings


def _cuobjdump(binary: Any, option: str) -> str:
    """What NVIDIA's tool, which comes with Triton, says of a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Instructions:
    """How many a warp executes: all, those of float32 arithmetic, and shuffles between lanes."""

    all: float
    float32: float
    shuffles: float

    @classmethod
    def of(cls, *pieces: tuple[Sequence[str], float]) -> Instructions:
        """Of pieces of code, each executed so many times."""
        counts = [
            (len(code), sum(bool(FLOAT32.search(line)) for line in code), sum("SHFL" in line for line in code))
            for code, _ in pieces
        ]
        return cls(*(sum(n * times for n, (_, times) in zip(kind, pieces)) for kind in zip(*counts)))


def loops(code: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Pieces of code that end in a jump back to their beginning, the shortest first."""
    addresses = [int(line.split()[0], 16) for line in code]
    found = []
    for place, line in enumerate(code):
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", line)
        if jump and int(jump[1], 16) < addresses[place]:
            found.append(code[addresses.index(int(jump[1], 16)) : place + 1])
    return sorted(found, key=len)


def executed(kernel: Kernel, sweeps: int) -> Instructions:
    """Instructions of a warp of NVIDIA's code: of `decompose` two nested loops, else one over blocks of 16 rows.

    Paths that are rarely taken lie outside of the loops and count once: a little too many.
    """
    inner, whole = loops(kernel.code), (kernel.code, 1)
    if kernel.name != "decompose":
        blocks = (kernel.columns + 15) // 16
        return Instructions.of(whole, *((loop, blocks - 1) for loop in inner))
    rounds = next(loop for loop in inner if sum("SHFL" in line for line in loop) >= 2 * kernel.columns)
    sweep = next(loop for loop in inner if len(loop) > len(rounds) and set(rounds) <= set(loop))
    pairs = (kernel.columns + 1) // 2
    return Instructions.of(whole, (sweep, sweeps - 1), (rounds, sweeps * (pairs - 1)))
