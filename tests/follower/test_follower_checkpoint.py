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
    def test_checkpoint_has_the_version_of_the_replica(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish(2)
        follower.once()
        path = follower.checkpoint()
        assert path == (into / "current").resolve()
        assert bits_of(path) == trainer.bits[2]
        assert follower.checkpoint() == path

    def test_checkpoint_of_an_empty_replica_is_an_error(self, follower: Follower) -> None:
        with pytest.raises(WeightwireError, match="holds nothing yet") as caught:
            follower.checkpoint()
        assert caught.value.hint

    def test_closed_follower_refuses_to_make_a_checkpoint(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        follower.close()
        with pytest.raises(Closed, match="this follower is closed"):
            follower.checkpoint()
        with pytest.raises(Closed), follower.borrow_checkpoint():
            pass

    def test_next_patch_starts_from_the_loaded_checkpoint(self, trainer: Trainer, follower: Follower) -> None:
        """The follower has advanced since the update without a patch."""
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

    def test_checkpoint_without_a_pending_load_does_not_move_the_next_patch(
        self, trainer: Trainer, follower: Follower
    ) -> None:
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

    def test_checkpoint_is_never_changed_by_newer_versions(
        self, trainer: Trainer, follower: Follower, into: Path
    ) -> None:
        """A process that has it open keeps its version."""
        trainer.publish()
        follower.once()
        with (into / "current" / "model.safetensors").open("rb") as file:
            before = file.read()
            trainer.publish(3)
            follower.once()
            file.seek(0)
            assert file.read() == before
        assert current(into) == 4

    def test_checkpoint_stays_while_newer_versions_arrive(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        taken(follower)
        path = follower.checkpoint()
        trainer.publish()
        follower.once()
        assert bits_of(path) == trainer.bits[1]

    def test_checkpoint_stays_after_close(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        with Follower(bucket, into=into, on_event=ignore) as follower:
            follower.once()
            path = follower.checkpoint()
            trainer.publish()
            follower.once()
        assert bits_of(path) == trainer.bits[1]
        assert current(into) == 2

    def test_several_checkpoints_can_be_borrowed_at_once(self, trainer: Trainer, follower: Follower) -> None:
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

    def test_next_patch_starts_from_the_borrowed_checkpoint(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        assert taken(follower).patch is None
        trainer.publish()
        follower.once()
        with follower.borrow_checkpoint() as path:
            assert bits_of(path) == trainer.bits[2]
        assert follower.take() is None

    def test_checkpoint_of_an_empty_replica_cannot_be_borrowed(self, follower: Follower) -> None:
        with pytest.raises(WeightwireError, match="holds nothing yet"), follower.borrow_checkpoint():
            pass

    def test_checkpoint_is_available_while_the_bucket_is_unreachable(
        self, bucket: Troubled, trainer: Trainer, into: Path
    ) -> None:
        trainer.publish(2)
        with Follower(bucket, into=into) as follower:
            follower.once()
        bucket.trouble("get", "", failed, ALWAYS)
        with Follower(bucket, into=into) as follower:
            with pytest.raises(Unavailable):
                follower.once()
            assert bits_of(follower.checkpoint()) == trainer.bits[2]


class TestClose:
    def test_close_makes_current_the_version_held(
        self, bucket: Troubled, trainer: Trainer, into: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The `current` of a large replica is not made for each version."""
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

    def test_close_ends_the_lease(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        for start in (Follower.once, Follower.start):
            with Follower(bucket, into=into, name="rollout-1", on_event=ignore) as follower:
                start(follower)
                until(lambda: beat_in(bucket, "rollout-1").lease > 0)
            assert beat_in(bucket, "rollout-1").stopped

    @pytest.mark.parametrize("what", [failed, denied, slow(600)])
    def test_close_works_if_the_last_heartbeat_cannot_be_written(
        self,
        bucket: Troubled,
        trainer: Trainer,
        follower: Follower,
        monkeypatch: pytest.MonkeyPatch,
        what: Trouble,
    ) -> None:
        """It takes a bounded time and raises no error. The lease runs out."""
        monkeypatch.setattr("weightwire.follower.follower._LAST_HEARTBEAT", 0.05)
        trainer.publish()
        follower.once()
        bucket.trouble("put", "replicas/", what, ALWAYS)
        follower.close()
        assert beat_in(bucket, "rollout-1").lease > 0

    def test_close_may_be_called_twice(self, follower: Follower) -> None:
        follower.close()
        follower.close()

    def test_close_unlocks_the_replica(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        first = Follower(bucket, into=into)
        first.start()
        until(lambda: first.version == 1)
        first.close()
        with Follower(bucket, into=into) as second:
            assert second.once() == 1

    def test_close_leaves_no_thread(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        def of_followers() -> set[threading.Thread]:
            return {thread for thread in threading.enumerate() if thread.name == "weightwire-follower"}

        trainer.publish()
        before = of_followers()
        with Follower(bucket, into=into) as follower:
            next(follower.watch(timeout=90))
            assert of_followers() - before
        assert not of_followers() - before

    def test_close_leaves_a_complete_checkpoint_at_any_moment(
        self, bucket: Troubled, trainer: Trainer, into: Path
    ) -> None:
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
