"""Verification finds damaged data."""

from __future__ import annotations

import hashlib

import pytest

from support.clocked_bucket import HOUR, Clocked, run
from support.verify_runs import data_of, edit, flip_last, only, rewrite, verified
from weightwire.chain.record_paths import commit_path, data_path, gc_path
from weightwire.chain.records import DataFile, Gc, seal
from weightwire.system.runtime import Runtime
from weightwire.upkeep.gc import sweep
from weightwire.upkeep.retention import Retention


@pytest.mark.parametrize("rebuild", [False, True])
class TestData:
    @pytest.mark.parametrize(("version", "kind"), [(3, "deltas"), (1, "anchors"), (4, "anchors")])
    def test_flipped_bit_is_a_problem(self, bucket: Clocked, rebuild: bool, version: int, kind: str) -> None:
        path = data_of(bucket, version, kind)
        edit(bucket, path, flip_last)

        found = verified(bucket, rebuild=rebuild)

        assert only(found) == f"{path}: corrupt: its hash does not match the record"
        assert found.problems[0].version == version
        assert found.whole == 8

    @pytest.mark.parametrize("size", [0, 5, 100])
    def test_truncated_file_is_a_problem(self, bucket: Clocked, rebuild: bool, size: int) -> None:
        path = data_of(bucket, 3)
        whole = len(run(bucket.get(path)))
        edit(bucket, path, lambda data: data.__delitem__(slice(size, None)))
        assert only(verified(bucket, rebuild=rebuild)) == f"{path}: has {size} bytes, but {whole} were published"

    def test_too_long_file_is_a_problem(self, bucket: Clocked, rebuild: bool) -> None:
        path = data_of(bucket, 3)
        edit(bucket, path, lambda data: data.append(0))
        assert f"{path}: has " in only(verified(bucket, rebuild=rebuild))

    def test_missing_file_is_a_problem(self, bucket: Clocked, rebuild: bool) -> None:
        path = data_of(bucket, 3)
        run(bucket.inner.delete(path))
        assert only(verified(bucket, rebuild=rebuild)) == f"{path}: missing"

    def test_all_problems_are_listed(self, bucket: Clocked, rebuild: bool) -> None:
        damaged = [data_of(bucket, 2), data_of(bucket, 4, "anchors"), data_of(bucket, 4), data_of(bucket, 8)]
        for path in damaged:
            edit(bucket, path, flip_last)
        assert [one.path for one in verified(bucket, rebuild=rebuild).problems] == damaged

    def test_file_with_another_state_than_its_commit_is_a_problem(self, bucket: Clocked, rebuild: bool) -> None:
        """Its hash and the chain are correct."""
        run(bucket.inner.delete(bucket.paths("shortcuts/8/")[0]))
        rewrite(bucket, 8, after="0" * 64)
        found = verified(bucket, rebuild=rebuild)
        assert only(found) == f"{data_of(bucket, 8)}: leads to another state than {commit_path(8)} names"

    def test_file_that_is_not_a_delta_is_a_problem(self, bucket: Clocked, rebuild: bool) -> None:
        data = b"not a safetensors file at all"
        sha256 = hashlib.sha256(data).hexdigest()
        file = DataFile(data_path("delta", 8, 2, 0, sha256), len(data), sha256)
        bucket.write(file.path, data)
        rewrite(bucket, 8, files=(file,))
        assert file.path in only(verified(bucket, rebuild=rebuild))

    def test_file_of_another_kind_is_a_problem(self, bucket: Clocked, rebuild: bool) -> None:
        data = run(bucket.get(data_of(bucket, 8, "anchors")))
        sha256 = hashlib.sha256(data).hexdigest()
        file = DataFile(data_path("delta", 8, 2, 0, sha256), len(data), sha256)
        bucket.write(file.path, data)
        rewrite(bucket, 8, files=(file,))
        assert only(verified(bucket, rebuild=rebuild)) == f"{file.path}: not a file of kind delta"

    @pytest.mark.parametrize("name", ["config.json", "vocab.txt"])
    def test_damaged_or_missing_side_file_is_a_problem(self, bucket: Clocked, rebuild: bool, name: str) -> None:
        path = next(path for path in bucket.paths("files/") if path.endswith(name))
        edit(bucket, path, flip_last)
        assert only(verified(bucket, rebuild=rebuild)) == f"{path}: corrupt: its hash does not match the record"
        bucket.write(path, b"x")
        assert f"{path}: has 1 bytes" in only(verified(bucket, rebuild=rebuild))
        run(bucket.inner.delete(path))
        assert only(verified(bucket, rebuild=rebuild)) == f"{path}: missing"


class TestRetention:
    @pytest.fixture
    def swept(self, bucket: Clocked) -> Clocked:
        bucket.now += HOUR
        found = run(sweep(bucket, Runtime(), Retention(2, 0.0, 0.0)))
        assert found.below == 7
        return bucket

    @pytest.mark.parametrize("rebuild", [False, True])
    def test_deleted_data_is_accepted(self, swept: Clocked, rebuild: bool) -> None:
        found = verified(swept, rebuild=rebuild)

        assert found.problems == ()
        assert (found.whole, found.below) == (8, 7)
        assert found.gone == 5  # the anchor of version 1, and deltas 2 to 5
        assert found.rebuilt == (((7, 8),) if rebuild else ())

    def test_missing_data_above_the_limit_is_a_problem(self, swept: Clocked) -> None:
        path = data_of(swept, 8)
        run(swept.inner.delete(path))
        assert only(verified(swept)) == f"{path}: missing"

    def test_gc_record_of_another_run_is_ignored(self, bucket: Clocked) -> None:
        path = data_of(bucket, 2)
        run(bucket.inner.delete(path))
        bucket.write(gc_path(8), seal(Gc(run="0" * 32, below=8)).data)
        assert [one.path for one in verified(bucket).problems] == [gc_path(8), path]

    @pytest.mark.parametrize("rebuild", [False, True])
    def test_data_deleted_during_the_check_is_accepted(self, bucket: Clocked, rebuild: bool) -> None:
        bucket.now += HOUR

        async def sweep_first(verb: str, path: str) -> None:
            if verb == "find":  # of the first side file: all listings are done
                bucket.hook = None
                await sweep(bucket, Runtime(), Retention(2, 0.0, 0.0))

        bucket.hook = sweep_first
        found = verified(bucket, rebuild=rebuild)

        assert (found.problems, found.gone) == ((), 6)  # the anchor of version 4 was still known
        assert found.below == 7
