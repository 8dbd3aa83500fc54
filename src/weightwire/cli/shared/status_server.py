"""The server of `follow --listen`: wake-ups, readiness, status and metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from weightwire.engines import Keeper, ReadyCheck
from weightwire.follower import Follower, WakeupServer
from weightwire.system import Access
from weightwire.telemetry import EngineMetrics, Metrics

__all__ = ["open_status_server"]


def open_status_server(
    address: str, follower: Follower, keeper: Keeper | None, check: ReadyCheck, metrics: Metrics, access: Access
) -> WakeupServer:
    engine_metrics = EngineMetrics(metrics)

    def status() -> dict[str, Any]:
        state = check.state(follower, keeper)
        return {"ready": state.is_ready, **asdict(state)}

    def render() -> bytes:
        state = check.state(follower, keeper)
        metrics.see(state.version, state.head)
        engine_metrics.set(state.is_ready, state.engines)
        return metrics.render()

    def reasons() -> tuple[str, ...]:
        return check.state(follower, keeper).reasons

    return WakeupServer(address, wake=follower.wake, status=status, metrics=render, reasons=reasons, access=access)
