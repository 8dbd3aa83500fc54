"""The shared parts of a follower: the bucket, the clock, the replica and the event listener."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from weightwire.bucket import Bucket, MonitoredBucket
from weightwire.chain import StageTiming
from weightwire.follower.stage_timings import StageTimings
from weightwire.follower.trust_settings import TrustSettings
from weightwire.replica import Replica
from weightwire.system import Runtime
from weightwire.telemetry import (
    Event,
    Listener,
    ProgressCallback,
    StartProgress,
    careful,
    ignore_progress,
    start_progress,
    warning,
)
from weightwire.weights import Weights

__all__ = ["FollowContext"]


@dataclass(frozen=True)
class FollowContext:
    """`base` is the checkpoint that the run starts from, if it is not in the bucket."""

    store: Bucket
    runtime: Runtime
    replica: Replica
    on_event: Listener
    base: Weights | None = None
    threads: int | None = None
    on_progress: ProgressCallback = ignore_progress
    trust: TrustSettings = field(default_factory=TrustSettings)
    timings: StageTimings = field(default_factory=StageTimings)  # for heartbeats

    @cached_property
    def bucket(self) -> MonitoredBucket:
        return MonitoredBucket(self.store, self.runtime, self.emit)

    @cached_property
    def emit(self) -> Listener:
        return careful(self.on_event)

    @property
    def progress(self) -> StartProgress:
        return start_progress(self.on_progress)

    def warn(self, message: str, version: int | None = None) -> None:
        self.emit(warning(message, version, at=self.runtime.time()))

    def stage(self, name: str, version: int, nbytes: int, seconds: float) -> None:
        """Emits a finished stage of a version, and keeps it for the next heartbeat."""
        now = self.runtime.time()
        self.timings.add(version, {name: StageTiming.of(seconds, nbytes, now)})
        self.emit(Event(name, version, nbytes, seconds, now))
