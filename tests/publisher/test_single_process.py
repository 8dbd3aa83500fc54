"""A run's tensors are fixed, its first version starts it, and a failed version is part of the next."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from support.failing_bucket import Troubled, denied
from support.run_contents import commits_in, run_in, version_in
from support.small_weights import RequestGate, initial, kinds, train
from weightwire import digest
from weightwire.errors import PermissionDenied, SchemaChanged
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event


class TestSchema:
    @pytest.mark.parametrize("blocking", [False, True])
    def test_the_tensors_of_a_run_are_fixed(self, bucket: Troubled, blocking: bool) -> None:
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

    def test_a_refusal_does_not_promise_that_the_next_version_includes_it(
        self, bucket: Troubled, heard: list[Event]
    ) -> None:
        with Publisher(bucket, blocking=True, on_event=heard.append) as publisher:
            publisher.publish(initial(), step=1)
            with pytest.raises(SchemaChanged):
                publisher.publish({"other": np.zeros(3)}, step=2)
        [warning] = [event.message for event in heard if event.stage == "warning"]
        assert warning.startswith("step 2: not published (")
        assert "next version" not in warning

    def test_the_tensors_of_a_run_stay_fixed_after_a_restart(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        with Publisher(bucket) as publisher:
            with pytest.raises(SchemaChanged):
                publisher.publish({"w": np.zeros(3)})
            publisher.publish(initial()).wait()

    def test_weights_are_refused_if_another_model_was_published_meanwhile(self, bucket: Troubled) -> None:
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
        """For example after a mistake in its URL."""
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


class TestSideFiles:
    def test_side_files_are_uploaded_with_the_run(self, bucket: Troubled) -> None:
        files = {"config.json": b"{}", "tokenizer/vocab.txt": b"a b c"}
        with Publisher(bucket, files=files) as publisher:
            publisher.publish(initial())
        run = run_in(bucket)
        assert [file.name for file in run.files] == ["config.json", "tokenizer/vocab.txt"]
        assert {file.name: asyncio.run(bucket.get(file.path)) for file in run.files} == files

    def test_side_files_of_a_directory_leave_out_hidden_ones(self, bucket: Troubled, tmp_path: Path) -> None:
        safetensors.numpy.save_file(initial(), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "config").write_text("secret")
        with Publisher(bucket, files=tmp_path) as publisher:
            publisher.publish(initial())
        assert [file.name for file in run_in(bucket).files] == ["config.json"]

    def test_side_files_are_uploaded_before_the_run_starts(self, bucket: Troubled) -> None:
        with Publisher(bucket, files={"config.json": b"{}"}) as publisher:
            publisher.publish(initial())
        writes = [path for verb, path in bucket.asked if verb in ("create", "put") and not path.startswith("probe/")]
        assert writes[0].startswith("files/")
        assert writes.index("run.json") > 0


class TestFirstVersion:
    def test_a_run_is_started_after_its_first_data_is_uploaded(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        writes = [path for verb, path in bucket.asked if verb in ("create", "put") and not path.startswith("probe/")]
        assert [path.split("/")[0] for path in writes[:4]] == ["anchors", "run.json", "epochs", "commits"]

    def test_a_url_is_free_for_other_weights_after_a_failed_first_version(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/", denied)
        publisher = Publisher(bucket)
        publisher.publish({"other": np.zeros(3)})
        with pytest.raises(PermissionDenied):
            publisher.close()
        with Publisher(bucket) as publisher:
            publisher.publish(initial())
        assert version_in(bucket) == digest(initial())

    def test_a_first_version_is_uploaded_again_if_another_publisher_started_the_run(self, bucket: Troubled) -> None:
        """The second upload has the right version in its path."""
        gate, weights = RequestGate(), initial()
        bucket.trouble("put", "anchors/", gate)
        slow_one = Publisher(bucket)
        handle = slow_one.publish(weights)
        assert gate.reached.wait(60)
        with Publisher(bucket) as other:
            train(weights)
            assert other.publish(weights).wait() == 1
            gate.open()
            assert handle.wait(60) == 3
            slow_one.close()
        assert kinds(bucket) == [("fence", 1), ("anchor", 1), ("fence", 2), ("anchor", 2)]
        assert [file.path.split("-")[0] for file in commits_in(bucket)[3].files] == ["anchors/3/e2"]
        assert version_in(bucket) == digest(initial())


class TestDroppedVersions:
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

    def test_a_dropped_first_version_is_part_of_the_next(self, bucket: Troubled) -> None:
        weights = initial()
        with Publisher(bucket) as publisher:
            bucket.trouble("put", "anchors/", denied)
            with pytest.raises(PermissionDenied):
                publisher.publish(weights).wait()
            train(weights)
            assert publisher.publish(weights).wait() == 1
        assert kinds(bucket) == [("fence", 1), ("anchor", 1)]
        assert version_in(bucket) == digest(weights)

    def test_a_dropped_version_is_a_warning(self, bucket: Troubled, heard: list[Event]) -> None:
        publisher = Publisher(bucket, on_event=heard.append)
        bucket.trouble("put", "anchors/", denied)
        publisher.publish(initial(), step=3)
        with pytest.raises(PermissionDenied):
            publisher.close()
        assert "step 3: not published (this key may not do that); the next version includes it" in [
            event.message for event in heard if event.stage == "warning"
        ]
