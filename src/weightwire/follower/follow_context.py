"""What every part of a follower works with: the bucket, the clock, the replica, and who hears of what happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from weightwire.bucket import Bucket
from weightwire.chain import StageTiming
from weightwire.follower.stage_timings import StageTimings
from weightwire.replica import Replica
from weightwire.system import Runtime
from weightwire.telemetry import Event, Listener, careful, warning
from weightwire.weights import Weights

__all__ = ["FollowContext"]


@dataclass(frozen=True)
class FollowContext:
    """`base` is the checkpoint that the run starts from, where the bucket does not have it."""

    bucket: Bucket
    runtime: Runtime
    replica: Replica
    on_event: Listener
    base: Weights | None = None
    threads: int | None = None
    timings: StageTimings = field(default_factory=StageTimings)  # for heartbeats

    @cached_property
    def emit(self) -> Listener:
        return careful(self.on_event)

    def warn(self, message: str, version: int | None = None) -> None:
        self.emit(warning(message, version, at=self.runtime.time()))

    def stage(self, name: str, version: int, nbytes: int, seconds: float) -> None:
        """A stage of a version has ended: emits it, and keeps it for the next heartbeat."""
        now = self.runtime.time()
        self.timings.add(version, {name: StageTiming.of(seconds, nbytes, now)})
        self.emit(Event(name, version, nbytes, seconds, now))
