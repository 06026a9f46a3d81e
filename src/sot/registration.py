"""Registers our models with timm and transformers as soon as one of these is imported, and loads neither before.

`import sot` is all a program needs for `timm.create_model("sot_tiny")` and `AutoModelFor….from_pretrained(folder)`.
Yet help of the command line and users of `sot.core` alone must not wait for libraries that they do not need.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

LIBRARIES = ("timm", "transformers")


def register_models() -> None:
    """Import `sot.models`, which registers; where a library is missing there is nothing to register with."""
    try:
        import_module("sot.models")
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise


class ImportWatcher(MetaPathFinder):
    """Finds nothing by itself: a library that the other finders find registers our models once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The library's own spec, whose loader registers afterwards."""
        if name not in LIBRARIES:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                register_models()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def watch_imports() -> None:
    """Register at once if a library is there already, else when it is imported."""
    if any(library in sys.modules for library in LIBRARIES):
        register_models()
    else:
        sys.meta_path.insert(0, ImportWatcher())
