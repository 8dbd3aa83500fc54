"""What inspection says about a signed run: who signed it, and whether the bucket shows all that its publisher did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from support.failing_bucket import Troubled, in_memory
from support.followers import Trainer, read, remove, write
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import ALIVE, commit_path
from weightwire.chain.records import SignOfLife, seal, unseal
from weightwire.chain.trust import Trust
from weightwire.errors import BrokenChain, Untrusted
from weightwire.inspection import read_keys, read_status, verify_run
from weightwire.system.runtime import Runtime

KEY, EVIL = PrivateKey.generate(), PrivateKey.generate()
TRUST = Trust(frozenset({KEY.public.hex}))

Read = Callable[[Troubled, Trust | None], Any]

READS: list[Read] = [
    lambda bucket, trust: asyncio.run(read_status(bucket, Runtime(), None, trust)).rights.keys,
    lambda bucket, trust: tuple(asyncio.run(read_keys(bucket, trust))),
]


@pytest.fixture
def bucket() -> Troubled:
    """A run whose newest version is 3."""
    bucket = in_memory()
    trainer = Trainer(bucket.inner, key=KEY)
    trainer.publish(3)
    trainer.close()
    return bucket


def show_alive(bucket: Troubled, version: int, key: PrivateKey) -> None:
    """Writes a sign of life that names a version which the bucket does not have yet, or another commit for it."""
    run = unseal(read(bucket, ALIVE), SignOfLife, ALIVE).record
    alive = SignOfLife(run=run.run, epoch=run.epoch, version=version, commit="0" * 64, time=run.time)
    write(bucket, ALIVE, seal(alive, key).data)


@pytest.mark.parametrize("shown", READS, ids=["status", "keys"])
class TestReaders:
    def test_keys_of_the_run_are_listed_with_and_without_trust(self, shown: Read, bucket: Troubled) -> None:
        assert shown(bucket, None) == shown(bucket, TRUST) == (KEY.public.hex,)

    def test_run_of_a_stranger_is_refused(self, shown: Read, bucket: Troubled) -> None:
        with pytest.raises(Untrusted, match="which you do not trust"):
            shown(bucket, Trust(frozenset({EVIL.public.hex})))

    def test_rolled_back_bucket_is_refused(self, shown: Read, bucket: Troubled) -> None:
        remove(bucket, commit_path(3))
        assert shown(bucket, None)
        with pytest.raises(BrokenChain, match="does not have version 3, which its publisher committed"):
            shown(bucket, TRUST)

    def test_replaced_version_is_refused(self, shown: Read, bucket: Troubled) -> None:
        show_alive(bucket, 2, KEY)
        with pytest.raises(BrokenChain, match="does not have version 2, which its publisher committed"):
            shown(bucket, TRUST)

    def test_sign_of_life_of_a_stranger_proves_nothing(self, shown: Read, bucket: Troubled) -> None:
        show_alive(bucket, 7, EVIL)
        assert shown(bucket, TRUST)
        write(bucket, ALIVE, b"not a record")
        assert shown(bucket, TRUST)


class TestVerify:
    def problems(self, bucket: Troubled, trust: Trust | None) -> list[tuple[str, str]]:
        found = asyncio.run(verify_run(bucket, Runtime(), trust=trust))
        assert found.signed
        return [(one.path, one.what) for one in found.problems]

    def test_intact_run_has_no_problems(self, bucket: Troubled) -> None:
        assert not self.problems(bucket, TRUST)

    def test_version_that_is_hidden_is_a_problem(self, bucket: Troubled) -> None:
        remove(bucket, commit_path(3))
        [what] = [what for path, what in self.problems(bucket, TRUST) if path == ALIVE]
        assert "does not have version 3" in what
        assert ALIVE not in [path for path, _ in self.problems(bucket, None)]
