"""`sot bench`: the clocks and counters on cases that are known, the references against the library, the commands."""

import json
import time
from functools import partial

import pytest
import timm
import torch
from test_cli import sot

from reference import power_of_svd
from sot.bench.cases import SIZES, Case, Measurement, Size, run_case
from sot.bench.head_cost import build_heads, growing_sizes, head_cases, head_inputs, memory_rows
from sot.bench.memory import measure_memory
from sot.bench.norm_cost import normalize_cases
from sot.bench.references import deflated_power, published_covariance, published_root, svd_power
from sot.bench.report import BenchReport
from sot.bench.rivals import rival_head_cases, rival_heads, rival_model_cases
from sot.bench.timing import Race, Spread, find_device, growth_exponent, race, thread_count, timed
from sot.core.normalize import fast_singular_value_power_norm, matrix_square_root, singular_value_power_norm
from sot.errors import SettingError

SMALL = Size("small", token_dim=12, head_dim=3, covariance_dim=4, batch=2, tokens=5)


# --- clocks --------------------------------------------------------------------------------------------------


def test_functions_take_turns_and_each_comes_first():
    calls = []
    result = race({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, warm_up=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert all(len(result.wall[name]) == len(result.cost[name]) == 3 for name in "abc")


def test_ratios_are_of_pairs_from_the_same_round():
    times = {"ours": [1.0, 20.0, 3.0], "theirs": [2.0, 40.0, 1.0]}
    ratio = Race(times, times).cost_ratio("ours", "theirs")
    assert ratio == Spread(0.5, 0.5, 1.75) and Race(times, times).wall_ratio("theirs", "theirs").high == 1


def test_wall_time_passes_while_asleep_and_process_time_does_not():
    result = race({"sleep": lambda: time.sleep(0.05)}, rounds=2, warm_up=0)
    assert min(result.wall["sleep"]) >= 0.05 and max(result.cost["sleep"]) < 0.05


def test_threads_are_pinned_and_given_back():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), thread_count(1):
        assert torch.get_num_threads() == 1
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_an_accelerator_is_timed_by_its_own_clock_between_two_waits(monkeypatch):
    """On no accelerator: what is called, and in which order."""
    calls = []

    class Event:
        def __init__(self, device, enable_timing):
            assert device.type == "cuda" and enable_timing

        def record(self):
            calls.append("record")

        def elapsed_time(self, later):
            return 250.0  # ms

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: calls.append("wait"))
    wall, cost = timed(lambda: calls.append("function"), torch.device("cuda"))
    assert calls == ["wait", "record", "function", "record", "wait"] and cost == 0.25 and wall < 0.25


