"""Gauges of engines, parsed by the Prometheus client."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from weightwire.telemetry.engine_metrics import EngineMetrics
from weightwire.telemetry.metrics import Metrics


@dataclass(frozen=True)
class Served:
    name: str = "a"
    version: int | None = 4
    behind: int | None = 1
    behind_seconds: float = 2.5
    pause_seconds: float | None = 0.05
    reasons: tuple[str, ...] = ()


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    found = [sample for family in families for sample in family.samples]
    return {(one.name, one.labels.get("engine", "")): one.value for one in found if one.name != "weightwire_warnings"}


def test_each_engine_has_its_gauges() -> None:
    metrics = Metrics("follower")
    EngineMetrics(metrics).set(False, [Served(), Served("b", None, None, 9.0, None, ("b: hangs",))])
    found = samples(metrics)
    assert found["weightwire_ready", ""] == 0
    assert [found[f"weightwire_engine_{name}", "a"] for name in ("ready", "version", "behind")] == [1, 4, 1]
    assert [found[f"weightwire_engine_{name}_seconds", "a"] for name in ("behind", "pause")] == [2.5, 0.05]
    assert [found[f"weightwire_engine_{name}", "b"] for name in ("ready", "version", "behind_seconds")] == [0, -1, 9]
    assert ("weightwire_engine_behind", "b") not in found
    assert ("weightwire_engine_pause_seconds", "b") not in found


def test_distance_that_is_unknown_again_is_not_shown() -> None:
    metrics = Metrics("follower")
    gauges = EngineMetrics(metrics)
    gauges.set(True, [Served()])
    gauges.set(False, [Served(version=None, behind=None)])
    assert ("weightwire_engine_behind", "a") not in samples(metrics)
    assert samples(metrics)["weightwire_engine_version", "a"] == -1
