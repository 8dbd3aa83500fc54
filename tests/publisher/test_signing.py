"""A publisher with a key signs every commit, and continues only a history that its key may vouch for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from support.chains import deny_as_s3
from support.failing_bucket import Act, Troubled, in_memory
from support.followers import Trainer, copy_of, paths, read, remove, write
from weightwire import Publisher
from weightwire.chain.keys import PrivateKey
from weightwire.chain.reader import read_run
from weightwire.chain.record_paths import ALIVE, commit_path
from weightwire.chain.records import Commit, SignOfLife, seal, unseal
from weightwire.errors import BrokenChain, Untrusted

KEY, EVIL = PrivateKey.generate(), PrivateKey.generate()


@pytest.fixture
def bucket() -> Troubled:
    return in_memory()


@pytest.fixture
def trainer(bucket: Troubled) -> Iterator[Trainer]:
    trainer = Trainer(bucket.inner, key=KEY)
    yield trainer
    trainer.close()


class TestPublisher:
    def test_every_commit_is_signed(self, trainer: Trainer, bucket: Troubled) -> None:
        trainer.publish(2)
        trainer.restart()
        trainer.publish()
        for path in paths(bucket, "commits/"):
            assert unseal(read(bucket, path), Commit, path).is_authentic
        assert asyncio.run(read_run(bucket)).keys == (KEY.public.hex,)

    @pytest.mark.parametrize(
        ("first", "second", "message"),
        [
            (KEY, None, "this run is signed, and this publisher has no key"),
            (None, KEY, "this run is not signed"),
            (KEY, EVIL, "which you do not trust"),
        ],
        ids=["no key", "unsigned run", "another key"],
    )
    def test_a_run_is_continued_only_with_its_key(
        self, first: PrivateKey | None, second: PrivateKey | None, message: str, bucket: Troubled
    ) -> None:
        trainer = Trainer(bucket.inner, key=first)
        trainer.publish(2)
        trainer.close()
        before = copy_of(bucket)
        with pytest.raises(Untrusted, match=message) as caught:
            Publisher(bucket.inner, key=second, blocking=True, on_event=lambda event: None)
        assert caught.value.hint
        assert {path for path in copy_of(bucket) if not path.startswith("probe/")} == {*before}

    def test_a_publisher_does_not_continue_a_strangers_version(self, trainer: Trainer, bucket: Troubled) -> None:
        trainer.publish(2)
        trainer.close()
        last = unseal(read(bucket, commit_path(2)), Commit, "")
        write(bucket, commit_path(2), seal(last.record, EVIL).data)
        with pytest.raises(Untrusted):
            Trainer(bucket.inner, key=KEY).publish()

    def test_sign_of_life_is_written_if_the_store_denies_what_is_missing(self, bucket: Troubled) -> None:
        """S3 answers 403 for a missing object to a key that may not list it."""
        bucket.trouble("get find", "commits/", deny_as_s3, times=1e9)
        with Publisher(bucket, key=KEY, on_event=lambda event: None) as publisher:
            publisher.publish({"w": np.ones(3, np.float32)}).wait(60)
        assert unseal(read(bucket, ALIVE), SignOfLife, ALIVE).record.version == 1

    def test_sign_of_life_names_a_version_that_was_committed_while_it_was_written(self, bucket: Troubled) -> None:
        release = threading.Event()

        async def hold(act: Act) -> None:
            await asyncio.to_thread(release.wait, 60)
            await act()

        bucket.trouble("put", ALIVE, hold)
        with Publisher(bucket, key=KEY, on_event=lambda event: None) as publisher:
            publisher.publish({"w": np.ones(3, np.float32)}).wait(60)
            publisher.publish({"w": np.zeros(3, np.float32)}).wait(60)
            release.set()
        assert unseal(read(bucket, ALIVE), SignOfLife, ALIVE).record.version == 2

    def test_a_publisher_does_not_continue_a_rolled_back_run(self, trainer: Trainer, bucket: Troubled) -> None:
        """Its sign of life names a version that the bucket has lost. To go on would be a second history."""
        trainer.publish(3)
        trainer.close()
        for path in (commit_path(2), commit_path(3)):
            remove(bucket, path)
        before = copy_of(bucket)
        with pytest.raises(BrokenChain, match="does not have version 3, which its publisher committed") as caught:
            Trainer(bucket.inner, key=KEY).publish()
        assert caught.value.hint
        assert "publish under another URL" in caught.value.hint
        assert {path for path in copy_of(bucket) if not path.startswith("probe/")} == {*before}
