"""FSDP2 in real processes: the ranks together publish exactly the bits that a single process would."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.run_contents import commits_in, run_in, version_in
from support.sharded import Job
from support.warm_python import FreshPython
from weightwire import Publisher, WeightwireError, digest
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def published_alone(tmp_path: Path, room: Path, steps: list[int]) -> Bucket:
    """Publishes the same steps from one process, with weights gathered by torch."""
    url = tmp_path / "alone"
    with Publisher(url, threads=1) as publisher:
        for step in steps:
            publisher.publish(Job.truth(room, step), step=step).wait(120)
    return open_bucket(url)


def check_same(tmp_path: Path, room: Path, url: Path) -> list[Any]:
    """Checks that every version holds exactly the weights of its step. Returns the commits."""
    bucket = open_bucket(url)
    commits = [commit for commit in commits_in(bucket) if commit.kind != "fence"]
    steps = [commit.step for commit in commits if commit.step is not None]
    assert len(steps) == len(commits)
    alone = published_alone(tmp_path, room, steps)
    assert [commit.after for commit in commits] == [one.after for one in commits_in(alone) if one.kind != "fence"]
    assert dict(run_in(bucket).tensors) == dict(run_in(alone).tensors)
    assert run_in(bucket).aliases == run_in(alone).aliases
    assert version_in(bucket) == version_in(alone)
    assert asyncio.run(verify_run(bucket, Runtime(), rebuild=True)).fine
    return commits


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_publish_the_same_as_a_single_process(tmp_path: Path, size: int) -> None:
    job = Job(tmp_path / "room", size, "train", tmp_path / "bucket", steps=12, anchor_every=3)
    assert job.wait() == [0] * size, job.said(0) + job.said(1)

    commits = check_same(tmp_path, job.room, tmp_path / "bucket")
    assert commits[-1].step == 11
    assert {file.rank for file in commits[0].files} == set(range(size))
    assert {0, 4, 8} <= {commit.step for commit in commits}  # the steps that were waited for
    assert "head.weight" in run_in(open_bucket(tmp_path / "bucket")).aliases
    assert run_in(open_bucket(tmp_path / "bucket")).tensors["embed.weight"] == ("BF16", (11, 24))
    ranks = [job.found(rank) for rank in range(size)]
    assert all(one == ranks[0] for one in ranks)
    assert ranks[0]["state"] == commits[-1].after


def test_rows_held_by_several_ranks_are_published_once(tmp_path: Path) -> None:
    """HSDP: two replicas, each sharded over two ranks. One rank of each pair publishes."""
    job = Job(tmp_path / "room", 4, "train", tmp_path / "bucket", steps=3, mesh=[2, 2])
    assert job.wait() == [0] * 4, job.said(0)
    check_same(tmp_path, job.room, tmp_path / "bucket")


def test_a_group_of_some_processes_can_publish(tmp_path: Path) -> None:
    job = Job(tmp_path / "room", 3, "group", tmp_path / "bucket")
    assert job.wait() == [0, 0, 0], job.said(1)
    assert [job.found(rank) for rank in range(3)] == [None, {"rank": 0, "size": 2}, {"rank": 1, "size": 2}]
    weights = {f"of-{rank}": np.full(300, 2) for rank in (1, 2)}
    assert version_in(open_bucket(tmp_path / "bucket")) == digest(weights)


def test_ranks_need_a_process_group() -> None:
    from weightwire.trainers.process_group import Ranks

    with pytest.raises(WeightwireError, match="not initialized"):
        Ranks()


def test_a_run_continues_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Nothing in the bucket depends on the number of ranks."""
    url = tmp_path / "bucket"
    first = Job(tmp_path / "room", 3, "train", url, steps=3, blocking=True)
    assert first.wait() == [0, 0, 0], first.said(0)
    assert first.found(2)["versions"] == [1, 2, 3]
    # Another number of ranks trains other weights. They must be published as they are.
    second = Job(tmp_path / "again", 2, "train", url, steps=2, first=3)
    assert second.wait() == [0, 0], second.said(0)
    for file in (tmp_path / "again").glob("step-*.pt"):
        file.rename(first.room / file.name)
    commits = check_same(tmp_path, first.room, url)
    assert [commit.kind for commit in commits][:4] == ["anchor", "delta", "delta", "anchor"]


def test_attach_publishes_from_all_ranks(tmp_path: Path) -> None:
    job = Job(tmp_path / "room", 2, "attach", tmp_path / "bucket", steps=4)
    assert job.wait() == [0, 0], job.said(0)
    newest = commits_in(open_bucket(tmp_path / "bucket"))[-1]
    assert newest.step == 4
    with Publisher(tmp_path / "alone", threads=1) as publisher:
        publisher.publish(Job.truth(job.room, 0)).wait(120)
        assert newest.after == publisher.state


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_fails_the_others(tmp_path: Path, dies: int) -> None:
    """The others get an error within seconds, and nothing partial is committed."""
    job = Job(tmp_path / "room", 3, "die", tmp_path / "bucket", dies=dies)
    assert [status for rank, status in enumerate(job.wait()) if rank != dies] == [0, 0], job.said(2)
    for rank in {0, 1, 2} - {dies}:
        found = job.found(rank)
        assert "lost its connection to the others" in found["message"]
        assert "restart all" in found["hint"]
        assert found["seconds"] < 120  # a silent rank would count as lost after 300
    commits = check_same(tmp_path, job.room, tmp_path / "bucket")
    assert [commit.step for commit in commits] == [0]


def test_a_program_that_fails_exits(tmp_path: Path) -> None:
    """No thread keeps it alive, although nothing is closed."""
    job = Job(tmp_path / "room", 2, "fail", tmp_path / "bucket", FreshPython)
    assert job.wait() == [3, 3], job.said(0)


def test_column_shards_are_refused(tmp_path: Path) -> None:
    job = Job(tmp_path / "room", 2, "refuse", tmp_path / "bucket")
    assert job.wait() == [0, 0], job.said(0)
    for rank in range(2):
        assert "'columns'" in job.found(rank)["message"]
        assert "full_tensor()" in job.found(rank)["hint"]