@pytest.mark.parametrize(
    "name, message",
    [
        ("tpu", "device must be one of cpu, cuda, mps, xpu, got 'tpu'"),
        ("cuda:x", "got 'cuda:x'"),
        ("xpu", "device is 'xpu', which torch does not find on this machine: it has cpu and cuda"),
        ("cuda:2", "device is 'cuda:2', and this machine has fewer of them"),
    ],
)
def test_devices_that_are_not_there(name, message, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert find_device("cpu").type == "cpu" and find_device("cuda:1").index == 1
    with pytest.raises(SettingError) as caught:
        find_device(name)
    assert message in str(caught.value)


@pytest.mark.parametrize("exponent", [0.5, 1, 2])
def test_exponent_of_a_power_is_found(exponent):
    sizes = [64, 256, 1024, 4096]
    assert growth_exponent(sizes, [3 * size**exponent for size in sizes]) == pytest.approx(exponent)


# --- counters ------------------------------------------------------------------------------------------------


def test_memory_of_a_chain_is_what_one_counts_by_hand():
    x, grad = torch.randn(100, 1000, requires_grad=True), torch.randn(100, 1000)
    unit = x.numel() * 4
    memory = measure_memory(lambda: (x * 2).exp().sin(), [x], grad)
    assert memory.saved == unit  # the exponential: its own derivative, and what the sine needs
    assert memory.peak == 4 * unit  # exponential, output, cosine, and its product with the gradient


def test_memory_counts_storages_once_and_leaves_out_what_was_there():
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    assert measure_memory(lambda: x @ weight, [x, weight], torch.randn(8, 4)).saved == 0
    square = measure_memory(lambda: (x * 1).t().t().square(), [x], torch.randn(8, 16))
    assert square.saved == x.numel() * 4  # of two views of one product


def test_memory_follows_what_only_autograd_holds_and_forgets_what_is_freed():
    x = torch.randn(1000, requires_grad=True)

    def freed():
        for _ in range(10):
            torch.ones(1000)
        return x * 1

    assert measure_memory(freed, [x], torch.ones(1000)).peak == 2 * 4000  # the product and its gradient
    assert measure_memory(lambda: x.exp().exp().exp(), [x], torch.ones(1000)).saved == 3 * 4000


# --- references ----------------------------------------------------------------------------------------------


def test_references_agree_with_the_library():
    matrix, start = torch.randn(3, 5, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    grad = torch.randn_like(matrix)
    for theirs, ours in (
        (svd_power, singular_value_power_norm),
        (lambda m: deflated_power(m, start, 0.5, 1, 1), lambda m: fast_singular_value_power_norm(m, start)),
        (lambda m: deflated_power(m, start, 0.5, 2, 3), lambda m: fast_singular_value_power_norm(m, start, 0.5, 2, 3)),
    ):
        inputs = [matrix.clone().requires_grad_() for _ in range(2)]
        outputs = theirs(inputs[0]), ours(inputs[1])
        gradients = [torch.autograd.grad(output, one, grad)[0] for output, one in zip(outputs, inputs)]
        assert torch.allclose(*outputs, atol=1e-4)  # theirs adds 1e-5 to the divisor
        assert torch.allclose(*gradients, atol=1e-3)
    assert torch.allclose(svd_power(matrix), power_of_svd(matrix, 0.5))


@pytest.mark.parametrize("num_iterations", [2, 3, 5])
def test_published_root_agrees_with_the_library(num_iterations):
    tokens = torch.randn(3, 20, 4, dtype=torch.float64)
    spd, grad = tokens.mT @ tokens, torch.randn(3, 4, 4, dtype=torch.float64)
    grad = grad + grad.mT  # theirs assumes it
    inputs = [spd.clone().requires_grad_() for _ in range(2)]
    outputs = published_root(inputs[0], num_iterations), matrix_square_root(inputs[1], num_iterations)
    assert torch.allclose(*outputs)
    assert torch.allclose(*[torch.autograd.grad(output, one, grad)[0] for output, one in zip(outputs, inputs)])


def test_published_mean_is_one_number_for_all_channels():
    left, right = torch.randn(2, 7, 3), torch.randn(2, 7, 3)
    expected = (left - left.mean((1, 2), keepdim=True)).mT @ (right - right.mean((1, 2), keepdim=True)) / 7
    assert torch.allclose(published_covariance(left, right, True), expected, atol=1e-6)


def test_published_head_with_the_same_weights_gives_the_same_logits():
    heads = {name: head.double() for name, head in build_heads(SMALL).items()}
    theirs, ours = heads["published, mean kept"], heads["ours, fast"]
    ours.pool.projection.load_state_dict(theirs.projection.state_dict())
    ours.pool.norm.start.data.copy_(theirs.start.data)
    ours.word_linear.load_state_dict(theirs.word_linear.state_dict())
    ours.class_linear.load_state_dict(theirs.class_linear.state_dict())
    inputs = [tensor.double() for tensor in head_inputs(SMALL)]
    assert torch.allclose(ours(*inputs), theirs(*inputs), atol=1e-4)


# --- cases, reports, commands --------------------------------------------------------------------------------


def test_every_case_names_its_reference():
    cases = head_cases((SMALL,)) + normalize_cases((SMALL,))
    for case in cases:
        assert case.reference in case.functions and set(case.notes) <= set(case.functions)
        rows = run_case(case, rounds=2)
        assert [row.name for row in rows] == list(case.functions)
        assert all(row.cost > 0 and row.ratio.low <= row.ratio.median <= row.ratio.high for row in rows)
    assert {(size.token_dim, size.head_dim, size.batch) for size in SIZES} == {
        (240, 14, 64),
        (384, 24, 64),
        (528, 38, 64),
    }
    assert [size.tokens for size in growing_sizes(SIZES[0])["tokens"]] == [64, 256, 1024, 4096]


def test_our_head_saves_less_than_half_of_what_the_published_one_does():
    limits = {"Tiny: head, peak": 1.0, "Tiny: head, saved": 0.5}
    rows = [row for row in memory_rows(SIZES[:1]) if row.name in ("ours", "ours, fast")]
    assert len(rows) == 4 and all(row.ratio.median <= limits[row.case] for row in rows)


def test_exact_stands_beside_svd_fast_gcp_and_efficient_probing():
    (case,) = rival_head_cases((SMALL,))
    names = ["ours, fast", "ours", "exact by SVD", "GCP", "efficient probing"]
    assert list(case.functions) == names and case.reference == "ours, fast"
    heads = {name: head.double() for name, head in rival_heads(SMALL).items()}
    heads["exact by SVD"].load_state_dict(heads["ours"].state_dict())
    inputs = [tensor.double() for tensor in head_inputs(SMALL)]
    assert torch.allclose(heads["ours"](*inputs), heads["exact by SVD"](*inputs))
    rows = run_case(case, rounds=1)
    report = BenchReport("title", 1, 1, rows)
    ratio = rows[1].cost / rows[0].cost
    assert report.caption.endswith(f"Exact takes this share of the time of fast: {ratio:.2f} ({case.title}).")


def test_whole_models_stand_side_by_side_with_each_head(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *name, **settings: create(*name, depth=1, **settings))
    forward, step = rival_model_cases("sot_tiny", 1, 2)
    assert list(forward.functions) == list(step.functions) and len(step.functions) == 5
    assert forward.functions["exact by SVD"]().shape == (1, 1000)
    step.functions["ours"]()


def test_our_heads_are_the_default_and_the_papers():
    heads = build_heads(SMALL)
    settings = {name: (head.config.norm, head.config.exponent) for name, head in heads.items() if "ours" in name}
    assert settings["ours"] == settings["ours, mean subtracted"] == ("svpn", 0.25)
    assert settings["ours, fast"] == ("svpn_fast", 0.5) and heads["ours, mean subtracted"].config.center


def test_report_as_markdown_and_picture():
    rows = run_case(Case("case", {"a": lambda: None, "b": lambda: None}, "a"), rounds=2)
    report = BenchReport("title", 1, 2, rows)
    lines = report.markdown().splitlines()
    assert lines[0] == "| case | what | cost | ratio | by wall clock |"
    assert lines[2].startswith("| case | a |") and lines[3].startswith("|  | b |")
    assert "1 thread," in lines[-1] and "2 rounds" in lines[-1]
    assert len(report.figure().axes) >= 1
    with pytest.raises(ValueError, match="nothing to draw"):
        BenchReport("title", 1, 1, [Measurement("growth", "with batch", 1.0, "exponent")]).figure()


@pytest.mark.parametrize("what, cases, functions", [("head", 1, 6), ("normalize", 4, 10), ("memory", 2, 10)])
def test_commands_print_tables_json_and_pictures(what, cases, functions, tmp_path):
    small = ["--size", "tiny", "--batch", 2, "--tokens", 16, *(["--rounds", 2] if what != "memory" else [])]
    result = sot("bench", what, *small, "--json", "--picture", "bars.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["threads"] == 1 and report["processor"] and report["benchmark"] == f"sot bench {what}"
    assert len(report["rows"]) == functions and len({row["case"] for row in report["rows"]}) == cases
    assert {"case", "name", "cost", "unit", "ratio", "wall_ratio", "note"} == set(report["rows"][0])
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 1
    assert "Tiny" in sot("bench", what, *small).stdout and not result.stderr


def test_several_numbers_of_threads_are_measured_one_after_the_other():
    small = ["--size", "tiny", "--batch", 2, "--tokens", 16, "--rounds", 1, "--threads", "1,2"]
    reports = json.loads(sot("bench", "head", *small, "--json").stdout)
    assert [report["threads"] for report in reports] == [1, 2] and reports[0]["rows"] != reports[1]["rows"]
    printed = sot("bench", "head", *small, "--markdown").stdout
    assert "1 thread, " in printed and "process time in turns" in printed
    assert "2 threads, " in printed and "wall clock in turns" in printed


@pytest.mark.parametrize("what, cases", [("head", 2), ("normalize", 4)])
def test_commands_measure_on_a_device(what, cases):
    small = ["--size", "tiny", "--batch", 2, "--tokens", 16, "--rounds", 1]
    result = sot("bench", what, *small, "--device", "cpu", "--json")
    assert result.returncode == 0, result.stderr
    assert len({row["case"] for row in json.loads(result.stdout)["rows"]}) == cases
    for device in ("cuda", "mps", "xpu"):
        if not torch.accelerator.is_available():
            result = sot("bench", what, "--device", device)
            assert result.returncode == 2 and "which torch does not find on this machine" in result.stderr


@pytest.mark.parametrize("what", ["head", "memory"])
def test_growth_is_an_exponent_for_tokens_and_batch(what, monkeypatch):
    few = {"tokens": [SMALL, Size("more", 12, 3, 4, 2, 40)], "batch": [SMALL, Size("more", 12, 3, 4, 16, 5)]}
    monkeypatch.setattr("sot.bench.head_cost.growing_sizes", lambda size: few)
    result = sot("bench", what, "--growth", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert [row["name"] for row in rows] == ["with tokens", "with batch"] and rows[0]["unit"] == "exponent"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bench", "head", "--size", "huge"], "unknown size 'huge'; accepted: Tiny, Small, Base"),
        (["bench", "head", "--json", "--markdown"], "--json and --markdown exclude each other"),
        (["bench", "memory", "--picture", "bars.jpg"], "must end in .png, got bars.jpg"),
        (["bench", "normalize", "--threads", "0"], "--threads must be numbers from 1 on, such as 1 or 1,2, got '0'"),
        (["bench", "head", "--threads", "1,x"], "--threads must be numbers from 1 on, such as 1 or 1,2, got '1,x'"),
        (["bench", "head", "--threads", "1,2", "--picture", "a.png"], "--picture"),
        (["bench", "speed"], "speed"),
        (["bench", "head", "--device", "tpu"], "--device must be one of cpu, cuda, mps, xpu, got 'tpu'"),
        (["bench", "model", "--runtimes", "--device", "cpu"], "--runtimes and --device exclude each other"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(arguments, message, tmp_path):
    result = sot(*arguments, cwd=tmp_path)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_step_of_training_is_timed_beside_a_bare_loop():
    small = ["--set", "batch_size=8", "--set", "model_args={embed: naive, embed_dim: 16, depth: 1, num_heads: 2}"]
    result = sot("bench", "train", *small, "--steps", 4, "--rounds", 2, "--json")
    assert result.returncode == 0, result.stderr
    bare, ours = json.loads(result.stdout)["rows"]
    assert (bare["name"], ours["name"]) == ("bare loop", "ours: sot train")
    assert bare["ratio"]["median"] == 1 and ours["cost"] > 0
    result = sot("bench", "train", *small, "--steps", 10_000)
    assert result.returncode == 2 and "steps must be between 3 and the 179 batches" in result.stderr


@pytest.mark.parametrize("options, cases", [([], 3), (["--runtimes"], 2), (["--compiled"], 2)])
def test_a_model_is_timed_beside_the_published_one_and_in_runtimes(options, cases, monkeypatch):
    """At a size and with runtimes that take seconds; the rest is timed by hand."""
    from sot.bench import model_cost as model
    from sot.bench import runtimes

    create, few = (
        timm.create_model,
        dict(eager=runtimes.forward_alone, folded=runtimes.folded, onnxruntime=runtimes.onnx),
    )
    monkeypatch.setattr(model.timm, "create_model", lambda name, **settings: create(name, depth=1, **settings))
    monkeypatch.setattr(runtimes.torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(runtimes, "available_runtimes", lambda: few)
    monkeypatch.setattr(runtimes, "BATCHES", (1, 2))
    result = sot("bench", "model", "--batch", 2, "--train-batch", 2, "--rounds", 1, *options, "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert len({row["case"] for row in rows}) == cases and all(row["cost"] > 0 for row in rows)
    assert sot("bench", "model", "--model", "resnet18").returncode == 2
