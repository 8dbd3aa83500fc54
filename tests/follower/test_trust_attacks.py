"""Attacks on signed runs that once worked: by whoever can write to the bucket, or holds a revoked key."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.failing_bucket import Troubled
from support.followers import (
    Trainer,
    append_version,
    copy_of,
    current,
    lose_weights,
    paths,
    put_back,
    read,
    remove,
    write,
)
from weightwire import Follower, Publisher
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import ALIVE, RUN, commit_path, side_path
from weightwire.chain.records import Commit, Run, SideFile, SignOfLife, seal, unseal
from weightwire.chain.writer import Signer
from weightwire.errors import BrokenChain, Fenced, Untrusted, WeightwireError
from weightwire.system.runtime import Runtime
from weightwire.upkeep.key_change import change_keys

KEY, OTHER, EVIL = (PrivateKey.generate() for _ in range(3))
NEVER = 1 << 30


@pytest.fixture
def trainer(bucket: Troubled) -> Trainer:
    trainer = Trainer(bucket.inner, key=KEY)
    trainer.publish(4)
    trainer.close()
    return trainer


@pytest.fixture
def follow(bucket: Troubled, into: Path) -> Callable[..., Follower]:
    def follow(*trusted: PrivateKey, **settings: Any) -> Follower:
        trust = [str(one.public) for one in trusted] or None
        return Follower(bucket, into=into, trust=trust, threads=1, on_event=lambda event: None, **settings)

    return follow


def replace_key(bucket: Troubled) -> int:
    add, revoke = frozenset({OTHER.public.hex}), frozenset({KEY.public.hex})
    version = asyncio.run(change_keys(bucket.inner, Runtime(), Signer(KEY), add, revoke, lambda message: None))
    assert version is not None
    return version


def rename_keys(bucket: Troubled, *keys: PrivateKey) -> None:
    """Writes other keys into run.json."""
    run = msgspec.json.decode(read(bucket, RUN))
    write(bucket, RUN, msgspec.json.encode(run | {"keys": [one.public.hex for one in keys]}))


def test_keys_of_a_changed_run_json_are_not_signed_into_the_run(trainer: Trainer, bucket: Troubled) -> None:
    rename_keys(bucket, KEY, EVIL)
    with pytest.raises(BrokenChain, match=r"does not belong to this run\.json"):
        replace_key(bucket)


def test_key_of_another_run_cannot_continue_this_one(
    trainer: Trainer, bucket: Troubled, follow: Callable[..., Follower]
) -> None:
    with follow(KEY, EVIL) as follower:
        follower.once()
    rename_keys(bucket, EVIL)
    append_version(bucket, EVIL)
    with follow(KEY, EVIL) as follower, pytest.raises(BrokenChain, match=r"does not belong to this run\.json"):
        follower.once()


def test_revoked_key_cannot_replace_the_fence_that_revoked_it(
    trainer: Trainer, bucket: Troubled, follow: Callable[..., Follower]
) -> None:
    fence = replace_key(bucket)
    append_version(bucket, OTHER)
    with follow(KEY) as follower:
        assert follower.once() == 6
    forged = msgspec.structs.replace(
        unseal(read(bucket, commit_path(fence)), Commit, "").record, keys=(EVIL.public.hex,)
    )
    append_version(bucket, EVIL)
    write(bucket, commit_path(fence), seal(forged, KEY).data)
    with follow(KEY) as follower, pytest.raises(Untrusted, match="ignores the keys"):
        follower.once()


def test_publisher_does_not_sign_the_run_json_of_a_stranger(bucket: Troubled) -> None:
    evil = b"import os"
    sha256 = hashlib.sha256(evil).hexdigest()
    with closing(Trainer((fork := Troubled(bucket.inner)).inner, key=KEY)) as trainer:
        trainer.publish()
    planted = unseal(read(fork, RUN), Run, RUN).record
    for path in copy_of(bucket):
        remove(bucket, path)
    files = (SideFile("modeling.py", side_path("modeling.py", sha256), len(evil), sha256),)
    for one in ({"files": files}, {"keys": (KEY.public.hex, EVIL.public.hex)}):
        write(bucket, RUN, seal(msgspec.structs.replace(planted, **one)).data)
        other = Trainer(bucket.inner, key=KEY)
        with pytest.raises(Untrusted, match=r"run\.json names other keys or side files"):
            other.publish()
        with suppress(Untrusted):
            other.close()
    assert not paths(bucket, "commits/")


def test_replica_that_lost_its_weights_does_not_go_back(
    trainer: Trainer, bucket: Troubled, follow: Callable[..., Follower], into: Path
) -> None:
    with follow(KEY) as follower:
        assert follower.once() == 4
    good = copy_of(bucket)
    lose_weights(into)
    for version in (3, 4):
        remove(bucket, f"deltas/{version}/")
    with follow(KEY) as follower:
        with pytest.raises(WeightwireError):
            follower.once()
        assert follower.version is None
        put_back(bucket, good)
        assert follower.once() == 4
    assert current(into) == 4


def test_version_that_was_followed_without_trust_is_checked(
    trainer: Trainer, bucket: Troubled, follow: Callable[..., Follower]
) -> None:
    append_version(bucket, EVIL)
    with follow() as follower:
        assert follower.once() == 5
    with follow(KEY) as follower, pytest.raises(Untrusted, match="is not a key of this run"):
        follower.once()


def test_replaced_publisher_shows_no_sign_of_life(bucket: Troubled) -> None:
    trainer = Trainer(bucket.inner, key=KEY)
    trainer.publish()
    with closing(Trainer(bucket.inner, key=KEY)) as successor:
        successor.publish()
    asyncio.run(bucket.inner.delete(ALIVE))
    publisher: Any = trainer.publisher
    publisher._background.call(publisher._process.writer.show_alive())
    assert ALIVE not in copy_of(bucket)
    with suppress(Fenced):
        trainer.close()


@pytest.mark.parametrize("added", [b" ", b"\n", b"\n{}"])
def test_signature_has_one_form(added: bytes, trainer: Trainer, bucket: Troubled) -> None:
    """Otherwise anyone could change the hash of the newest commit, which followers remember for good."""
    data = read(bucket, commit_path(4))
    with pytest.raises(BrokenChain, match="cannot be read"):
        unseal(data + added, Commit, "commit")


def test_sign_of_life_in_the_far_future_is_refused() -> None:
    with pytest.raises(ValueError, match="its time is malformed"):
        SignOfLife(run="ab" * 16, epoch=1, version=1, commit="ab" * 32, time=1e300)


def test_trust_in_nobody_is_refused(trainer: Trainer, bucket: Troubled, into: Path) -> None:
    nobody: list[Any] = ["", []]
    for trust in nobody:
        with pytest.raises(WeightwireError, match="names no key"):
            Follower(bucket, into=into, trust=trust)
        with pytest.raises(WeightwireError, match="names no key"):
            Publisher(bucket, key=KEY, trust=trust or [])


@pytest.mark.parametrize("age", ["5min", -1, 0])
def test_greatest_age_is_a_number_of_seconds(age: Any, bucket: Troubled, into: Path) -> None:
    with pytest.raises(WeightwireError, match="is not a number of seconds"):
        Follower(bucket, into=into, trust=str(KEY.public), max_age=age)


def test_publisher_takes_one_trusted_key(trainer: Trainer, bucket: Troubled) -> None:
    replace_key(bucket)
    with closing(Trainer(bucket.inner, key=OTHER, trust=str(KEY.public))) as after:
        assert after.publish() == 7


def test_another_history_of_the_same_key_is_refused_even_after_the_weights_are_lost(
    bucket: Troubled, follow: Callable[..., Follower], into: Path
) -> None:
    """A publisher that is shown an old copy of the bucket signs other versions with the same numbers."""
    with closing(Trainer(bucket.inner, key=KEY)) as trainer:
        trainer.publish(2)
        early = copy_of(bucket)
        trainer.publish(3)
    good = copy_of(bucket)
    with follow(KEY) as follower:
        assert follower.once() == 5
    lose_weights(into)
    put_back(bucket, early)
    with closing(Trainer(bucket.inner, key=KEY)) as other:
        other.publish(5)
    with follow(KEY) as follower:
        with pytest.raises(BrokenChain, match="does not follow from version 5, seen before"):
            follower.once()
        put_back(bucket, good)
        assert follower.once() == 5
