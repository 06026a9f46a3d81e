"""`sot reproduce`: the paper's tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sot.cli.options import SetOption, WorkersOption, console, errors, is_first_process, progress
from sot.files import check_folder, rich_table

if TYPE_CHECKING:
    from sot.paper.work import Store, Unit, Where


def reproduce(
    table: Annotated[str | None, typer.Argument(help="Number of a table in the paper; without it, list all.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the results: runs, table and figure.")] = Path(
        "reproduce"
    ),
    data: Annotated[str | None, typer.Option(help="Images, as --data of sot train.")] = None,
    texts: Annotated[Path | None, typer.Option(help="Folder of the text tasks. Default: from the hub.")] = None,
    imagenet_a: Annotated[str | None, typer.Option(help="ImageNet-A, to evaluate on.")] = None,
    model: Annotated[str | None, typer.Option(help="Model for rows that name none: texts with --preset cpu.")] = None,
    preset: Annotated[str, typer.Option(help="paper: its own settings. cpu: small ones.")] = "paper",
    rows: Annotated[str | None, typer.Option(help="Rows by number, e.g. 1,3-5.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Text tasks, e.g. cola,rte.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per row.", min=1)] = 3,
    settings: SetOption = None,
    merge: Annotated[list[Path] | None, typer.Option(help="Take the results of another --out. Repeatable.")] = None,
    workers: WorkersOption = 0,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cost and stop.")] = False,
    report_only: Annotated[bool, typer.Option("--report", help="Print what there is, train nothing.")] = False,
) -> None:
    """Train the missing rows of a table of the paper, and print ours beside the paper's."""
    if table is None:
        _list(preset)
        return
    from sot.models.folder import show_bars_on_terminals_only
    from sot.paper.side_by_side import collect, side_by_side_table, subject, write_report
    from sot.paper.table import choose_rows, choose_tasks, load_paper_table
    from sot.paper.work import Store, Where, plan
    from sot.training.run_folder import only_processes

    chosen = load_paper_table(table, preset, settings or [])
    wanted = choose_tasks(choose_rows(chosen, rows), tasks)
    where = Where(data, texts, imagenet_a, model)
    store = Store(out)
    units = plan(wanted, range(seeds), where, as_of_imagenet=dry_run)
    if dry_run:
        _show_costs(units, store, where)
        return
    show_bars_on_terminals_only()
    check_folder(out)
    with only_processes(out):
        for folder in merge or []:
            console.print(f"{store.merge(folder)} results taken from {folder}.", soft_wrap=True)
        if not report_only:
            _train(units, store, where, workers, threads)
        found = collect(chosen, units, store)
        if is_first_process():
            write_report(chosen, found, out, subject(units, data))
    console.print(side_by_side_table(chosen, found))
    console.print(f"As Markdown, CSV and figure: {out / f'table-{table}'}.*", soft_wrap=True)


def _list(preset: str) -> None:
    from sot.paper.table import load_paper_table, table_names

    tables = [load_paper_table(name, preset) for name in table_names()]
    rows = ((table.name, table.title, str(len(table.rows))) for table in tables)
    console.print(rich_table(["table", "title"], ["rows"], rows, title=f"The paper's tables, preset {preset}"))


def _train(units: list[Unit], store: Store, where: Where, workers: int, threads: int | None) -> None:
    from transformers.utils import logging

    from sot.bench.timing import thread_count
    from sot.paper.work import do, lacks

    logging.set_verbosity_error()
    missing = [unit for unit in units if lacks(unit, store, where)]
    began = time.monotonic()
    with thread_count(threads):
        for number, unit in enumerate(missing):
            what = f"{unit.row.name}{f', {unit.task}' if unit.task else ''}, seed {unit.recipe.seed}"
            if number > 0:
                minutes = (time.monotonic() - began) / 60 / number * (len(missing) - number)
                what += f" (about {minutes:.0f} minutes left)"
            errors.print(f"{number + 1} of {len(missing)}: {what}", highlight=False, soft_wrap=True)
            do(unit, store, where, workers)


def _show_costs(units: list[Unit], store: Store, where: Where) -> None:
    from sot.paper.cost import estimate_work

    missing = [unit for unit in units if store.result(unit) is None]
    first: dict[tuple[str, str | None], Unit] = {}
    for unit in missing:
        first.setdefault((unit.row.name, unit.task), unit)
    caption = "Hours: on this machine, from one small step; reading data comes on top."
    shown = rich_table(["row", "task"], ["trainings", "steps", "MACs P", "hours"], caption=caption)
    total = [0.0, 0.0, 0.0]
    for unit in progress(first.values(), "Timing"):
        cost = estimate_work(unit, where)
        times = sum(other.row.name == unit.row.name and other.task == unit.task for other in missing)
        figures = (times * cost.steps, times * cost.macs / 1e15, times * cost.hours)
        total = [before + figure for before, figure in zip(total, figures)]
        steps, macs, hours = figures
        shown.add_row(unit.row.name, unit.task or "images", str(times), f"{steps:,}", f"{macs:.3g}", f"{hours:.3g}")
    shown.add_section()
    shown.add_row("all", "", str(len(missing)), f"{total[0]:,.0f}", f"{total[1]:.3g}", f"{total[2]:.3g}")
    console.print(shown)
