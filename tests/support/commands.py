"""Runs weightwire commands, and a training that writes checkpoints."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from weightwire.cli.entry_point import main
from weightwire.delta.state import digest
from weightwire.weights.source import read_weights

Arrays = dict[str, npt.NDArray[Any]]

COMMAND = [sys.executable, "-m", "weightwire"]


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    def check_failed(self, *texts: str) -> None:
        """Checks that the command printed one error with a hint, and no traceback."""
        assert (self.code, self.out) == (1, ""), self
        error, hint = without_slowness(self.err).splitlines()
        assert re.fullmatch(r"error: .* \[WW-[A-Z-]+\]", error), self
        assert hint.startswith("hint: "), self
        for text in texts:
            assert text in self.err


def without_slowness(text: str) -> str:
    """Without the lines about a store that is slow, as any store may be on a busy machine."""
    slow = ("has not answered for", "answers again after")
    return "".join(line for line in text.splitlines(keepends=True) if not any(words in line for words in slow))


class Command:
    """Runs weightwire in this process. Returns exit code, stdout and stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *args: str | Path) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["weightwire", *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = self._capsys.readouterr()
        return Ran(int(exit.value.code or 0), *map(without_slowness, captured))


def weightwire(*args: str | Path | int) -> Ran:
    """Runs a command in this process, which is faster."""
    out, err = io.StringIO(), io.StringIO()
    code = _run(args, out, err)
    return Ran(code, *map(without_slowness, (out.getvalue(), err.getvalue())))


def on_terminal(*args: str | Path | int) -> Ran:
    """Like `weightwire`, but stderr is a terminal. Returns all that it showed, without escape codes."""
    out = io.StringIO()
    code, shown = shown_on_terminal(args, out, columns=100)
    return Ran(code, out.getvalue(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))


def shown_on_terminal(args: Sequence[str | Path | int], out: IO[str] | None = None, *, columns: int) -> tuple[int, str]:
    """Runs a command in this process, with stderr on a terminal, and stdout, too, unless it goes to `out`.

    Returns the exit code and all that the terminal got.
    """
    reader, writer = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while chunk := os.read(reader, 1 << 16):
                shown.append(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    with pytest.MonkeyPatch.context() as patch, open(writer, "w") as terminal:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm-256color")
        code = _run(args, out or terminal, terminal)
    thread.join()
    os.close(reader)
    return code, b"".join(shown).decode()


def _run(args: Sequence[str | Path | int], out: IO[str], err: IO[str]) -> int:
    """Returns the exit code."""
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    argv, sys.argv = sys.argv, ["weightwire", *map(str, args)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as exit:
        return int(exit.code or 0)
    finally:
        sys.argv = argv
        for number, handler in handlers:
            signal.signal(number, handler)
    raise AssertionError("it did not exit")


class Running:
    """A command in a separate process."""

    def __init__(self, *args: str | Path | int, command: Sequence[str] = COMMAND) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([*command, *map(str, args)], stdout=pipe, stderr=pipe, text=True)
        self.lines: dict[str, list[str]] = {"out": [], "err": []}
        self._readers = [
            threading.Thread(target=self._read, args=(stream, self.lines[name]), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: IO[str], lines: list[str]) -> None:
        for line in stream:
            lines.append(line)

    def wait_for(self, text: str, count: int = 1, stream: str = "err", seconds: float = 120.0) -> str:
        """Waits for the `count`-th line that contains the text."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            has_ended = not any(reader.is_alive() for reader in self._readers)  # and all its lines are here
            found = [line for line in self.lines[stream] if text in line]
            if len(found) >= count:
                return found[count - 1]
            assert not has_ended, f"ended: {self.lines}"
            time.sleep(0.02)
        raise AssertionError(f"no {text!r} in {self.lines}")

    def stop(self, number: int = signal.SIGTERM) -> Ran:
        self.process.send_signal(number)
        return self.end()

    def end(self) -> Ran:
        code = self.process.wait(timeout=120)
        for reader in self._readers:
            reader.join()
        return Ran(code, *(without_slowness("".join(self.lines[name])) for name in ("out", "err")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.end()


@dataclass
class Training:
    """Writes checkpoints as transformers does: weights in two shards, and files that are not weights."""

    parent: Path
    seed: int = 7
    weights: Arrays = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        shapes = {f"model.layers.{layer}.weight": (32 << layer, 256 >> layer) for layer in range(3)}
        self.weights = {name: random.normal(0, 0.02, one).astype(ml_dtypes.bfloat16) for name, one in shapes.items()}
        self.weights["norm"] = random.normal(1, 0.1, 128).astype(np.float32)

    def step(self) -> None:
        """A few weights move by one ulp."""
        self.weights = {name: array.copy() for name, array in self.weights.items()}
        for name in self.weights.keys() - {"norm"}:
            self.weights[name].view(np.uint16).reshape(-1)[::97] += 1

    def save(self, name: str) -> Path:
        directory = self.parent / name
        save_checkpoint(directory, self.weights)
        self.step()
        return directory

    def move_in(self, name: str) -> Path:
        """Like `save`, but complete at once: whoever watches may look at any time."""
        directory, elsewhere = self.parent / name, self.parent.with_name("unfinished")
        save_checkpoint(elsewhere, self.weights)
        self.parent.mkdir(parents=True, exist_ok=True)
        elsewhere.rename(directory)
        self.step()
        return directory


def save_checkpoint(directory: Path, arrays: Arrays) -> Path:
    names = sorted(arrays)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    (directory / "tokenizer").mkdir(parents=True, exist_ok=True)
    for shard, members in shards.items():
        safetensors.numpy.save_file({name: arrays[name] for name in members}, directory / shard, {"format": "pt"})
    listed = {name: shard for shard, members in shards.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    (directory / "config.json").write_text('{"model_type": "tiny"}\n')
    (directory / "tokenizer" / "vocab.txt").write_text("hello\n")
    return directory


def bits_of(path: Path) -> dict[str, bytes]:
    return {name: tensor.bits.tobytes() for name, tensor in read_weights(path).items()}


def state_of(path: Path) -> str:
    return digest(path).hex


def versions_in(bucket: Path) -> list[dict[str, Any]]:
    """The commits of a run, in order."""
    return [json.loads(path.read_bytes()) for path in sorted((bucket / "commits").glob("*.json"))]


def kinds_in(bucket: Path) -> list[str]:
    return [commit["kind"] for commit in versions_in(bucket)]


def tree(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
