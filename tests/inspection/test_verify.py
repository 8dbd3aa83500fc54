"""That an audit finds whatever is wrong with a run, and nothing where nothing is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.clocked import HOUR, Arrays, Clocked, clocked, first_weights, publish, run, stepped
from weightwire.bucket.registry import open_bucket
from weightwire.chain.records import (
    Commit,
    DataFile,
    Gc,
    Sealed,
    Shortcut,
    commit_path,
    data_path,
    gc_path,
    seal,
    shortcut_path,
    unseal,
)
from weightwire.delta.file import Delta, Packed, pack
from weightwire.delta.maker import anchor, diff
from weightwire.delta.state import digest
from weightwire.errors import NoRun, Unavailable, UnsupportedFormat, WrongBase
from weightwire.inspection import chain_walk
from weightwire.inspection.chain_walk import Verification
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime
from weightwire.upkeep.gc import sweep
from weightwire.upkeep.retention import Retention
from weightwire.weights.source import read_weights
from weightwire.weights.tensor import Tensor

FILES = {"config.json": b'{"model_type": "tiny"}', "tokenizer/vocab.txt": b"a\nb\n"}


@pytest.fixture
def bucket() -> Clocked:
    """Versions 0 to 8, of which 0 and 6 are fences, and 1, 4, 7 and 8 have anchors."""
    bucket = clocked()
    weights = publish(bucket, first_weights(), 5, every=HOUR, clock=bucket, anchor_every=3, files=FILES)
    publish(bucket, stepped(weights, 9), 2, every=HOUR, clock=bucket, anchor_every=1)
    return bucket


def audited(bucket: Clocked, *, rebuild: bool = False, **more: Any) -> Verification:
    return run(verify_run(bucket, Runtime(), rebuild=rebuild, **more))


def said(found: Verification) -> list[str]:
    return [f"{one.path}: {one.what}" for one in found.problems]


def only(found: Verification) -> str:
    assert len(found.problems) == 1, found.problems
    return said(found)[0]


def read(bucket: Clocked, version: int) -> Sealed[Commit]:
    return unseal(run(bucket.get(commit_path(version))), Commit, "here")


def data_of(bucket: Clocked, version: int, kind: str = "deltas") -> str:
    return bucket.paths(f"{kind}/{version}/")[0]


def edit(bucket: Clocked, path: str, change: Callable[[bytearray], object]) -> None:
    data = bytearray(run(bucket.get(path)))
    change(data)
    bucket.write(path, bytes(data))


def flip_last(data: bytearray) -> None:
    data[-1] ^= 1


def rewrite(bucket: Clocked, version: int, **fields: Any) -> None:
    """A commit that says something else, and all later ones adapted to it, as someone would who can write."""
    head = max(int(path[8:28]) for path in bucket.paths("commits/"))
    commits = [read(bucket, number) for number in range(head + 1)]
    for number in range(version, head + 1):
        record, parent = commits[number].record, commits[number - 1]
        changed: dict[str, Any] = {"parent": parent.sha256, "before": parent.record.after}
        changed["back"] = [commits[number - (2 << k)].sha256 for k in range(len(record.back))]
        if record.kind == "fence":
            changed["after"] = parent.record.after
        commits[number] = seal(msgspec.structs.replace(record, **changed | (fields if number == version else {})))
        bucket.write(commit_path(number), commits[number].data)


class TestFine:
    @pytest.mark.parametrize("rebuild", [False, True])
    def test_everything_is_as_it_should_be(self, bucket: Clocked, rebuild: bool) -> None:
        found = audited(bucket, rebuild=rebuild)

        assert found.problems == ()
        assert found.fine
        assert (found.head, found.whole, found.gone, found.below) == (8, 8, 0, 0)
        sizes = [one.size for folder in ("deltas/", "anchors/") for one in run(bucket.list(folder))]
        assert (found.files, found.nbytes) == (len(sizes), sum(sizes))
        assert found.rebuilt == (((1, 8),) if rebuild else ())
        assert found.compared == (3 if rebuild else 0)

    @pytest.mark.parametrize("rebuild", [False, True])
    def test_tells_how_far_it_is(self, bucket: Clocked, rebuild: bool) -> None:
        told: list[tuple[int, int]] = []

        found = audited(bucket, rebuild=rebuild, progress=lambda done, total: told.append((done, total)))

        nbytes = found.nbytes + sum(map(len, FILES.values()))
        assert told[-1] == (nbytes, nbytes)
        assert {total for _, total in told} == {nbytes}
        assert [done for done, _ in told] == sorted(done for done, _ in told)

    def test_writes_nothing(self, bucket: Clocked) -> None:
        bucket.read_only = True
        assert audited(bucket, rebuild=True).fine

    def test_files_of_many_pieces(self, bucket: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chain_walk, "_PIECE", 100)
        assert audited(bucket).fine

    def test_in_a_directory(self, tmp_path: Path) -> None:
        bucket = open_bucket(tmp_path)
        publish(bucket, first_weights(), 3, anchor_every=2)
        assert run(verify_run(bucket, Runtime(), rebuild=True)).rebuilt == ((1, 3),)

    def test_nothing_published_yet(self) -> None:
        with pytest.raises(NoRun):
            audited(clocked())

    def test_a_version_that_changes_nothing(self) -> None:
        bucket = clocked()
        weights = publish(bucket, first_weights(), 2)
        publish(bucket, weights, 1)

        assert read(bucket, 4).record.files == ()
        assert audited(bucket, rebuild=True).rebuilt == ((1, 4),)

    def test_what_is_published_meanwhile_is_left_out(self, bucket: Clocked) -> None:
        """A shortcut of a later version too."""
        hidden = {path for path in bucket.paths() if path.split("/")[1:2] in (["7"], ["8"])}
        bucket.hidden = {commit_path(7), commit_path(8)} | {path for path in hidden if path.startswith("deltas")}

        found = audited(bucket)

        assert (found.head, found.problems) == (6, ())


class TestChain:
    def test_a_missing_commit(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(commit_path(5)))

        found = audited(bucket, rebuild=True)

        assert (found.whole, found.head) == (4, 8)
        assert only(found) == f"{commit_path(5)}: is missing, though later versions are there"
        assert found.rebuilt == ((1, 4),)

    def test_no_first_commit(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(commit_path(0)))
        assert audited(bucket).whole == -1

    def test_a_commit_that_was_edited(self, bucket: Clocked) -> None:
        edited = msgspec.structs.replace(read(bucket, 3).record, step=1000)
        bucket.write(commit_path(3), seal(edited).data)

        found = audited(bucket)

        assert found.whole == 3
        assert only(found).startswith(f"{commit_path(4)}: does not follow from the version before it")

    @pytest.mark.parametrize("version", [1, 3, 8])
    def test_a_commit_that_is_nonsense(self, bucket: Clocked, version: int) -> None:
        bucket.write(commit_path(version), b"{")

        found = audited(bucket)

        assert found.whole == version - 1
        assert only(found) == f"{commit_path(version)}: cannot be read (it is no JSON)"

    def test_a_commit_of_another_run(self, bucket: Clocked) -> None:
        foreign = msgspec.structs.replace(read(bucket, 8).record, run="0" * 32)
        bucket.write(commit_path(8), seal(foreign).data)

        found = audited(bucket)

        assert found.whole == 7
        assert f"{commit_path(8)}: belongs to run 000000000000" in only(found)

    def test_a_commit_of_a_newer_format(self, bucket: Clocked) -> None:
        newer = json.loads(read(bucket, 4).data) | {"format": "weightwire/2"}
        bucket.write(commit_path(4), json.dumps(newer).encode())

        found = audited(bucket)

        assert found.whole == 3
        assert f"{commit_path(4)}: has format version 2" in only(found)

    def test_a_run_of_a_newer_format(self, bucket: Clocked) -> None:
        bucket.write("run.json", b'{"format": "weightwire/2"}')
        with pytest.raises(UnsupportedFormat):
            audited(bucket)

    def test_a_hash_further_back(self, bucket: Clocked) -> None:
        """Which readers rely on that come late, and nobody else looks at."""
        record = read(bucket, 8).record
        wrong = msgspec.structs.replace(record, back=(*record.back[:2], "0" * 64))
        bucket.write(commit_path(8), seal(wrong).data)

        found = audited(bucket)

        assert (found.whole, len(record.back)) == (8, 3)
        assert only(found) == f"{commit_path(8)}: names another commit of version 0 than there is"

    def test_a_bucket_that_fails_is_no_problem_of_the_run(self, bucket: Clocked) -> None:
        async def fail(verb: str, path: str) -> None:
            if path == commit_path(5):
                raise Unavailable("down")

        bucket.hook = fail
        with pytest.raises(Unavailable):
            audited(bucket)


@pytest.mark.parametrize("rebuild", [False, True])
class TestData:
    @pytest.mark.parametrize(("version", "kind"), [(3, "deltas"), (1, "anchors"), (4, "anchors")])
    def test_one_bit(self, bucket: Clocked, rebuild: bool, version: int, kind: str) -> None:
        path = data_of(bucket, version, kind)
        edit(bucket, path, flip_last)

        found = audited(bucket, rebuild=rebuild)

        assert only(found) == f"{path}: its bytes are not those that were published"
        assert found.problems[0].version == version
        assert found.whole == 8

    @pytest.mark.parametrize("size", [0, 5, 100])
    def test_truncated(self, bucket: Clocked, rebuild: bool, size: int) -> None:
        path = data_of(bucket, 3)
        whole = len(run(bucket.get(path)))
        edit(bucket, path, lambda data: data.__delitem__(slice(size, None)))
        assert only(audited(bucket, rebuild=rebuild)) == f"{path}: has {size} bytes, and {whole} were published"

    def test_longer(self, bucket: Clocked, rebuild: bool) -> None:
        path = data_of(bucket, 3)
        edit(bucket, path, lambda data: data.append(0))
        assert f"{path}: has " in only(audited(bucket, rebuild=rebuild))

    def test_missing(self, bucket: Clocked, rebuild: bool) -> None:
        path = data_of(bucket, 3)
        run(bucket.inner.delete(path))
        assert only(audited(bucket, rebuild=rebuild)) == f"{path}: is missing"

    def test_all_that_is_wrong(self, bucket: Clocked, rebuild: bool) -> None:
        damaged = [data_of(bucket, 2), data_of(bucket, 4, "anchors"), data_of(bucket, 4), data_of(bucket, 8)]
        for path in damaged:
            edit(bucket, path, flip_last)
        assert [one.path for one in audited(bucket, rebuild=rebuild).problems] == damaged

    def test_a_file_that_says_another_state_than_its_commit(self, bucket: Clocked, rebuild: bool) -> None:
        """Its hash is right, and so is the chain."""
        run(bucket.inner.delete(bucket.paths("shortcuts/8/")[0]))
        rewrite(bucket, 8, after="0" * 64)
        found = audited(bucket, rebuild=rebuild)
        assert only(found) == f"{data_of(bucket, 8)}: leads to another state than {commit_path(8)} says"

    def test_a_file_that_is_no_delta(self, bucket: Clocked, rebuild: bool) -> None:
        data = b"not a safetensors file at all"
        sha256 = hashlib.sha256(data).hexdigest()
        file = DataFile(data_path("delta", 8, 2, 0, sha256), len(data), sha256)
        bucket.write(file.path, data)
        rewrite(bucket, 8, files=(file,))
        assert file.path in only(audited(bucket, rebuild=rebuild))

    def test_a_file_of_another_kind(self, bucket: Clocked, rebuild: bool) -> None:
        data = run(bucket.get(data_of(bucket, 8, "anchors")))
        sha256 = hashlib.sha256(data).hexdigest()
        file = DataFile(data_path("delta", 8, 2, 0, sha256), len(data), sha256)
        bucket.write(file.path, data)
        rewrite(bucket, 8, files=(file,))
        assert only(audited(bucket, rebuild=rebuild)) == f"{file.path}: is no delta"

    @pytest.mark.parametrize("name", ["config.json", "vocab.txt"])
    def test_side_files(self, bucket: Clocked, rebuild: bool, name: str) -> None:
        path = next(path for path in bucket.paths("files/") if path.endswith(name))
        edit(bucket, path, flip_last)
        assert only(audited(bucket, rebuild=rebuild)) == f"{path}: its bytes are not those that were published"
        bucket.write(path, b"x")
        assert f"{path}: has 1 bytes" in only(audited(bucket, rebuild=rebuild))
        run(bucket.inner.delete(path))
        assert only(audited(bucket, rebuild=rebuild)) == f"{path}: is missing"


class TestShortcuts:
    def shortcut(self, bucket: Clocked, version: int) -> tuple[str, Shortcut]:
        path = bucket.paths(f"shortcuts/{version}/")[0]
        return path, unseal(run(bucket.get(path)), Shortcut, "here").record

    def test_to_another_state(self, bucket: Clocked) -> None:
        _, shortcut = self.shortcut(bucket, 4)
        wrong = msgspec.structs.replace(shortcut, after="0" * 64)
        bucket.write(shortcut_path(seal(wrong)), seal(wrong).data)
        found = audited(bucket)
        assert only(found) == f"{shortcut_path(seal(wrong))}: leads to another state than the commit of its version"

    def test_to_a_version_that_does_not_exist(self, bucket: Clocked) -> None:
        _, shortcut = self.shortcut(bucket, 4)
        files = (DataFile(data_path("anchor", 20, 1, 0, "0" * 64), 5, "0" * 64),)
        wrong = msgspec.structs.replace(shortcut, version=20, files=files)
        bucket.write(shortcut_path(seal(wrong)), seal(wrong).data)
        assert only(audited(bucket)) == f"{shortcut_path(seal(wrong))}: leads to a version that does not exist"

    def test_under_another_name(self, bucket: Clocked) -> None:
        path, shortcut = self.shortcut(bucket, 4)
        bucket.write("shortcuts/5/anchor-0123456789abcdef.json", seal(shortcut).data)
        assert only(audited(bucket)) == "shortcuts/5/anchor-0123456789abcdef.json: says something else than its name"
        assert path != "shortcuts/5/anchor-0123456789abcdef.json"

    @pytest.mark.parametrize("data", [b"nonsense", b'{"format": "weightwire/2"}'])
    def test_that_cannot_be_read(self, bucket: Clocked, data: bytes) -> None:
        bucket.write("shortcuts/4/other.json", data)
        assert only(audited(bucket)).startswith("shortcuts/4/other.json: ")

    def test_of_another_run(self, bucket: Clocked) -> None:
        _, shortcut = self.shortcut(bucket, 4)
        foreign = msgspec.structs.replace(shortcut, run="0" * 32)
        bucket.write(shortcut_path(seal(foreign)), seal(foreign).data)
        assert "belongs to run 0000" in only(audited(bucket))


class TestRetention:
    @pytest.fixture
    def swept(self, bucket: Clocked) -> Clocked:
        bucket.now += HOUR
        found = run(sweep(bucket, Runtime(), Retention(2, 0.0, 0.0)))
        assert found.below == 7
        return bucket

    @pytest.mark.parametrize("rebuild", [False, True])
    def test_what_has_been_deleted_is_no_problem(self, swept: Clocked, rebuild: bool) -> None:
        found = audited(swept, rebuild=rebuild)

        assert found.problems == ()
        assert (found.whole, found.below) == (8, 7)
        assert found.gone == 5  # the anchor of version 1, and deltas 2 to 5
        assert found.rebuilt == (((7, 8),) if rebuild else ())

    def test_what_is_missing_above_is(self, swept: Clocked) -> None:
        path = data_of(swept, 8)
        run(swept.inner.delete(path))
        assert only(audited(swept)) == f"{path}: is missing"

    def test_a_gc_record_of_another_run_excuses_nothing(self, bucket: Clocked) -> None:
        path = data_of(bucket, 2)
        run(bucket.inner.delete(path))
        bucket.write(gc_path(8), seal(Gc(run="0" * 32, below=8)).data)
        assert [one.path for one in audited(bucket).problems] == [gc_path(8), path]

    @pytest.mark.parametrize("rebuild", [False, True])
    def test_what_is_deleted_while_one_looks_is_no_problem(self, bucket: Clocked, rebuild: bool) -> None:
        bucket.now += HOUR

        async def sweep_first(verb: str, path: str) -> None:
            if verb == "find":  # of the first side file: everything has been listed by now
                bucket.hook = None
                await sweep(bucket, Runtime(), Retention(2, 0.0, 0.0))

        bucket.hook = sweep_first
        found = audited(bucket, rebuild=rebuild)

        assert (found.problems, found.gone) == ((), 6)  # the anchor of version 4 was still known
        assert found.below == 7


class TestRebuild:
    def test_goes_on_from_the_next_anchor(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(data_of(bucket, 3)))
        found = audited(bucket, rebuild=True)
        assert found.rebuilt == ((1, 2), (4, 8))
        assert found.compared == 2

    def test_an_anchor_that_is_damaged_does_not_stop_it(self, bucket: Clocked) -> None:
        edit(bucket, data_of(bucket, 4, "anchors"), flip_last)
        found = audited(bucket, rebuild=True)
        assert (found.rebuilt, found.compared) == (((1, 8),), 2)

    def test_finds_a_delta_that_does_not_do_what_it_says(self) -> None:
        """Every hash and every header is right; only the weights are not."""
        bucket = clocked()
        publish(bucket, first_weights(), 3)
        lying = self.lie(bucket, 3, "delta")

        assert audited(bucket).fine
        found = audited(bucket, rebuild=True)

        assert only(found).startswith(f"{lying}: ")
        assert found.rebuilt == ((1, 2),)

    def test_finds_an_anchor_that_holds_something_else(self, bucket: Clocked) -> None:
        commit = read(bucket, 4).record
        weights = stepped(first_weights(5), 1)
        made = anchor(weights)
        lying = _claim(made, after=commit.after)
        sha256 = hashlib.sha256(lying).hexdigest()
        file = DataFile(data_path("anchor", 4, 9, 0, sha256), len(lying), sha256)
        shortcut = Shortcut(run=commit.run, version=4, kind="anchor", after=commit.after, files=(file,))
        bucket.write(file.path, lying)
        bucket.write(shortcut_path(seal(shortcut)), seal(shortcut).data)

        assert audited(bucket).fine
        found = audited(bucket, rebuild=True)

        assert only(found).startswith(f"{file.path}: ")
        assert found.rebuilt == ((1, 8),)

    def lie(self, bucket: Clocked, version: int, kind: str) -> str:
        commit = read(bucket, version).record
        weights: Arrays = first_weights()
        for step in range(version - 2):
            weights = stepped(weights, step)
        lying = _claim(diff(weights, stepped(weights, 40)), before=commit.before, after=commit.after)
        sha256 = hashlib.sha256(lying).hexdigest()
        file = DataFile(data_path(kind, version, 9, 0, sha256), len(lying), sha256)
        bucket.write(file.path, lying)
        rewrite(bucket, version, files=(file,))
        return file.path


def _claim(delta: Delta, **states: str) -> bytes:
    """The same file, with another header."""
    parts = [
        Packed(entry, [bytes(delta.block(entry, index)) for index in range(len(entry.blocks))])
        for entry in delta.entries.values()
    ]
    return pack(parts, kind=delta.kind, **states).to_bytes()


class TestBase:
    @pytest.fixture
    def based(self) -> Clocked:
        """A run that starts from a base; its only anchor is that of version 4."""
        bucket = clocked()
        weights = first_weights()
        publish(bucket, stepped(weights, 1), 4, base=weights, source="somewhere/else", anchor_every=3)
        return bucket

    def test_is_where_a_rebuild_starts(self, based: Clocked) -> None:
        found = audited(based, rebuild=True, base=read_weights(first_weights()))
        assert (found.problems, found.rebuilt, found.compared) == ((), ((1, 5),), 1)

    def test_that_is_not_here_is_no_problem_where_there_is_an_anchor(self, based: Clocked) -> None:
        found = audited(based, rebuild=True)
        assert (found.problems, found.rebuilt, found.compared) == ((), ((4, 5),), 0)

    def test_that_is_another_is_refused(self, based: Clocked) -> None:
        with pytest.raises(WrongBase):
            audited(based, rebuild=True, base=read_weights(first_weights(8)))

    def test_nothing_to_rebuild_from(self) -> None:
        bucket = clocked()
        weights = first_weights()
        publish(bucket, stepped(weights, 1), 2, base=weights, anchor_every=100)

        assert audited(bucket).fine
        found = audited(bucket, rebuild=True)

        assert only(found).startswith(f"{commit_path(1)}: cannot be rebuilt")
        assert digest(weights).hex == read(bucket, 1).record.after


class TestParts:
    """Of several ranks: each file has some rows, and knows no state of all."""

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
        """Version 1 is an anchor, version 2 a delta, version 2 has an anchor too; all of two parts."""
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

    def test_are_fine(self, ranks: Clocked) -> None:
        found = audited(ranks, rebuild=True)
        assert (found.problems, found.rebuilt, found.compared, found.files) == ((), ((1, 2),), 1, 6)
        assert audited(ranks).fine

    def test_of_an_anchor_that_holds_something_else(self, ranks: Clocked, weights: Arrays) -> None:
        shortcut = self.add_anchor(ranks, self.parts(weights))
        assert audited(ranks).fine
        found = audited(ranks, rebuild=True)
        assert only(found) == (
            f"{shortcut.files[0].path}: leads to another state than {shortcut_path(seal(shortcut))} says"
        )

    def test_of_which_one_is_missing(self, ranks: Clocked) -> None:
        path = ranks.paths("deltas/2/")[1]
        run(ranks.inner.delete(path))
        found = audited(ranks, rebuild=True)
        assert (only(found), found.rebuilt, found.compared) == (f"{path}: is missing", ((1, 2),), 0)


def _rows(weights: Arrays, begin: int, end: int) -> dict[str, Tensor]:
    whole = read_weights(weights)["a.weight"]
    width = whole.shape[1]
    return {"a.weight": Tensor(whole.dtype, whole.shape, whole.bits[begin * width : end * width], (begin, end))}
