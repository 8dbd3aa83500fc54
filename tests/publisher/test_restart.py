"""A publisher after another: it continues from the published weights and fences off the other."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from support.captures import eventually
from support.failing_bucket import Troubled, denied
from support.run_contents import commits_in, run_in, version_in
from support.small_weights import RequestGate, initial, kinds, state, train
from weightwire import digest
from weightwire.errors import Fenced, PermissionDenied, UnsafeBucket, WrongBase
from weightwire.publisher.publisher import Publisher


class TestRestart:
    def test_a_publisher_continues_where_the_last_one_ended(self, bucket: Troubled) -> None:
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

    def test_the_first_delta_is_against_the_published_weights(self, bucket: Troubled) -> None:
        """Steps that the trainer lost or skipped do not matter."""
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

    def test_a_publisher_that_publishes_nothing_leaves_the_run_as_it_was(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        before = asyncio.run(bucket.list(""))
        with Publisher(bucket) as publisher:
            assert publisher.version == 1
            assert publisher.state == state(initial())
        assert asyncio.run(bucket.list("")) == before
        assert kinds(bucket) == [("fence", 1), ("anchor", 1)]
        assert version_in(bucket) == digest(initial())

    def test_a_publisher_continues_from_versions_added_after_it_opened(self, bucket: Troubled) -> None:
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

    def test_a_publisher_that_died_before_its_first_version_leaves_no_trace_in_the_chain(
        self, bucket: Troubled
    ) -> None:
        bucket.trouble("put", "anchors/", denied)
        publisher = Publisher(bucket)
        publisher.publish(initial())
        with pytest.raises(PermissionDenied):
            publisher.close()
        with Publisher(bucket) as publisher:
            assert publisher.state is None
            publisher.publish(initial())
        assert kinds(bucket) == [("fence", 1), ("anchor", 1)]

    def test_a_run_whose_publisher_died_before_its_first_version_is_taken_over(self, bucket: Troubled) -> None:
        bucket.trouble("create", "commits/00000000000000000001", denied, times=1e9)
        publisher = Publisher(bucket)
        publisher.publish(initial())
        assert eventually(lambda: bucket.count("create", "commits/00000000000000000001") > 0)
        with pytest.raises(TimeoutError):
            publisher.close(0.5)
        publisher._background._thread.join(60)  # it may still be sending a request
        bucket.calm()
        with Publisher(bucket) as publisher:
            assert (publisher.version, publisher.state) == (0, None)
            publisher.publish(initial())
        assert kinds(bucket) == [("fence", 1), ("fence", 2), ("anchor", 2)]

    def test_published_weights_avoid_a_download(self, bucket: Troubled, tmp_path: Path) -> None:
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

    def test_other_published_weights_are_not_used(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        other = initial()
        train(other)
        for published in (other, {"w": np.zeros(3)}, {**initial(), "more": np.zeros(3)}):
            bucket.asked.clear()
            with Publisher(bucket, published=published) as publisher:
                assert publisher.state == state(initial())
                assert bucket.count("read_into") > 0

    def test_given_published_weights_are_never_changed(self, bucket: Troubled) -> None:
        weights, changed = initial(), initial()
        train(changed)
        with Publisher(bucket) as publisher:
            publisher.publish(weights)
        with Publisher(bucket, published=weights) as publisher:
            publisher.publish(changed)
        assert state(weights) == state(initial())

    def test_a_publisher_plans_around_an_anchor_that_is_gone(self, bucket: Troubled) -> None:
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
    def test_a_run_from_a_base_needs_no_anchor(self, bucket: Troubled) -> None:
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

    def test_a_base_may_be_a_checkpoint(self, bucket: Troubled, tmp_path: Path) -> None:
        safetensors.numpy.save_file(initial(), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text("{}")
        weights = initial()
        with Publisher(bucket, base=tmp_path) as publisher:
            train(weights)
            publisher.publish(weights)
        assert commits_in(bucket)[1].source == str(tmp_path)
        assert [file.name for file in run_in(bucket).files] == ["config.json"]
        bucket.url = "/data/run"  # a directory
        assert version_in(bucket) == digest(weights)  # the base is at its recorded source

    @pytest.mark.parametrize(
        ("source", "stored"),
        [
            ("https://user:secret@host/model", "https://host/model"),
            ("https://user:se@cret@host:8/model?X-Amz-Signature=secret#secret", "https://host:8/model"),
            ("hf://org/model?token=secret", "hf://org/model"),
            ("s3://bucket/user@team/model", "s3://bucket/user@team/model"),
            ("/data/model?v=2", "/data/model?v=2"),
        ],
    )
    def test_the_source_is_stored_without_secrets(self, bucket: Troubled, source: str, stored: str) -> None:
        with Publisher(bucket, base=initial(), source=source):
            pass
        assert commits_in(bucket)[1].source == stored
        assert "secret" not in repr(commits_in(bucket)[1])

    def test_the_base_is_never_changed(self, bucket: Troubled) -> None:
        base, weights = initial(), initial()
        with Publisher(bucket, base=base) as publisher:
            train(weights)
            publisher.publish(weights)
        assert state(base) == state(initial())

    def test_a_base_may_be_given_again_after_a_restart(self, bucket: Troubled) -> None:
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

    def test_a_run_from_a_base_cannot_be_continued_without_it(self, bucket: Troubled) -> None:
        with Publisher(bucket, base=initial()):
            pass
        with pytest.raises(WrongBase, match="that is not on this machine"):
            Publisher(bucket)

    def test_a_base_is_not_used_in_an_existing_run(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        other = initial()
        train(other)
        with Publisher(bucket, base=other) as publisher:
            assert publisher.state == state(initial())


class TestFencing:
    def test_the_older_publisher_is_fenced_off(self, bucket: Troubled) -> None:
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

    def test_pending_weights_of_a_fenced_publisher_fail(self, bucket: Troubled) -> None:
        gate, weights = RequestGate(), initial()
        old = Publisher(bucket)
        old.publish(weights).wait()
        bucket.trouble("put", "deltas/", gate)
        train(weights)
        handles = [old.publish(weights)]
        assert gate.reached.wait(60)
        handles += [old.publish(weights) for _ in range(3)]
        with Publisher(bucket) as new:
            new.publish(weights).wait()
            gate.open()
            for handle in handles:
                with pytest.raises(Fenced):
                    handle.wait(60)
            old.close()
        assert handles[-1].superseded_by is None

    def test_the_publisher_that_publishes_later_takes_over(self, bucket: Troubled) -> None:
        """Both are opened before the run exists."""
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


class Careless(Troubled):
    """A store that silently ignores the condition of a create."""

    async def create(self, path: str, data: bytes) -> None:
        self.asked.append(("create", path))
        await self.inner.put(path, data)


class TestStart:
    def test_a_key_without_write_permission_is_refused_at_once(self, bucket: Troubled) -> None:
        bucket.trouble("create put", "", denied, times=1e9)
        with pytest.raises(PermissionDenied):
            Publisher(bucket)
        assert not [thread for thread in threading.enumerate() if thread.name == "weightwire-publisher"]

    def test_a_key_without_write_permission_cannot_continue_a_run(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        bucket.trouble("create put", "", denied, times=1e9)
        with pytest.raises(PermissionDenied):
            Publisher(bucket)
        with Publisher(bucket, insist=True) as publisher, pytest.raises(PermissionDenied):
            publisher.publish(initial()).wait()
        assert len(commits_in(bucket)) == 2

    def test_a_bucket_without_atomic_create_is_refused(self, bucket: Troubled) -> None:
        with pytest.raises(UnsafeBucket, match="two trainers could both publish"):
            Publisher(Careless(bucket.inner))

    def test_a_bucket_without_atomic_create_is_used_if_the_user_insists(self, bucket: Troubled) -> None:
        with Publisher(Careless(bucket.inner), insist=True) as publisher:
            publisher.publish(initial())
        assert run_in(bucket).mode == "single-writer"
        assert version_in(bucket) == digest(initial())

    def test_a_strict_run_is_not_continued_through_a_bucket_without_atomic_create(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        assert run_in(bucket).mode == "strict"
        bucket.strict = False
        with pytest.raises(UnsafeBucket, match="has no atomic create"):
            Publisher(bucket)

    def test_a_bucket_without_atomic_create_gets_a_single_writer_run(self, bucket: Troubled) -> None:
        bucket.strict = False
        for _ in range(2):
            with Publisher(bucket) as publisher:
                publisher.publish(initial())
        assert run_in(bucket).mode == "single-writer"
        assert kinds(bucket)[-2:] == [("fence", 2), ("delta", 2)]

    def test_the_probe_leaves_no_objects(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        assert bucket.count("create", "probe/") > 2
        assert not asyncio.run(bucket.list("probe/"))
