"""The folder of a run: who may write to it, and what makes it that run. Loads no torch, to refuse mistakes at once."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from sot.errors import SettingError
from sot.files import check_folder, digest, read_object, write_atomically
from sot.lock import LOCK, only_writer
from sot.saved import RUN_FILE as RUN_FILE
from sot.training.recipe import Recipe

logger = logging.getLogger("sot")
MANIFEST = "manifest.json"
UNFINISHED = "unfinished"  # where a checkpoint is written, in the folder of its run


def full_name(name: str) -> str:
    """A local path in full, so that it means the same from everywhere; any other name as it is."""
    if name in ("digits", "tones"):  # the built-in sets, even where there is a folder of this name
        return name
    if Path(name).exists():
        return str(Path(name).resolve())
    kind, _, root = name.partition("@")
    return f"{kind}@{Path(root).resolve()}" if root and kind.startswith(("torch/", "wds/")) else name


def kept_split(out: Path) -> dict[str, Any]:
    """How a run divided data that came in one piece: by class or not, as the first ones, and its fold."""
    kept = read_object(out / RUN_FILE) if (out / RUN_FILE).is_file() else {"split": "stratified"}
    return {"stratified": "split" in kept, "fold": tuple(kept["fold"]) if "fold" in kept else None}


def check_out(out: Path, resume: bool, overwrite: bool) -> bool:
    """Whether there is something in the folder of a run; what cannot be started or continued there is refused."""
    if resume and overwrite:
        raise SettingError("{resume} continues the run in {} and {overwrite} replaces it: give one of them", out)
    check_folder(out)
    ignored = (LOCK, f".{RUN_FILE}.partial")  # of a killed start
    used = out.exists() and any(path.name not in ignored for path in out.iterdir())
    if used and not (resume or overwrite):
        raise SettingError("{} exists: continue it with {resume} or replace it with {overwrite}", out)
    if used and resume and not (out / RUN_FILE).is_file():
        raise ValueError(f"{out} is not the folder of a run: it has no {RUN_FILE}")
    if used and overwrite and not (out / RUN_FILE).is_file():
        said = "{} is not the folder of a run: it has no {}, and {overwrite} replaces runs only"
        raise SettingError(said, out, RUN_FILE)
    return used


@contextmanager
def open_run(out: Path, identity: Mapping[str, Any], recipe: Recipe, resume: bool, overwrite: bool) -> Iterator[bool]:
    """Have the folder of a run alone; one that exists needs `resume`, of the same model and data, or `overwrite`.

    The context is whether the run is continued.
    """
    from accelerate import PartialState

    check_out(out, resume, overwrite)
    with only_processes(out):
        used = check_out(out, resume, overwrite)
        if used and resume:
            _check_same_run(out, identity, recipe)
        if used and overwrite:
            _check_replaceable(out, identity)
        processes = PartialState()
        processes.wait_for_everyone()  # all have looked before one writes
        if processes.is_main_process:
            if used and resume:
                shutil.rmtree(out / UNFINISHED, ignore_errors=True)
            elif used:
                _empty(out)
            write_atomically(out / RUN_FILE, json.dumps({**identity, "recipe": recipe.to_yaml()}, indent=2))
            write_atomically(out / "recipe.yaml", recipe.to_yaml())
        processes.wait_for_everyone()
        yield used and resume


@contextmanager
def only_processes(out: Path) -> Iterator[None]:
    """Be the only processes that write to a folder: the first has the lock, and tells the others if it has not."""
    import torch
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    processes = PartialState(cpu=not torch.accelerator.is_available())  # else each were alone on a CPU
    refusal = list[Exception | None]([None])
    with ExitStack() as stack:
        if processes.is_main_process:
            try:
                stack.enter_context(only_writer(out))
            except (ValueError, OSError) as error:
                refusal[0] = error
        if processes.num_processes > 1:
            broadcast_object_list(refusal)
        if refusal[0] is not None:
            raise refusal[0]
        yield


@contextmanager
def removed_unless_begun(out: Path, continued: bool) -> Iterator[None]:
    """Leave no folder of a new run, which `open_run` made, that ends by an error before its first checkpoint."""
    try:
        yield
    except BaseException:
        if os.environ.get("RANK", "0") == "0" and not continued and not checkpoints(out):
            shutil.rmtree(out, ignore_errors=True)
        raise


def _check_replaceable(out: Path, identity: Mapping[str, Any]) -> None:
    """Raise ValueError if anything that is in use lies inside of `out`."""
    for lock in out.rglob(f"*/{LOCK}"):  # of the trials of a search
        with only_writer(lock.parent):
            pass
    names = ("model", "data", "source", "dev", "weights")
    named = {name: value for name in names if isinstance(value := identity.get(name), str)}
    for what, name in {"current directory": str(Path.cwd()), **named}.items():
        place = Path(full_name(name))
        place = place if place.is_absolute() else Path(full_name(name).partition("@")[2])
        if place.is_absolute() and place.is_relative_to(out.resolve()):  # other names are no local paths
            raise SettingError("{overwrite} would delete the {}, which is in {}: choose another {out}", what, out)


def _empty(out: Path) -> None:
    """Remove a run except its run.json, which is written anew: without it an interrupted removal would be no run."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (RUN_FILE, LOCK):
            path.unlink()


def _check_same_run(out: Path, identity: Mapping[str, Any], recipe: Recipe) -> None:
    before = read_object(out / RUN_FILE)
    was = next(
        (
            f"{name} {before.get(name)!r}, not {value!r}"
            for name, value in identity.items()
            if not _is_same(name, before.get(name), value)
        ),
        None,
    )
    if was is None and _saved_recipe(before.get("recipe"), out) != recipe:
        was = "another recipe"
    if was is not None:
        raise ValueError(f"{out} is a run of {was}: resume it as it was started, or choose another folder")


def _is_same(name: str, before: Any, value: Any) -> bool:
    from sot.core.head_config import HeadConfig

    if name in ("model", "data") and isinstance(before, str):  # however a path is spelt
        return full_name(before) == full_name(value)
    if name == "head" and before and value:
        return HeadConfig.from_saved(before).to_dict() == value
    return bool(before == value)


def _saved_recipe(text: Any, out: Path) -> Recipe:
    """The recipe of a run; one that was kept before a key was added has the default of it."""
    try:
        return Recipe.from_dict(yaml.safe_load(text))
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ValueError(f"{out / RUN_FILE} is damaged: it holds no recipe") from error


# --- checkpoints: whole, or passed over ------------------------------------------------------------


def finish_checkpoint(folder: Path, target: Path) -> None:
    """Record what the folder holds, and move it into place in one step."""
    manifest = {str(file.relative_to(folder)): digest(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    shutil.rmtree(target, ignore_errors=True)
    folder.replace(target)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint holds every file it was written with, unchanged."""
    try:
        manifest = read_object(folder / MANIFEST)
        return all(digest(folder / name) == expected for name, expected in manifest.items())
    except (OSError, ValueError):
        return False


def checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, the newest first."""
    found = [path for path in out.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)


def last_whole_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint that is whole; those that are not are named and passed over."""
    for path in checkpoints(out):
        if is_whole(path):
            return path
        logger.warning("%s is damaged or unfinished: falling back to the one before.", path)
    return None


def remove_old(out: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for path in checkpoints(out)[keep:]:
        shutil.rmtree(path)
