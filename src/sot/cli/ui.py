"""`sot ui`: the page in a browser."""

from __future__ import annotations

import os
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from sot.cli.options import console, errors, progress


def ui(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Trained models. Default: a small one, made first.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Default: the first free port from 7860.", min=1, max=65535)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Any but loopback lets others in.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Open a page in the browser: classify, explain and compare models."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave the cores to others; before torch
    from sot.extras import need
    from sot.ui.arguments import LOOPBACK, check_address, check_folders

    def say(text: str) -> None:
        errors.print(text, highlight=False, soft_wrap=True, markup=False)

    check_folders(folders or [])
    need("gradio", "the page", "ui")
    check_address(host, port)
    if host not in LOOPBACK:
        say(f"Anybody who reaches {host} can use this page.")
    from sot.ui.serve import serve
    from sot.ui.shown import first_models, open_models

    models = open_models(folders, progress) if folders else first_models(say)

    def ready(address: str) -> None:
        console.print(f"{address}  (Ctrl+C ends it)", highlight=False, soft_wrap=True, markup=False)
        if browser:
            webbrowser.open(address)

    try:
        serve(models, host, port, ready, threading.Event().wait)
    finally:
        for shown in models.values():
            shown.stop()
