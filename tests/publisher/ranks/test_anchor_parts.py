"""Anchors of several ranks."""

from __future__ import annotations

import asyncio

from support.failing_bucket import Troubled, denied
from support.rank_circle import at_step, check_no_mixture, on_all, shard
from weightwire import digest
from weightwire.chain.records import Shortcut, unseal
from weightwire.publisher.publisher import Publisher


class TestAnchors:
    def test_an_anchor_has_a_part_of_each_rank(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            for step in range(7):
                publisher.publish(shard(at_step(step), rank, 3), step=step).wait(60)

        on_all(bucket, 3, work, anchor_every=2)
        found = asyncio.run(bucket.list("shortcuts/"))
        assert found
        for one in found:
            shortcut = unseal(asyncio.run(bucket.get(one.path)), Shortcut, one.path).record
            assert [file.rank for file in shortcut.files] == [0, 1, 2]
            assert shortcut.after == digest(at_step(shortcut.version - 1)).hex
        check_no_mixture(bucket)  # restores from the anchors

    def test_an_anchor_that_fails_on_one_rank_is_not_recorded(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/3/e1-r1", denied)

        def work(publisher: Publisher, rank: int) -> None:
            for step in range(4):
                publisher.publish(shard(at_step(step), rank, 2), step=step).wait(60)

        on_all(bucket, 2, work, anchor_every=2)
        assert not [one for one in asyncio.run(bucket.list("shortcuts/")) if one.path.startswith("shortcuts/3/")]
        check_no_mixture(bucket)
