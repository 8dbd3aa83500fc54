"""Files that are not regular, in place of files that a reader expects."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["fifo_at", "in_time"]


@contextmanager
def fifo_at(path: Path) -> Iterator[None]:
    """A FIFO without a writer in place of a file. Frees blocked readers at the end, and puts the file back."""
    before = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
            path.unlink()
            if before is not None:
                path.write_bytes(before)


def in_time(work: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The result or the exception of a function. Fails if it takes longer."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as problem:
            results.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"no result after {seconds:g} s"
    return results[0]
