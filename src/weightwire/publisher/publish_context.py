"""Shared by all parts of a publisher: the bucket, the clock, the settings and the event listener."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property

from weightwire.bucket import Bucket, MonitoredBucket
from weightwire.chain import StageTiming
from weightwire.publisher.background_tasks import BackgroundTasks
from weightwire.publisher.backlog import Backlog
from weightwire.publisher.lifecycle import Lifecycle
from weightwire.publisher.settings import PublisherSettings
from weightwire.publisher.upload import Uploader
from weightwire.system import Runtime
from weightwire.telemetry import Event, Listener, warning

__all__ = ["PublishContext", "RunningStage"]


@dataclass(frozen=True)
class PublishContext:
    store: Bucket
    runtime: Runtime
    settings: PublisherSettings
    emit: Listener
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)
    backlog: Backlog = field(default_factory=Backlog)
    adapter_files: dict[str, bytes] = field(default_factory=dict)  # side files that came with an adapter's weights

    @cached_property
    def bucket(self) -> MonitoredBucket:
        return MonitoredBucket(self.store, self.runtime, self.emit, self.backlog.__str__)

    @cached_property
    def uploader(self) -> Uploader:
        settings = self.settings
        return Uploader(self.bucket, self.runtime, settings.retry_seconds, self._warn_of_retry, settings.progress)

    @property
    def is_stuck(self) -> bool:
        """Whether the bucket has refused or not answered writes for as long as uploads are retried."""
        return self.bucket.trouble_seconds > self.settings.retry_seconds

    def warn(self, message: str) -> None:
        self.emit(warning(message, at=self.runtime.time()))

    def _warn_of_retry(self, message: str) -> None:
        backlog = str(self.backlog)
        self.warn(f"{message}{f' ({backlog})' if backlog else ''}; trying again")

    @asynccontextmanager
    async def stage(self, name: str, version: int, message: str = "") -> AsyncIterator[RunningStage]:
        """Measures a stage and emits it, unless it fails."""
        running = RunningStage(self.runtime)
        yield running
        timing = running.timing
        self.emit(Event(name, version, timing.bytes, timing.seconds, timing.at, message))


class RunningStage:
    """A stage in progress. Its caller sets `nbytes`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began = runtime.clock()
        self.nbytes = 0

    @property
    def timing(self) -> StageTiming:
        return StageTiming.of(self._runtime.clock() - self._began, self.nbytes, self._runtime.time())
