"""The publisher as a trainer sees it: publish and go on; what was published is in the bucket, bit for bit."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.published import commits_in, run_in, version_in
from support.samples import base as bits_of
from support.samples import change
from support.troubled import Act, Troubled, denied, failed, in_memory, slow
from weightwire import digest
from weightwire.bucket.registry import open_bucket
from weightwire.chain.records import Heartbeat, heartbeat_path, seal
from weightwire.errors import Fenced, PermissionDenied, SchemaChanged, UnsafeBucket, WeightwireError, WrongBase
from weightwire.publisher.publication import Publication
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event
from weightwire.weights import DTYPES

Arrays = dict[str, Any]
F16 = DTYPES["F16"]


def initial() -> Arrays:
    return {
        "layer.weight": bits_of(F16, 6400).view(np.float16).reshape(100, 64),
        "norm": np.linspace(0, 1, 5, dtype=np.float32),
        "none": np.zeros((0, 3), np.float32),
        "scale": np.array(0.5, np.float32),
    }


def train(weights: Arrays, step: int = 0) -> None:
    """Changes some weights in place, as an optimizer does."""
    bits = weights["layer.weight"].reshape(-1).view(np.uint16)
    bits[:] = change(bits, F16, "few", seed=step + 100)
    weights["norm"][step % 5] += 1


def state(weights: Arrays) -> str:
    return digest(weights).hex


def kinds(bucket: Troubled) -> list[tuple[str, int]]:
    return [(commit.kind, commit.epoch) for commit in commits_in(bucket)]


class Gate:
    """Requests wait here until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    async def __call__(self, act: Act) -> Any:
        self.reached.set()
        while not self._open.is_set():
            await asyncio.sleep(0.001)
        return await act()

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def bucket() -> Troubled:
    return in_memory()


@pytest.fixture
def heard() -> list[Event]:
    return []


