"""The checkpoints that a follower hands out, and what it leaves when it is closed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from support.failing_bucket import Trouble, Troubled, denied, failed, slow
from support.followers import (
    ALWAYS,
    Engine,
    Trainer,
    beat_in,
    check,
    current,
    ignore,
    taken,
    until,
)
from support.small_run import bits_of
from weightwire import Follower
from weightwire.errors import (
    Closed,
    Unavailable,
    WeightwireError,
)
from weightwire.follower import replica_updater


class TestCheckpoint:
    def test_is_of_the_version_held(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish(2)
        follower.once()
        path = follower.checkpoint()
        assert path == (into / "current").resolve()
        assert bits_of(path) == trainer.bits[2]
        assert follower.checkpoint() == path

    def test_needs_a_version(self, follower: Follower) -> None:
        with pytest.raises(WeightwireError, match="holds nothing yet") as caught:
            follower.checkpoint()
        assert caught.value.hint

    def test_of_a_closed_follower_is_refused_as_such(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        follower.close()
        with pytest.raises(Closed, match="this follower is closed"):
            follower.checkpoint()
        with pytest.raises(Closed), follower.borrow_checkpoint():
            pass

    def test_is_where_the_next_patch_starts(self, trainer: Trainer, follower: Follower) -> None:
        """Though the follower has gone on since it said that all weights must be loaded."""
        engine = Engine(follower)
        trainer.publish()
        follower.once()
        assert taken(follower).patch is None
        trainer.publish(2)
        follower.once()
        engine.load()
        assert bits_of(engine.weights) == trainer.bits[3]
        assert follower.take() is None
        trainer.publish()
        follower.once()
        engine.take(taken(follower))
        assert bits_of(engine.weights) == trainer.bits[4]

    def test_for_others_does_not_move_the_next_patch(self, trainer: Trainer, follower: Follower) -> None:
        engine = Engine(follower)
        trainer.publish()
        follower.once()
        engine.take(taken(follower))
        for _ in range(3):
            trainer.publish()
            follower.once()
            follower.checkpoint()
        engine.take(taken(follower))
        assert bits_of(engine.weights) == trainer.bits[4]

    def test_is_never_changed(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        """Whoever has it open keeps the version that it was."""
        trainer.publish()
        follower.once()
        with (into / "current" / "model.safetensors").open("rb") as file:
            before = file.read()
            trainer.publish(3)
            follower.once()
            file.seek(0)
            assert file.read() == before
        assert current(into) == 4

    def test_stays_while_newer_versions_come(self, trainer: Trainer, follower: Follower) -> None:
        """However fast versions come."""
        trainer.publish()
        follower.once()
        taken(follower)
        path = follower.checkpoint()
        trainer.publish()
        follower.once()
        assert bits_of(path) == trainer.bits[1]

    def test_is_there_after_close(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        with Follower(bucket, into=into, on_event=ignore) as follower:
            follower.once()
            path = follower.checkpoint()
            trainer.publish()
            follower.once()
        assert bits_of(path) == trainer.bits[1]
        assert current(into) == 2

    def test_can_be_borrowed_by_several(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        with follower.borrow_checkpoint() as first:
            trainer.publish()
            follower.once()
            with follower.borrow_checkpoint() as second:
                trainer.publish()
                follower.once()
                follower.checkpoint()
                assert bits_of(second) == trainer.bits[2]
            assert not second.exists()
            assert bits_of(first) == trainer.bits[1]
        assert not first.exists()

    def test_that_is_borrowed_is_where_the_next_patch_starts(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        assert taken(follower).patch is None
        trainer.publish()
        follower.once()
        with follower.borrow_checkpoint() as path:
            assert bits_of(path) == trainer.bits[2]
        assert follower.take() is None

    def test_of_nothing_cannot_be_borrowed(self, follower: Follower) -> None:
        with pytest.raises(WeightwireError, match="holds nothing yet"), follower.borrow_checkpoint():
            pass

    def test_can_be_had_while_the_bucket_is_away(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish(2)
        with Follower(bucket, into=into) as follower:
            follower.once()
        bucket.trouble("get", "", failed, ALWAYS)
        with Follower(bucket, into=into) as follower:
            with pytest.raises(Unavailable):
                follower.once()
            assert bits_of(follower.checkpoint()) == trainer.bits[2]


class TestClose:
    def test_leaves_the_version_held(
        self, bucket: Troubled, trainer: Trainer, into: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a large replica, for which `current` is not made each time."""
        monkeypatch.setattr(replica_updater, "_SMALL", 0)
        trainer.publish()
        with Follower(bucket, into=into) as follower:
            follower.once()
            follower.checkpoint()
            trainer.publish(2)
            follower.once()
            assert (follower.version, current(into)) == (3, 1)
        assert current(into) == 3
        assert bits_of(into / "current") == trainer.bits[3]

    def test_ends_the_lease(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        for start in (Follower.once, Follower.start):
            with Follower(bucket, into=into, name="rollout-1", on_event=ignore) as follower:
                start(follower)
                until(lambda: beat_in(bucket, "rollout-1").lease > 0)
            assert beat_in(bucket, "rollout-1").stopped

    @pytest.mark.parametrize("what", [failed, denied, slow(600)])
    def test_works_where_the_last_heartbeat_cannot_be_written(
        self,
        bucket: Troubled,
        trainer: Trainer,
        follower: Follower,
        monkeypatch: pytest.MonkeyPatch,
        what: Trouble,
    ) -> None:
        """It takes a bounded time, and is no error; the lease runs out."""
        monkeypatch.setattr("weightwire.follower.follower._LAST_WORDS", 0.05)
        trainer.publish()
        follower.once()
        bucket.trouble("put", "replicas/", what, ALWAYS)
        follower.close()
        assert beat_in(bucket, "rollout-1").lease > 0

    def test_may_be_called_twice(self, follower: Follower) -> None:
        follower.close()
        follower.close()

    def test_lets_go_of_the_replica(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        first = Follower(bucket, into=into)
        first.start()
        until(lambda: first.version == 1)
        first.close()
        with Follower(bucket, into=into) as second:
            assert second.once() == 1

    def test_leaves_no_thread(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        with Follower(bucket, into=into) as follower:
            next(follower.watch(timeout=20))
            assert "weightwire-follower" in {thread.name for thread in threading.enumerate()}
        assert "weightwire-follower" not in {thread.name for thread in threading.enumerate()}

    def test_leaves_a_whole_checkpoint_at_any_moment(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        """At any moment: what is left is whole."""
        trainer.publish(30)
        for pause in (0.0, 0.005, 0.01, 0.02):
            with Follower(bucket, into=into, threads=1, on_event=ignore) as follower:
                follower.start()
                time.sleep(pause)
            if (into / "current").exists():
                assert bits_of(into / "current") == trainer.bits[current(into)]
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 30
            check(follower, trainer.bits, 30)
