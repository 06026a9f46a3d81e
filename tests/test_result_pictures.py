"""Pictures of kept results can be read at the width they are shown. SOT_PICTURES=docs draws those of the docs anew."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image
from test_results import FOLDER, SETTINGS, TABLES, units_of

import sot
from sot.bench.cases import Measurement
from sot.bench.report import BenchReport
from sot.bench.timing import Spread
from sot.core.head import HeadConfig
from sot.evaluation.evaluate import Evaluation, draw_confusion
from sot.explain import columns_figure, explain_image
from sot.figures import SMALL, WIDTH
from sot.files import as_png
from sot.paper.picture import draw_table
from sot.paper.side_by_side import collect, subject
from sot.paper.table import load_paper_table
from sot.paper.work import Store
from sot.probe.outcome import ProbeComparison, Result
from sot.training.run import draw_curves

PROBES = sorted(file.with_suffix(".json") for file in FOLDER.rglob("*.png") if not file.stem.startswith("table-"))

NAMES = ("published, mean kept", "ours", "ours, mean subtracted", "ours, fast", "matrix products alone")
FIGURE = re.compile(r"\d+\.\d+")


def texts_of(figure):
    """The texts that are seen, and their boxes in pixels."""
    figure.draw_without_rendering()
    beyond = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in outside(axis)}
    seen = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text, text.get_window_extent()) for text in seen if text not in beyond]


def outside(axis):
    """Labels of ticks that the limits leave out, or that axes without a frame do not show."""
    if not axis.axes.axison:
        return [axis.label, *axis.get_ticklabels(which="both")]
    low, high = sorted(axis.get_view_interval())
    margin = 1e-6 * (high - low)
    return [tick.label1 for tick in axis.get_major_ticks() if not low - margin <= tick.get_loc() <= high + margin]


def check_readable(figure):
    """No letter is small, no two texts overlap, none is cut off."""
    assert figure.get_size_inches()[0] <= WIDTH
    shown = texts_of(figure)
    assert len(shown) > 3
    assert [text.get_text() for text, _ in shown if text.get_fontsize() < SMALL] == []
    for number, (text, box) in enumerate(shown):
        assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= -1 and box.y1 <= figure.bbox.y1 + 1, text
        for other, its in shown[number + 1 :]:
            across = min(box.x1, its.x1) - max(box.x0, its.x0)
            along = min(box.y1, its.y1) - max(box.y0, its.y0)
            assert across < 1 or along < 2, (text.get_text(), other.get_text())


def keep(figure, name):
    """For the docs, if they are to be made anew."""
    if "SOT_PICTURES" in os.environ:
        (Path(os.environ["SOT_PICTURES"]) / name).write_bytes(as_png(figure))


def data_of(folder):
    return "Imagenette" if folder.startswith("imagenette") else "CIFAR-10"


@pytest.mark.parametrize(("folder", "file"), TABLES, ids=lambda value: getattr(value, "stem", value))
def test_tables(folder, file):
    name, store = file.stem.removeprefix("table-"), Store(FOLDER / folder)
    table = load_paper_table(name, "cpu", SETTINGS[folder])
    units = [unit for unit in units_of(name, folder) if store.result(unit) is not None]
    rows = collect(table, units, store)
    figure = draw_table(table, rows, subject(units, data_of(folder)))
    check_readable(figure)
    assert data_of(folder) in figure.get_suptitle() or (units[0].task and units[0].model in figure.get_suptitle())
    tasks = {unit.task for unit in units}
    drawn = [axes for axes in figure.axes if axes.axison and "ours" in axes.get_title()]
    assert len(drawn) == len(tasks)  # one row a task; pictures have one
    for axes in drawn:
        means = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
        assert means == sorted(means, reverse=True) and len(means) == len(axes.get_yticks())
    has_baseline = any(row.recipe.head.get("fusion") == "class" for row, _ in rows)
    said = [text.get_text() for text, _ in texts_of(figure)]
    assert ("class token alone" in said) == has_baseline
    keep(figure, f"results/{folder}/table-{name}.png")


def read_probe(file):
    found = json.loads(file.read_text())
    heads = found.pop("heads")
    results = []
    for row in heads:
        config = row["config"] and HeadConfig.from_dict(row["config"])
        values = {name: value for name, value in row.items() if name not in ("mean", "interval", "config")}
        results.append(Result(config=config, **values))
    return ProbeComparison(results=results, **found)


@pytest.mark.parametrize("file", PROBES, ids=lambda file: file.stem)
def test_probes(file):
    comparison = read_probe(file)
    figure = comparison.figure()
    check_readable(figure)
    said = [text.get_text() for text, _ in texts_of(figure)]
    left_out = set() if comparison.has_draws else {"majority"}  # it would squeeze the others
    assert {result.head for result in comparison.results} - left_out <= set(said)
    if comparison.has_draws:
        legend, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
        assert legend.x0 >= axes.x1  # it covers no data
    else:
        assert {f"{result.params:,}" for result in comparison.results} <= set(said)
    keep(figure, f"{file.relative_to(FOLDER.parent).with_suffix('.png')}")


def read_bench():
    """The first table of the page of benchmarks: one thread."""
    page = (FOLDER.parent / "benchmarks.md").read_text().split("## The head\n")[1]
    lines = [line.strip("| ").split(" | ") for line in page.split("\n| case |")[1].split("\n\n")[0].splitlines()[2:]]
    rows, case = [], ""
    for line in lines:
        named = [case, *line] if line[0] in NAMES else line
        case, name, cost, ratio = named[:4]
        rows.append(Measurement(case, name, float(cost.split()[0]), "ms", Spread(*map(float, FIGURE.findall(ratio)))))
    return rows


def test_heads_of_three_sizes_have_a_panel_each():
    rows = read_bench()
    figure = BenchReport("sot bench head", 1, 9, rows).figure()
    check_readable(figure)
    assert [axes.get_title() for axes in figure.axes] == ["Tiny", "Small", "Base"]
    assert figure.get_supxlabel().startswith("time relative to the published head")
    bars = [[bar.get_width() for bar in axes.patches] for axes in figure.axes]
    assert bars == [
        [row.ratio.median for row in rows if row.case.startswith(size)] for size in ("Tiny", "Small", "Base")
    ]
    other = [Measurement("a case", name, 1.0, "ms", Spread(1, 1, 1)) for name in ("a", "b")]
    assert len(BenchReport("title", 1, 9, [*rows, *other]).figure().axes) == 4
    keep(figure, "bench-head.png")


def test_explanations():
    labels = ["English springer", "church", "chain saw", "tench", "parachute"]
    head = {"heads": 3, "left_dim": 8, "right_dim": 8}
    model = sot.equip("test_vit", labels=labels, head=head, pretrained=False, model_args={"img_size": 64}).eval()
    explanation = explain_image(model, model.processor, Image.new("RGB", (64, 64), "orange"), truth="church")
    for figure in (explanation.figure(), columns_figure([explanation] * 2)):
        check_readable(figure)
        assert {"weak", "strong"} <= {text.get_text() for text, _ in texts_of(figure)}
    assert {"for", "against"} <= {text.get_text() for text, _ in texts_of(explanation.figure())}


def test_curves_have_whole_epochs_and_name_the_score():
    rows = [{"epoch": n / 2, "train_loss": 2 / n, "eval_loss": 2.5 / n, "eval_mcc": 0.1 * n} for n in range(1, 7)]
    figure = draw_curves({name: rows for name in ("ClassT", "WordT", "ClassT+WordT")})
    check_readable(figure)
    left, right = figure.axes
    assert left.get_ylabel() == "loss" and right.get_ylabel() == "mcc on validation"
    for axes in (left, right):
        assert all(float(place).is_integer() for place in axes.get_xticks())


@pytest.mark.parametrize("classes", [2, 10, 16, 40])
def test_confusion_has_counts(classes):
    counts = np.full((classes, classes), 3) + np.diag([900] * classes)
    figure = draw_confusion(Evaluation({}, [f"class number {n}" for n in range(classes)], counts))
    check_readable(figure)
    said = [text.get_text() for text, _ in texts_of(figure)]
    assert said.count("903") == (classes if classes <= 16 else 0)
    assert sum(name.startswith("class number") for name in said) == 2 * classes
