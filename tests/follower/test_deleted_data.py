"""Followers route around deleted data, also with keys without list permission."""

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
from weightwire.chain.record_paths import HEAD
from weightwire.errors import (
    DataGone,
    NotFound,
    PermissionDenied,
)


class TestLostData:
    def test_follower_avoids_lost_data_with_an_anchor(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=4)
        trainer.publish()
        follower.once()
        trainer.publish(6)
        trainer.close()
        remove(bucket, "deltas/3/")
        assert follower.once() == 7
        check(follower, trainer.bits, 7)
        assert bucket.count("read_into", "anchors/5/") == 1

    def test_fresh_follower_starts_from_an_older_anchor_if_data_is_lost(
        self, bucket: Troubled, follower: Follower
    ) -> None:
        trainer = Trainer(bucket.inner, anchor_every=4)
        trainer.publish(10)
        trainer.close()
        remove(bucket, "anchors/9/")
        assert follower.once() == 10
        check(follower, trainer.bits, 10)

    def test_follower_gets_past_lost_data_once_there_is_an_anchor(
        self, bucket: Troubled, trainer: Trainer, follower: Follower
    ) -> None:
        trainer.publish()
        follower.once()
        trainer.publish(2)
        remove(bucket, "deltas/2/")
        with pytest.raises(DataGone) as caught:
            follower.once()
        assert str(caught.value.hint).startswith("restart the trainer with anchor_every=1; or stop it")
        check(follower, trainer.bits, 1)
        trainer.close()
        trainer._settings |= {"anchor_every": 1, "published": trainer.weights}
        trainer.restart()
        version = trainer.publish()
        trainer.close()
        assert follower.once() == version
        check(follower, trainer.bits, version)

    def test_fresh_follower_fails_if_every_anchor_is_lost(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, into: Path
    ) -> None:
        trainer.publish(3)
        remove(bucket, "anchors/")
        with pytest.raises(DataGone, match="no anchor leads"):
            follower.once()
        assert not (into / "current").exists()
        assert follower.version is None


def missing_is_denied(bucket: Troubled) -> None:
    """Denies access to missing objects, as S3 does for a key without list permission."""

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


class TestKeyWithoutListPermission:
    def test_key_without_list_permission_can_follow(
        self, bucket: Troubled, trainer: Trainer, follower: Follower
    ) -> None:
        missing_is_denied(bucket)
        trainer.publish(3)
        assert follower.once() == 3
        assert follower.once() == 3
        for versions in (1, 2, 70):
            version = trainer.publish(versions)
            assert follower.once() == version
            check(follower, trainer.bits, version)

    def test_key_without_list_permission_finds_the_newest_anchor(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=5)
        trainer.publish(14)
        trainer.close()
        assert json.loads(read(bucket, HEAD))["anchor"]
        missing_is_denied(bucket)
        assert follower.once() == 14
        check(follower, trainer.bits, 14)
        assert bucket.count("read_into", "anchors/11/") == 1

    def test_key_without_list_permission_avoids_lost_data(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=4)
        trainer.publish()
        follower.once()
        trainer.publish(6)
        trainer.close()
        remove(bucket, "deltas/3/")
        missing_is_denied(bucket)
        assert follower.once() == 7
        check(follower, trainer.bits, 7)

    def test_key_without_any_permission_is_denied(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        bucket.trouble("get find list read_into", "", denied, ALWAYS)
        with pytest.raises(PermissionDenied):
            follower.once()
