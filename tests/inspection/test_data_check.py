"""That a verification finds whatever is wrong with the data of a run."""

from __future__ import annotations

import hashlib

import pytest

from support.clocked_bucket import HOUR, Clocked, run
from support.verify_runs import data_of, edit, flip_last, only, rewrite, verified
from weightwire.chain.records import (
    DataFile,
    Gc,
    commit_path,
    data_path,
    gc_path,
    seal,
)
from weightwire.system.runtime import Runtime
from weightwire.upkeep.gc import sweep
from weightwire.upkeep.retention import Retention


@pytest.mark.parametrize("rebuild", [False, True])
class TestData:
    @pytest.mark.parametrize(("version", "kind"), [(3, "deltas"), (1, "anchors"), (4, "anchors")])
    def test_one_bit(self, bucket: Clocked, rebuild: bool, version: int, kind: str) -> None:
        path = data_of(bucket, version, kind)
        edit(bucket, path, flip_last)

        found = verified(bucket, rebuild=rebuild)

        assert only(found) == f"{path}: its bytes are not those that were published"
        assert found.problems[0].version == version
        assert found.whole == 8

    @pytest.mark.parametrize("size", [0, 5, 100])
    def test_truncated(self, bucket: Clocked, rebuild: bool, size: int) -> None:
        path = data_of(bucket, 3)
        whole = len(run(bucket.get(path)))
        edit(bucket, path, lambda data: data.__delitem__(slice(size, None)))
        assert only(verified(bucket, rebuild=rebuild)) == f"{path}: has {size} bytes, and {whole} were published"

    def test_longer(self, bucket: Clocked, rebuild: bool) -> None:
        path = data_of(bucket, 3)
        edit(bucket, path, lambda data: data.append(0))
        assert f"{path}: has " in only(verified(bucket, rebuild=rebuild))

    def test_missing(self, bucket: Clocked, rebuild: bool) -> None:
        path = data_of(bucket, 3)
        run(bucket.inner.delete(path))
        assert only(verified(bucket, rebuild=rebuild)) == f"{path}: is missing"

    def test_all_that_is_wrong(self, bucket: Clocked, rebuild: bool) -> None:
        damaged = [data_of(bucket, 2), data_of(bucket, 4, "anchors"), data_of(bucket, 4), data_of(bucket, 8)]
        for path in damaged:
            edit(bucket, path, flip_last)
        assert [one.path for one in verified(bucket, rebuild=rebuild).problems] == damaged

    def test_a_file_that_says_another_state_than_its_commit(self, bucket: Clocked, rebuild: bool) -> None:
        """Its hash is right, and so is the chain."""
        run(bucket.inner.delete(bucket.paths("shortcuts/8/")[0]))
        rewrite(bucket, 8, after="0" * 64)
        found = verified(bucket, rebuild=rebuild)
        assert only(found) == f"{data_of(bucket, 8)}: leads to another state than {commit_path(8)} says"

    def test_a_file_that_is_no_delta(self, bucket: Clocked, rebuild: bool) -> None:
        data = b"not a safetensors file at all"
        sha256 = hashlib.sha256(data).hexdigest()
        file = DataFile(data_path("delta", 8, 2, 0, sha256), len(data), sha256)
        bucket.write(file.path, data)
        rewrite(bucket, 8, files=(file,))
        assert file.path in only(verified(bucket, rebuild=rebuild))

    def test_a_file_of_another_kind(self, bucket: Clocked, rebuild: bool) -> None:
        data = run(bucket.get(data_of(bucket, 8, "anchors")))
        sha256 = hashlib.sha256(data).hexdigest()
        file = DataFile(data_path("delta", 8, 2, 0, sha256), len(data), sha256)
        bucket.write(file.path, data)
        rewrite(bucket, 8, files=(file,))
        assert only(verified(bucket, rebuild=rebuild)) == f"{file.path}: is no delta"

    @pytest.mark.parametrize("name", ["config.json", "vocab.txt"])
    def test_side_files(self, bucket: Clocked, rebuild: bool, name: str) -> None:
        path = next(path for path in bucket.paths("files/") if path.endswith(name))
        edit(bucket, path, flip_last)
        assert only(verified(bucket, rebuild=rebuild)) == f"{path}: its bytes are not those that were published"
        bucket.write(path, b"x")
        assert f"{path}: has 1 bytes" in only(verified(bucket, rebuild=rebuild))
        run(bucket.inner.delete(path))
        assert only(verified(bucket, rebuild=rebuild)) == f"{path}: is missing"


class TestRetention:
    @pytest.fixture
    def swept(self, bucket: Clocked) -> Clocked:
        bucket.now += HOUR
        found = run(sweep(bucket, Runtime(), Retention(2, 0.0, 0.0)))
        assert found.below == 7
        return bucket

    @pytest.mark.parametrize("rebuild", [False, True])
    def test_what_has_been_deleted_is_no_problem(self, swept: Clocked, rebuild: bool) -> None:
        found = verified(swept, rebuild=rebuild)

        assert found.problems == ()
        assert (found.whole, found.below) == (8, 7)
        assert found.gone == 5  # the anchor of version 1, and deltas 2 to 5
        assert found.rebuilt == (((7, 8),) if rebuild else ())

    def test_what_is_missing_above_is(self, swept: Clocked) -> None:
        path = data_of(swept, 8)
        run(swept.inner.delete(path))
        assert only(verified(swept)) == f"{path}: is missing"

    def test_a_gc_record_of_another_run_excuses_nothing(self, bucket: Clocked) -> None:
        path = data_of(bucket, 2)
        run(bucket.inner.delete(path))
        bucket.write(gc_path(8), seal(Gc(run="0" * 32, below=8)).data)
        assert [one.path for one in verified(bucket).problems] == [gc_path(8), path]

    @pytest.mark.parametrize("rebuild", [False, True])
    def test_what_is_deleted_while_one_looks_is_no_problem(self, bucket: Clocked, rebuild: bool) -> None:
        bucket.now += HOUR

        async def sweep_first(verb: str, path: str) -> None:
            if verb == "find":  # of the first side file: everything has been listed by now
                bucket.hook = None
                await sweep(bucket, Runtime(), Retention(2, 0.0, 0.0))

        bucket.hook = sweep_first
        found = verified(bucket, rebuild=rebuild)

        assert (found.problems, found.gone) == ((), 6)  # the anchor of version 4 was still known
        assert found.below == 7
