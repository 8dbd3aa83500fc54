"""Verification passes intact runs and finds wrong weights."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from support.clocked_bucket import Arrays, Clocked, clocked, first_weights, publish, run, stepped
from support.verify_runs import FILES, data_of, edit, flip_last, only, read, rewrite, verified
from weightwire.bucket.registry import open_bucket
from weightwire.catchup import data_file_check
from weightwire.chain.record_paths import commit_path, data_path
from weightwire.chain.records import DataFile, Shortcut, seal, shortcut_path
from weightwire.delta.file import Delta, Packed, pack
from weightwire.delta.maker import anchor, diff
from weightwire.delta.state import digest
from weightwire.errors import NoRun, WrongBase
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime
from weightwire.weights.source import read_weights
from weightwire.weights.tensor import Tensor


class TestIntactRun:
    @pytest.mark.parametrize("rebuild", [False, True])
    def test_intact_run_has_no_problems(self, bucket: Clocked, rebuild: bool) -> None:
        found = verified(bucket, rebuild=rebuild)

        assert found.problems == ()
        assert found.fine
        assert (found.head, found.whole, found.gone, found.below) == (8, 8, 0, 0)
        sizes = [one.size for folder in ("deltas/", "anchors/") for one in run(bucket.list(folder))]
        assert (found.files, found.nbytes) == (len(sizes), sum(sizes))
        assert found.rebuilt == (((1, 8),) if rebuild else ())
        assert found.compared == (3 if rebuild else 0)

    @pytest.mark.parametrize("rebuild", [False, True])
    def test_verify_reports_progress(self, bucket: Clocked, rebuild: bool) -> None:
        reports: list[tuple[int, int]] = []

        found = verified(bucket, rebuild=rebuild, progress=lambda done, total: reports.append((done, total)))

        nbytes = found.nbytes + sum(map(len, FILES.values()))
        assert reports[-1] == (nbytes, nbytes)
        assert {total for _, total in reports} == {nbytes}
        assert [done for done, _ in reports] == sorted(done for done, _ in reports)

    def test_verify_writes_nothing(self, bucket: Clocked) -> None:
        bucket.read_only = True
        assert verified(bucket, rebuild=True).fine

    def test_file_of_many_pieces_is_intact(self, bucket: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(data_file_check, "_PIECE", 100)
        assert verified(bucket).fine

    def test_run_in_a_directory_is_rebuilt(self, tmp_path: Path) -> None:
        bucket = open_bucket(tmp_path)
        publish(bucket, first_weights(), 3, anchor_every=2)
        assert run(verify_run(bucket, Runtime(), rebuild=True)).rebuilt == ((1, 3),)

    def test_empty_bucket_has_no_run(self) -> None:
        with pytest.raises(NoRun):
            verified(clocked())

    def test_version_without_changes_is_intact(self) -> None:
        bucket = clocked()
        weights = publish(bucket, first_weights(), 2)
        publish(bucket, weights, 1)

        assert read(bucket, 4).record.files == ()
        assert verified(bucket, rebuild=True).rebuilt == ((1, 4),)

    def test_versions_published_meanwhile_are_left_out(self, bucket: Clocked) -> None:
        """Including shortcuts of later versions."""
        hidden = {path for path in bucket.paths() if path.split("/")[1:2] in (["7"], ["8"])}
        bucket.hidden = {commit_path(7), commit_path(8)} | {path for path in hidden if path.startswith("deltas")}

        found = verified(bucket)

        assert (found.head, found.problems) == (6, ())


class TestRebuild:
    def test_rebuild_continues_at_the_next_anchor(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(data_of(bucket, 3)))
        found = verified(bucket, rebuild=True)
        assert found.rebuilt == ((1, 2), (4, 8))
        assert found.compared == 2

    def test_damaged_anchor_is_skipped(self, bucket: Clocked) -> None:
        edit(bucket, data_of(bucket, 4, "anchors"), flip_last)
        found = verified(bucket, rebuild=True)
        assert (found.rebuilt, found.compared) == (((1, 8),), 2)

    def test_rebuild_finds_a_delta_with_wrong_weights(self) -> None:
        """All hashes and headers are correct. Only the weights are wrong."""
        bucket = clocked()
        publish(bucket, first_weights(), 3)
        lying = self.lie(bucket, 3, "delta")

        assert verified(bucket).fine
        found = verified(bucket, rebuild=True)

        assert only(found).startswith(f"{lying}: ")
        assert found.rebuilt == ((1, 2),)

    def test_rebuild_finds_an_anchor_with_wrong_weights(self, bucket: Clocked) -> None:
        """Its header has the digests of the right ones."""
        weights = first_weights()
        for step in range(3):
            weights = stepped(weights, step)
        path = self.add_anchor(bucket, 4, anchor(stepped(first_weights(5), 1)), anchor(weights))

        assert verified(bucket).fine
        found = verified(bucket, rebuild=True)

        assert only(found).startswith(f"{path}: ")
        assert found.rebuilt == ((1, 8),)

    def test_an_anchor_whose_digests_contradict_its_state_is_found_without_a_rebuild(self, bucket: Clocked) -> None:
        made = anchor(stepped(first_weights(5), 1))
        path = self.add_anchor(bucket, 4, made, made)

        assert only(verified(bucket)) == f"{path}: its tensors do not have the state that it names"
        assert only(verified(bucket, rebuild=True)).startswith(f"{path}: ")

    def add_anchor(self, bucket: Clocked, version: int, made: Delta, digests: Delta) -> str:
        """A shortcut to an anchor that claims the state of a version, with the digests of another anchor."""
        commit = read(bucket, version).record
        stacks = tuple(
            replace(one, entries=tuple(replace(e, digest=digests.entries[e.name].digest) for e in one.entries))
            for one in made.stacks
        )
        lying = _claim(replace(made, stacks=stacks), after=commit.after)
        sha256 = hashlib.sha256(lying).hexdigest()
        file = DataFile(data_path("anchor", version, 9, 0, sha256), len(lying), sha256)
        shortcut = Shortcut(run=commit.run, version=version, kind="anchor", after=commit.after, files=(file,))
        bucket.write(file.path, lying)
        bucket.write(shortcut_path(seal(shortcut)), seal(shortcut).data)
        return file.path

    def lie(self, bucket: Clocked, version: int, kind: str) -> str:
        commit = read(bucket, version).record
        weights: Arrays = first_weights()
        for step in range(version - 2):
            weights = stepped(weights, step)
        lying = _claim(diff(weights, stepped(weights, 40)), before=commit.before, after=commit.after)
        sha256 = hashlib.sha256(lying).hexdigest()
        file = DataFile(data_path(kind, version, commit.epoch, 0, sha256), len(lying), sha256)
        bucket.write(file.path, lying)
        rewrite(bucket, version, files=(file,))
        return file.path


def _claim(delta: Delta, **states: str) -> bytes:
    """The same file with another header."""
    parts = [
        Packed(stack, [bytes(delta.block(stack, index)) for index in range(len(stack.blocks))])
        for stack in delta.stacks
    ]
    return pack(parts, kind=delta.kind, **states).to_bytes()


class TestBase:
    @pytest.fixture
    def based(self) -> Clocked:
        """A run that starts from a base. Its only anchor is at version 4."""
        bucket = clocked()
        weights = first_weights()
        publish(bucket, stepped(weights, 1), 4, base=weights, source="somewhere/else", anchor_every=3)
        return bucket

    def test_rebuild_starts_from_the_base(self, based: Clocked) -> None:
        found = verified(based, rebuild=True, base=read_weights(first_weights()))
        assert (found.problems, found.rebuilt, found.compared) == ((), ((1, 5),), 1)

    def test_missing_base_is_accepted_if_there_is_an_anchor(self, based: Clocked) -> None:
        found = verified(based, rebuild=True)
        assert (found.problems, found.rebuilt, found.compared) == ((), ((4, 5),), 0)

    def test_wrong_base_is_rejected(self, based: Clocked) -> None:
        with pytest.raises(WrongBase):
            verified(based, rebuild=True, base=read_weights(first_weights(8)))

    def test_missing_base_without_an_anchor_is_a_problem(self) -> None:
        bucket = clocked()
        weights = first_weights()
        publish(bucket, stepped(weights, 1), 2, base=weights, anchor_every=100)

        assert verified(bucket).fine
        found = verified(bucket, rebuild=True)

        assert only(found).startswith(f"{commit_path(1)}: cannot be rebuilt")
        assert digest(weights).hex == read(bucket, 1).record.after


class TestAnchorParts:
    """Files of several ranks: each holds some rows, and does not name the whole state."""

    def parts(self, weights: Arrays, then: Arrays | None = None) -> list[Delta]:
        made = []
        for begin, end in ((0, 12), (12, 32)):
            first, second = (_rows(one, begin, end) for one in (weights, then or weights))
            made.append(anchor(first) if then is None else diff(first, second))
        return made

    @pytest.fixture
    def weights(self) -> Arrays:
        return {"a.weight": first_weights()["a.weight"]}

    @pytest.fixture
    def ranks(self, weights: Arrays) -> Clocked:
        """Version 1 is an anchor, version 2 a delta with an anchor beside it. All have two parts."""
        bucket = clocked()
        publish(bucket, weights, 2)
        then = stepped(weights, 0)
        rewrite(bucket, 1, files=self.upload(bucket, "anchor", 1, self.parts(weights)))
        rewrite(bucket, 2, files=self.upload(bucket, "delta", 2, self.parts(weights, then)))
        self.add_anchor(bucket, self.parts(then))
        return bucket

    def upload(self, bucket: Clocked, kind: str, version: int, parts: list[Delta]) -> tuple[DataFile, ...]:
        files = []
        for rank, part in enumerate(parts):
            data = part.to_bytes()
            sha256 = hashlib.sha256(data).hexdigest()
            files.append(DataFile(data_path(kind, version, 1, rank, sha256), len(data), sha256, rank))
            bucket.write(files[-1].path, data)
        return tuple(files)

    def add_anchor(self, bucket: Clocked, parts: list[Delta]) -> Shortcut:
        commit = read(bucket, 2).record
        files = self.upload(bucket, "anchor", 2, parts)
        shortcut = Shortcut(run=commit.run, version=2, kind="anchor", after=commit.after, files=files)
        bucket.write(shortcut_path(seal(shortcut)), seal(shortcut).data)
        return shortcut

    def test_intact_parts_have_no_problems(self, ranks: Clocked) -> None:
        found = verified(ranks, rebuild=True)
        assert (found.problems, found.rebuilt, found.compared, found.files) == ((), ((1, 2),), 1, 6)
        assert verified(ranks).fine

    def test_anchor_with_other_weights_is_a_problem(self, ranks: Clocked, weights: Arrays) -> None:
        shortcut = self.add_anchor(ranks, self.parts(weights))
        assert verified(ranks).fine
        found = verified(ranks, rebuild=True)
        assert only(found) == (
            f"{shortcut.files[0].path}: leads to another state than {shortcut_path(seal(shortcut))} names"
        )

    def test_missing_part_is_a_problem(self, ranks: Clocked) -> None:
        path = next(path for path in ranks.paths("deltas/2/") if "-r1-" in path)
        run(ranks.inner.delete(path))
        found = verified(ranks, rebuild=True)
        assert (only(found), found.rebuilt, found.compared) == (f"{path}: missing", ((1, 2),), 0)


def _rows(weights: Arrays, begin: int, end: int) -> dict[str, Tensor]:
    whole = read_weights(weights)["a.weight"]
    width = whole.shape[1]
    return {"a.weight": Tensor(whole.dtype, whole.shape, whole.bits[begin * width : end * width], (begin, end))}
