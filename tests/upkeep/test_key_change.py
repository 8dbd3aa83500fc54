"""Replacing the keys of a run: what may be changed, and that nothing is written where nothing changes."""

from __future__ import annotations

import asyncio

import pytest

from support.failing_bucket import Troubled, in_memory
from support.followers import Trainer, copy_of, remove
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import commit_path
from weightwire.chain.writer import Signer
from weightwire.errors import BadKey, BrokenChain, Untrusted
from weightwire.inspection import read_keys
from weightwire.system.runtime import Runtime
from weightwire.upkeep import change_keys

KEY, OTHER, EVIL = (PrivateKey.generate() for _ in range(3))


@pytest.fixture
def bucket() -> Troubled:
    """A signed run whose newest version is 2."""
    bucket = in_memory()
    trainer = Trainer(bucket.inner, key=KEY)
    trainer.publish(2)
    trainer.close()
    return bucket


def change(
    bucket: Troubled, *, add: tuple[PrivateKey, ...] = (), revoke: tuple[PrivateKey, ...] = (), by: PrivateKey = KEY
) -> int | None:
    added, revoked = (frozenset(one.public.hex for one in keys) for keys in (add, revoke))
    signer = Signer(by, frozenset({KEY.public.hex}))
    return asyncio.run(change_keys(bucket.inner, Runtime(), signer, added, revoked, lambda message: None))


def keys_of(bucket: Troubled) -> set[str]:
    return {*asyncio.run(read_keys(bucket))}


def test_added_key_may_sign_the_next_version(bucket: Troubled) -> None:
    assert change(bucket, add=(OTHER,)) == 3
    assert keys_of(bucket) == {KEY.public.hex, OTHER.public.hex}
    assert change(bucket, revoke=(KEY,), by=OTHER) == 4
    assert keys_of(bucket) == {OTHER.public.hex}


def test_key_that_the_run_has_already_is_not_added_again(bucket: Troubled) -> None:
    """A fence would stop the trainer for nothing."""
    before = copy_of(bucket)
    assert change(bucket, add=(KEY,)) is None
    assert copy_of(bucket) == before


@pytest.mark.parametrize(
    ("revoked", "message"),
    [(KEY, "no key would be left"), (OTHER, "is not a key of this run")],
    ids=["last", "unknown"],
)
def test_last_key_and_unknown_keys_cannot_be_revoked(bucket: Troubled, revoked: PrivateKey, message: str) -> None:
    before = copy_of(bucket)
    with pytest.raises(BadKey, match=message):
        change(bucket, revoke=(revoked,))
    assert copy_of(bucket) == before


def test_keys_of_a_rolled_back_run_are_not_changed(bucket: Troubled) -> None:
    remove(bucket, commit_path(2))
    before = copy_of(bucket)
    with pytest.raises(BrokenChain, match="does not have version 2, which its publisher committed"):
        change(bucket, add=(OTHER,))
    assert copy_of(bucket) == before


def test_stranger_cannot_change_keys_and_leaves_no_epoch(bucket: Troubled) -> None:
    before = copy_of(bucket)
    with pytest.raises(Untrusted, match="is not a key of this run, or was revoked"):
        change(bucket, add=(EVIL,), by=EVIL)
    assert copy_of(bucket) == before
