"""The suites of timm and transformers on our models, from checkouts that `make test-peers` names."""

import os
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

SOURCES = {"test_timm.py": "TIMM", "test_transformers.py": "TRANSFORMERS"}
EXCEPTIONS = yaml.safe_load((Path(__file__).parent / "exceptions.yaml").read_text())

collect_ignore = [name for name, source in SOURCES.items() if not os.environ.get(source)]


def pytest_collection_modifyitems(items):
    """Leave out what exceptions.yaml names; the reason is in the report."""
    for item in items:
        if item.path.name not in SOURCES:
            continue
        item.add_marker(pytest.mark.peers)
        known = EXCEPTIONS[item.path.stem.removeprefix("test_")]
        names = (item.name, f"{item.parent.name}::{item.name}")
        for reason in (reason for pattern, reason in known.items() if any(fnmatch(name, pattern) for name in names)):
            item.add_marker(pytest.mark.skip(reason=f"exception: {reason}"))
