"""Verification finds damaged records."""

from __future__ import annotations

import json

import msgspec
import pytest

from support.clocked_bucket import Clocked, run
from support.verify_runs import only, read, verified
from weightwire.chain.record_paths import commit_path, data_path
from weightwire.chain.records import DataFile, Shortcut, seal, shortcut_path, unseal
from weightwire.errors import Unavailable, UnsupportedFormat


class TestChain:
    def test_missing_commit_is_a_problem(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(commit_path(5)))

        found = verified(bucket, rebuild=True)

        assert (found.whole, found.head) == (4, 8)
        assert only(found) == f"{commit_path(5)}: missing, although later versions exist"
        assert found.rebuilt == ((1, 4),)

    def test_missing_first_commit_breaks_the_whole_chain(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(commit_path(0)))
        assert verified(bucket).whole == -1

    def test_edited_commit_is_a_problem_of_the_next_version(self, bucket: Clocked) -> None:
        edited = msgspec.structs.replace(read(bucket, 3).record, step=1000)
        bucket.write(commit_path(3), seal(edited).data)

        found = verified(bucket)

        assert found.whole == 3
        assert only(found).startswith(f"{commit_path(4)}: does not follow the previous version")

    @pytest.mark.parametrize("version", [1, 3, 8])
    def test_malformed_commit_is_a_problem(self, bucket: Clocked, version: int) -> None:
        bucket.write(commit_path(version), b"{")

        found = verified(bucket)

        assert found.whole == version - 1
        assert only(found) == f"{commit_path(version)}: cannot be read (it is not JSON)"

    def test_commit_of_another_run_is_a_problem(self, bucket: Clocked) -> None:
        foreign = msgspec.structs.replace(read(bucket, 8).record, run="0" * 32)
        bucket.write(commit_path(8), seal(foreign).data)

        found = verified(bucket)

        assert found.whole == 7
        assert f"{commit_path(8)}: belongs to run 000000000000" in only(found)

    def test_commit_of_a_newer_format_is_a_problem(self, bucket: Clocked) -> None:
        newer = json.loads(read(bucket, 4).data) | {"format": "weightwire/2"}
        bucket.write(commit_path(4), json.dumps(newer).encode())

        found = verified(bucket)

        assert found.whole == 3
        assert f"{commit_path(4)}: has format version 2" in only(found)

    def test_run_of_a_newer_format_is_an_error(self, bucket: Clocked) -> None:
        bucket.write("run.json", b'{"format": "weightwire/2"}')
        with pytest.raises(UnsupportedFormat):
            verified(bucket)

    def test_wrong_hash_of_an_older_commit_is_a_problem(self, bucket: Clocked) -> None:
        """Only late joiners rely on these hashes."""
        record = read(bucket, 8).record
        wrong = msgspec.structs.replace(record, back=(*record.back[:2], "0" * 64))
        bucket.write(commit_path(8), seal(wrong).data)

        found = verified(bucket)

        assert (found.whole, len(record.back)) == (8, 3)
        assert only(found) == f"{commit_path(8)}: its hash of commit 0 does not match that commit"

    def test_bucket_error_is_raised(self, bucket: Clocked) -> None:
        async def fail(verb: str, path: str) -> None:
            if path == commit_path(5):
                raise Unavailable("down")

        bucket.hook = fail
        with pytest.raises(Unavailable):
            verified(bucket)


class TestShortcuts:
    def shortcut(self, bucket: Clocked, version: int) -> tuple[str, Shortcut]:
        path = bucket.paths(f"shortcuts/{version}/")[0]
        return path, unseal(run(bucket.get(path)), Shortcut, "here").record

    def test_shortcut_to_another_state_is_a_problem(self, bucket: Clocked) -> None:
        _, shortcut = self.shortcut(bucket, 4)
        wrong = msgspec.structs.replace(shortcut, after="0" * 64)
        bucket.write(shortcut_path(seal(wrong)), seal(wrong).data)
        found = verified(bucket)
        assert only(found) == f"{shortcut_path(seal(wrong))}: its state differs from that of its version's commit"

    def test_shortcut_to_a_missing_version_is_a_problem(self, bucket: Clocked) -> None:
        _, shortcut = self.shortcut(bucket, 4)
        files = (DataFile(data_path("anchor", 20, 1, 0, "0" * 64), 5, "0" * 64),)
        wrong = msgspec.structs.replace(shortcut, version=20, files=files)
        bucket.write(shortcut_path(seal(wrong)), seal(wrong).data)
        assert only(verified(bucket)) == f"{shortcut_path(seal(wrong))}: its version does not exist"

    def test_shortcut_under_another_name_is_a_problem(self, bucket: Clocked) -> None:
        path, shortcut = self.shortcut(bucket, 4)
        bucket.write("shortcuts/5/anchor-0123456789abcdef.json", seal(shortcut).data)
        assert only(verified(bucket)) == "shortcuts/5/anchor-0123456789abcdef.json: its content does not match its path"
        assert path != "shortcuts/5/anchor-0123456789abcdef.json"

    @pytest.mark.parametrize("data", [b"nonsense", b'{"format": "weightwire/2"}'])
    def test_unreadable_shortcut_is_a_problem(self, bucket: Clocked, data: bytes) -> None:
        bucket.write("shortcuts/4/other.json", data)
        assert only(verified(bucket)).startswith("shortcuts/4/other.json: ")

    def test_shortcut_of_another_run_is_a_problem(self, bucket: Clocked) -> None:
        _, shortcut = self.shortcut(bucket, 4)
        foreign = msgspec.structs.replace(shortcut, run="0" * 32)
        bucket.write(shortcut_path(seal(foreign)), seal(foreign).data)
        assert "belongs to run 0000" in only(verified(bucket))
