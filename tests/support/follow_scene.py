"""A trainer and a follower in virtual time, where waiting takes no real time."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from faults.simulated_runtime import Faults, Process, SimRuntime
from faults.simulated_store import SimBucket, Store
from support.failing_bucket import Troubled
from support.samples import base as bits_for
from support.small_run import Bits, bits_of
from weightwire import Update
from weightwire.chain.record_paths import RUN, commit_path, heartbeat_path
from weightwire.chain.records import Commit, Heartbeat, Run, unseal
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.follow_loop import FollowLoop
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.settings import PublisherSettings
from weightwire.publisher.single_process import SingleProcess
from weightwire.replica.replica import Replica
from weightwire.telemetry.events import Event
from weightwire.weights import DTYPES
from weightwire.weights.source import read_weights

Arrays = dict[str, Any]
Play = Callable[..., None]
"""Runs a test body: an async function that takes a `Scene`."""
Result = TypeVar("Result")
ALWAYS = NEVER = 10**9
NAME = "rollout-1"


def random_bits(seed: int = 1) -> Any:
    return bits_for(DTYPES["F16"], 51200, seed=seed).view(np.float16).reshape(400, 128)


def initial() -> Arrays:
    return {"embed": random_bits(), "norm": np.linspace(0, 1, 5, dtype=np.float32)}


class Scene:
    """A trainer and a follower. Virtual time passes only while all tasks wait."""

    def __init__(self, into: Path, seed: int = 7, **settings: Any) -> None:
        self.into = into
        self._seed = seed
        self.store = Store()
        self.bucket = Troubled(self._bucket())
        self.weights = initial()
        self.bits: dict[int, Bits] = {}
        self.heard: list[Event] = []
        self.every = 997  # a step changes one of this many weights
        self._settings = settings
        self._publishing: PublishLoop | None = None
        self.steps = 0
        self._running: asyncio.Task[None] | None = None
        self.open()

    def _bucket(self) -> SimBucket:
        return SimBucket(self.store, _process())

    # The trainer

    async def publish(self, versions: int = 1, pause: float = 0.0) -> int:
        """Publishes some versions, with a pause in seconds after each. Returns the last version."""
        if self._publishing is None:
            given = {"threads": 1, "blocking": True, "anchor_every": NEVER} | self._settings
            runtime, settings = SimRuntime(_process(self._seed)), PublisherSettings(**given)
            context = PublishContext(self._bucket(), runtime, settings, lambda event: None)
            self._publishing = PublishLoop(context, SingleProcess(context))
            await self._publishing.process.start()
        for _ in range(versions):
            self.train()
            publication = Publication(step=self.steps)
            await self._publishing.publish_now(publication, read_weights(self.weights))
            assert publication.version is not None
            self.bits[publication.version] = bits_of(self.weights)
            await self._publishing.context.background.wait()  # anchors
            await asyncio.sleep(pause)
        return publication.version or 0

    def train(self) -> None:
        self.steps += 1
        self.weights["embed"].reshape(-1).view(np.uint16)[self.steps % self.every :: self.every] += 1
        self.weights["norm"][self.steps % 5] += 1

    # Direct access to the store

    def read(self, path: str) -> bytes:
        return self.store.objects[path][0]

    def write(self, path: str, data: bytes) -> None:
        self.store.objects[path] = data, 0.0

    def remove(self, prefix: str) -> None:
        for path in [path for path in self.store.objects if path.startswith(prefix)]:
            del self.store.objects[path]

    def commit(self, version: int) -> Commit:
        return unseal(self.read(commit_path(version)), Commit, "").record

    @property
    def run_id(self) -> str:
        return unseal(self.read(RUN), Run, "").record.run

    @property
    def beat(self) -> Heartbeat:
        return unseal(self.read(heartbeat_path(NAME)), Heartbeat, "").record

    # The follower

    def open(self, **given: Any) -> None:
        self.replica = Replica.open(self.into, threads=1)
        runtime = SimRuntime(_process())
        context = FollowContext(self.bucket, runtime, self.replica, self.heard.append, threads=1, **given)
        self.work = FollowLoop(context, NAME)

    def start(self) -> None:
        self._running = asyncio.create_task(self.work.run())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def look(self) -> list[str]:
        """Looks for versions once. Returns the folders of the files that it fetched, such as "anchors/1"."""
        self.bucket.asked.clear()
        await self.work.look()
        return self.fetched()

    def fetched(self) -> list[str]:
        paths = [path for verb, path in self.bucket.asked if verb == "read_into"]
        return [path.rsplit("/", 1)[0] for path in paths]

    def check(self, version: int) -> None:
        """Checks that the follower holds a version, bit for bit."""
        assert self.work.version == version
        assert bits_of(self.replica.weights) == self.bits[version]

    async def take(self) -> Update:
        update = await self.work.take()
        assert update is not None
        return update

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.heard if event.stage == "warning"]


def _process(seed: int = 7) -> Process:
    """A process without faults."""
    return Process("test", random.Random(seed), Faults())


def now() -> float:
    return asyncio.get_running_loop().time()


async def eventually(reached: Callable[[], object], seconds: float = 3600.0) -> None:
    end = now() + seconds
    while not reached():
        assert now() < end, f"the condition was not met within {seconds} s"
        await asyncio.sleep(0.05)


def lose(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts the write of the next version halfway."""

    def fail(*_: object, **__: object) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(os, "fsync", lambda fd: None)
        raise MemoryError("half of it")

    monkeypatch.setattr("weightwire.replica.workdir.write_absolute", fail)
