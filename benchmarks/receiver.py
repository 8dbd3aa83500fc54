"""The receiving process of a sync. sync.py starts it and reads its output.

    python benchmarks/receiver.py follow URL INTO BASE      # a follower; prints its events
    python benchmarks/receiver.py download URL FILE NBYTES  # fetches whole objects, one per line on stdin

Prints JSON lines with wall-clock times. Exits when stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from recording import read_header

from weightwire.bucket import GET_LIMIT, ForwardingBucket, open_bucket
from weightwire.follower.follower import Follower
from weightwire.follower.wakeups import WakeupServer
from weightwire.telemetry.events import Event


def print_json(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class ReportingBucket(ForwardingBucket):
    """A `Bucket` that prints when a commit was found and how long a data file took."""

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        began = time.time()
        data = await self._inner.get(path, limit)
        if path.startswith("commits/"):
            print_json(stage="found", version=int(path[8:28]), began=began, at=time.time())
        return data

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        began = time.time()
        await self._inner.read_into(path, buffer, start)
        if path.startswith("deltas/"):
            print_json(stage="fetch", version=int(path.split("/")[1]), began=began, at=time.time())


# ---- a follower ----


class PushSwitch:
    """Forwards pushes to a follower while it is enabled."""

    def __init__(self) -> None:
        self.is_enabled = False
        self.follower: Follower | None = None

    def wake(self, commit: bytes) -> None:
        if self.is_enabled and self.follower is not None:
            self.follower.wake(commit)


def follow(url: str, into: Path, base: Path) -> None:
    pushes = PushSwitch()
    with (
        WakeupServer("127.0.0.1:0", wake=pushes.wake, status=dict, metrics=bytes) as server,
        Follower(ReportingBucket(open_bucket(url)), into=into, base=base, on_event=print_event) as follower,
    ):
        pushes.follower = follower
        print_json(stage="listening", address=server.address)
        threading.Thread(target=take_updates, args=(follower,), daemon=True).start()
        for line in sys.stdin:
            pushes.is_enabled = line.strip() == "push"
            print_json(stage="switched")
    print_json(stage="closed", current=str(into / "current"))


def take_updates(follower: Follower) -> None:
    """Takes updates as an engine does, and drops them, until the follower is closed."""
    with suppress(CancelledError, RuntimeError):
        for _ in follower.watch():
            pass


def print_event(event: Event) -> None:
    print_json(
        stage=event.stage, version=event.version, began=event.at - event.seconds, at=event.at, message=event.message
    )


# ---- whole files ----


def download(url: str, path: Path, nbytes: int) -> None:
    """Downloads into a warm mapped file, then copies from there into warm memory: the fastest possible load."""
    bucket = open_bucket(url)
    with path.open("w+b") as file:
        file.truncate(nbytes)
        mapped = mmap.mmap(file.fileno(), nbytes)
    mapped[:] = bytes(nbytes)
    loaded = np.zeros(nbytes, np.uint8)
    print_json(stage="ready")
    for line in sys.stdin:
        began = time.time()
        asyncio.run(bucket.read_into(line.strip(), memoryview(mapped)))
        fetched = time.time()
        load(mapped, loaded)
        print_json(stage="downloaded", began=began, fetched=fetched, at=time.time())


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
