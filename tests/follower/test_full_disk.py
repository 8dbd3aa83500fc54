"""On a full disk, a follower keeps its version. It recovers when space is free again."""

from __future__ import annotations

import errno
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.failing_bucket import Troubled
from support.followers import (
    Trainer,
    check,
    current,
    settled,
    until,
    warnings,
)
from weightwire import Follower
from weightwire.chain.keys import PrivateKey
from weightwire.errors import (
    ReplicaError,
    WeightwireError,
)
from weightwire.system import durable_files
from weightwire.telemetry.events import Event


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limits the size of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestFullDisk:
    def test_full_disk_leaves_the_version_held(self, trainer: Trainer, follower: Follower) -> None:
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

    def test_full_disk_leaves_no_partial_files(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish(2)
        with full_disk(50_000):
            with pytest.raises(WeightwireError, match="File too large") as caught:
                follower.once()
            assert caught.value.hint
        assert not (into / "current").exists()
        assert follower.once() == 2
        check(follower, trainer.bits, 2)

    def test_full_disk_leaves_current_unchanged(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish()
        follower.once()
        trainer.publish(2)
        with full_disk(50_000):
            with pytest.raises(ReplicaError, match="File too large") as caught:
                follower.once()
            assert caught.value.hint == "free some space, then try again"
            assert current(into) == 1
        trainer.publish()
        assert follower.once() == 4
        check(follower, trainer.bits, 4)

    def test_current_is_made_once_there_is_space(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish()
        follower.once()
        trainer.publish()
        with full_disk(50_000), pytest.raises(ReplicaError):
            follower.once()
        assert follower.once() == 2
        assert current(into) == 2

    def test_background_follower_recovers_from_a_full_disk(
        self, trainer: Trainer, follower: Follower, heard: list[Event]
    ) -> None:
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

    def test_version_is_not_applied_before_it_is_remembered(
        self, bucket: Troubled, into: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A follower with trusted keys writes down each version that it has seen."""

        def fail(path: Path, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "disk full")

        trainer = Trainer(bucket.inner, key=(key := PrivateKey.generate()))
        trainer.publish(2)
        with Follower(bucket, into=into, trust=str(key.public), threads=1, on_event=lambda event: None) as follower:
            follower.once()
            trainer.publish(3)
            trainer.close()
            with monkeypatch.context() as patched:
                patched.setattr(durable_files, "write_file", fail)
                with pytest.raises(ReplicaError, match="disk full") as caught:
                    follower.once()
            assert caught.value.hint
            assert follower.version == 2
            assert follower.once() == 5
        assert json.loads((into / "seen.json").read_bytes())["version"] == 5
