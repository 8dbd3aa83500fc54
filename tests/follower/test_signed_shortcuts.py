"""Shortcuts of a signed run: only the state digest binds their data to the chain, and an attacker can craft that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.failing_bucket import Troubled
from support.followers import Trainer, check, paths, read, remove, write
from weightwire import Follower
from weightwire.chain.keys import PrivateKey
from weightwire.chain.records import Shortcut, seal, shortcut_path, unseal
from weightwire.chain.writer import Signer
from weightwire.system.runtime import Runtime
from weightwire.upkeep.key_change import change_keys

KEY, OTHER, EVIL = (PrivateKey.generate() for _ in range(3))


@pytest.fixture
def trainer(bucket: Troubled) -> Trainer:
    trainer = Trainer(bucket.inner, key=KEY, anchor_every=2)
    trainer.publish(6)
    trainer.close()
    assert paths(bucket, "shortcuts/")
    return trainer


@pytest.fixture
def late(bucket: Troubled, into: Path) -> Iterator[Follower]:
    """A new follower that trusts KEY."""
    with Follower(bucket, into=into, trust=str(KEY.public), threads=1, on_event=lambda event: None) as follower:
        yield follower


def sign_again(bucket: Troubled, key: PrivateKey | None) -> None:
    """Replaces all shortcuts by the same ones with another signature."""
    for path in paths(bucket, "shortcuts/"):
        record = unseal(read(bucket, path), Shortcut, path).record
        remove(bucket, path)
        sealed = seal(record, key)
        write(bucket, shortcut_path(sealed), sealed.data)


def replace_key(bucket: Troubled) -> None:
    add, revoke = frozenset({OTHER.public.hex}), frozenset({KEY.public.hex})
    asyncio.run(change_keys(bucket.inner, Runtime(), Signer(KEY), add, revoke, lambda message: None))


def anchors_read(bucket: Troubled) -> set[str]:
    """The versions whose anchors were requested."""
    return {path.split("/")[1] for _, path in bucket.asked if path.startswith("anchors/")}


def test_late_joiners_start_from_signed_shortcuts(trainer: Trainer, bucket: Troubled, late: Follower) -> None:
    remove(bucket, "anchors/1/")
    assert late.once() == 6
    check(late, trainer.bits, 6)


@pytest.mark.parametrize("key", [None, EVIL], ids=["nobody", "a stranger"])
def test_shortcuts_that_another_key_signed_are_not_used(
    key: PrivateKey | None, trainer: Trainer, bucket: Troubled, late: Follower
) -> None:
    sign_again(bucket, key)
    bucket.asked.clear()
    assert late.once() == 6
    check(late, trainer.bits, 6)
    assert anchors_read(bucket) == {"1"}


def test_shortcuts_of_a_revoked_key_are_not_used(trainer: Trainer, bucket: Troubled, late: Follower) -> None:
    replace_key(bucket)
    bucket.asked.clear()
    assert late.once() == 7
    assert anchors_read(bucket) == {"1"}


def test_the_first_version_of_a_new_key_gets_an_anchor(trainer: Trainer, bucket: Troubled) -> None:
    replace_key(bucket)
    with closing(Trainer(bucket.inner, key=OTHER, trust=[str(KEY.public)])) as after:
        version = after.publish()
    (made,) = paths(bucket, f"shortcuts/{version}/")
    assert unseal(read(bucket, made), Shortcut, made).is_authentic
