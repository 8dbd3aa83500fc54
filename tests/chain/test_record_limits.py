"""Records of any size may be in a bucket. No reader reads past the limit of their kind, and the run lives on."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import numpy as np
import pytest

from support.commands import weightwire
from support.failing_bucket import Quick, in_memory, quickly
from support.records import Warnings, a_run, store
from support.small_run import bits_of
from weightwire import Follower, Publisher
from weightwire.chain.absence import get_record
from weightwire.chain.record_paths import ALIVE, HEAD, RUN, Folder, commit_path, gc_path, heartbeat_path, side_path
from weightwire.chain.records import RECORD_LIMITS, Run, SideFile, record_limit, seal, unseal
from weightwire.chain.writer import ChainWriter, begin_run
from weightwire.errors import BrokenChain, CheckpointError, Fenced, NotPublished, WeightwireError
from weightwire.weights import LARGEST_SIDE_FILE

HUGE = 1 << 42  # bytes: a sparse file that no machine can hold in memory


def make_huge(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        os.truncate(file.fileno(), HUGE)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with versions 1 to 3."""
    with Publisher(tmp_path / "run", blocking=True, threads=1, on_event=lambda event: None) as publisher:
        for version in range(1, 4):
            publisher.publish({"w": np.full(1000, version, np.float32)})
    return tmp_path / "run"


def follow(root: Path, into: Path) -> int | None:
    with Follower(str(root), into=into, threads=1, on_event=lambda event: None) as follower:
        follower.once()
        return follower.version


class TestLimits:
    def test_every_record_has_a_limit(self) -> None:
        records = {RUN, HEAD, ALIVE, *Folder} - {Folder.ANCHORS, Folder.DELTAS, Folder.FILES, Folder.PROBE}
        assert set(RECORD_LIMITS) == records
        assert record_limit(commit_path(3)) == RECORD_LIMITS[Folder.COMMITS]
        assert record_limit(RUN) == RECORD_LIMITS[RUN]

    def test_a_record_of_the_largest_size_is_read(self) -> None:
        bucket, path = in_memory(), heartbeat_path("one")
        limit = record_limit(path)
        asyncio.run(bucket.put(path, bytes(limit)))
        assert len(asyncio.run(get_record(bucket, path))) == limit
        asyncio.run(bucket.put(path, bytes(limit + 1)))
        with pytest.raises(BrokenChain, match="more than 1,048,576 bytes") as caught:
            asyncio.run(get_record(bucket, path))
        assert caught.value.hint

    def test_run_of_200_000_tensors_is_within_its_limit(self) -> None:
        names = (f"model.layers.{number}.mlp.experts.down_proj.weight" for number in range(200_000))
        tensors = dict.fromkeys(names, ("BF16", (4096, 1536)))
        data = seal(a_run(tensors=tensors)).data
        assert 10e6 < len(data) < record_limit(RUN)
        assert len(unseal(data, Run, "here").record.tensors) == 200_000


@pytest.mark.parametrize(
    "name",
    [HEAD, "replicas/gpu-0.json", gc_path(2), "epochs/00000007.json", "shortcuts/2/anchor-0123456789abcdef.json"],
)
def test_a_huge_record_that_nothing_needs_stops_no_reader(root: Path, tmp_path: Path, name: str) -> None:
    make_huge(root / name)

    assert follow(root, tmp_path / "replica") == 3
    for command in ("status", "log"):
        assert weightwire(command, root).code == 0
    assert weightwire("page", root, "--export", tmp_path / "page.html").code == 0
    swept = weightwire("gc", root)
    if name.startswith("replicas/"):  # this replica may need any data
        swept.check_failed("gpu-0.json: has more than 1,048,576 bytes", "WW-BROKEN-CHAIN")
    else:
        assert swept.code == 0, swept.err


def test_a_huge_run_record_is_an_error_until_it_is_replaced(root: Path, tmp_path: Path) -> None:
    good = (root / RUN).read_bytes()
    make_huge(root / RUN)

    for command in ("status", "gc", "verify"):
        weightwire(command, root).check_failed("run.json: has more than 67,108,864 bytes", "WW-BROKEN-CHAIN")
    (root / RUN).write_bytes(good)
    assert follow(root, tmp_path / "replica") == 3


