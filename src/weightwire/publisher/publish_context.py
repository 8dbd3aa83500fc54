"""What every part of a publisher works with: the bucket, the clock, the settings, and who hears of what happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property

from weightwire.bucket import Bucket
from weightwire.chain import StageTiming
from weightwire.publisher.background_tasks import BackgroundTasks
from weightwire.publisher.lifecycle import Lifecycle
from weightwire.publisher.settings import PublisherSettings
from weightwire.publisher.upload import Uploader
from weightwire.system import Runtime
from weightwire.telemetry import Event, Listener, warning

__all__ = ["PublishContext", "RunningStage"]


@dataclass(frozen=True)
class PublishContext:
    bucket: Bucket
    runtime: Runtime
    settings: PublisherSettings
    emit: Listener
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)

    @cached_property
    def uploader(self) -> Uploader:
        return Uploader(self.bucket, self.runtime, self.settings.retry_seconds, self.warn)

    def warn(self, message: str) -> None:
        self.emit(warning(message, at=self.runtime.time()))

    @asynccontextmanager
    async def stage(self, name: str, version: int) -> AsyncIterator[RunningStage]:
        """Measures a stage, and emits it unless it fails."""
        running = RunningStage(self.runtime)
        yield running
        timing = running.timing
        self.emit(Event(name, version, timing.bytes, timing.seconds, timing.at))


class RunningStage:
    """A stage under way; whoever runs it sets `nbytes`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began = runtime.clock()
        self.nbytes = 0

    @property
    def timing(self) -> StageTiming:
        return StageTiming.of(self._runtime.clock() - self._began, self.nbytes, self._runtime.time())
