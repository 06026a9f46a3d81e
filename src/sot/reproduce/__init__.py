"""The paper's tables again: what each row trains, what it scored, and ours beside the paper's."""

from sot.reproduce.cost import Cost, estimate
from sot.reproduce.report import as_markdown, as_picture, as_table, collect, write_report
from sot.reproduce.tables import Row, TableOfPaper, choose_rows, choose_tasks, load_table, table_names
from sot.reproduce.work import Store, Unit, Where, do, lacks, plan

__all__ = [
    "Cost",
    "Row",
    "Store",
    "TableOfPaper",
    "Unit",
    "Where",
    "as_markdown",
    "as_picture",
    "as_table",
    "choose_rows",
    "choose_tasks",
    "collect",
    "do",
    "estimate",
    "lacks",
    "load_table",
    "plan",
    "table_names",
    "write_report",
]
