"""Anchors beside the chain: when they are written, and that nothing depends on them."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.failing_bucket import Troubled, failed
from support.run_contents import commits_in, version_in
from support.samples import base as bits_of
from support.samples import change
from support.small_weights import F16, initial, settle, train
from weightwire import codec, digest
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event


def hinted(bucket: Troubled) -> tuple[int, str]:
    """The version and the anchor that HEAD.json names."""
    hint = json.loads(asyncio.run(bucket.get("HEAD.json")))
    return hint["version"], hint["anchor"]


def newest_shortcut(bucket: Troubled) -> str:
    """The path of the newest anchor beside the chain, or an empty string."""
    paths = [one.path for one in asyncio.run(bucket.list("shortcuts/"))]
    return max(paths, key=lambda path: int(path.split("/")[1]), default="")


def test_scratch_memory_is_given_back_after_each_version_and_anchor(
    bucket: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(codec, "trim", lambda: trims.append(1))
    weights = initial()
    with Publisher(bucket, anchor_every=3) as publisher:
        for step in range(5):
            train(weights, step)
            publisher.publish(weights).wait()
            settle(publisher)
    assert len(trims) == 5 + 1


class TestAnchors:
    def test_anchors_are_written_every_n_versions(self, bucket: Troubled) -> None:
        weights = initial()
        states = {}
        with Publisher(bucket, anchor_every=3, blocking=True) as publisher:
            for step in range(10):
                train(weights, step)
                version = publisher.publish(weights).wait()
                settle(publisher)  # or the next anchor waits for this one
                states[version] = digest(weights)
        made = [int(one.path.split("/")[1]) for one in asyncio.run(bucket.list("shortcuts/"))]
        assert sorted(made) == [4, 7, 10]
        bucket.asked.clear()
        for version in (4, 6, 10):
            assert version_in(bucket, version) == states[version]
        assert not [path for verb, path in bucket.asked if verb == "read_into" and path.startswith("anchors/1/")]

    def test_an_anchor_is_written_when_deltas_add_up_to_half_its_size(self, bucket: Troubled) -> None:
        weights = {"w": bits_of(F16, 6400)}
        with Publisher(bucket, blocking=True) as publisher:
            publisher.publish(weights).wait()
            for step in range(16):
                weights["w"] = change(weights["w"], F16, "mostly-up", seed=step)
                publisher.publish(weights).wait()
                settle(publisher)
        commits = commits_in(bucket)
        made = sorted(int(one.path.split("/")[1]) for one in asyncio.run(bucket.list("shortcuts/")))
        total, due = 0, []
        for commit in commits[2:]:
            total += commit.nbytes
            if total > commits[1].nbytes / 2:
                due.append(commit.version)
                total = 0
        assert due
        assert made == due

    def test_no_anchor_is_written_while_deltas_are_small(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            for _ in range(10):
                weights["scale"][...] += 1
                publisher.publish(weights).wait()
        assert not asyncio.run(bucket.list("shortcuts/"))

    def test_versions_since_the_last_anchor_are_counted_over_restarts(self, bucket: Troubled) -> None:
        """A trainer that restarts often still writes anchors."""
        weights = initial()
        for step in range(7):
            published = {name: array.copy() for name, array in weights.items()}
            with Publisher(bucket, anchor_every=3, published=published if step % 2 else None) as publisher:
                train(weights, step)
                publisher.publish(weights)
            assert hinted(bucket) == (commits_in(bucket)[-1].version, newest_shortcut(bucket))
        commits = commits_in(bucket)
        made = {int(one.path.split("/")[1]): one.path for one in asyncio.run(bucket.list("shortcuts/"))}
        first, second = sorted(made)
        assert [commit.kind for commit in commits[2 : first + 1]].count("delta") == 3
        assert [commit.kind for commit in commits[first + 1 : second + 1]].count("delta") == 3

    def test_a_failed_anchor_is_only_a_warning(self, bucket: Troubled, heard: list[Event]) -> None:
        weights = initial()
        with Publisher(bucket, anchor_every=1, on_event=heard.append) as publisher:
            publisher.publish(weights).wait()
            bucket.trouble("put", "anchors/", failed, times=1e9)
            for step in range(3):
                train(weights, step)
                publisher.publish(weights).wait()
        assert version_in(bucket) == digest(weights)
        assert not asyncio.run(bucket.list("shortcuts/"))
        assert "version 2: no anchor was written (the request failed)" in [event.message for event in heard]

    def test_the_newest_anchor_is_named_in_head_json(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, anchor_every=1) as publisher:
            for step in range(5):
                train(weights, step)
                publisher.publish(weights).wait()
        assert hinted(bucket) == (5, newest_shortcut(bucket))
