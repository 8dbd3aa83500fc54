"""The command line: the commands put together, and what becomes of errors.

Each command has a file of its own; `terminal` is how they talk. Data goes to stdout, talk to stderr. Only a
bug in weightwire shows a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from weightwire import WeightwireError, __version__
from weightwire.cli import demo, diff, follow, gc, log, page, patch, publish, restore, serve, show, status, verify
from weightwire.cli.shared.terminal import fail, write_json_line

__all__ = ["app", "main", "script"]

# Plain help, and no boxes around errors: they read the same in a log as in a terminal.
app = typer.Typer(
    name="weightwire",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Command(TyperCommand):
    """A command whose errors also go to stdout where it was called with --json."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return self._invoke(ctx)
        except WeightwireError as problem:
            if ctx.params.get("as_json"):
                write_json_line({"error": {"code": problem.code, "message": problem.message, "hint": problem.hint}})
            raise

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MemoryError as problem:
            hint = "try fewer --threads, or a machine with more memory"
            raise WeightwireError("out of memory", hint=hint) from problem


def _add(command: Callable[..., None], usage: str = "[OPTIONS]", *, needs_arguments: bool = True) -> None:
    app.command(cls=_Command, no_args_is_help=needs_arguments, options_metavar=usage)(command)


# The demo first; a run, as one comes to need them; then what works on files alone.
_add(demo.demo, needs_arguments=False)
_add(publish.publish)
_add(follow.follow, "[OPTIONS] --into DIR")
_add(serve.serve, "[OPTIONS] --follow URL")
_add(restore.restore, "[OPTIONS] -o DIR")
_add(status.status)
_add(log.log)
_add(page.page)
_add(verify.verify)
_add(gc.gc)
_add(diff.diff, "[OPTIONS] -o DELTA")
_add(patch.patch, "[OPTIONS] -o OUT")
_add(show.show)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"weightwire {__version__}")
        raise typer.Exit


@app.callback()
def weightwire(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Ships a model's weight changes from a trainer to its inference servers, bit for bit."""


def script() -> NoReturn:
    """What is run as `weightwire`: `main`, and then out without Python's own way.

    Threads of the object store's client may still be about to report to it, and abort the process if they find it gone.
    """
    code: int | str | None = 0
    try:
        main()
    except SystemExit as left:
        code = left.code
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    """Runs the command line and exits: 0 if all went well, 1 after an error, 2 if it was called wrongly."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    try:
        try:
            app(prog_name="weightwire")
        finally:
            # Flushed here, and not as Python exits: what goes wrong then can no longer be dealt with.
            print(end="", flush=True)
    except WeightwireError as problem:
        fail(problem.message, problem.hint)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        _drop_stdout()
        sys.exit(1)
    except OSError as problem:
        # Files have errors of their own: what is left is stdout.
        _drop_stdout()
        fail(f"stdout: cannot be written ({problem.strerror})", "send it to another place")


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """By an exception, so that files half written are removed on the way out."""
    sys.exit(128 + number)


def _drop_stdout() -> None:
    """Whoever read it has left (`| head`); what is still buffered would be an error when Python exits."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
