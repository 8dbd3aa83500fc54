"""The publisher's interface: publish returns at once, and the exact bits reach the bucket."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.failing_bucket import Troubled, denied, slow
from support.run_contents import commits_in, run_in, version_in
from support.small_weights import Arrays, RequestGate, initial, kinds, settle, state, train
from weightwire import digest
from weightwire.bucket.registry import open_bucket
from weightwire.errors import CheckpointError, Fenced, PermissionDenied, WeightwireError
from weightwire.publisher.publication import Publication
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event


class TestVersions:
    def test_versions_are_committed_one_after_the_other(self, bucket: Troubled) -> None:
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

    def test_a_delta_is_much_smaller_than_the_weights(self, bucket: Troubled) -> None:
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

    def test_a_directory_is_a_bucket(self, tmp_path: Path) -> None:
        weights = initial()
        with Publisher(tmp_path / "run") as publisher:
            publisher.publish(weights)
        assert version_in(open_bucket(tmp_path / "run")) == digest(weights)

    def test_a_url_is_opened_as_a_bucket(self) -> None:
        with Publisher("memory://test-publisher/at-a-url") as publisher:
            publisher.publish(initial())
        assert version_in(open_bucket("memory://test-publisher/at-a-url")) == digest(initial())

    def test_a_checkpoint_is_published(self, bucket: Troubled, tmp_path: Path) -> None:
        safetensors.numpy.save_file({"w": np.arange(9.0)}, tmp_path / "model.safetensors")
        with Publisher(bucket) as publisher:
            publisher.publish(tmp_path)
        assert version_in(bucket) == digest({"w": np.arange(9.0)})

    def test_raw_bits_are_published(self, bucket: Troubled) -> None:
        weights = {"w": ("BF16", (2, 3), bytes(range(12)))}
        with Publisher(bucket) as publisher:
            publisher.publish(weights)
        assert version_in(bucket) == digest(weights)
        assert run_in(bucket).tensors == {"w": ("BF16", (2, 3))}

    def test_a_commit_carries_step_metrics_and_stages(self, bucket: Troubled) -> None:
        metrics = {"reward": 0.25, "loss": math.nan, "kl": math.inf, "count": np.float32(3)}
        with Publisher(bucket) as publisher:
            publisher.publish(initial(), step=np.int64(7), metrics=metrics)  # type: ignore[arg-type]
        commit = commits_in(bucket)[-1]
        assert commit.step == 7
        assert commit.metrics == {"reward": 0.25, "loss": None, "kl": None, "count": 3.0}
        assert set(commit.stages) == {"capture", "encode", "upload"}
        assert commit.stages["capture"].bytes == sum(array.nbytes for array in initial().values())
        assert commit.stages["upload"].bytes == commit.nbytes

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"metrics": {"lr": None}}, "metric 'lr' must be a number, not NoneType"),
            ({"metrics": {"lr": "high"}}, "metric 'lr' must be a number, not str"),
            ({"metrics": {"lr": np.ones(2)}}, "metric 'lr' must be a number, not ndarray"),
            ({"step": 0.5}, "step must be an integer, not float"),
        ],
    )
    def test_metrics_and_steps_that_are_not_numbers_are_rejected_at_once(
        self, bucket: Troubled, given: Any, message: str
    ) -> None:
        """The caller gets the error, and the next publish works."""
        with Publisher(bucket) as publisher:
            with pytest.raises(TypeError, match=message):
                publisher.publish(initial(), **given)
            assert publisher.publish(initial()).wait() == 1

    @pytest.mark.parametrize("blocking", [False, True])
    def test_empty_weights_are_rejected_at_once(self, bucket: Troubled, blocking: bool) -> None:
        with Publisher(bucket, blocking=blocking) as publisher:
            with pytest.raises(CheckpointError, match="no tensors to publish"):
                publisher.publish({})
            assert publisher.publish(initial()).wait() == 1

    def test_a_version_without_changes_has_no_files(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial()).wait()
            assert publisher.publish(initial(), step=1).wait() == 2
        commit = commits_in(bucket)[-1]
        assert (commit.kind, commit.files, commit.step) == ("delta", (), 1)
        assert commit.before == commit.after == state(initial())

    def test_tensors_may_come_in_any_order(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            publisher.publish(weights).wait()
            train(weights)
            publisher.publish(dict(reversed(weights.items())))
        assert version_in(bucket) == digest(weights)

    def test_every_stage_of_a_version_is_emitted(self, bucket: Troubled, heard: list[Event]) -> None:
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
    def test_weights_may_change_as_soon_as_publish_returns(self, bucket: Troubled) -> None:
        """The trainer continues before the bucket gets the first request."""
        gate, weights = RequestGate(), initial()
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

    def test_a_capture_does_not_wait_for_the_bucket(self, bucket: Troubled) -> None:
        gate, weights = RequestGate(), initial()
        with Publisher(bucket) as publisher:
            publisher.publish(weights).wait()
            bucket.trouble("put", "deltas/", gate, times=100)
            for step in range(20):
                train(weights, step)
                publisher.publish(weights, step=step)
            assert gate.reached.wait(60)
            assert publisher.version == 1
            gate.open()


class TestPublication:
    def test_a_publication_is_done_when_its_version_is_committed(self, bucket: Troubled) -> None:
        gate = RequestGate()
        with Publisher(bucket) as publisher:
            bucket.trouble("put", "anchors/", gate)
            handle = publisher.publish(initial(), step=3)
            assert gate.reached.wait(60)
            assert (handle.done, handle.version, handle.superseded_by, handle.error) == (False, None, None, None)
            with pytest.raises(TimeoutError, match="step 3"):
                handle.wait(0.01)
            with pytest.raises(TimeoutError):
                publisher.wait(timeout=0.01)
            gate.open()
            assert handle.wait() == handle.version == publisher.wait() == 1
            assert handle.done

    def test_a_superseded_publication_waits_for_the_newer_one(self, bucket: Troubled) -> None:
        gate, weights = RequestGate(), initial()
        with Publisher(bucket) as publisher:
            bucket.trouble("put", "anchors/", gate)
            handles = [publisher.publish(weights, step=0)]
            assert gate.reached.wait(60)
            for step in range(1, 5):
                train(weights, step)
                handles.append(publisher.publish(weights, step=step))
            gate.open()
            assert [handle.wait() for handle in handles] == [1, 2, 2, 2, 2]
        assert [handle.version for handle in handles] == [1, None, None, None, 2]
        assert [handle.superseded_by for handle in handles] == [None, handles[2], handles[3], handles[4], None]
        assert [commit.step for commit in commits_in(bucket)] == [None, 0, 4]
        assert version_in(bucket) == digest(weights)

    def test_wait_fails_before_anything_was_published(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher, pytest.raises(WeightwireError, match="nothing has been published yet"):
            publisher.wait()


class TestSlowBucket:
    def test_a_slow_bucket_only_delays_versions(self, bucket: Troubled) -> None:
        gate, weights = RequestGate(), initial()
        with Publisher(bucket) as publisher:
            bucket.trouble("put", "deltas/", gate)
            bucket.trouble("put", "deltas/", slow(0.05), times=1000)
            handles = []
            for step in range(60):
                train(weights, step)
                handles.append(publisher.publish(weights, step=step))
                if step == 0:
                    handles[0].wait()
                if step == 30:
                    gate.open()  # by then some are superseded, however slow the trainer is
        commits = commits_in(bucket)
        assert 3 <= len(commits) < 60
        assert commits[-1].step == 59
        assert version_in(bucket) == digest(weights)
        published = [handle for handle in handles if handle.version is not None]
        assert [commit.step for commit in commits[1:]] == [handle.step for handle in published]
        assert all(handle.done for handle in handles)


class TestTiedTensors:
    def test_tied_tensors_are_published_once(self, bucket: Troubled) -> None:
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

    def test_other_views_of_the_same_memory_are_not_tied(self, bucket: Troubled) -> None:
        memory = np.arange(100, dtype=np.float32)
        weights: Arrays = {"a": memory, "b": memory.reshape(10, 10), "c": memory[:50], "d": memory.view(np.int32)}
        weights |= {"e": memory[:0], "f": memory[:0]}
        with Publisher(bucket) as publisher:
            publisher.publish(weights)
        assert run_in(bucket).aliases == {}
        assert version_in(bucket) == digest(weights)

    def test_tied_tensors_stay_tied_after_a_restart(self, bucket: Troubled) -> None:
        embed = np.arange(100, dtype=np.float32)
        for value in (1, 2):
            with Publisher(bucket) as publisher:
                embed[0] = value
                publisher.publish({"embed": embed, "head": embed})
        assert version_in(bucket) == digest({"embed": embed})


class TestClose:
    def test_close_publishes_pending_weights(self, bucket: Troubled) -> None:
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

    def test_a_closed_publisher_cannot_publish(self, bucket: Troubled) -> None:
        publisher = Publisher(bucket)
        publisher.close()
        publisher.close()
        with pytest.raises(WeightwireError, match="this publisher is closed"):
            publisher.publish(initial())
        assert not [thread for thread in threading.enumerate() if thread.name == "weightwire-publisher"]

    def test_a_publisher_that_publishes_nothing_leaves_an_empty_bucket(self, bucket: Troubled) -> None:
        Publisher(bucket).close()
        assert not asyncio.run(bucket.list(""))

    def test_an_error_of_the_program_does_not_lose_pending_weights(self, bucket: Troubled) -> None:
        with pytest.raises(ZeroDivisionError):
            self.stumble(bucket)
        assert version_in(bucket) == digest(initial())

    def test_an_error_of_the_program_hides_one_of_the_publisher(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/", denied)
        with pytest.raises(ZeroDivisionError):
            self.stumble(bucket)

    def stumble(self, bucket: Troubled) -> None:
        """Fails after its publish."""
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
            raise ZeroDivisionError

    def test_close_raises_the_failure(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/", denied)
        publisher = Publisher(bucket)
        publisher.publish(initial())
        with pytest.raises(PermissionDenied):
            publisher.close()

    def test_close_does_not_raise_an_error_twice(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/", denied)
        publisher = Publisher(bucket)
        with pytest.raises(PermissionDenied):
            publisher.publish(initial()).wait()
        publisher.close()

    def test_close_waits_no_longer_than_its_timeout(self, bucket: Troubled) -> None:
        gate = RequestGate()
        bucket.trouble("put", "anchors/", gate)
        publisher = Publisher(bucket)
        handle = publisher.publish(initial())
        assert gate.reached.wait(60)
        with pytest.raises(TimeoutError):
            publisher.close(timeout=0.05)
        with pytest.raises(WeightwireError, match="interrupted"):
            handle.wait(60)


class TestNothing:
    @pytest.mark.parametrize("blocking", [False, True])
    @pytest.mark.parametrize("make", [dict, list, lambda: iter([])])
    def test_a_publish_without_tensors_is_refused(
        self, bucket: Troubled, make: Callable[[], Any], blocking: bool
    ) -> None:
        with Publisher(bucket, blocking=blocking) as publisher:
            with pytest.raises(CheckpointError, match="no tensors to publish"):
                publisher.publish(make())
            publisher.publish(initial())
        assert version_in(bucket) == digest(initial())

    def test_a_base_without_tensors_is_refused(self, bucket: Troubled) -> None:
        with pytest.raises(CheckpointError, match="the base has no tensors") as caught:
            Publisher(bucket, base={})
        assert caught.value.hint
        assert not asyncio.run(bucket.list(""))


class TestBlocking:
    def test_a_blocking_publish_returns_when_it_is_committed(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, blocking=True) as publisher:
            for step in range(4):
                train(weights, step)
                assert publisher.publish(weights, step=step).version == step + 1
                assert version_in(bucket) == digest(weights)

    def test_a_blocking_publish_raises_the_failure(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, blocking=True) as publisher:
            publisher.publish(weights)
            bucket.trouble("put", "deltas/", denied)
            train(weights)
            with pytest.raises(PermissionDenied):
                publisher.publish(weights)
            assert publisher.publish(weights).version == 2
        assert version_in(bucket) == digest(weights)

    def test_a_blocking_publish_is_fenced_off_at_once(self, bucket: Troubled) -> None:
        publisher = Publisher(bucket, blocking=True)
        publisher.publish(initial())
        with Publisher(bucket) as other:
            other.publish(initial())
        with pytest.raises(Fenced):
            publisher.publish(initial())
        publisher.close()

    def test_a_blocking_publisher_starts_from_a_base(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket, base=initial(), blocking=True) as publisher:
            train(weights)
            assert publisher.publish(weights).version == 2
        assert version_in(bucket, base=initial()) == digest(weights)


def test_publish_returns_a_publication(bucket: Troubled) -> None:
    with Publisher(bucket) as publisher:
        assert isinstance(publisher.publish(initial()), Publication)


class TestThreads:
    """One publisher, used by several threads."""

    @pytest.mark.parametrize("blocking", [False, True])
    def test_captures_of_several_threads_are_never_mixed(self, bucket: Troubled, blocking: bool) -> None:
        weights = [initial() for _ in range(6)]
        for number, one in enumerate(weights):
            for _ in range(number):
                train(one)
        states = {state(one) for one in weights}
        with Publisher(bucket, blocking=blocking) as publisher:
            with ThreadPoolExecutor(len(weights)) as pool:
                publications = list(pool.map(publisher.publish, weights))
            assert {one.wait(60) for one in publications} <= set(range(1, 7))
        assert {commit.after for commit in commits_in(bucket) if commit.after} <= states
        assert version_in(bucket).hex in states


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_cannot_use_the_publisher_of_its_parent(bucket: Troubled) -> None:
    with Publisher(bucket) as publisher:
        publisher.publish(initial()).wait(60)
        settle(publisher)  # its thread must hold no lock
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
        assert publisher.publish(initial()).wait(60) == 2
