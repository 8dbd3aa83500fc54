"""Restarted ranks: published weights are not restored from the bucket, but used if they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.failing_bucket import Troubled
from support.rank_circle import SIZES, ByRank, at_step, check_no_mixture, on_all, shard
from support.run_contents import commits_in, version_in
from weightwire import Follower, digest
from weightwire.errors import SchemaChanged
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event


class TestRestart:
    def publish(self, bucket: Troubled, size: int, *numbers: int, **settings: Any) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            for step in numbers:
                publisher.publish(shard(at_step(step), rank, size), step=step).wait(60)

        on_all(bucket, size, work, **settings)

    def kinds(self, bucket: Troubled) -> list[str]:
        return [commit.kind for commit in commits_in(bucket)]

    def test_the_first_version_after_a_restart_is_an_anchor(self, bucket: Troubled) -> None:
        heard: list[Event] = []
        self.publish(bucket, 2, 0, 1)
        self.publish(bucket, 3, 2, 3, on_event=heard.append)
        assert self.kinds(bucket) == ["fence", "anchor", "delta", "fence", "anchor", "delta"]
        assert len([event for event in heard if "the next version is an anchor" in event.message]) == 1
        check_no_mixture(bucket)

    @pytest.mark.parametrize("given", ["published", "base"])
    def test_given_published_weights_avoid_the_anchor(self, bucket: Troubled, given: str) -> None:
        self.publish(bucket, 2, 0, 1)
        self.publish(bucket, 3, 2, 3, **{given: at_step(1)})
        assert self.kinds(bucket) == ["fence", "anchor", "delta", "fence", "delta", "delta"]
        check_no_mixture(bucket)

    def test_other_given_weights_are_not_used(self, bucket: Troubled) -> None:
        self.publish(bucket, 2, 0, 1)
        self.publish(bucket, 2, 2, published=at_step(0))
        assert self.kinds(bucket) == ["fence", "anchor", "delta", "fence", "anchor"]
        check_no_mixture(bucket)

    def test_one_process_continues_after_several(self, bucket: Troubled) -> None:
        self.publish(bucket, 2, 0, 1)
        with Publisher(bucket) as publisher:
            publisher.publish(at_step(2), step=2).wait(60)
        assert self.kinds(bucket) == ["fence", "anchor", "delta", "fence", "delta"]
        self.publish(bucket, 2, 3)
        check_no_mixture(bucket)

    def test_a_follower_continues_after_a_restart_with_other_ranks(self, tmp_path: Path) -> None:
        url = tmp_path / "bucket"
        self.publish(url, 2, 0, 1)  # type: ignore[arg-type]
        with Follower(url, into=tmp_path / "replica") as follower:
            follower.once()
            self.publish(url, 3, 2, 3)  # type: ignore[arg-type]
            follower.once()
            assert follower.version == 5
            found = load_file(follower.checkpoint() / "model.safetensors")
        np.testing.assert_array_equal(found["norm"], at_step(3)["norm"])

    @SIZES
    def test_a_new_run_may_start_from_a_base(self, bucket: Troubled, size: int) -> None:
        self.publish(bucket, size, 1, 2, base=at_step(0), source="elsewhere")
        _, base, *rest = commits_in(bucket)
        assert (base.kind, base.after, base.source) == ("base", digest(at_step(0)).hex, "elsewhere")
        assert [commit.kind for commit in rest] == ["delta", "delta"]
        assert version_in(bucket, base=at_step(0)) == digest(at_step(2))

    def test_a_base_that_only_one_rank_was_given_is_not_used(self, bucket: Troubled) -> None:
        heard: list[Event] = []
        self.publish(bucket, 2, 1, base=ByRank({0: at_step(0)}), on_event=heard.append)
        assert self.kinds(bucket) == ["fence", "anchor"]
        assert any("not all ranks were given the same published= or base= weights" in event.message for event in heard)

    def test_a_base_of_another_model_is_refused(self, bucket: Troubled) -> None:
        with pytest.raises(SchemaChanged):
            self.publish(bucket, 2, 1, base={"x": np.zeros(3)})
