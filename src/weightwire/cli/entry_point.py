"""The entry point of the command line: exit codes, signals, and how errors reach people and programs.

Data goes to stdout, messages to stderr. Only a bug in weightwire shows a traceback. Imports little: a Ctrl-C while the
commands are imported is handled like any other.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

__all__ = ["main", "script"]


def script() -> NoReturn:
    """Runs `main` and exits without Python's own shutdown.

    Threads of the object store's client may still report to the interpreter, and abort the process if it is gone.
    """
    code: int | str | None = 0
    try:
        main()
    except SystemExit as left:
        code = left.code
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # None, if it was closed before the start
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> NoReturn:
    """Runs the command line and exits: 0 on success, 1 after an error, 2 after wrong usage, 130 after Ctrl-C."""
    try:
        signal.signal(signal.SIGTERM, _terminate)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signal.SIGHUP, _terminate)
        code = _run()
    except KeyboardInterrupt:  # before or after the command itself
        code = _interrupted("nothing was changed")
    except BrokenPipeError:
        _drop_stdout()
        code = 1
    except OSError as problem:
        if problem.filename is not None:
            _fail("WW-USAGE", f"{problem.filename}: {problem.strerror}", "check the path and its permissions")
        # Without a file name it is stdout.
        _drop_stdout()
        _fail("WW-OUTPUT", f"stdout: cannot be written ({problem.strerror})", "redirect it to another place")
    sys.exit(code)


def _run() -> int:
    import typer

    from weightwire.cli.application import app
    from weightwire.cli.shared.stop_signal import CommandInterrupted
    from weightwire.errors import WeightwireError

    try:
        try:
            code = app(prog_name="weightwire", standalone_mode=False)
        finally:
            # Here, because an error while Python exits can no longer be handled.
            print(end="", flush=True)
    except WeightwireError as problem:
        _fail(problem.code, problem.message, problem.hint)
    except CommandInterrupted as interrupted:
        return _interrupted(str(interrupted))
    except Exception as problem:
        # Newer releases of typer have their own copy of click, so its ClickException cannot be imported by name.
        if not isinstance(problem, typer.BadParameter.__mro__[2]):
            raise
        return _refuse(problem)
    return code if isinstance(code, int) else 0


def _refuse(problem: Any) -> int:
    """Wrong usage."""
    from weightwire.errors import printable

    _write_error("WW-USAGE", problem.format_message())
    problem.message = printable(problem.message)
    problem.show()
    return 2


def _fail(code: str, message: str, hint: str | None) -> NoReturn:
    from weightwire.cli.shared.terminal import fail

    _write_error(code, message, hint)
    fail(message, hint, code)


def _interrupted(left: str) -> int:
    """Prints the state that the command leaves behind, in one line."""
    from weightwire.errors import printable

    print(printable(f"interrupted: {left}"), file=sys.stderr)
    _write_error("WW-INTERRUPTED", f"interrupted: {left}")
    return 128 + signal.SIGINT


def _write_error(code: str, message: str, hint: str | None = None) -> None:
    """Under `--json` an error is also one line on stdout."""
    if "--json" in sys.argv[1:]:
        from weightwire.cli.shared.json_output import ErrorOutput, write_json_line

        write_json_line(ErrorOutput.of(code, message, hint))


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Exits by an exception, so that partial files are removed."""
    sys.exit(128 + number)


def _drop_stdout() -> None:
    """The reader closed the pipe (`| head`). Discard buffered output, or Python reports an error at exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
