"""What the engines of a follower serve, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from weightwire.telemetry.metrics import Metrics

__all__ = ["EngineMetrics", "ServedState"]


class ServedState(Protocol):
    """An engine, as far as metrics show it."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int | None: ...
    @property
    def behind(self) -> int | None: ...
    @property
    def behind_seconds(self) -> float: ...
    @property
    def pause_seconds(self) -> float | None: ...
    @property
    def reasons(self) -> tuple[str, ...]: ...


class EngineMetrics:
    """Gauges beside the metrics of a follower. Call `set` before they are rendered."""

    def __init__(self, metrics: Metrics) -> None:
        from prometheus_client import Gauge

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"weightwire_{name}", text, ["role", *labels], registry=metrics.registry)

        self._ready = gauge("ready", "1 if /readyz answers 200, otherwise 0.")
        self._engine_ready = gauge("engine_ready", "1 if the engine is ready, otherwise 0.", "engine")
        self._version = gauge("engine_version", "Version that the engine serves; -1 if none.", "engine")
        self._behind = gauge("engine_behind", "Versions that the engine is behind the newest.", "engine")
        self._lag = gauge("engine_behind_seconds", "For how long the engine has not served the newest.", "engine")
        self._pause = gauge("engine_pause_seconds", "Pause of the engine for its last update.", "engine")

    def set(self, is_ready: bool, engines: Iterable[ServedState]) -> None:
        self._ready.labels("follower").set(is_ready)
        for one in (self._behind, self._pause):  # these may be unknown
            one.clear()
        for engine in engines:
            labels = "follower", engine.name
            self._engine_ready.labels(*labels).set(not engine.reasons)
            self._version.labels(*labels).set(-1 if engine.version is None else engine.version)
            self._lag.labels(*labels).set(engine.behind_seconds)
            if engine.behind is not None:
                self._behind.labels(*labels).set(engine.behind)
            if engine.pause_seconds is not None:
                self._pause.labels(*labels).set(engine.pause_seconds)
