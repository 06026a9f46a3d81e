"""What exact svPN adds to a step of training on a GPU: an estimate from counted instructions, bytes and launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sot.bench.cases import HEADS, SIZES, Size
from sot.bench.kernels import KERNELS, Kernel, compile_kernel, executed
from sot.ops.svpn import triton as by_triton

SWEEPS = {14: 8, 24: 9, 38: 11}  # the most that were seen
CLOCKS_ALONE = 2  # of a warp that shares its scheduler with no other, for each instruction
LAUNCH = 10e-6  # seconds of the host: Triton 3.5 takes 6 without and 13 with 19 arguments (tritonbench, pull 669)
SUSTAINED = 0.4  # share of the peak that a model trains at
BATCHES = (64, 256, 1024)
ASSUMED = (
    "An estimate, not a measurement: counted instructions at the GPU's full rate, every byte once, 10 µs a launch;"
    " the model at 40 % of its peak in bfloat16. Expect 1.5 to 2.5 times the arithmetic."
)


@dataclass(frozen=True)
class GPU:
    """What its maker says: clock in Hz, warps' float32 instructions a clock and multiprocessor, bytes/s, MAC/s.

    Warps have 32 lanes: 64 float32 units a multiprocessor are 2 instructions, 128 are 4.
    """

    name: str
    architecture: str
    multiprocessors: int
    clock: float
    float32: float
    bandwidth: float
    macs: float  # bfloat16, dense
    issues: float = 4.0  # instructions that a multiprocessor issues in a clock
    shuffles: float = 1.0


# NVIDIA's data sheets and white papers of the A100 SXM with 80 GB (19.5 Tera-FLOP/s in float32, 312 in bfloat16) and
# the H100 SXM (66.9 and 989.4). The clock is that of float32: the H100's tensor cores have 1.83 GHz.
GPUS = (
    GPU("A100", "sm_80", 108, 1.41e9, 2, 2.039e12, 156e12),
    GPU("H100", "sm_90", 132, 1.98e9, 4, 3.35e12, 494.7e12),
)


@dataclass(frozen=True)
class Estimate:
    """Seconds: of exact svPN by arithmetic, by memory and by launches, and of the whole step of the model."""

    gpu: str
    size: str
    batch: int
    arithmetic: float
    memory: float
    launches: float
    step: float

    @property
    def added(self) -> float:
        """Of exact svPN: the kernels one after the other, or the host that launches them, if that takes longer."""
        return max(self.arithmetic + self.memory, self.launches)

    @property
    def share(self) -> float:
        """Of the step."""
        return self.added / self.step


def estimate_step(gpu: GPU, size: Size, batch: int, macs: float, kernels: list[Kernel]) -> Estimate:
    """For a batch of pictures, of which each takes `macs` multiply-adds forward and backward."""
    matrices, columns = batch * HEADS, size.head_dim
    arithmetic = sum(_seconds(gpu, kernel, matrices) for kernel in kernels)
    square = columns * columns
    moved = (3 * square + columns) + (3 * square + columns) + (4 * square + columns)  # of the three, once each
    launches = sum(by_triton.LAUNCHES) * LAUNCH
    step = batch * macs / (SUSTAINED * gpu.macs)
    return Estimate(gpu.name, size.name, batch, arithmetic, 4 * matrices * moved / gpu.bandwidth, launches, step)


def _seconds(gpu: GPU, kernel: Kernel, matrices: int) -> float:
    """At full rate, or of one warp alone where there are few."""
    groups = by_triton.decomposition_settings(kernel.columns, kernel.columns, False)["GROUPS"]
    warps = -(-matrices // groups) if kernel.name == "decompose" else matrices * kernel.warps
    work = executed(kernel, SWEEPS[kernel.columns])
    clocks = max(work.all / gpu.issues, work.float32 / gpu.float32, work.shuffles / gpu.shuffles)
    together = -(-warps // gpu.multiprocessors) * clocks
    return max(together, work.all * CLOCKS_ALONE) / gpu.clock


@cache
def training_macs(model: str) -> float:
    """Multiply-adds of a picture, forward and backward, without the decomposition."""
    import timm

    from sot.models.complexity import measure_training

    return measure_training(timm.create_model(model), (3, 224, 224)).macs


def estimates() -> list[Estimate]:
    """Of each GPU, size and batch; the kernels are compiled for it."""
    found = []
    for gpu in GPUS:
        for size in SIZES:
            kernels = [compile_kernel(name, size.head_dim, gpu.architecture) for name in KERNELS]
            macs = training_macs(f"sot_{size.name.lower()}")
            found += [estimate_step(gpu, size, batch, macs, kernels) for batch in BATCHES]
    return found
