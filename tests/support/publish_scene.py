"""A publish loop on a failing bucket, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from faults.simulated_runtime import Faults, Process, SimLoop, SimRuntime
from faults.simulated_store import SimBucket, Store
from support.failing_bucket import Act, Troubled
from support.run_contents import commits_in, version_in
from weightwire import digest
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.settings import PublisherSettings
from weightwire.publisher.single_process import SingleProcess
from weightwire.telemetry.events import Event
from weightwire.weights.source import read_weights

Arrays = dict[str, Any]
Result = TypeVar("Result")


def initial() -> Arrays:
    return {"w": np.arange(4000, dtype=np.float32), "b": np.zeros(3, np.float16)}


def train(weights: Arrays, step: int) -> None:
    weights["w"][step::97] += 1


class _Instant(random.Random):
    """Requests and threads take no time."""

    def expovariate(self, lambd: float = 1.0) -> float:
        return 0.0


def _process() -> Process:
    return Process("test", _Instant(7), Faults())


def simulated_bucket() -> Troubled:
    """A new, empty bucket for virtual time."""
    return Troubled(SimBucket(Store(), _process()))


def in_virtual_time(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine. Time passes only while all tasks wait: on a slow machine nothing seems slow."""
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(work)


class LoopTrainer:
    """A running publisher and its weights, in virtual time."""

    def __init__(self, bucket: Troubled, **settings: Any) -> None:
        self.bucket = bucket
        self.weights = initial()
        self.heard: list[Event] = []
        given = PublisherSettings(threads=1, **settings)
        context = PublishContext(bucket, SimRuntime(_process()), given, self.heard.append)
        self.work = PublishLoop(context, SingleProcess(context))
        self.running: asyncio.Task[None] | None = None
        self._step = 0

    async def start(self) -> LoopTrainer:
        await self.work.process.start()
        self.running = asyncio.create_task(self.work.run())
        return self

    def train(self) -> None:
        self._step += 1
        train(self.weights, self._step)

    def publish(self) -> Publication:
        """Trains one step and publishes it."""
        self.train()
        publication = Publication(step=self._step)
        self.work.capture(publication, read_weights(self.weights))
        self.work.wake()
        return publication

    async def publish_all(self, count: int) -> None:
        for _ in range(count):
            await over(self.publish())

    async def close(self) -> None:
        assert self.running is not None
        await self.work.close()
        await self.running
        await self.work.close()

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.heard if event.stage == "warning"]

    @property
    def held(self) -> str:
        """The state of the published copy, verified by a full digest."""
        assert self.work.process.copies is not None
        assert self.work.process.state is not None
        assert digest(self.work.process.copies.published) == self.work.process.state
        return self.work.process.state.hex


async def over(publication: Publication) -> Publication:
    """Waits until the publication has succeeded or failed."""
    while not publication.done:
        await asyncio.sleep(0.5)
    return publication


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0.5)


class HeldRequests(asyncio.Event):
    """Holds requests until it is set."""

    async def __call__(self, act: Act) -> Any:
        await self.wait()
        return await act()


Played = Callable[[LoopTrainer], Awaitable[None]]


def play(scene: Played, **settings: Any) -> LoopTrainer:
    """Runs a scene with a publisher at version 1. Afterwards the bucket must hold the weights of the publisher."""

    async def whole() -> LoopTrainer:
        trainer = await LoopTrainer(simulated_bucket(), **settings).start()
        await trainer.publish_all(1)
        await scene(trainer)
        trainer.bucket.calm()
        await trainer.close()
        return trainer

    trainer = in_virtual_time(whole())
    if trainer.work.context.lifecycle.failure is None:
        assert version_in(trainer.bucket).hex == trainer.held
    return trainer


def steps(trainer: LoopTrainer) -> list[int | None]:
    return [commit.step for commit in commits_in(trainer.bucket)]
