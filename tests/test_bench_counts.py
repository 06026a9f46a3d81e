"""`sot bench launches` and `sot bench kernels`: what is counted without a GPU."""

import json

import pytest
import torch
from test_cli import sot
from torch import nn

from sot.bench import kernel_estimate, kernels
from sot.bench.cases import SIZES, Size
from sot.bench.kernel_estimate import GPUS, estimate_step
from sot.bench.kernels import Instructions, Kernel, executed, loops
from sot.bench.launches import COPIED, count_launches, head_launches, norm_launches
from sot.errors import SettingError

# --- launches ------------------------------------------------------------------------------------------------


class Known(nn.Module):
    """Views and room, which launch nothing; a copy that a product makes; and two operators."""

    def forward(self, x):
        torch.empty_like(x)
        left = x.transpose(1, 2)  # (b, h, t, m): cannot be a batch of matrices where it lies
        return (left.mT @ left).flatten(1).relu()


def test_launches_are_what_one_counts_by_hand():
    x = torch.empty(2, 5, 3, 4, device="meta", requires_grad=True)
    forward, backward = count_launches(Known(), [x])
    assert forward == {"aten.clone.default": 2, "aten.bmm.default": 1, "aten.relu.default": 1}
    assert backward["aten.threshold_backward.default"] == 1 and backward["aten.bmm.default"] == 2


def test_every_head_launches_fewer_than_the_published_one():
    rows = {(row.size, row.name): row for row in head_launches()}
    for size in ("Tiny", "Small", "Base"):
        published, exact, fast = (rows[size, name] for name in ("published", "ours", "ours, fast"))
        assert exact.inside["sot.svpn.default"] == 2 and exact.inside["sot.svpn_backward.default"] == 1
        assert exact.both <= 28 and fast.both <= 53 and published.both == 138  # they may only fall
        assert exact.both < fast.both
    copied = rows["Base", "ours, without Triton"]
    assert copied.both == rows["Base", "ours"].both - 3 + sum(COPIED.values())  # 38 columns are decomposed on the CPU
    assert rows["Tiny", "ours, without Triton"].inside["aten._linalg_eigh.default"] == 1
    assert not any("svd" in name for row in rows.values() if row.name != "exact by SVD" for name in row.inside)


def test_a_copy_is_less_than_any_form_in_torchs_operations():
    rows = {(row.size, row.name): row for row in norm_launches()}
    for size in ("Tiny", "Small", "Base"):
        assert (rows[size, "Triton"].forward, rows[size, "Triton"].backward) == (2, 1)
        assert rows[size, "copied to the CPU"].both == 4 < rows[size, "matrix products only"].both
    assert rows["Tiny", "eigh of QᵀQ"].inside["aten._linalg_eigh.default"] == 1
    assert rows["Tiny", "SVD, float64"].inside["aten._linalg_svd.default"] == 1
    assert ("Base", "eigh of QᵀQ") not in rows  # torch would loop over matrices of 38 columns
    table = sot("bench", "launches", "--norm", "--size", "base", "--markdown").stdout
    assert "| Base | copied to the CPU | 2 | 2 | 1.33 |" in table


def test_launches_are_printed():
    result = sot("bench", "launches", "--size", "tiny", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["name"] for row in rows][:3] == ["published", "ours, fast", "ours"] and rows[0]["both"] == 138
    table = sot("bench", "launches", "--size", "tiny", "--markdown").stdout
    assert "| Tiny | published | 39 | 99 | 1.00 |" in table


# --- kernels -------------------------------------------------------------------------------------------------

CODE = tuple(
    f"{16 * place:04x} {instruction}"
    for place, instruction in enumerate(
        "MOV R1|SHFL.IDX R1, R2|SHFL.IDX R1, R2|SHFL.IDX R1, R2|SHFL.IDX R1, R2|FFMA R1, R2, R3, R4|@P0 BRA 0x0010"
        "|FADD R1, R2, R3|@P1 BRA 0x0000|EXIT|BRA 0x00a0".split("|")
    )
)


