"""Serving the page: only its own routes, only small requests, nothing fetched and nothing shown from elsewhere."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate.utils import patch_environment

from sot.extras import need
from sot.ui.arguments import LOOPBACK
from sot.ui.shown import Shown

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
MAX_FILE = 20 * 2**20  # bytes of an upload
MAX_REQUEST = 1_000_000  # bytes of anything else
MAX_STORED = 1_000_000_000  # bytes of all uploads that are kept
MAX_WAITING = 40  # requests that wait for their turn; the next is told so
ROUTES = re.compile(
    r"/(|config|theme\.css|favicon\.ico|manifest\.json|robots\.txt|(assets|static|svelte)/.*"
    r"|gradio_api/(info|app_id|startup-events|theme\.css|heartbeat/\w+|queue/(join|data)|upload|upload_progress|reset|cancel"
    r"|call/.*|run/.*|file=.*))/?"
)
READABLE = {  # Gradio's own pairs of colours have too little contrast
    "block_label_text_color": "*primary_800",
    "block_title_text_color": "*primary_800",
    "block_info_text_color": "*neutral_600",
    "body_text_color_subdued": "*neutral_600",
    "button_primary_background_fill": "*primary_600",
    "button_primary_background_fill_hover": "*primary_700",
    "button_primary_background_fill_dark": "*primary_600",
    "button_primary_background_fill_hover_dark": "*primary_700",
    "input_placeholder_color": "*neutral_600",
}
OWN_THINGS_ONLY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'self'"
)


class Gate:
    """In front of Gradio: other routes do not exist, large bodies are cut off, and the browser may load ours only."""

    def __init__(self, app: Any, folder: Path) -> None:
        self.app, self.folder = app, folder

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        uploads = path.rstrip("/") == "/gradio_api/upload"
        if not ROUTES.fullmatch(path):
            await _refuse(send, 404, "there is no such page")
        elif is_foreign({name.lower(): value.decode("latin-1") for name, value in scope["headers"]}):
            await _refuse(send, 403, "this page takes requests from itself only")
        elif uploads and stored(self.folder) > MAX_STORED:
            await _refuse(send, 507, "too many images were uploaded; try again in an hour")
        else:
            await self._limited(scope, receive, send, MAX_FILE + MAX_REQUEST if uploads else MAX_REQUEST)

    async def _limited(self, scope: Any, receive: Any, send: Any, limit: int) -> None:
        size = dict(scope["headers"]).get(b"content-length", b"0")
        if not size.isdigit() or int(size) > limit:
            await _refuse(send, 413, f"the request is too large: at most {limit:,} bytes are accepted")
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            return {"type": "http.disconnect"} if seen > limit else message

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(b"content-security-policy", OWN_THINGS_ONLY.encode()), (b"referrer-policy", b"no-referrer")]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self.app(scope, counted, guarded)


def is_foreign(headers: Mapping[bytes, str]) -> bool:
    """Whether a page of another server sends a request, by what browsers say of it whatever that page wants."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if headers.get(b"sec-fetch-mode") == "navigate" and headers.get(b"sec-fetch-dest") == "document":
        return origin is not None and site not in ("same-origin", "none")  # a link may lead here, a form may not
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and urlsplit(origin).netloc != headers.get(b"host")


async def _refuse(send: Any, status: int, why: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": why.encode()})


def stored(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@contextmanager
def serving(models: Mapping[str, Shown], host: str = "127.0.0.1", port: int | None = None) -> Iterator[str]:
    """Serve a page for the models from threads of its own while the context lasts; the address."""
    need("gradio", "the page", "ui")
    uploads = tempfile.TemporaryDirectory(prefix="sot-ui-")  # gone when the server is
    with uploads as folder, patch_environment(GRADIO_TEMP_DIR=folder):
        page, address = _launch(models, host, port, Path(folder))
        try:
            yield address
        finally:
            page.close(verbose=False)


def _launch(models: Mapping[str, Shown], host: str, port: int | None, folder: Path) -> tuple[Any, str]:
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from sot.ui.page import build_page
    from sot.ui.style import CSS

    page = build_page(models, folder)
    page.queue(max_size=MAX_WAITING, default_concurrency_limit=1, api_open=False)
    gates = [Middleware(Gate, folder=folder)]
    if host in LOOPBACK:  # a name that a stranger's page had resolved to this machine is none of ours
        gates.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"]))
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"]
    theme = gr.themes.Soft(
        primary_hue="blue", neutral_hue="slate", font=fonts, font_mono=["ui-monospace", "Menlo", "monospace"]
    ).set(**READABLE)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        share=False,
        inbrowser=False,
        prevent_thread_lock=True,
        quiet=True,
        show_error=True,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        max_file_size=MAX_FILE,
        max_threads=8,
        state_session_capacity=100,
        allowed_paths=[],
        app_kwargs={"middleware": gates, "docs_url": None, "redoc_url": None, "openapi_url": None},
        theme=theme,
        css=CSS,
    )
    return page, address


def serve(
    models: Mapping[str, Shown], host: str, port: int | None, ready: Callable[[str], None], wait: Callable[[], Any]
) -> None:
    """Serve until `wait` returns, or somebody ends it from the keyboard or by a signal that can be answered."""
    signals = (
        signal.SIGTERM,
        getattr(signal, "SIGHUP", signal.SIGTERM),
    )  # the terminal's end, which Windows has none of
    with suppress(KeyboardInterrupt), _ended_by(*signals), serving(models, host, port) as address:
        ready(address)
        wait()


@contextmanager
def _ended_by(*signals: signal.Signals) -> Iterator[None]:
    """Have signals do what Ctrl+C does, so that the pictures of others do not outlive the server."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, signal.default_int_handler) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
