"""Events as Prometheus metrics. One listener serves a publisher or a follower; the label `role` says which.

Knows events and the Prometheus text format. `WakeupServer` serves the metrics, or any server of your own.
"""

from __future__ import annotations

from typing import Literal

from weightwire.telemetry.events import Event
from weightwire.telemetry.stages import STAGES

__all__ = ["Metrics"]

# Seconds: from a delta applied in place to an anchor of a large model over a slow line.
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


_STAGES = frozenset(stage.name for stage in STAGES)


class Metrics:
    """A listener: `Publisher(..., on_event=metrics)`, and `render` for whoever asks.

    What has not been seen yet is left out, but for warnings: to count from nothing needs a nothing to count from.
    """

    def __init__(self, role: Literal["publisher", "follower"]) -> None:
        # Here, since most who import weightwire do not ask for metrics.
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        # Of its own: the program around it may have metrics, and be a publisher and a follower at once.
        self.registry = registry = CollectorRegistry()
        self._role = role
        self._seconds = Histogram(
            "weightwire_stage_seconds",
            "How long a stage of a version's way took.",
            ["role", "stage"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._bytes = Counter("weightwire_bytes", "What went through a stage.", ["role", "stage"], registry=registry)
        self._version = Gauge("weightwire_version", "The version published last, or held.", ["role"], registry=registry)
        self._head = Gauge("weightwire_head", "The newest version seen.", ["role"], registry=registry)
        self._behind = Gauge("weightwire_behind", "Versions between the two.", ["role"], registry=registry)
        self._warnings = Counter("weightwire_warnings", "Things that went wrong.", ["role"], registry=registry)
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
        """What is known without any event: a follower that starts where it should be has none to tell."""
        if version is not None:
            self._reached = version
            self._version.labels(self._role).set(version)
        if head is not None and head >= 0:
            self._newest = head if self._newest is None else max(self._newest, head)
            self._head.labels(self._role).set(self._newest)
        if self._reached is not None and self._newest is not None:
            self._behind.labels(self._role).set(max(0, self._newest - self._reached))

    def render(self) -> bytes:
        """All of it, in the text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