def test_loops_and_what_they_execute():
    inner, outer = loops(CODE)
    assert (len(inner), len(outer)) == (6, 9)
    assert Instructions.of((inner, 1)) == Instructions(6, 1, 4)
    kernel = Kernel("decompose", 2, "sm_80", 1, 0, 0, 1, CODE)  # one pair of columns: a sweep is each loop once
    assert executed(kernel, sweeps=3) == Instructions(2 + 3 * 9, 3 * 2, 3 * 4)
    blocks = Kernel("combine", 38, "sm_80", 1, 0, 0, 1, CODE[:7])  # three blocks of rows
    assert executed(blocks, sweeps=1).all == 7 + 2 * 6


def test_estimates_grow_with_the_batch_and_shrink_with_the_gpu():
    code = tuple(f"{16 * place:04x} FFMA R1, R2, R3, R4" for place in range(6400))
    made = [Kernel("combine", 14, "sm_80", 32, 0, 0, 1, code)]
    size = Size("Tiny", 240, 14, 48)
    few, many = (estimate_step(GPUS[0], size, batch, 1e9, made) for batch in (1, 1800))
    assert few.arithmetic == pytest.approx(6400 * 2 / 1.41e9)  # warps that are alone
    assert many.arithmetic == pytest.approx(100 * 6400 / 2 / 1.41e9)  # 108 multiprocessors, two warps a clock
    assert many.memory == pytest.approx(1800 * 6 * 4 * (10 * 14 * 14 + 3 * 14) / 2.039e12)
    assert many.step == pytest.approx(1800 * 1e9 / (0.4 * 156e12)) and few.launches == pytest.approx(30e-6)
    assert many.added == many.arithmetic + many.memory and many.share == many.added / many.step
    assert few.added == max(few.arithmetic + few.memory, few.launches)
    faster = estimate_step(GPUS[1], size, 1800, 1e9, made)
    assert faster.added < many.added and faster.step < many.step
    assert set(kernel_estimate.SWEEPS) == {size.head_dim for size in SIZES}


def test_what_a_model_computes_is_that_of_the_table_of_training():
    assert kernel_estimate.training_macs("sot_tiny") == pytest.approx(7.34e9, rel=0.01)


def test_one_sentence_without_triton(monkeypatch):
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="compiled by Triton, which is not installed: pip install triton"):
        kernels.compile_kernel("combine", 14, "sm_80")


def test_architectures_have_names():
    assert kernels.check_architecture("gfx90a") == "gfx90a"
    with pytest.raises(SettingError, match="architecture must be one such as sm_80, sm_90, gfx942, got 'h100'"):
        kernels.check_architecture("h100")
    result = sot("bench", "kernels", "--architecture", "h100")
    assert result.returncode == 2 and "--architecture must be one such as" in result.stderr
    result = sot("bench", "kernels", "--estimate", "--columns", 14)
    assert result.returncode == 2 and "--estimate and --columns exclude each other" in result.stderr


def test_a_kernel_is_compiled_without_a_gpu(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = kernels.compile_kernel("combine", 14, "sm_80")
    assert 0 < kernel.registers <= 255 and kernel.stack == 0 and kernel.shared > 0 and kernel.warps == 1
    work = executed(kernel, sweeps=1)
    assert work.all > work.float32 > 14 * 14 * 14 / 32  # a multiply-add for each lane at the least


@pytest.mark.slow
@pytest.mark.parametrize("architecture", kernels.ARCHITECTURES)
@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize("columns", kernels.COLUMNS)
def test_kernels_stay_in_registers(name, columns, architecture, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = kernels.compile_kernel(name, columns, architecture)
    print(f"{name} {columns} {architecture}: {kernel.registers} / {kernel.stack} / {kernel.shared}")
    assert kernel.stack == 0 or (columns, name, architecture) == (38, "decompose", "sm_80")
    assert kernel.stack <= 64


@pytest.mark.slow
def test_the_estimate_counts_what_is_compiled(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = kernels.compile_kernel("decompose", 14, "sm_80")
    rounds = next(loop for loop in loops(kernel.code) if Instructions.of((loop, 1)).shuffles >= 28)
    assert Instructions.of((rounds, 1)).shuffles == 64  # 16 rows of W and V, each in two rounds
    seven = executed(kernel, 7)
    assert executed(kernel, 8).all - seven.all == pytest.approx(7 * len(rounds), rel=0.2)
