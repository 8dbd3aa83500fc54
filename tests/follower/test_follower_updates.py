"""Updates for engines: all weights first, then one patch for all versions since."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from support.failing_bucket import Troubled
from support.followers import (
    Engine,
    Trainer,
    ignore,
    taken,
    until,
    warnings,
)
from support.small_run import bits_of
from weightwire import Follower, digest
from weightwire.follower.follow_loop import FollowLoop
from weightwire.telemetry.events import Event


class TestWatch:
    def test_watch_starts_with_all_weights_and_continues_with_patches(
        self, trainer: Trainer, follower: Follower
    ) -> None:
        trainer.publish(2)
        engine, seen = Engine(follower), []
        for update in follower.watch(timeout=90):
            engine.take(update)
            seen.append((update.version, update.patch is None))
            assert bits_of(engine.weights) == trainer.bits[update.version]
            if update.version == 5:
                break
            trainer.publish()
        assert seen == [(2, True), (3, False), (4, False), (5, False)]

    def test_watch_returns_the_trainers_step_and_metrics(self, trainer: Trainer, follower: Follower) -> None:
        began = time.time()
        trainer.publish(2)
        update = next(follower.watch(timeout=90))
        assert (update.version, update.step, update.metrics) == (2, 2, {"reward": 0.5})
        assert update.state == digest(trainer.weights).hex
        assert began <= update.time <= time.time()

    def test_watch_returns_one_patch_for_several_versions(self, trainer: Trainer, follower: Follower) -> None:
        engine = Engine(follower)
        trainer.publish()
        updates = follower.watch(timeout=90)
        engine.take(next(updates))
        version = trainer.publish(20)
        until(lambda: follower.version == version)
        update = next(updates)
        assert update.version == version
        assert update.patch is not None
        engine.take(update)
        assert bits_of(engine.weights) == trainer.bits[version]

    def test_watch_ends_after_the_timeout(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        assert [update.version for update in follower.watch(timeout=0.3)] == [1]
        began = time.monotonic()
        assert not list(follower.watch(timeout=0.1))
        assert 0.1 <= time.monotonic() - began < 60

    def test_watch_continues_where_the_last_watch_ended(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        assert next(follower.watch(timeout=90)).patch is None
        trainer.publish()
        update = next(follower.watch(timeout=90))
        assert update.version == 2
        assert update.patch is not None

    def test_watch_waits_for_a_run_to_begin(self, trainer: Trainer, follower: Follower, heard: list[Event]) -> None:
        follower.start()
        until(lambda: follower.trouble)
        assert "nothing has been published there yet" in follower.trouble
        trainer.publish()
        assert next(follower.watch(timeout=90)).version == 1
        until(lambda: not follower.trouble)
        assert len(warnings(heard)) == 1

    def test_watch_of_a_closed_follower_ends(self, trainer: Trainer, bucket: Troubled, into: Path) -> None:
        trainer.publish()
        for started in (False, True):
            with Follower(bucket, into=into, on_event=ignore) as follower:
                if started:
                    assert next(follower.watch(timeout=90)).version == 1
            assert not list(follower.watch())

    def test_watch_ends_when_another_thread_closes_the_follower(
        self, trainer: Trainer, bucket: Troubled, into: Path
    ) -> None:
        trainer.publish()
        follower = Follower(bucket, into=into, on_event=ignore)
        seen: list[int] = []
        ended: list[BaseException | None] = []

        def watch() -> None:
            try:
                seen.extend(update.version for update in follower.watch())
                ended.append(None)
            except BaseException as problem:
                ended.append(problem)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        until(lambda: follower.version == 1)
        time.sleep(0.05)
        follower.close()
        thread.join(60)
        assert ended == [None]

    def test_watch_raises_an_unexpected_error_of_the_loop(
        self, trainer: Trainer, follower: Follower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.publish()
        updates = follower.watch(timeout=90)
        next(updates)

        async def look(self: FollowLoop, *, retries_later: bool) -> NoReturn:
            raise ZeroDivisionError("ours")

        monkeypatch.setattr(FollowLoop, "look", look)
        follower.wake()
        with pytest.raises(ZeroDivisionError, match="ours"):
            next(updates)

    def test_watch_survives_a_failing_listener(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        def fail(event: Event) -> NoReturn:
            raise ValueError("theirs")

        trainer.publish()
        with Follower(bucket, into=into, on_event=fail) as follower:
            assert next(follower.watch(timeout=90)).version == 1


class TestTake:
    def test_take_returns_none_without_a_new_version(self, trainer: Trainer, follower: Follower) -> None:
        assert follower.take() is None
        trainer.publish()
        assert follower.take() is None
        follower.once()
        assert follower.take() is not None
        assert follower.take() is None
        follower.once()
        assert follower.take() is None

    def test_take_returns_one_patch_per_version(self, trainer: Trainer, follower: Follower) -> None:
        engine = Engine(follower)
        for version in range(1, 6):
            trainer.publish()
            follower.once()
            update = taken(follower)
            assert (update.patch is None) == (version == 1)
            engine.take(update)
            assert bits_of(engine.weights) == trainer.bits[version]

    def test_take_returns_one_patch_for_all_versions_since_the_last(self, trainer: Trainer, follower: Follower) -> None:
        engine = Engine(follower)
        trainer.publish()
        follower.once()
        engine.take(taken(follower))
        for versions in (1, 2, 5):
            trainer.publish(versions)
            follower.once()
        update = taken(follower)
        assert update.version == 9
        assert update.patch is not None
        assert update.patch.before == digest(engine.weights).hex
        engine.take(update)
        assert bits_of(engine.weights) == trainer.bits[9]

    def test_a_fence_changes_no_weights(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        engine = Engine(follower)
        engine.take(taken(follower))
        trainer.restart()
        follower.once()
        update = taken(follower)
        assert update.version == 2
        assert update.patch is not None
        assert not update.patch.entries
        engine.take(update)
        assert bits_of(engine.weights) == trainer.bits[1]

    def test_all_weights_must_be_loaded_after_a_rebuild(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, every=50, anchor_every=40)
        trainer.publish()
        follower.once()
        engine = Engine(follower)
        engine.take(taken(follower))
        trainer.publish(90)
        trainer.close()
        follower.once()
        assert bucket.count("read_into", "anchors/81/") == 1
        update = taken(follower)
        assert (update.version, update.patch) == (91, None)
        engine.take(update)
        assert bits_of(engine.weights) == trainer.bits[91]

    def test_all_weights_must_be_loaded_after_a_restart(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        """The version of the engine is unknown."""
        trainer.publish(2)
        for _ in range(2):
            with Follower(bucket, into=into) as follower:
                follower.once()
                update = taken(follower)
                assert (update.version, update.patch) == (2, None)
