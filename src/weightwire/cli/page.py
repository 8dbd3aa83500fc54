"""`weightwire page`: a run as charts in a browser, live or as one file."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from weightwire.cli.shared.bucket_command import Url, with_bucket
from weightwire.cli.shared.listen_options import Insecure, TokenFile, access_of
from weightwire.cli.shared.metered_bucket import MeteredBucket
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.cli.shared.stop_signal import interrupt_leaves, output_left, stop_on_signal
from weightwire.cli.shared.terminal import byte_size, say
from weightwire.errors import OutputError, printable
from weightwire.page import export_page
from weightwire.page.page_server import PORT, PageServer
from weightwire.system import durable_files
from weightwire.weights import file_to_replace

__all__ = ["page"]


def page(
    url: Url,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the current page to one file and exit.")
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on. The default accepts only this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            show_default=f"{PORT} or the next free port",
            help="Port to listen on; 0 picks a free one.",
        ),
    ] = None,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    open_browser: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open", show_default="on a terminal with a display", help="Open the page in a browser."
        ),
    ] = None,
) -> None:
    """Show the run at URL in a browser, live until Ctrl-C.

    The page shows timeline, bytes, layers, replicas and metrics. It only reads the bucket.
    """
    if export is not None:
        if export.suffix.lower() not in (".html", ".htm"):
            raise typer.BadParameter(f"{export} does not end in .html", param_hint="--export")
        with interrupt_leaves(output_left(export)):
            _export(url, export)
        return
    access = access_of(token_file, insecure)
    with stop_on_signal() as stop, PageServer(url, host=host, port=port, access=access) as shown:
        print(printable(shown.address), flush=True)
        say(f"showing {url} live; press Ctrl-C to stop")
        if access.token is not None:
            say("the browser asks for a user and a password: the password is the token, the user can be anything")
        if _is_watched() if open_browser is None else open_browser:
            with suppress(webbrowser.Error):
                webbrowser.open(shown.address)
        stop.wait()
    stop.finish("the page has stopped")


def _export(url: str, out: Path) -> None:
    target = file_to_replace(out, "page", lambda start: start.startswith(b"<!doctype html>"))
    with progress_bar("reading the run") as bar:
        document = with_bucket(url, lambda bucket: export_page(MeteredBucket(bucket, on_read=bar.add)))
    try:
        durable_files.write_file(target, document)
    except OSError as problem:
        raise OutputError(f"{out}: cannot write the page ({problem.strerror})", hint="choose another path") from problem
    say(f"wrote {out}: {byte_size(len(document))}, opens in any browser")


def _is_watched() -> bool:
    """Whether the user would see a browser that is opened here."""
    display = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.stderr.isatty() and bool(display) and "SSH_CONNECTION" not in os.environ
