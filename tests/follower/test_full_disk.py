"""A disk without room leaves the version held, and is got over."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.followers import (
    Trainer,
    check,
    current,
    settled,
    until,
    warnings,
)
from weightwire import Follower
from weightwire.errors import (
    ReplicaError,
    WeightwireError,
)
from weightwire.telemetry.events import Event


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can be longer than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestAFullDisk:
    def test_leaves_the_version_held(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        trainer.publish(2)
        with full_disk(100):
            with pytest.raises(WeightwireError, match="File too large") as caught:
                follower.once()
            assert caught.value.hint
        check(follower, trainer.bits, 1)
        assert follower.once() == 3
        check(follower, trainer.bits, 3)

    def test_leaves_nothing_half_made(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish(2)
        with full_disk(50_000):
            with pytest.raises(WeightwireError, match="File too large") as caught:
                follower.once()
            assert caught.value.hint
        assert not (into / "current").exists()
        assert follower.once() == 2
        check(follower, trainer.bits, 2)

    def test_leaves_current_as_it_was(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish()
        follower.once()
        trainer.publish(2)
        with full_disk(50_000):
            with pytest.raises(ReplicaError, match="File too large") as caught:
                follower.once()
            assert caught.value.hint == "free some space, and go on"
            assert current(into) == 1
        trainer.publish()
        assert follower.once() == 4
        check(follower, trainer.bits, 4)

    def test_that_has_room_again_makes_current(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        """Without waiting for the next version."""
        trainer.publish()
        follower.once()
        trainer.publish()
        with full_disk(50_000), pytest.raises(ReplicaError):
            follower.once()
        assert follower.once() == 2
        assert current(into) == 2

    def test_is_got_over(self, trainer: Trainer, follower: Follower, heard: list[Event]) -> None:
        trainer.publish()
        follower.start()
        until(lambda: settled(follower, 1))
        with full_disk(100):
            trainer.publish()
            until(lambda: follower.trouble)
            time.sleep(0.05)
            assert len(warnings(heard)) == 1
        until(lambda: settled(follower, 2))
        check(follower, trainer.bits, 2)
