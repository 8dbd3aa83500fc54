"""A trainer and followers as subprocesses that can be killed at any moment, and the expected weights.

`Actor` starts them. They import only weightwire, so that many of them start fast. They write what they know to files,
are controlled by signals, and die with their parent.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from weightwire import Tensor, digest, patch
from weightwire.errors import BucketError, WeightwireError
from weightwire.follower.follower import Follower
from weightwire.publisher.publication import Publication
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event
from weightwire.weights import DTYPES
from weightwire.weights.source import read_weights

__all__ = ["Actor", "Engine", "Journal", "Line", "Rest", "become_actor", "bits_at", "sample", "say", "weights_at"]

Line = dict[str, Any]

SHAPES = {
    "layer.weight": ("BF16", (1024, 1024)),
    "embed.weight": ("BF16", (64, 33)),
    "norm": ("F32", (257,)),
    "empty": ("F32", (0, 3)),
    "steps": ("I64", ()),
}
TIME_TO_START = 120.0


# --- the expected weights --------------------------------------------------------------------------------------------


def weights_at(seed: int, step: int) -> dict[str, Tensor]:
    """The trainer's weights at a step. They depend only on seed and step, so a killed trainer can continue."""
    rng = np.random.default_rng([seed, step])
    weights = {}
    for name, first in _first(seed).items():
        bits = first.bits.copy()
        moved = rng.integers(0, max(bits.size, 1), bits.size // 100)
        bits[moved] += rng.integers(1, 3, moved.size).astype(bits.dtype)
        weights[name] = Tensor(first.dtype, first.shape, bits)
    weights["steps"].bits[:] = step
    return weights


def bits_at(seed: int, step: int) -> dict[str, bytes]:
    return {name: tensor.bits.tobytes() for name, tensor in weights_at(seed, step).items()}


@cache
def _first(seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, (kind, shape) in SHAPES.items():
        dtype = DTYPES[kind]
        values = rng.normal(0, 0.02, int(np.prod(shape))).astype(np.float32).view(np.uint32)
        bits = values >> 16 if kind == "BF16" else values
        weights[name] = Tensor(dtype, shape, bits.astype(f"<u{dtype.unit}"))
    return weights


class Journal:
    """An append-only file of lines. A line survives its writer once `add` has returned."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, *, sync: bool = True, **line: Any) -> None:
        os.write(self._file, json.dumps(line | {"time": time.time()}).encode() + b"\n")
        if sync:
            os.fsync(self._file)

    @staticmethod
    def read(path: Path) -> list[Line]:
        """All complete lines."""
        return Journal.Reader(path).read()

    class Reader:
        """Reads a journal that is being written. Each call returns the complete lines since the last."""

        def __init__(self, path: Path) -> None:
            self._path = path
            self._read = 0  # bytes

        def read(self) -> list[Line]:
            if not self._path.exists():
                return []
            with self._path.open("rb") as file:
                file.seek(self._read)
                lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
            self._read += sum(map(len, lines))
            return [json.loads(line) for line in lines]


class Rest:
    """The file that makes the trainer rest. See `Trainer`."""

    def __init__(self, room: Path) -> None:
        self._path = room / "rest"

    def begin(self, name: str) -> str:
        """Asks the trainer to rest. Returns the text that its answer contains."""
        asked = f"{name}-{secrets.token_hex(4)}"
        partial = self._path.with_suffix(".partial")
        partial.write_text(asked)
        os.replace(partial, self._path)
        return asked

    def end(self) -> None:
        self._path.unlink(missing_ok=True)


# --- the parent ------------------------------------------------------------------------------------------------------


@dataclass
class Actor:
    """A process that can be killed and started again."""

    room: Path
    name: str
    arguments: Sequence[str]
    env: Mapping[str, str]
    program: Path = Path(__file__)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        assert not self.alive
        command = [sys.executable, str(self.program), *self.arguments, "--parent", str(os.getpid())]
        # Several processes share the cores.
        env = os.environ | dict(self.env) | {"OPENBLAS_NUM_THREADS": "1"}
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    @property
    def said(self) -> Path:
        return self.room / f"{self.name}.out"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def pause(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def dump_threads(self) -> None:
        """Makes it say where it is, or hangs."""
        if self.process is not None and self.alive:
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def leave(self) -> int:
        """Stops it with SIGTERM and returns its exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout=90)
        except subprocess.TimeoutExpired as problem:
            self.dump_threads()
            time.sleep(1.0)
            raise AssertionError(f"{self.name} did not end:\n{self.said.read_text()[-8000:]}") from problem
        finally:
            self.process.kill()
            self.process.wait()
            self.process = None


# --- the trainer -----------------------------------------------------------------------------------------------------


class Trainer:
    """Publishes step after step. Records each capture before, and each acknowledgement after it.

    While a file named `rest` exists, it captures nothing new, and records that it rests once all is published.
    """

    def __init__(self, url: str, room: Path, seed: int, pace: float) -> None:
        self._url = url
        self._room = room
        self._seed = seed
        self._pace = pace
        self._random = random.Random()
        path = room / "trainer.journal"
        captured = [line["step"] for line in Journal.read(path) if line["what"] == "captured"]
        self._step = max(captured, default=-1) + 1
        self._journal = Journal(path)
        self._waiting: list[tuple[Publication, str]] = []
        self._last: Publication | None = None
        self._rested = ""

    def run(self, versions: int | None, replicas: int) -> None:
        with _started(lambda: Publisher(self._url, threads=1, on_event=say), self._journal) as publisher:
            self._journal.add(what="started", version=publisher.version)
            while versions is None or self._step < versions:
                self._settle()
                if (self._room / "rest").exists():
                    self._rest(publisher)
                    time.sleep(0.02)
                    continue
                self._publish(publisher, self._step)
                self._step += 1
                time.sleep(self._pace * self._random.uniform(0.5, 1.5))
            publisher.wait(timeout=120)
            self._settle()
            if replicas:
                version = publisher.wait(replicas=replicas, timeout=150)
                self._journal.add(what="reached", version=version)

    def _publish(self, publisher: Publisher, step: int) -> None:
        weights = weights_at(self._seed, step)
        state = digest(weights, threads=1).hex
        self._journal.add(what="captured", step=step, state=state)
        began = time.perf_counter()
        self._last = publisher.publish(weights, step=step, metrics={"step": step})
        seconds = time.perf_counter() - began
        self._waiting.append((self._last, state))
        self._journal.add(sync=False, what="returned", step=step, seconds=seconds)

    def _settle(self) -> None:
        """Records the results of finished publications."""
        waiting, self._waiting = self._waiting, []
        for publication, state in waiting:
            if not publication.done:
                self._waiting.append((publication, state))
            elif publication.error is not None:
                self._journal.add(what="failed", step=publication.step, why=publication.error.message)
            elif publication.version is not None:
                self._journal.add(what="acknowledged", step=publication.step, version=publication.version, state=state)

    def _rest(self, publisher: Publisher) -> None:
        """Records that it rests, once the last capture is published. Captures again after a failure."""
        asked = (self._room / "rest").read_text() if (self._room / "rest").exists() else ""
        if self._waiting or asked == self._rested:
            return
        if self._last is None or self._last.version is None:
            self._publish(publisher, self._step)
            self._step += 1
            return
        self._rested = asked
        self._journal.add(what="rests", asked=asked, version=publisher.version, step=self._last.step)


def _started(make: Any, journal: Journal) -> Publisher:
    """Starts a publisher. Retries, because a publisher fails at once without a server."""
    until = time.monotonic() + TIME_TO_START
    while True:
        try:
            publisher: Publisher = make()
            return publisher
        except BucketError as problem:
            journal.add(what="could not start", why=problem.message)
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


# --- followers -------------------------------------------------------------------------------------------------------


Serve = Callable[[int, str, Mapping[str, Tensor]], None]
"""Receives a version, its state and the weights that an engine serves."""


class Engine:
    """Applies patches like an inference server, and compares the digests. Calls `serve` with every version."""

    def __init__(self, follower: Follower, log: Journal, serve: Serve = lambda version, state, weights: None) -> None:
        self._follower = follower
        self._log = log
        self._serve = serve
        self._weights: dict[str, Tensor] = {}

    def run(self) -> None:
        for update in self._follower.watch():
            if update.patch is None or not self._weights:
                self._load(update.state)
            else:
                patch(self._weights, update.patch, threads=1)
                if digest(self._weights, threads=1).hex != update.state:
                    self._log.add(what="wrong", version=update.version)
            if self._weights:
                self._serve(update.version, update.state, self._weights)

    def _load(self, state: str) -> None:
        """Loads all weights. If the checkpoint is newer than the update, the next update loads again."""
        checkpoint = self._follower.checkpoint()
        about = json.loads((checkpoint / "weightwire.json").read_bytes())
        self._weights = {}
        if about["state"] == state:
            for name, tensor in read_weights(checkpoint).items():
                self._weights[name] = Tensor(tensor.dtype, tensor.shape, tensor.bits.copy())


def follow(url: str, room: Path, name: str) -> None:
    log = Journal(room / f"{name}.log")
    with Follower(url, into=room / name, name=name, threads=1, on_event=say) as follower:
        log.add(sync=False, what="started")
        threading.Thread(target=sample, args=(follower, log), daemon=True).start()
        Engine(follower, log).run()


def sample(follower: Follower, log: Journal, every: float = 0.1) -> None:
    """Records the version of the follower every few seconds, for ever."""
    while True:
        version = follower.version
        log.add(sync=False, what="holds", version=version, head=follower.head, trouble=follower.trouble)
        time.sleep(every)


def samples(room: Path, name: str) -> Iterator[list[Line]]:
    """The samples of a follower, one list per life."""
    life: list[Line] = []
    for line in Journal.read(room / f"{name}.log"):
        if line["what"] == "started" and life:
            yield life
            life = []
        if line["what"] == "holds":
            life.append(line)
    if life:
        yield life


# --- subprocesses ----------------------------------------------------------------------------------------------------


def say(event: Event) -> None:
    if event.message:
        print(f"{time.time():.3f} {event.stage} {event.version} {event.message}", flush=True)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        sys.exit("the parent process is gone")


def _leave(number: int, frame: object) -> None:
    sys.exit(0)


def become_actor(parent: int) -> None:
    """Dies with the parent, and stops cleanly on SIGTERM."""
    _die_with(parent)
    signal.signal(signal.SIGTERM, _leave)
    faulthandler.register(signal.SIGUSR1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["train", "follow"])
    parser.add_argument("url")
    parser.add_argument("room", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.1)
    parser.add_argument("--versions", type=int)
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    become_actor(args.parent)
    try:
        if args.role == "train":
            Trainer(args.url, args.room, args.seed, args.pace).run(args.versions, args.replicas)
        else:
            follow(args.url, args.room, args.name)
    except WeightwireError as problem:
        print(f"{time.time():.3f} ended: {problem!r}", flush=True)
        raise


if __name__ == "__main__":
    main()
