"""The paper's comparison tables: every row is built, counted as the paper counts, and explained where it differs."""

import dataclasses
import io
import json

import pytest
import timm
from rich.console import Console
from test_cli import sot as run

from sot.paper.comparison import PAPER_FIGURES, ComparedModel, find_models, load_comparisons
from sot.paper.counts import Measured, as_json, build, comparison_table, find_comparison, measure_row

ROWS = [row for table in load_comparisons().values() for row in table.rows]
QUICK = ("SoT-Tiny (ours)", "DeiT-T+ours", "T2T-ViT-12+ours", "Swin-T+ours", "PiT-Ti")


def marked(row):
    return pytest.param(row, id=row.name, marks=[] if row.name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("row", [marked(row) for row in ROWS])
def test_row_has_the_papers_counts_or_says_why_not(row):
    measured = measure_row(row)
    assert measured.params and measured.macs, measured.reason
    assert measured.is_close() != bool(row.why), measured.deviations()


def test_rows_are_the_papers():
    assert [len(table.rows) for table in load_comparisons().values()] == [12, 16, 11]
    assert len({row.name for row in ROWS}) == len(ROWS)
    plain = {row.name: row for row in ROWS if row.side is None}
    for row in ROWS:
        if row.side is not None:  # the same backbone as the plain row, and better
            peer = plain[row.name.removesuffix("+ours")]
            assert row.model == peer.model and row.imagenet > peer.imagenet and row.is_ours
    assert all(timm.is_model(row.model) for row in ROWS) and find_models(None) == list(PAPER_FIGURES)
    assert PAPER_FIGURES["t2t_vit_14"] == (21.5, 5.2) and PAPER_FIGURES["sot_tiny"] == (7.7, 2.5)


def test_equipped_rows_have_the_head_and_the_embedding():
    (row,) = [row for row in ROWS if row.name == "T2T-ViT-12+ours"]
    model = build(row)
    assert model.device.type == "meta" and model.config.embed == "densenet" and model.classifier.config.left_dim == 14


def test_a_row_that_cannot_be_built_tells_why():
    missing = ComparedModel("Nothing", "no_such_model", 1.0, 1.0, 50.0)
    measured = measure_row(missing)
    assert measured.params is None and measured.note == "no_such_model is not registered with timm"
    refused = measure_row(dataclasses.replace(missing, model="ps_vit_ti_14", side=14))
    assert refused.macs is None and "progressive sampling" in refused.note
    cells = measured.cells()
    assert cells == ["Nothing", "–", "1.0", "–", "–", "1.0", "–", "– / 50.0", "– / –"]


def test_deviations_and_notes():
    row = ComparedModel("Model", "sot_7", params=10.0, macs=2.0, imagenet=80.0, why="because")
    close, far = Measured(row, 10_090_000, 2_050_000_000), Measured(row, 10_000_000, 2_100_000_000)
    assert close.deviations() == pytest.approx((0.009, 0.025)) and close.is_close() and close.note == ""
    assert not far.is_close() and far.note == "because"
    assert far.cells()[1:7] == ["10.00", "10.0", "+0.0", "2.10", "2.0", "+5.0"]
    assert Measured(dataclasses.replace(row, why=""), 1, 1).note == "not the paper's figures"
    (record,) = [json.loads(line) for line in as_json([far]).splitlines()]
    assert (record["params"], record["paper_macs"]) == (10**7, 2e9)
    assert (record["imagenet"], record["paper_imagenet"]) == (None, 80.0)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table(find_comparison("5a"), [close, far]))
    text = console.export_text()
    assert "Model: because." in text and "+5.0" in text and "…" not in text


def test_the_command_line_refuses_what_it_cannot_show():
    for arguments, message in (
        (["--table", "5d"], "unknown table '5d'; accepted: 5a, 5b, 5c"),
        (["sot_*", "--table", "5a"], "takes neither a pattern nor --training"),
    ):
        result = run("models", *arguments)
        assert result.returncode == 2 and message in result.stderr
