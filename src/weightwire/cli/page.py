"""`weightwire page`: a run as pictures in a browser, live or as one file."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from weightwire.cli.shared.bucket_command import Url, with_bucket
from weightwire.cli.shared.stop_signal import stop_on_signal
from weightwire.cli.shared.terminal import byte_size, say
from weightwire.errors import OutputError
from weightwire.page import export_page
from weightwire.page.page_server import PORT, PageServer
from weightwire.system import durable_files
from weightwire.weights import file_to_replace

__all__ = ["page"]


def page(
    url: Url,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the page as it is now to one file, and exit.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; the default is for this machine only.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, show_default=f"{PORT}, or the next that is free", help="The port; 0 for any."),
    ] = None,
    open_browser: Annotated[
        bool | None,
        typer.Option("--open/--no-open", show_default="on a terminal with a display", help="Open it in the browser."),
    ] = None,
) -> None:
    """Show the run at URL as a page: its timeline, bytes, layers, replicas and metrics, live until Ctrl-C.

    It reads the bucket alone, and writes nothing to it.
    """
    if export is not None:
        _export(url, export)
        return
    with stop_on_signal() as stop, PageServer(url, host=host, port=port) as shown:
        print(shown.address, flush=True)
        say(f"the page of {url}; Ctrl-C ends it")
        if _is_watched() if open_browser is None else open_browser:
            with suppress(webbrowser.Error):
                webbrowser.open(shown.address)
        stop.wait()


def _export(url: str, out: Path) -> None:
    target = file_to_replace(out, "page", lambda start: start.startswith(b"<!doctype html>"))
    document = with_bucket(url, export_page)
    try:
        durable_files.write_file(target, document)
    except OSError as problem:
        raise OutputError(f"{out}: cannot be written ({problem.strerror})", hint="choose another place") from problem
    say(f"wrote {out}: {byte_size(len(document))}, which any browser opens")


def _is_watched() -> bool:
    """Whether a browser would open where the one who typed this sees it."""
    display = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.stderr.isatty() and bool(display) and "SSH_CONNECTION" not in os.environ