class TestVersions:
    def test_come_out_one_after_the_other(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            assert publisher.version is None
            assert publisher.state is None
            for step in range(5):
                train(weights, step)
                assert publisher.publish(weights, step=step).wait() == step + 1
                assert publisher.version == step + 1
                assert publisher.state == state(weights)
                assert version_in(bucket) == digest(weights)
        assert kinds(bucket) == [("fence", 1), ("anchor", 1), *[("delta", 1)] * 4]
        assert [commit.step for commit in commits_in(bucket)] == [None, 0, 1, 2, 3, 4]

    def test_are_small(self, bucket: Troubled) -> None:
        """1% of the weights change."""
        weights = initial()
        with Publisher(bucket) as publisher:
            publisher.publish(weights).wait()
            train(weights)
            publisher.publish(weights).wait()
        anchor, delta = commits_in(bucket)[1:]
        assert delta.nbytes < anchor.nbytes / 4
        assert 0 < delta.changed < 200
        assert anchor.changed == 0

    def test_in_a_directory(self, tmp_path: Path) -> None:
        weights = initial()
        with Publisher(tmp_path / "run") as publisher:
            publisher.publish(weights)
        assert version_in(open_bucket(tmp_path / "run")) == digest(weights)

    def test_at_a_url(self) -> None:
        with Publisher("memory://test-publisher/at-a-url") as publisher:
            publisher.publish(initial())
        assert version_in(open_bucket("memory://test-publisher/at-a-url")) == digest(initial())

    def test_of_a_checkpoint(self, bucket: Troubled, tmp_path: Path) -> None:
        safetensors.numpy.save_file({"w": np.arange(9.0)}, tmp_path / "model.safetensors")
        with Publisher(bucket) as publisher:
            publisher.publish(tmp_path)
        assert version_in(bucket) == digest({"w": np.arange(9.0)})

    def test_of_raw_bits(self, bucket: Troubled) -> None:
        weights = {"w": ("BF16", (2, 3), bytes(range(12)))}
        with Publisher(bucket) as publisher:
            publisher.publish(weights)
        assert version_in(bucket) == digest(weights)
        assert run_in(bucket).tensors == {"w": ("BF16", (2, 3))}

    def test_carry_what_people_want_to_know(self, bucket: Troubled) -> None:
        metrics = {"reward": 0.25, "loss": math.nan, "kl": math.inf, "count": np.float32(3)}
        with Publisher(bucket) as publisher:
            publisher.publish(initial(), step=np.int64(7), metrics=metrics)  # type: ignore[arg-type]
        commit = commits_in(bucket)[-1]
        assert commit.step == 7
        assert commit.metrics == {"reward": 0.25, "loss": None, "kl": None, "count": 3.0}
        assert set(commit.stages) == {"capture", "encode", "upload"}
        assert commit.stages["capture"].bytes == sum(array.nbytes for array in initial().values())
        assert commit.stages["upload"].bytes == commit.nbytes

    @pytest.mark.parametrize("given", [{"metrics": {"lr": None}}, {"metrics": {"lr": "high"}}, {"step": 0.5}])
    def test_what_is_no_number_is_told_at_once(self, bucket: Troubled, given: Any) -> None:
        """To who gave it, and it harms nothing else."""
        with Publisher(bucket) as publisher:
            with pytest.raises((TypeError, ValueError)):
                publisher.publish(initial(), **given)
            assert publisher.publish(initial()).wait() == 1

    def test_that_change_nothing_have_no_files(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial()).wait()
            assert publisher.publish(initial(), step=1).wait() == 2
        commit = commits_in(bucket)[-1]
        assert (commit.kind, commit.files, commit.step) == ("delta", (), 1)
        assert commit.before == commit.after == state(initial())

    def test_may_come_in_any_order_of_names(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            publisher.publish(weights).wait()
            train(weights)
            publisher.publish(dict(reversed(weights.items())))
        assert version_in(bucket) == digest(weights)

    def test_are_told_of(self, bucket: Troubled, heard: list[Event]) -> None:
        with Publisher(bucket, on_event=heard.append) as publisher:
            publisher.publish(initial()).wait()
        assert [(event.stage, event.version) for event in heard] == [
            ("capture", None),
            ("encode", 1),
            ("upload", 1),
            ("commit", 1),
        ]
        assert heard[2].nbytes == commits_in(bucket)[1].nbytes
        assert all(event.at > 1.7e9 for event in heard)


class TestCapture:
    def test_is_complete_when_publish_returns(self, bucket: Troubled) -> None:
        """The trainer goes on at once, while the bucket has not even begun."""
        gate, weights = Gate(), initial()
        publisher = Publisher(bucket)
        publisher.publish(weights).wait()
        states = [state(weights)]
        bucket.trouble("put create", "", gate, times=100)
        for step in range(3):
            train(weights, step)
            publisher.publish(weights, step=step)
            states.append(state(weights))
            train(weights, step + 50)
        assert len(asyncio.run(bucket.inner.list("commits/"))) == 2
        gate.open()
        publisher.close()
        commits = commits_in(bucket)
        assert commits[-1].after == states[-1]
        assert {commit.after for commit in commits} <= {"", *states}
        assert version_in(bucket).hex == states[-1]

    def test_does_not_wait_for_the_bucket(self, bucket: Troubled) -> None:
        gate, weights = Gate(), initial()
        with Publisher(bucket) as publisher:
            publisher.publish(weights).wait()
            bucket.trouble("put", "deltas/", gate, times=100)
            for step in range(20):
                train(weights, step)
                publisher.publish(weights, step=step)
            assert gate.reached.wait(10)
            assert publisher.version == 1
            gate.open()


class TestHandle:
    def test_of_a_version_under_way(self, bucket: Troubled) -> None:
        gate = Gate()
        with Publisher(bucket) as publisher:
            bucket.trouble("put", "anchors/", gate)
            handle = publisher.publish(initial(), step=3)
            assert gate.reached.wait(10)
            assert (handle.done, handle.version, handle.superseded_by, handle.error) == (False, None, None, None)
            with pytest.raises(TimeoutError, match="step 3"):
                handle.wait(0.01)
            with pytest.raises(TimeoutError):
                publisher.wait(timeout=0.01)
            gate.open()
            assert handle.wait() == handle.version == publisher.wait() == 1
            assert handle.done

    def test_of_one_that_a_newer_one_replaced(self, bucket: Troubled) -> None:
        gate, weights = Gate(), initial()
        with Publisher(bucket) as publisher:
            bucket.trouble("put", "anchors/", gate)
            handles = [publisher.publish(weights, step=0)]
            assert gate.reached.wait(10)
            for step in range(1, 5):
                train(weights, step)
                handles.append(publisher.publish(weights, step=step))
            gate.open()
            assert [handle.wait() for handle in handles] == [1, 2, 2, 2, 2]
        assert [handle.version for handle in handles] == [1, None, None, None, 2]
        assert [handle.superseded_by for handle in handles] == [None, handles[2], handles[3], handles[4], None]
        assert [commit.step for commit in commits_in(bucket)] == [None, 0, 4]
        assert version_in(bucket) == digest(weights)

    def test_of_nothing(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher, pytest.raises(WeightwireError, match="nothing has been published yet"):
            publisher.wait()


class TestASlowBucket:
    def test_costs_freshness_and_nothing_else(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            bucket.trouble("put", "deltas/", slow(0.05), times=1000)
            handles = []
            for step in range(60):
                train(weights, step)
                handles.append(publisher.publish(weights, step=step))
        commits = commits_in(bucket)
        assert 3 <= len(commits) < 60
        assert commits[-1].step == 59
        assert version_in(bucket) == digest(weights)
        published = [handle for handle in handles if handle.version is not None]
        assert [commit.step for commit in commits[1:]] == [handle.step for handle in published]
        assert all(handle.done for handle in handles)


class TestRestart:
    def test_goes_on_where_the_last_one_ended(self, bucket: Troubled) -> None:
        weights = initial()
        for life in range(3):
            with Publisher(bucket) as publisher:
                assert publisher.state == (state(weights) if life else None)
                for step in range(3):
                    train(weights, 10 * life + step)
                    publisher.publish(weights).wait()
                    assert version_in(bucket) == digest(weights)
        expected = [("fence", 1), ("anchor", 1), ("delta", 1), ("delta", 1)]
        assert kinds(bucket) == expected + [(kind, epoch) for epoch in (2, 3) for kind in ["fence"] + 3 * ["delta"]]

    def test_with_other_weights_than_were_published(self, bucket: Troubled) -> None:
        """The diff is against what was published: what the trainer lost or skipped does not matter."""
        weights = initial()
        with Publisher(bucket) as publisher:
            publisher.publish(weights)
        other = initial()
        for step in range(5):
            train(other, step + 7)
        with Publisher(bucket) as publisher:
            publisher.publish(other)
        assert version_in(bucket) == digest(other)
        assert version_in(bucket, 1) == digest(weights)

    def test_without_a_publish_leaves_the_run_as_it_was(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        before = asyncio.run(bucket.list(""))
        with Publisher(bucket) as publisher:
            assert publisher.version == 1
            assert publisher.state == state(initial())
        assert asyncio.run(bucket.list("")) == before
        assert kinds(bucket) == [("fence", 1), ("anchor", 1)]
        assert version_in(bucket) == digest(initial())

    def test_goes_on_from_what_another_published_after_it_looked(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as old, Publisher(bucket) as early:
            assert early.version is None
            old.publish(weights).wait()
            with Publisher(bucket) as new:
                assert new.version == 1
                train(weights, 1)
                old.publish(weights).wait()
                train(weights, 2)
                assert new.publish(weights).wait() == 4
                with pytest.raises(Fenced):
                    old.publish(weights).wait()
        assert kinds(bucket) == [("fence", 1), ("anchor", 1), ("delta", 1), ("fence", 2), ("delta", 2)]
        assert version_in(bucket) == digest(weights)

    def test_of_one_that_died_before_its_first_version(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/", denied)
        publisher = Publisher(bucket)
        publisher.publish(initial())
        with pytest.raises(PermissionDenied):
            publisher.close()
        with Publisher(bucket) as publisher:
            assert publisher.state is None
            publisher.publish(initial())
        assert kinds(bucket) == [("fence", 1), ("anchor", 1)]

    def test_of_one_that_died_after_it_started_the_run(self, bucket: Troubled) -> None:
        bucket.trouble("create", "commits/00000000000000000001", denied, times=1e9)
        publisher = Publisher(bucket)
        publisher.publish(initial())
        with pytest.raises(TimeoutError):
            publisher.close(0.5)
        bucket.calm()
        with Publisher(bucket) as publisher:
            assert (publisher.version, publisher.state) == (0, None)
            publisher.publish(initial())
        assert kinds(bucket) == [("fence", 1), ("fence", 2), ("anchor", 2)]

    def test_with_weights_at_hand_fetches_nothing(self, bucket: Troubled, tmp_path: Path) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            publisher.publish(weights)
        safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
        for published in (weights, tmp_path):
            bucket.asked.clear()
            with Publisher(bucket, published=published) as publisher:
                assert publisher.state == state(weights)
                assert bucket.count("read_into") == 0
                train(weights)
                publisher.publish(weights).wait()
                assert version_in(bucket) == digest(weights)
                weights = initial()
                publisher.publish(weights)

    def test_with_other_weights_at_hand_fetches_what_was_published(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        other = initial()
        train(other)
        for published in (other, {"w": np.zeros(3)}, {**initial(), "more": np.zeros(3)}):
            bucket.asked.clear()
            with Publisher(bucket, published=published) as publisher:
                assert publisher.state == state(initial())
                assert bucket.count("read_into") > 0

    def test_never_changes_the_weights_at_hand(self, bucket: Troubled) -> None:
        weights, changed = initial(), initial()
        train(changed)
        with Publisher(bucket) as publisher:
            publisher.publish(weights)
        with Publisher(bucket, published=weights) as publisher:
            publisher.publish(changed)
        assert state(weights) == state(initial())

    def test_finds_another_way_where_data_is_gone(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, anchor_every=2) as publisher:
            for step in range(6):
                train(weights, step)
                publisher.publish(weights).wait()
        newest = max(asyncio.run(bucket.list("shortcuts/")), key=lambda one: one.path)
        for one in asyncio.run(bucket.list(f"anchors/{newest.path.split('/')[1]}/")):
            asyncio.run(bucket.inner.delete(one.path))
        with Publisher(bucket) as publisher:
            assert publisher.state == state(weights)


class TestBase:
    def test_needs_no_anchor(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, base=initial(), source="hf://org/model") as publisher:
            assert publisher.version == 1
            assert publisher.state == state(weights)
            train(weights)
            publisher.publish(weights)
        assert kinds(bucket) == [("fence", 1), ("base", 1), ("delta", 1)]
        assert commits_in(bucket)[1].source == "hf://org/model"
        assert not asyncio.run(bucket.list("anchors/"))
        assert version_in(bucket, base=initial()) == digest(weights)

    def test_as_a_checkpoint(self, bucket: Troubled, tmp_path: Path) -> None:
        safetensors.numpy.save_file(initial(), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text("{}")
        weights = initial()
        with Publisher(bucket, base=tmp_path) as publisher:
            train(weights)
            publisher.publish(weights)
        assert commits_in(bucket)[1].source == str(tmp_path)
        assert [file.name for file in run_in(bucket).files] == ["config.json"]
        assert version_in(bucket) == digest(weights)  # it is where the run says

    def test_stays_as_it_is(self, bucket: Troubled) -> None:
        base, weights = initial(), initial()
        with Publisher(bucket, base=base) as publisher:
            train(weights)
            publisher.publish(weights)
        assert state(base) == state(initial())

    def test_again_after_a_restart(self, bucket: Troubled) -> None:
        weights = initial()
        for step in range(3):
            with Publisher(bucket, base=initial()) as publisher:
                train(weights, step)
                publisher.publish(weights)
        assert kinds(bucket) == [
            ("fence", 1),
            ("base", 1),
            ("delta", 1),
            ("fence", 2),
            ("delta", 2),
            ("fence", 3),
            ("delta", 3),
        ]
        assert version_in(bucket, base=initial()) == digest(weights)

    def test_missing_after_a_restart(self, bucket: Troubled) -> None:
        with Publisher(bucket, base=initial()):
            pass
        with pytest.raises(WrongBase, match="that is not here"):
            Publisher(bucket)

    def test_of_another_run_is_not_used(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        other = initial()
        train(other)
        with Publisher(bucket, base=other) as publisher:
            assert publisher.state == state(initial())


class TestSchema:
    @pytest.mark.parametrize("blocking", [False, True])
    def test_is_fixed(self, bucket: Troubled, blocking: bool) -> None:
        weights = initial()
        less = {name: array for name, array in weights.items() if name != "norm"}
        with Publisher(bucket, blocking=blocking) as publisher:
            publisher.publish(weights).wait()
            for name, other in [
                ("norm", less),
                ("more", {**weights, "more": np.zeros(2)}),
                ("norm", {**weights, "norm": np.zeros(6, np.float32)}),
                ("norm", {**weights, "norm": np.zeros(5, np.int32)}),
            ]:
                with pytest.raises(SchemaChanged, match=f"tensor '{name}'") as caught:
                    publisher.publish(other)
                assert caught.value.hint
                assert "start a new run" in caught.value.hint
            train(weights)
            assert publisher.publish(weights).wait() == 2
        assert version_in(bucket) == digest(weights)

    def test_is_that_of_the_run_after_a_restart(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        with Publisher(bucket) as publisher:
            with pytest.raises(SchemaChanged):
                publisher.publish({"w": np.zeros(3)})
            publisher.publish(initial()).wait()

    def test_a_run_of_another_model_was_started_meanwhile(self, bucket: Troubled) -> None:
        late = Publisher(bucket)
        with Publisher(bucket) as first:
            first.publish({"other": np.zeros(3)})
        late.publish(initial())
        with pytest.raises(SchemaChanged, match=f"in the run at {bucket.url}"):
            late.close()

    @pytest.mark.parametrize("blocking", [False, True])
    def test_a_publisher_with_other_weights_does_not_fence_off_the_live_one(
        self, bucket: Troubled, blocking: bool
    ) -> None:
        """Such as one that was given the URL of another run by mistake."""
        weights = initial()
        with Publisher(bucket) as live, Publisher(bucket, blocking=blocking) as early:
            live.publish(weights).wait()
            with Publisher(bucket, blocking=blocking) as stray, pytest.raises(SchemaChanged):
                stray.publish({"other": np.zeros(3)})
            with pytest.raises(SchemaChanged):
                early.publish({"other": np.zeros(3)}).wait()
            train(weights)
            assert live.publish(weights).wait() == 2
        assert kinds(bucket) == [("fence", 1), ("anchor", 1), ("delta", 1)]


class TestTiedTensors:
    def test_are_published_once(self, bucket: Troubled) -> None:
        embed = np.arange(100, dtype=np.float32).reshape(10, 10)
        tied = {"embed": embed, "head": embed, "again": embed.view(), "alike": embed.copy()}
        with Publisher(bucket) as publisher:
            publisher.publish(tied).wait()
            embed[3, 3] = 7
            publisher.publish(tied)
        run = run_in(bucket)
        assert sorted(run.tensors) == ["alike", "embed"]
        assert run.aliases == {"head": "embed", "again": "embed"}
        assert version_in(bucket) == digest({"embed": embed, "alike": tied["alike"]})

    def test_other_views_of_the_same_memory_are_tensors_of_their_own(self, bucket: Troubled) -> None:
        memory = np.arange(100, dtype=np.float32)
        weights: Arrays = {"a": memory, "b": memory.reshape(10, 10), "c": memory[:50], "d": memory.view(np.int32)}
        weights |= {"e": memory[:0], "f": memory[:0]}
        with Publisher(bucket) as publisher:
            publisher.publish(weights)
        assert run_in(bucket).aliases == {}
        assert version_in(bucket) == digest(weights)

    def test_are_tied_after_a_restart_too(self, bucket: Troubled) -> None:
        embed = np.arange(100, dtype=np.float32)
        for value in (1, 2):
            with Publisher(bucket) as publisher:
                embed[0] = value
                publisher.publish({"embed": embed, "head": embed})
        assert version_in(bucket) == digest({"embed": embed})


class TestSideFiles:
    def test_go_along(self, bucket: Troubled) -> None:
        files = {"config.json": b"{}", "tokenizer/vocab.txt": b"a b c"}
        with Publisher(bucket, files=files) as publisher:
            publisher.publish(initial())
        run = run_in(bucket)
        assert [file.name for file in run.files] == ["config.json", "tokenizer/vocab.txt"]
        assert {file.name: asyncio.run(bucket.get(file.path)) for file in run.files} == files

    def test_of_a_directory(self, bucket: Troubled, tmp_path: Path) -> None:
        safetensors.numpy.save_file(initial(), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "config").write_text("secret")
        with Publisher(bucket, files=tmp_path) as publisher:
            publisher.publish(initial())
        assert [file.name for file in run_in(bucket).files] == ["config.json"]

    def test_are_there_before_the_run_is(self, bucket: Troubled) -> None:
        with Publisher(bucket, files={"config.json": b"{}"}) as publisher:
            publisher.publish(initial())
        writes = [path for verb, path in bucket.asked if verb in ("create", "put") and not path.startswith("probe/")]
        assert writes[0].startswith("files/")
        assert writes.index("run.json") > 0


class TestTheFirstVersion:
    def test_starts_the_run_when_its_data_is_there(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        writes = [path for verb, path in bucket.asked if verb in ("create", "put") and not path.startswith("probe/")]
        assert [path.split("/")[0] for path in writes[:4]] == ["anchors", "run.json", "epochs", "commits"]

    def test_that_failed_does_not_bind_the_next_publisher_to_its_weights(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/", denied)
        publisher = Publisher(bucket)
        publisher.publish({"other": np.zeros(3)})
        with pytest.raises(PermissionDenied):
            publisher.close()
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        assert version_in(bucket) == digest(initial())

    def test_of_a_run_that_another_starts_meanwhile(self, bucket: Troubled) -> None:
        """The data is uploaded again, under the version that it becomes."""
        gate, weights = Gate(), initial()
        bucket.trouble("put", "anchors/", gate)
        slow_one = Publisher(bucket)
        handle = slow_one.publish(weights)
        assert gate.reached.wait(10)
        with Publisher(bucket) as other:
            train(weights)
            assert other.publish(weights).wait() == 1
            gate.open()
            assert handle.wait(10) == 3
            slow_one.close()
        assert kinds(bucket) == [("fence", 1), ("anchor", 1), ("fence", 2), ("anchor", 2)]
        assert [file.path.split("-")[0] for file in commits_in(bucket)[3].files] == ["anchors/3/e2"]
        assert version_in(bucket) == digest(initial())


class TestAnchors:
    def test_every_so_many_versions(self, bucket: Troubled) -> None:
        weights = initial()
        states = {}
        with Publisher(bucket, anchor_every=3) as publisher:
            for step in range(10):
                train(weights, step)
                version = publisher.publish(weights).wait()
                states[version] = digest(weights)
        made = [int(one.path.split("/")[1]) for one in asyncio.run(bucket.list("shortcuts/"))]
        assert sorted(made) == [4, 7, 10]
        bucket.asked.clear()
        for version in (4, 6, 10):
            assert version_in(bucket, version) == states[version]
        assert not [path for verb, path in bucket.asked if verb == "read_into" and path.startswith("anchors/1/")]

    def test_when_the_deltas_add_up_to_half_of_one(self, bucket: Troubled) -> None:
        weights = {"w": bits_of(F16, 6400)}
        with Publisher(bucket) as publisher:
            publisher.publish(weights).wait()
            for step in range(16):
                weights["w"] = change(weights["w"], F16, "mostly-up", seed=step)
                publisher.publish(weights).wait()
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

    def test_not_while_deltas_are_small(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            for _ in range(10):
                weights["scale"][...] += 1
                publisher.publish(weights).wait()
        assert not asyncio.run(bucket.list("shortcuts/"))

    def test_are_counted_over_restarts(self, bucket: Troubled) -> None:
        """A trainer that never lives long enough for one makes one all the same, and does not forget it."""
        weights = initial()
        for step in range(7):
            published = {name: array.copy() for name, array in weights.items()}
            with Publisher(bucket, anchor_every=3, published=published if step % 2 else None) as publisher:
                train(weights, step)
                publisher.publish(weights)
        commits = commits_in(bucket)
        made = {int(one.path.split("/")[1]): one.path for one in asyncio.run(bucket.list("shortcuts/"))}
        first, second = sorted(made)
        assert [commit.kind for commit in commits[2 : first + 1]].count("delta") == 3
        assert [commit.kind for commit in commits[first + 1 : second + 1]].count("delta") == 3
        hint = json.loads(asyncio.run(bucket.get("HEAD.json")))
        assert hint["anchor"] == made[first]  # the second came after the last hint

    def test_that_fail_harm_nothing(self, bucket: Troubled, heard: list[Event]) -> None:
        weights = initial()
        with Publisher(bucket, anchor_every=1, on_event=heard.append) as publisher:
            publisher.publish(weights).wait()
            bucket.trouble("put", "anchors/", failed, times=1e9)
            for step in range(3):
                train(weights, step)
                publisher.publish(weights).wait()
        assert version_in(bucket) == digest(weights)
        assert not asyncio.run(bucket.list("shortcuts/"))
        assert "no anchor for version 2 (the request failed)" in [event.message for event in heard]

    def test_are_hinted_at(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, anchor_every=1) as publisher:
            for step in range(5):
                train(weights, step)
                publisher.publish(weights).wait()
        hint = json.loads(asyncio.run(bucket.get("HEAD.json")))
        assert hint["version"] in (4, 5)
        assert hint["anchor"] in [one.path for one in asyncio.run(bucket.list("shortcuts/"))]


class TestTrouble:
    def test_a_dropped_version_is_part_of_the_next(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            publisher.publish(weights).wait()
            bucket.trouble("put", "deltas/", denied)
            train(weights, 1)
            handle = publisher.publish(weights, step=1)
            with pytest.raises(PermissionDenied):
                handle.wait()
            assert handle.error is not None
            assert publisher.version == 1
            train(weights, 2)
            assert publisher.publish(weights, step=2).wait() == 2
        assert [commit.step for commit in commits_in(bucket)[2:]] == [2]
        assert version_in(bucket) == digest(weights)

    def test_a_first_version_that_was_dropped(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            bucket.trouble("put", "anchors/", denied)
            with pytest.raises(PermissionDenied):
                publisher.publish(weights).wait()
            train(weights)
            assert publisher.publish(weights).wait() == 1
        assert kinds(bucket) == [("fence", 1), ("anchor", 1)]
        assert version_in(bucket) == digest(weights)

    def test_it_is_told_of(self, bucket: Troubled, heard: list[Event]) -> None:
        publisher = Publisher(bucket, on_event=heard.append)
        bucket.trouble("put", "anchors/", denied)
        publisher.publish(initial(), step=3)
        with pytest.raises(PermissionDenied):
            publisher.close()
        assert "step 3: not published (this key may not do that); the next one includes it" in [
            event.message for event in heard if event.stage == "warning"
        ]


class TestFencing:
    def test_the_older_one_is_told(self, bucket: Troubled) -> None:
        weights = initial()
        old = Publisher(bucket)
        old.publish(weights).wait()
        with Publisher(bucket) as new:
            new.publish(weights).wait()
            with pytest.raises(Fenced, match="another publisher"):
                old.publish(weights).wait()
            with pytest.raises(Fenced):
                old.publish(weights)
            with pytest.raises(Fenced):
                old.wait()
            old.close()
            train(weights)
            new.publish(weights).wait()
        assert kinds(bucket) == [("fence", 1), ("anchor", 1), ("fence", 2), ("delta", 2), ("delta", 2)]
        assert version_in(bucket) == digest(weights)

    def test_what_it_had_waiting_fails_too(self, bucket: Troubled) -> None:
        gate, weights = Gate(), initial()
        old = Publisher(bucket)
        old.publish(weights).wait()
        bucket.trouble("put", "deltas/", gate)
        train(weights)
        handles = [old.publish(weights)]
        assert gate.reached.wait(10)
        handles += [old.publish(weights) for _ in range(3)]
        with Publisher(bucket) as new:
            new.publish(weights).wait()
            gate.open()
            for handle in handles:
                with pytest.raises(Fenced):
                    handle.wait(10)
            old.close()
        assert handles[-1].superseded_by is None

    def test_of_two_in_an_empty_run(self, bucket: Troubled) -> None:
        """Neither has begun; the one that publishes later takes over."""
        weights = initial()
        one = Publisher(bucket)
        with Publisher(bucket) as two:
            assert one.publish(weights).wait() == 1
            train(weights)
            assert two.publish(weights).wait() == 3
            one.publish(weights)
            with pytest.raises(Fenced):
                one.close()
        assert version_in(bucket) == digest(weights)


class TestTheEnd:
    def test_publishes_what_waits(self, bucket: Troubled) -> None:
        weights = initial()
        publisher = Publisher(bucket)
        bucket.trouble("put", "", slow(0.05), times=100)
        for step in range(3):
            train(weights, step)
            handle = publisher.publish(weights, step=step)
        publisher.close()
        assert handle.version is not None
        assert commits_in(bucket)[-1].step == 2
        assert version_in(bucket) == digest(weights)

    def test_is_the_end(self, bucket: Troubled) -> None:
        publisher = Publisher(bucket)
        publisher.close()
        publisher.close()
        with pytest.raises(WeightwireError, match="this publisher is closed"):
            publisher.publish(initial())
        assert not [thread for thread in threading.enumerate() if thread.name == "weightwire-publisher"]

    def test_leaves_nothing_in_an_empty_bucket(self, bucket: Troubled) -> None:
        Publisher(bucket).close()
        assert not asyncio.run(bucket.list(""))

    def test_with_an_error_publishes_what_waits(self, bucket: Troubled) -> None:
        with pytest.raises(ZeroDivisionError):
            self.stumble(bucket)
        assert version_in(bucket) == digest(initial())

    def test_the_first_error_is_what_counts(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/", denied)
        with pytest.raises(ZeroDivisionError):
            self.stumble(bucket)

    def stumble(self, bucket: Troubled) -> None:
        """A trainer that fails after its publish."""
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
            raise ZeroDivisionError

    def test_raises_what_went_wrong(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/", denied)
        publisher = Publisher(bucket)
        publisher.publish(initial())
        with pytest.raises(PermissionDenied):
            publisher.close()

    def test_does_not_repeat_what_was_told(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/", denied)
        publisher = Publisher(bucket)
        with pytest.raises(PermissionDenied):
            publisher.publish(initial()).wait()
        publisher.close()

    def test_waits_no_longer_than_asked_for(self, bucket: Troubled) -> None:
        gate = Gate()
        bucket.trouble("put", "anchors/", gate)
        publisher = Publisher(bucket)
        handle = publisher.publish(initial())
        assert gate.reached.wait(10)
        with pytest.raises(TimeoutError):
            publisher.close(timeout=0.05)
        with pytest.raises(WeightwireError, match="interrupted"):
            handle.wait(10)


class TestBlocking:
    def test_returns_when_it_is_committed(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, blocking=True) as publisher:
            for step in range(4):
                train(weights, step)
                assert publisher.publish(weights, step=step).version == step + 1
                assert version_in(bucket) == digest(weights)

    def test_raises_what_went_wrong(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, blocking=True) as publisher:
            publisher.publish(weights)
            bucket.trouble("put", "deltas/", denied)
            train(weights)
            with pytest.raises(PermissionDenied):
                publisher.publish(weights)
            assert publisher.publish(weights).version == 2
        assert version_in(bucket) == digest(weights)

    def test_is_fenced_off_at_once(self, bucket: Troubled) -> None:
        publisher = Publisher(bucket, blocking=True)
        publisher.publish(initial())
        with Publisher(bucket) as other:
            other.publish(initial())
        with pytest.raises(Fenced):
            publisher.publish(initial())
        publisher.close()

    def test_continues_with_a_base(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, base=initial(), blocking=True) as publisher:
            train(weights)
            assert publisher.publish(weights).version == 2
        assert version_in(bucket, base=initial()) == digest(weights)


class TestReplicas:
    def beat(self, bucket: Troubled, name: str, version: int, run: str | None = None) -> None:
        """What a follower writes."""
        run = run or run_in(bucket).run
        beat = Heartbeat(run=run, name=name, version=version, head=version, lease=60.0)
        asyncio.run(bucket.inner.put(heartbeat_path(name), seal(beat).data))

    def test_are_waited_for(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial()).wait()
            self.beat(bucket, "one", 1)
            assert publisher.wait(replicas=1) == 1
            with pytest.raises(TimeoutError):
                publisher.wait(replicas=2, timeout=0.05)
            threading.Timer(0.05, self.beat, [bucket, "two", 1]).start()
            assert publisher.wait(replicas=2, timeout=10) == 1

    def test_that_are_behind_do_not_count(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial()).wait()
            self.beat(bucket, "behind", 1)
            publisher.publish(initial()).wait()
            with pytest.raises(TimeoutError):
                publisher.wait(replicas=1, timeout=0.05)
            self.beat(bucket, "ahead", 5)
            with pytest.raises(TimeoutError):
                publisher.wait(replicas=1, timeout=0.05)
            self.beat(bucket, "there", 2)
            assert publisher.wait(replicas=1, timeout=10) == 2

    def test_of_other_runs_do_not_count(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial()).wait()
            self.beat(bucket, "lost", 9, run="0" * 32)
            asyncio.run(bucket.put("replicas/rotten.json", b"?"))
            with pytest.raises(TimeoutError):
                publisher.wait(replicas=1, timeout=0.05)


class TestNotify:
    @contextmanager
    def listening(self) -> Iterator[tuple[str, list[Any], threading.Event]]:
        """A server that wants to hear of new versions."""
        told: list[Any] = []
        third = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                told.append((self.path, self.headers["Content-Type"], json.loads(body)))
                self.send_response(204)
                self.end_headers()
                if len(told) == 3:
                    third.set()

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/wake", told, third
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def test_tells_of_every_version(self, bucket: Troubled) -> None:
        with self.listening() as (url, told, third), Publisher(bucket, notify=[url]) as publisher:
            for _ in range(3):
                publisher.publish(initial()).wait()
            assert third.wait(10)
        assert sorted(body["version"] for _, _, body in told) == [1, 2, 3]
        assert {(path, kind) for path, kind, _ in told} == {("/wake", "application/json")}

    def test_nobody_needs_to_listen(self, bucket: Troubled) -> None:
        warned = threading.Event()
        warnings: list[Event] = []

        def listen(event: Event) -> None:
            if event.stage == "warning":
                warnings.append(event)
                warned.set()

        with Publisher(bucket, notify=["http://127.0.0.1:1/", "nonsense"], on_event=listen) as publisher:
            assert publisher.publish(initial()).wait() == 1
            assert warned.wait(10)
        assert "http://127.0.0.1:1/: could not be woken" in warnings[0].message


class Careless(Troubled):
    """A store that takes the request and ignores its condition, without a word."""

    async def create(self, path: str, data: bytes) -> None:
        self.asked.append(("create", path))
        await self.inner.put(path, data)


class TestStart:
    def test_with_a_key_that_may_not_write(self, bucket: Troubled) -> None:
        bucket.trouble("create put", "", denied, times=1e9)
        with pytest.raises(PermissionDenied):
            Publisher(bucket)
        assert not [thread for thread in threading.enumerate() if thread.name == "weightwire-publisher"]

    def test_with_a_key_that_may_not_write_to_a_run(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        bucket.trouble("create put", "", denied, times=1e9)
        with pytest.raises(PermissionDenied):
            Publisher(bucket)
        with Publisher(bucket, insist=True) as publisher, pytest.raises(PermissionDenied):
            publisher.publish(initial()).wait()
        assert len(commits_in(bucket)) == 2

    def test_with_a_bucket_that_lets_both_win(self, bucket: Troubled) -> None:
        with pytest.raises(UnsafeBucket, match="two trainers could both publish"):
            Publisher(Careless(bucket.inner))

    def test_unless_one_insists(self, bucket: Troubled) -> None:
        with Publisher(Careless(bucket.inner), insist=True) as publisher:
            publisher.publish(initial())
        assert run_in(bucket).mode == "single-writer"
        assert version_in(bucket) == digest(initial())

    def test_a_strict_run_stays_strict(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        assert run_in(bucket).mode == "strict"
        bucket.strict = False
        with pytest.raises(UnsafeBucket, match="nothing can be created safely"):
            Publisher(bucket)

    def test_in_a_bucket_without_atomic_create(self, bucket: Troubled) -> None:
        bucket.strict = False
        for _ in range(2):
            with Publisher(bucket) as publisher:
                publisher.publish(initial())
        assert run_in(bucket).mode == "single-writer"
        assert kinds(bucket)[-2:] == [("fence", 2), ("delta", 2)]

    def test_leaves_no_traces_of_the_probe(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        assert bucket.count("create", "probe/") > 2
        assert not asyncio.run(bucket.list("probe/"))


def test_a_publication_is_what_publish_returns(bucket: Troubled) -> None:
    with Publisher(bucket) as publisher:
        assert isinstance(publisher.publish(initial()), Publication)


class TestThreads:
    """One publisher, several threads of one trainer."""

    @pytest.mark.parametrize("blocking", [False, True])
    def test_all_that_is_published_is_whole(self, bucket: Troubled, blocking: bool) -> None:
        weights = [initial() for _ in range(6)]
        for number, one in enumerate(weights):
            for _ in range(number):
                train(one)
        states = {state(one) for one in weights}
        with Publisher(bucket, blocking=blocking) as publisher:
            with ThreadPoolExecutor(len(weights)) as pool:
                publications = list(pool.map(publisher.publish, weights))
            assert {one.wait(10) for one in publications} <= set(range(1, 7))
        assert {commit.after for commit in commits_in(bucket) if commit.after} <= states
        assert version_in(bucket).hex in states


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_cannot_use_the_publisher_of_its_parent(bucket: Troubled) -> None:
    with Publisher(bucket) as publisher:
        publisher.publish(initial()).wait(10)
        child = os.fork()
        if child == 0:
            refused = False
            try:
                publisher.publish(initial())
            except WeightwireError as problem:
                refused = "another process" in problem.message
            publisher.close()
            os._exit(0 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert publisher.publish(initial()).wait(10) == 2
