"""Events as Prometheus metrics. The label `role` is "publisher" or "follower".

`WakeupServer` serves them, or your own server.
"""

from __future__ import annotations

from typing import Literal

from weightwire.telemetry.events import Event
from weightwire.telemetry.stages import STAGES

__all__ = ["Metrics"]

# Seconds: from a delta that is applied in place to the anchor of a large model on a slow connection.
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


_STAGES = frozenset(stage.name for stage in STAGES)


class Metrics:
    """An event listener: `Publisher(..., on_event=metrics)`. `render` returns the metrics as text.

    A metric appears with its first event. Warnings start at 0, so that a rate can be computed from the first one on.
    """

    def __init__(self, role: Literal["publisher", "follower"]) -> None:
        # Imported here, because most programs do not use metrics.
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        # A separate registry: the program may have other metrics, or both a publisher and a follower.
        self.registry = registry = CollectorRegistry()
        self._role = role
        self._seconds = Histogram(
            "weightwire_stage_seconds",
            "Duration of a stage.",
            ["role", "stage"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._bytes = Counter(
            "weightwire_bytes", "Bytes that went through a stage.", ["role", "stage"], registry=registry
        )
        self._version = Gauge(
            "weightwire_version", "Version published last (publisher) or held (follower).", ["role"], registry=registry
        )
        self._head = Gauge("weightwire_head", "Newest version seen in the run.", ["role"], registry=registry)
        self._behind = Gauge("weightwire_behind", "Versions behind the newest.", ["role"], registry=registry)
        self._warnings = Counter("weightwire_warnings", "Warnings since the start.", ["role"], registry=registry)
        self._warnings.labels(role)
        self._reached: int | None = None
        self._newest: int | None = None

    def __call__(self, event: Event) -> None:
        if event.stage == "warning":
            self._warnings.labels(self._role).inc()
        if event.stage not in _STAGES:
            return
        self._seconds.labels(self._role, event.stage).observe(event.seconds)
        self._bytes.labels(self._role, event.stage).inc(event.nbytes)
        if event.stage == "discover":
            self.see(None, event.version)
        elif event.stage in ("commit", "apply"):
            self.see(event.version, event.version)

    def see(self, version: int | None, head: int | None) -> None:
        """Sets the versions without an event: a follower that starts up to date emits none."""
        if version is not None:
            self._reached = version
            self._version.labels(self._role).set(version)
        if head is not None and head >= 0:
            self._newest = head if self._newest is None else max(self._newest, head)
            self._head.labels(self._role).set(self._newest)
        if self._reached is not None and self._newest is not None:
            self._behind.labels(self._role).set(max(0, self._newest - self._reached))

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
