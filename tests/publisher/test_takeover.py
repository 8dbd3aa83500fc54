"""Takeover of a run with damaged data: the publisher finds another path or heals the run with an anchor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.damage import HARMS, flip, paths
from support.failing_bucket import Troubled, in_memory
from support.run_contents import commits_in, version_in
from weightwire import Publisher, digest
from weightwire.telemetry.events import Event

Arrays = dict[str, Any]


def weights_at(step: int) -> Arrays:
    weights: Arrays = {"w": np.arange(4000, dtype=np.uint16), "b": np.zeros(7, np.float32)}
    weights["w"][: 3 * step] += 1
    weights["b"][0] = step
    return weights


def publish(bucket: Troubled, steps: range, **settings: Any) -> list[str]:
    """Publishes a version for each step with a new publisher. Returns its warnings."""
    heard: list[Event] = []
    with Publisher(bucket, on_event=heard.append, threads=1, **settings) as publisher:
        for step in steps:
            publisher.publish(weights_at(step), step=step).wait()
    return [event.message for event in heard if event.stage == "warning"]


def kinds(bucket: Troubled) -> list[str]:
    return [commit.kind for commit in commits_in(bucket)]


@pytest.fixture
def bucket() -> Troubled:
    """Versions 1 (an anchor), 2 and 3."""
    bucket = in_memory()
    publish(bucket, range(1, 4), anchor_every=100, blocking=True)
    assert kinds(bucket) == ["fence", "anchor", "delta", "delta"]
    return bucket


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("folder", ["deltas/3/", "anchors/1/"])
def test_an_anchor_heals_a_run_that_cannot_be_rebuilt(bucket: Troubled, blocking: bool, harm: Any, folder: str) -> None:
    [path] = paths(bucket.inner, folder)
    harm(bucket.inner, folder)

    [warning] = publish(bucket, range(4, 6), anchor_every=100, blocking=blocking)

    assert path in warning
    assert "the next version will be an anchor" in warning
    assert kinds(bucket)[4:6] == ["fence", "anchor"]
    assert commits_in(bucket)[5].before == commits_in(bucket)[4].after == digest(weights_at(3)).hex
    assert version_in(bucket) == digest(weights_at(5))


def test_a_healed_run_is_continued_without_another_anchor(bucket: Troubled) -> None:
    flip(bucket.inner, "deltas/3/")
    publish(bucket, range(4, 5), anchor_every=100)

    assert not publish(bucket, range(5, 6), anchor_every=100)
    assert kinds(bucket)[4:] == ["fence", "anchor", "fence", "delta"]
    assert version_in(bucket) == digest(weights_at(5))


def test_published_weights_are_used_instead_of_damaged_data(bucket: Troubled) -> None:
    flip(bucket.inner, "deltas/3/")

    assert not publish(bucket, range(4, 5), anchor_every=100, published=weights_at(3))
    assert kinds(bucket)[4:] == ["fence", "delta"]


def test_a_damaged_anchor_is_bypassed(bucket: Troubled) -> None:
    publish(bucket, range(4, 5), anchor_every=1)
    flip(bucket.inner, "anchors/5/")

    [warning] = publish(bucket, range(5, 6), anchor_every=100)

    assert "anchors/5/" in warning
    assert warning.endswith("; took another path")
    assert kinds(bucket)[-2:] == ["fence", "delta"]
    newest = commits_in(bucket)[-1]
    assert (newest.before, newest.after) == (digest(weights_at(4)).hex, digest(weights_at(5)).hex)
