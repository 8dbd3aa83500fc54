"""The other end of a sync, in a process of its own: sync.py starts it, and reads what it prints.

    python benchmarks/receiver.py follow URL INTO BASE      # a follower; says what it did, and when
    python benchmarks/receiver.py download URL FILE NBYTES  # fetches whole objects, one per line of its input

Prints JSON lines, with times of the clock that all processes of a machine share. Ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from recording import read_header

from weightwire.bucket.bucket import Bucket, ObjectInfo
from weightwire.bucket.registry import open_bucket
from weightwire.follower.follower import Follower
from weightwire.follower.wakeups import WakeupServer
from weightwire.telemetry.events import Event


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Watched:
    """A `Bucket` that says when a commit was found, and how long data took."""

    def __init__(self, inner: Bucket) -> None:
        self.url, self.strict = inner.url, inner.strict
        self._inner = inner

    async def get(self, path: str) -> bytes:
        began = time.time()
        data = await self._inner.get(path)
        if path.startswith("commits/"):
            say(stage="found", version=int(path[8:28]), began=began, at=time.time())
        return data

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        began = time.time()
        await self._inner.read_into(path, buffer, start)
        if path.startswith("deltas/"):
            say(stage="fetch", version=int(path.split("/")[1]), began=began, at=time.time())

    async def create(self, path: str, data: bytes) -> None:
        await self._inner.create(path, data)

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        await self._inner.put(path, data, size)

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return await self._inner.list(prefix)

    async def find(self, path: str) -> ObjectInfo | None:
        return await self._inner.find(path)

    async def delete(self, path: str) -> None:
        await self._inner.delete(path)

    async def close(self) -> None:
        await self._inner.close()


# ---- a follower ----


class Ear:
    """Follows, and is woken by pushes only while it is told to hear them."""

    def __init__(self) -> None:
        self.hears = False
        self.follower: Follower | None = None

    def wake(self) -> None:
        if self.hears and self.follower is not None:
            self.follower.wake()


def follow(url: str, into: Path, base: Path) -> None:
    ear = Ear()
    with (
        WakeupServer("127.0.0.1:0", wake=ear.wake, status=dict, metrics=bytes) as door,
        Follower(Watched(open_bucket(url)), into=into, base=base, on_event=tell) as follower,
    ):
        ear.follower = follower
        say(stage="listening", address=door.address)
        threading.Thread(target=take_updates, args=(follower,), daemon=True).start()
        for line in sys.stdin:
            ear.hears = line.strip() == "push"
            say(stage="told")
    say(stage="closed", current=str(into / "current"))


def take_updates(follower: Follower) -> None:
    """As an engine would, but without doing anything with them, until the follower is closed."""
    with suppress(CancelledError, RuntimeError):
        for _ in follower.watch():
            pass


def tell(event: Event) -> None:
    say(stage=event.stage, version=event.version, began=event.at - event.seconds, at=event.at, message=event.message)


# ---- whole files ----


def download(url: str, path: Path, nbytes: int) -> None:
    """Into a file that is mapped and warm, then from there into memory that is warm: as fast as a load can be."""
    bucket = open_bucket(url)
    with path.open("w+b") as file:
        file.truncate(nbytes)
        mapped = mmap.mmap(file.fileno(), nbytes)
    mapped[:] = bytes(nbytes)
    loaded = np.zeros(nbytes, np.uint8)
    say(stage="ready")
    for line in sys.stdin:
        began = time.time()
        asyncio.run(bucket.read_into(line.strip(), memoryview(mapped)))
        fetched = time.time()
        load(mapped, loaded)
        say(stage="downloaded", began=began, fetched=fetched, at=time.time())


def load(mapped: mmap.mmap, loaded: np.typing.NDArray[np.uint8]) -> None:
    file, at = np.frombuffer(mapped, np.uint8), 0
    header, data = read_header(file)
    for entry in header.values():
        start, end = entry["data_offsets"]
        loaded[at : at + end - start] = file[data + start : data + end]
        at += end - start


def main() -> None:
    match sys.argv[1:]:
        case ["follow", url, into, base]:
            follow(url, Path(into), Path(base))
        case ["download", url, path, nbytes]:
            download(url, Path(path), int(nbytes))
        case _:
            sys.exit("usage: receiver.py follow URL INTO BASE | download URL FILE NBYTES")


if __name__ == "__main__":
    main()
