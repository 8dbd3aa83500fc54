"""Runs scripts of this directory as child processes that communicate in lines."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["PATIENCE", "Child"]

HERE = Path(__file__).parent
PATIENCE = 300.0  # seconds to wait for a line


class Child:
    """A script of this directory. It exits when its stdin closes, even if this process is killed.

    If the `with` block fails, the child is killed at once: it may be waiting for something that never happens.
    """

    def __init__(self, script: str | Path, *arguments: str | Path) -> None:
        self._script = script
        command = [sys.executable, HERE / script, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def next_line(self, timeout: float = PATIENCE) -> str:
        try:
            text = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise SystemExit(f"{self._script} printed nothing for {timeout:g} s") from None
        if not text:
            raise SystemExit(f"{self._script} ended too early; its error is above")
        return text.strip()

    def send(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(f"{self._script} ended too early; its error is above") from None

    def end(self, timeout: float = PATIENCE) -> None:
        """Closes its stdin and waits until it exits."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SystemExit(f"{self._script} did not end within {timeout:g} s") from None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
        else:
            self.kill()
