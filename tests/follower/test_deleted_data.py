"""Data that was deleted: the way around it, also for keys that may not list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.failing_bucket import Act, Troubled, denied
from support.followers import (
    ALWAYS,
    Trainer,
    check,
    read,
    remove,
)
from weightwire import Follower
from weightwire.chain.records import (
    HEAD,
)
from weightwire.errors import (
    DataGone,
    NotFound,
    PermissionDenied,
)


class TestLostData:
    def test_is_passed_by_an_anchor(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=4)
        trainer.publish()
        follower.once()
        trainer.publish(6)
        trainer.close()
        remove(bucket, "deltas/3/")
        assert follower.once() == 7
        check(follower, trainer.bits, 7)
        assert bucket.count("read_into", "anchors/5/") == 1

    def test_makes_a_fresh_follower_start_from_an_older_anchor(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=4)
        trainer.publish(10)
        trainer.close()
        remove(bucket, "anchors/9/")
        assert follower.once() == 10
        check(follower, trainer.bits, 10)

    def test_is_healed_by_a_later_anchor(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        """An anchor that comes later is as good."""
        trainer.publish()
        follower.once()
        trainer.publish(2)
        remove(bucket, "deltas/2/")
        with pytest.raises(DataGone) as caught:
            follower.once()
        assert str(caught.value.hint).startswith("publish a new anchor, or ")
        check(follower, trainer.bits, 1)
        trainer.close()
        trainer._settings |= {"anchor_every": 1, "published": trainer.weights}
        trainer.restart()
        version = trainer.publish()
        trainer.close()
        assert follower.once() == version
        check(follower, trainer.bits, version)

    def test_of_every_anchor_leaves_nothing_to_start_from(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, into: Path
    ) -> None:
        trainer.publish(3)
        remove(bucket, "anchors/")
        with pytest.raises(DataGone, match="no anchor leads"):
            follower.once()
        assert not (into / "current").exists()
        assert follower.version is None


def missing_is_denied(bucket: Troubled) -> None:
    """As S3 answers to a key that may not list."""

    async def get(act: Act) -> Any:
        try:
            return await act()
        except NotFound as problem:
            raise PermissionDenied("403") from problem

    async def find(act: Act) -> Any:
        found = await act()
        if found is None:
            raise PermissionDenied("403")
        return found

    bucket.trouble("get read_into", "", get, ALWAYS)
    bucket.trouble("find", "", find, ALWAYS)
    bucket.trouble("list", "", denied, ALWAYS)


class TestAKeyWithoutListPermission:
    def test_is_enough(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        missing_is_denied(bucket)
        trainer.publish(3)
        assert follower.once() == 3
        assert follower.once() == 3
        for versions in (1, 2, 70):
            version = trainer.publish(versions)
            assert follower.once() == version
            check(follower, trainer.bits, version)

    def test_finds_the_newest_anchor(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=5)
        trainer.publish(14)
        trainer.close()
        assert json.loads(read(bucket, HEAD))["anchor"]
        missing_is_denied(bucket)
        assert follower.once() == 14
        check(follower, trainer.bits, 14)
        assert bucket.count("read_into", "anchors/11/") == 1

    def test_gets_past_data_that_is_gone(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=4)
        trainer.publish()
        follower.once()
        trainer.publish(6)
        trainer.close()
        remove(bucket, "deltas/3/")
        missing_is_denied(bucket)
        assert follower.once() == 7
        check(follower, trainer.bits, 7)

    def test_differs_from_one_without_any_permission(
        self, bucket: Troubled, trainer: Trainer, follower: Follower
    ) -> None:
        trainer.publish()
        follower.once()
        bucket.trouble("get find list read_into", "", denied, ALWAYS)
        with pytest.raises(PermissionDenied):
            follower.once()
