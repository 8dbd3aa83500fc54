"""A trainer and followers as processes of their own, to be killed at any moment; and what the trainer knows to be true.

Started by `Actor`, which needs no more than weightwire: a crowd of them must not take long to start. What they know
they write to files, and nothing is asked of them but signals. They die with whoever started them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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

__all__ = ["Actor", "Journal", "Line", "bits_at", "weights_at"]

Line = dict[str, Any]

SHAPES = {
    "layer.weight": ("BF16", (1024, 1024)),
    "embed.weight": ("BF16", (64, 33)),
    "norm": ("F32", (257,)),
    "empty": ("F32", (0, 3)),
    "steps": ("I64", ()),
}
TIME_TO_START = 120.0


# --- the truth -------------------------------------------------------------------------------------------------------


def weights_at(seed: int, step: int) -> dict[str, Tensor]:
    """What the trainer has at a step: nothing else goes into it, so a trainer that was killed simply goes on."""
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
    """Lines on disk, only ever added to. What `add` has returned from survives whoever wrote it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, *, sync: bool = True, **line: Any) -> None:
        os.write(self._file, json.dumps(line | {"time": time.time()}).encode() + b"\n")
        if sync:
            os.fsync(self._file)

    @staticmethod
    def read(path: Path) -> list[Line]:
        """All lines but one that was cut off."""
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


# --- whoever starts them ---------------------------------------------------------------------------------------------


@dataclass
class Actor:
    """A process that can be killed and started again."""

    room: Path
    name: str
    arguments: Sequence[str]
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        assert not self.alive
        command = [sys.executable, __file__, *self.arguments, "--parent", str(os.getpid())]
        # More threads than one would only get in each other's way here.
        env = os.environ | dict(self.env) | {"OPENBLAS_NUM_THREADS": "1"}
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    @property
    def said(self) -> Path:
        return self.room / f"{self.name}.out"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def leave(self) -> int:
        """As one that is told to stop; returns its exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.wait()
            self.process = None


# --- the trainer -----------------------------------------------------------------------------------------------------


class Trainer:
    """Publishes one step after the other. Writes down what it captures before, and what it was promised after.

    While a file called `rest` is there it captures nothing new; when all is published it writes down that it rests.
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
        with _started(lambda: Publisher(self._url, threads=1, on_event=_say), self._journal) as publisher:
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
            publisher.wait(timeout=60)
            self._settle()
            if replicas:
                version = publisher.wait(replicas=replicas, timeout=120)
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
        """Writes down what became of those that are done."""
        waiting, self._waiting = self._waiting, []
        for publication, state in waiting:
            if not publication.done:
                self._waiting.append((publication, state))
            elif publication.error is not None:
                self._journal.add(what="failed", step=publication.step, why=publication.error.message)
            elif publication.version is not None:
                self._journal.add(what="acknowledged", step=publication.step, version=publication.version, state=state)

    def _rest(self, publisher: Publisher) -> None:
        """Not before the last capture is published: what failed is captured again."""
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
    """A publisher that finds no server fails at once: whoever runs it starts it again."""
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


class Engine:
    """Takes patches as an inference server does, and holds them against what it was told."""

    def __init__(self, follower: Follower, log: Journal) -> None:
        self._follower = follower
        self._log = log
        self._weights: dict[str, Tensor] = {}

    def run(self) -> None:
        for update in self._follower.watch():
            if update.patch is None or not self._weights:
                self._load(update.state)
                continue
            patch(self._weights, update.patch, threads=1)
            if digest(self._weights, threads=1).hex != update.state:
                self._log.add(what="wrong", version=update.version)

    def _load(self, state: str) -> None:
        """All weights anew. A checkpoint that is newer than its update is no base for the next: then once more."""
        checkpoint = self._follower.checkpoint()
        about = json.loads((checkpoint / "weightwire.json").read_bytes())
        self._weights = {}
        if about["state"] == state:
            for name, tensor in read_weights(checkpoint).items():
                self._weights[name] = Tensor(tensor.dtype, tensor.shape, tensor.bits.copy())


def follow(url: str, room: Path, name: str) -> None:
    log = Journal(room / f"{name}.log")
    with Follower(url, into=room / name, name=name, threads=1, on_event=_say) as follower:
        log.add(sync=False, what="started")
        threading.Thread(target=_sample, args=(follower, log), daemon=True).start()
        Engine(follower, log).run()


def _sample(follower: Follower, log: Journal) -> None:
    while True:
        version = follower.version
        log.add(sync=False, what="holds", version=version, head=follower.head, trouble=follower.trouble)
        time.sleep(0.1)


def samples(room: Path, name: str) -> Iterator[list[Line]]:
    """What a follower said of itself, by the lives that it had."""
    life: list[Line] = []
    for line in Journal.read(room / f"{name}.log"):
        if line["what"] == "started" and life:
            yield life
            life = []
        if line["what"] == "holds":
            life.append(line)
    if life:
        yield life


# --- as processes ----------------------------------------------------------------------------------------------------


def _say(event: Event) -> None:
    if event.message:
        print(f"{time.time():.3f} {event.stage} {event.version} {event.message}", flush=True)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        sys.exit("whoever started this is gone")


def _leave(number: int, frame: object) -> None:
    sys.exit(0)


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
    _die_with(args.parent)
    signal.signal(signal.SIGTERM, _leave)
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