def test_a_follower_keeps_its_version_before_a_huge_commit_and_recovers(root: Path, tmp_path: Path) -> None:
    good = (root / commit_path(3)).read_bytes()
    make_huge(root / commit_path(3))
    with Follower(str(root), into=tmp_path / "replica", threads=1, on_event=lambda event: None) as follower:
        with pytest.raises(WeightwireError, match="more than 1,048,576 bytes") as caught:
            follower.once()
        assert caught.value.hint
        (root / commit_path(3)).unlink()
        follower.once()
        assert follower.version == 2
        make_huge(root / commit_path(3))
        with pytest.raises(WeightwireError, match="more than 1,048,576 bytes"):
            follower.once()
        assert bits_of(follower.replica.weights) == bits_of({"w": np.full(1000, 2, np.float32)})
        (root / commit_path(3)).write_bytes(good)
        follower.once()
        assert follower.version == 3


def test_a_publisher_is_fenced_off_by_a_huge_object_in_place_of_its_commit() -> None:
    async def race() -> None:
        bucket = in_memory()
        await store(bucket.inner, [])
        writer = ChainWriter(bucket, a_run(), Quick(), Warnings())
        await writer.take_over()
        commit = await writer.prepare(kind="base", after="0" * 64, before="")
        await bucket.inner.put(commit_path(1), bytes(record_limit(commit_path(1)) + 1))
        with pytest.raises(Fenced):
            await writer.send(commit)

    quickly(race())


class TestWriters:
    def test_too_many_tensors_for_the_run_record_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(RECORD_LIMITS, RUN, 100)
        bucket = in_memory()
        with pytest.raises(CheckpointError, match="1 tensors need a record of more than 100 bytes") as caught:
            quickly(begin_run(bucket, a_run(), Quick(), Warnings()))
        assert caught.value.hint
        assert bucket.count("create") == 0

    def test_a_commit_over_the_limit_is_not_published_and_the_next_one_is(self, tmp_path: Path) -> None:
        metrics = {f"{'reward' * 10} {number}": 0.123456789 for number in range(30_000)}
        with Publisher(tmp_path / "run", blocking=True, threads=1, on_event=lambda event: None) as publisher:
            publisher.publish({"w": np.zeros(10, np.float32)})
            with pytest.raises(NotPublished, match="its commit has more than 1,048,576 bytes") as caught:
                publisher.publish({"w": np.ones(10, np.float32)}, metrics=metrics)
            assert caught.value.hint == "pass fewer metrics"
            publisher.publish({"w": np.ones(10, np.float32)})
        assert follow(tmp_path / "run", tmp_path / "replica") == 2

    def test_a_side_file_over_the_limit_is_refused(self, tmp_path: Path) -> None:
        sha256 = "0" * 64
        SideFile("a", side_path("a", sha256), LARGEST_SIDE_FILE, sha256)
        with pytest.raises(ValueError, match="'a' has more than 67,108,864 bytes"):
            SideFile("a", side_path("a", sha256), LARGEST_SIDE_FILE + 1, sha256)
        files = [SideFile(f"{i}", side_path(f"{i}", sha256), LARGEST_SIDE_FILE, sha256) for i in range(17)]
        a_run(files=tuple(files[:16]))
        with pytest.raises(ValueError, match="its side files are too large"):
            a_run(files=tuple(files))


class TestShapes:
    """A shape of many large dimensions used to take quadratic time in every reader."""

    def read(self, dimensions: int) -> Run:
        shape = ",".join(["9007199254740991"] * (dimensions - 1) + ["0"])
        text = seal(a_run()).data.decode().replace("[4,8]", f"[{shape}]")
        return unseal(text.encode(), Run, "here").record

    def test_64_dimensions_are_allowed(self) -> None:
        assert len(self.read(64).tensors["w"][1]) == 64

    @pytest.mark.parametrize("dimensions", [65, 60_000])
    def test_more_dimensions_are_refused_at_once(self, dimensions: int) -> None:
        began = time.thread_time()  # not the time that other processes take
        with pytest.raises(BrokenChain, match="tensor 'w': its dtype or shape is invalid"):
            self.read(dimensions)
        assert time.thread_time() - began < 2
