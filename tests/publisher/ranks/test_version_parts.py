"""A version of several ranks equals that of one process, with one file per rank."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from support.failing_bucket import Troubled, in_memory
from support.rank_circle import SIZES, at_step, check_no_mixture, initial, on_all, shard
from support.run_contents import commits_in, run_in
from weightwire import Follower, digest
from weightwire.bucket.registry import open_bucket
from weightwire.inspection.verify import verify_run
from weightwire.publisher.publisher import Publisher
from weightwire.system.runtime import Runtime


@SIZES
class TestVersions:
    def test_versions_equal_those_of_one_process(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> list[int]:
            return [publisher.publish(shard(at_step(step), rank, size), step=step).wait(60) for step in range(5)]

        assert on_all(bucket, size, work) == [[1, 2, 3, 4, 5]] * size

        alone = in_memory()
        with Publisher(alone) as publisher:
            for step in range(5):
                publisher.publish(at_step(step), step=step).wait(60)
        ours, theirs = commits_in(bucket), commits_in(alone)
        assert [(one.kind, one.step, one.before, one.after, one.changed) for one in ours] == [
            (one.kind, one.step, one.before, one.after, one.changed) for one in theirs
        ]
        assert run_in(bucket).tensors == run_in(alone).tensors
        check_no_mixture(bucket)

    def test_a_version_has_a_file_of_each_rank(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, size), step=0).wait(60)

        on_all(bucket, size, work)
        files = commits_in(bucket)[1].files
        assert [file.rank for file in files] == list(range(size))
        assert all(f"/e1-r{rank}-" in file.path for rank, file in enumerate(files))

    def test_a_rank_without_changes_has_no_file(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            weights = at_step(0)
            publisher.publish(shard(weights, rank, size), step=0).wait(60)
            weights["layer.weight"][6, 3] += 1
            publisher.publish(shard(weights, rank, size), step=0).wait(60)
            publisher.publish(shard(weights, rank, size), step=0).wait(60)

        on_all(bucket, size, work)
        assert [[file.rank for file in commit.files] for commit in commits_in(bucket)[2:]] == [[size - 1], []]
        assert asyncio.run(verify_run(bucket, Runtime(), rebuild=True)).fine

    def test_every_rank_knows_the_published_state(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> tuple[Any, ...]:
            publication = publisher.publish(shard(at_step(3), rank, size), step=3, metrics={"rank": rank})
            publication.wait(60)
            return publisher.version, publisher.state, publication.commit

        (version, state, commit), *others = on_all(bucket, size, work)
        assert all(other == (version, state, commit) for other in others)
        assert (version, state) == (1, digest(at_step(3)).hex)
        assert commit == commits_in(bucket)[1]
        assert commit.metrics == {"rank": 0.0}
        assert commit.stages["upload"].bytes == commit.nbytes

    def test_versions_of_several_ranks_reach_a_follower(self, tmp_path: Path, size: int) -> None:
        """Anchors, deltas and shortcuts have several files."""
        url = tmp_path / "bucket"

        def work(publisher: Publisher, rank: int) -> None:
            for step in range(6):
                publisher.publish(shard(at_step(step), rank, size), step=step).wait(60)

        on_all(url, size, work, anchor_every=2)
        with Follower(url, into=tmp_path / "late") as follower:
            follower.once()
            found = load_file(follower.checkpoint() / "model.safetensors")
        for name, value in at_step(5).items():
            np.testing.assert_array_equal(found[name], value)
        assert asyncio.run(verify_run(open_bucket(url), Runtime(), rebuild=True)).fine

    def test_a_tensor_may_be_on_one_rank_only(self, bucket: Troubled, size: int) -> None:
        """As with pipeline stages: whole tensors, each on one rank."""
        names = list(initial())

        def work(publisher: Publisher, rank: int) -> None:
            for step in range(3):
                mine: dict[str, Any] = {
                    name: value for name, value in at_step(step).items() if names.index(name) % size == rank
                }
                publisher.publish(mine, step=step).wait(60)

        on_all(bucket, size, work)
        check_no_mixture(bucket)
