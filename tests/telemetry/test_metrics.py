"""Metrics, parsed by the Prometheus client."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from weightwire.telemetry.events import Event
from weightwire.telemetry.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, without `role`, which must be the same everywhere."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels["role"] == "follower"
            key = (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "role"))
            found[key] = sample.value
    return found


def test_stages_are_timed_and_their_bytes_counted() -> None:
    metrics = Metrics("follower")

    metrics(Event("apply", 4, 1000, 0.02))
    metrics(Event("apply", 5, 500, 2.0))

    found = samples(metrics)
    assert found["weightwire_bytes_total", "apply"] == 1500
    assert found["weightwire_stage_seconds_count", "apply"] == 2
    assert found["weightwire_stage_seconds_sum", "apply"] == 2.02
    assert found["weightwire_stage_seconds_bucket", "0.03", "apply"] == 1
    assert found["weightwire_stage_seconds_bucket", "+Inf", "apply"] == 2


def test_version_head_and_behind_of_a_follower() -> None:
    metrics = Metrics("follower")

    metrics(Event("discover", 7))
    assert samples(metrics)["weightwire_head",] == 7
    assert ("weightwire_version",) not in samples(metrics)
    metrics(Event("apply", 5))
    assert [samples(metrics)[f"weightwire_{name}",] for name in ("version", "head", "behind")] == [5, 7, 2]
    metrics(Event("apply", 6))
    metrics(Event("apply", 7))
    assert [samples(metrics)[f"weightwire_{name}",] for name in ("version", "head", "behind")] == [7, 7, 0]


def test_versions_can_be_set_without_an_event() -> None:
    metrics = Metrics("follower")

    metrics.see(None, -1)
    assert ("weightwire_head",) not in samples(metrics)
    metrics.see(3, 4)

    assert [samples(metrics)[f"weightwire_{name}",] for name in ("version", "head", "behind")] == [3, 4, 1]


def test_warnings_are_counted_from_zero() -> None:
    metrics = Metrics("follower")

    assert samples(metrics)["weightwire_warnings_total",] == 0
    metrics(Event("warning", message="oh"))
    metrics(Event("recovered", message="over"))
    metrics(Event("something new", 3, 100, 1.0))

    assert samples(metrics)["weightwire_warnings_total",] == 1
    assert not any("something new" in key for key in samples(metrics))


def test_publisher_has_the_same_metrics() -> None:
    metrics = Metrics("publisher")

    metrics(Event("commit", 9, 0, 0.1))

    text = metrics.render().decode()
    assert 'weightwire_version{role="publisher"} 9.0' in text
    assert 'weightwire_behind{role="publisher"} 0.0' in text


def test_registries_are_separate() -> None:
    first, second = Metrics("publisher"), Metrics("publisher")

    assert isinstance(first.registry, CollectorRegistry)
    first(Event("commit", 1))

    assert b"weightwire_version{" not in second.render()
