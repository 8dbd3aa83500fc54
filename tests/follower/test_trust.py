"""A follower with trusted keys: nothing that the holder of the bucket does makes it accept other weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.failing_bucket import Troubled, in_memory
from support.followers import (
    Trainer,
    append_version,
    check,
    copy_of,
    current,
    last_commit,
    lose_weights,
    paths,
    put_back,
    read,
    remove,
    settled,
    train,
    until,
    write,
)
from weightwire import Follower
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import ALIVE, RUN, commit_path
from weightwire.chain.records import Commit, SignOfLife, seal, unseal
from weightwire.chain.writer import Signer
from weightwire.errors import BadKey, BrokenChain, ForeignRun, ReplicaError, Stale, Untrusted, WeightwireError
from weightwire.system.runtime import Runtime
from weightwire.upkeep.key_change import change_keys

KEY, OTHER, EVIL = (PrivateKey.generate() for _ in range(3))
TRUST = str(KEY.public)
Objects = dict[str, bytes]


@pytest.fixture
def trainer(bucket: Troubled) -> Iterator[Trainer]:
    trainer = Trainer(bucket.inner, key=KEY)
    yield trainer
    trainer.close()


@pytest.fixture
def follow(bucket: Troubled, into: Path) -> Callable[..., Any]:
    """Opens a follower that trusts KEY, with the same replica each time."""

    @contextmanager
    def follow(trust: Any = TRUST, **settings: Any) -> Iterator[Follower]:
        with Follower(bucket, into=into, trust=trust, threads=1, on_event=lambda event: None, **settings) as follower:
            yield follower

    return follow


def test_signed_versions_are_followed(trainer: Trainer, follow: Callable[..., Any]) -> None:
    trainer.publish(3)
    with follow() as follower:
        assert follower.once() == 3
        check(follower, trainer.bits, 3)


# --- what a stranger may write into the bucket -----------------------------------------------------------------------


def unsigned(bucket: Troubled) -> None:
    record = last_commit(bucket)
    write(bucket, commit_path(record.version), seal(record).data)


def signed_by_a_stranger(bucket: Troubled) -> None:
    record = last_commit(bucket)
    write(bucket, commit_path(record.version), seal(record, EVIL).data)


def changed_after_signing(bucket: Troubled) -> None:
    record = last_commit(bucket)
    signature = read(bucket, commit_path(record.version)).partition(b"\n")[2]
    other = msgspec.json.encode(msgspec.structs.replace(record, step=1000))
    write(bucket, commit_path(record.version), other + b"\n" + signature)


def a_strangers_fork(bucket: Troubled) -> None:
    """A complete, valid run of other weights with the same id and the same keys in run.json."""
    ours = msgspec.json.decode(read(bucket, RUN))
    fork = in_memory()
    other = Trainer(fork.inner, key=EVIL)
    train(other.weights, 77)
    other.publish(5)
    other.close()
    objects = copy_of(fork)
    theirs = msgspec.json.decode(objects[RUN])
    for path, data in objects.items():
        objects[path] = data.replace(theirs["run"].encode(), ours["run"].encode())
    objects[RUN] = read(bucket, RUN)
    put_back(bucket, objects)


def another_signed_run(bucket: Troubled) -> None:
    """A run of other weights that the same key has signed."""
    other = Trainer((fork := in_memory()).inner, key=KEY)
    train(other.weights, 77)
    other.publish(5)
    other.close()
    put_back(bucket, copy_of(fork))


def other_side_files(bucket: Troubled) -> None:
    run = msgspec.json.decode(read(bucket, RUN))
    write(bucket, RUN, msgspec.json.encode(run | {"time": 1.0}))


def reordered(bucket: Troubled) -> None:
    version = last_commit(bucket).version
    first, second = (read(bucket, commit_path(one)) for one in (version - 1, version))
    write(bucket, commit_path(version), first)
    write(bucket, commit_path(version - 1), second)


def swapped_data(bucket: Troubled) -> None:
    """The data of another version, under the name of this one."""
    *_, before, last = sorted(paths(bucket, "deltas/"), key=lambda path: int(path.split("/")[1]))
    write(bucket, last, read(bucket, before))


HARM = [
    unsigned,
    signed_by_a_stranger,
    changed_after_signing,
    a_strangers_fork,
    reordered,
    swapped_data,
]


@pytest.mark.parametrize("harm", HARM)
def test_a_follower_stays_at_the_last_good_version_and_recovers(
    harm: Callable[[Troubled], None], trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
) -> None:
    trainer.publish(3)
    with follow() as follower:
        follower.once()
        trainer.publish(2)
        good = copy_of(bucket)
        harm(bucket)
        with pytest.raises(WeightwireError) as caught:
            follower.once()
        assert caught.value.hint
        assert follower.version in (3, 4)  # 4 is untouched by some of them
        check(follower, trainer.bits, follower.version)
        put_back(bucket, good)
        assert follower.once() == 5
        check(follower, trainer.bits, 5)


@pytest.mark.parametrize("harm", [*HARM, other_side_files])
def test_a_new_follower_accepts_none_of_it(
    harm: Callable[[Troubled], None], trainer: Trainer, bucket: Troubled, follow: Callable[..., Any], into: Path
) -> None:
    trainer.publish(5)
    good = copy_of(bucket)
    harm(bucket)
    with follow() as follower:
        with pytest.raises(WeightwireError):
            follower.once()
        if follower.version is not None:  # a version before the damage
            check(follower, trainer.bits, follower.version)
        put_back(bucket, good)
        assert follower.once() == 5
        check(follower, trainer.bits, 5)


def test_a_run_without_signatures_is_refused(bucket: Troubled, follow: Callable[..., Any]) -> None:
    with closing(Trainer(bucket.inner)) as trainer:
        trainer.publish(2)
    with follow() as follower, pytest.raises(Untrusted, match="this run is not signed"):
        follower.once()


def test_a_run_of_an_unknown_key_is_refused(bucket: Troubled, follow: Callable[..., Any]) -> None:
    trainer = Trainer(bucket.inner, key=EVIL)
    trainer.publish(2)
    trainer.close()
    with follow() as follower, pytest.raises(Untrusted, match="which you do not trust"):
        follower.once()


# --- never un-see -----------------------------------------------------------------------------------------------------


class TestRollback:
    @pytest.fixture
    def early(self, trainer: Trainer, bucket: Troubled) -> Objects:
        """The bucket at version 2. It is at version 5 now."""
        trainer.publish(2)
        objects = copy_of(bucket)
        trainer.publish(3)
        return objects

    def test_a_bucket_that_went_back_is_refused(
        self, early: Objects, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        with follow() as follower:
            follower.once()
        put_back(bucket, early)
        with (
            follow() as follower,
            pytest.raises(BrokenChain, match="does not have version 5, which this replica holds"),
        ):
            follower.once()
        assert current(follower.replica.directory) == 5

    def test_it_is_refused_even_after_the_weights_are_lost(
        self, early: Objects, bucket: Troubled, follow: Callable[..., Any], into: Path
    ) -> None:
        with follow() as follower:
            follower.once()
        good = copy_of(bucket)
        lose_weights(into)
        put_back(bucket, early)
        with follow() as follower:
            with pytest.raises(BrokenChain, match="does not have version 5 any more, which was seen before"):
                follower.once()
            assert not (into / "current").exists()
            put_back(bucket, good)
            assert follower.once() == 5

    def test_a_version_that_was_seen_but_not_held_is_not_forgotten(
        self, early: Objects, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        late = copy_of(bucket)
        put_back(bucket, early)
        with follow() as follower:
            follower.once()
            put_back(bucket, late)
            remove(bucket, "deltas/5/")
            with pytest.raises(WeightwireError):
                follower.once()
            check(follower, trainer.bits, 4)
        remove(bucket, commit_path(5))
        with follow() as follower:
            with pytest.raises(BrokenChain, match="does not have version 5 any more"):
                follower.once()
            put_back(bucket, late)
            assert follower.once() == 5

    def test_another_signed_run_is_refused(
        self, early: Objects, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        good = copy_of(bucket)
        with follow() as follower:
            follower.once()
        another_signed_run(bucket)
        with follow() as follower:
            with pytest.raises(ForeignRun, match="but this replica has followed run"):
                follower.once()
            put_back(bucket, good)
            assert follower.once() == 5
            check(follower, trainer.bits, 5)

    @pytest.mark.parametrize(
        "damaged", [b"{", b'{"\xff": 1}', b"[" * 10_000, b'{"run": "r", "version": -1, "commit": "c"}']
    )
    def test_a_damaged_memory_is_an_error(
        self, early: Objects, follow: Callable[..., Any], into: Path, damaged: bytes
    ) -> None:
        with follow() as follower:
            follower.once()
        (into / "seen.json").write_bytes(damaged)
        with follow() as follower, pytest.raises(ReplicaError, match=r"seen\.json: cannot be read"):
            follower.once()

    def test_a_follower_without_trust_remembers_nothing(
        self, early: Objects, follow: Callable[..., Any], into: Path
    ) -> None:
        with follow(trust=None) as follower:
            follower.once()
        assert not (into / "seen.json").exists()


# --- keys ------------------------------------------------------------------------------------------------------------


class TestKeys:
    def test_first_use_pins_the_keys_of_the_run(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any], into: Path
    ) -> None:
        trainer.publish(2)
        with follow(trust="first-use") as follower:
            assert follower.once() == 2
        good = copy_of(bucket)
        append_version(bucket, EVIL)
        run = msgspec.json.decode(read(bucket, RUN))
        write(bucket, RUN, msgspec.json.encode(run | {"keys": [EVIL.public.hex]}))
        trainer.close()
        lose_weights(into)  # which would prove run.json
        with follow(trust="first-use") as follower:
            with pytest.raises(Untrusted, match="which you do not trust"):
                follower.once()
            put_back(bucket, good)
            assert follower.once() == 2

    def test_follower_that_starts_with_a_forged_run_json_recovers(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        """It must not keep the keys of the forged one: they would tell nothing about a later change of keys."""
        trainer.publish(2)
        trainer.close()
        with follow() as follower:
            assert follower.once() == 2
        good = copy_of(bucket)
        run = msgspec.json.decode(read(bucket, RUN))
        write(bucket, RUN, msgspec.json.encode(run | {"keys": [EVIL.public.hex]}))
        with follow() as follower:
            with pytest.raises(BrokenChain, match="does not belong to this run"):
                follower.once()
            put_back(bucket, good)
            new, old = frozenset({OTHER.public.hex}), frozenset({KEY.public.hex})
            asyncio.run(change_keys(bucket.inner, Runtime(), Signer(KEY), new, old, lambda message: None))
            with closing(Trainer(bucket.inner, key=OTHER, trust=[TRUST])) as after:
                after.publish()
            assert follower.once() == 5
            check(follower, after.bits, 5)

    def test_first_use_of_a_run_without_keys_is_refused(self, bucket: Troubled, follow: Callable[..., Any]) -> None:
        with closing(Trainer(bucket.inner)) as trainer:
            trainer.publish(2)
        with follow(trust="first-use") as follower, pytest.raises(Untrusted, match="is not signed"):
            follower.once()

    def test_a_rotated_key_is_followed_and_the_old_one_refused(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        trainer.publish(2)
        trainer.close()
        with follow() as follower:
            follower.once()
            new = frozenset({OTHER.public.hex})
            old = frozenset({KEY.public.hex})
            fence = asyncio.run(change_keys(bucket.inner, Runtime(), Signer(KEY), new, old, lambda message: None))
            assert fence == 3
            with pytest.raises(Untrusted, match="is not a key of this run, or was revoked"):
                trainer.publish()
            after = Trainer(bucket.inner, key=OTHER, trust=[TRUST])
            after.publish()
            after.close()
            assert follower.once() == 5
            check(follower, after.bits, 5)
        with Follower(bucket, into=follower.replica.directory.parent / "new", trust=str(OTHER.public)) as late:
            assert late.once() == 5

    def test_a_revoked_key_is_refused_even_after_the_weights_are_lost(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any], into: Path
    ) -> None:
        """A proof by `back` alone would skip the change of the keys."""
        trainer.publish(2)
        trainer.close()
        new, old = frozenset({OTHER.public.hex}), frozenset({KEY.public.hex})
        asyncio.run(change_keys(bucket.inner, Runtime(), Signer(KEY), new, old, lambda message: None))
        with follow() as follower:
            assert follower.once() == 3
        good = copy_of(bucket)
        for _ in range(2):
            append_version(bucket, KEY, keys_from=None)
        lose_weights(into)
        with follow() as follower:
            with pytest.raises(Untrusted, match="ignores the keys that version 3 named"):
                follower.once()
            put_back(bucket, good)
            assert follower.once() == 3

    def test_trust_comes_from_the_environment(
        self, bucket: Troubled, follow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closing(Trainer(bucket.inner)) as trainer:
            trainer.publish()
        monkeypatch.setenv("WEIGHTWIRE_TRUST", TRUST)
        with follow(trust=None) as follower, pytest.raises(Untrusted):
            follower.once()


# --- signs of life ---------------------------------------------------------------------------------------------------


class TestFreshness:
    def show(self, bucket: Troubled, age: float, key: PrivateKey | None = KEY) -> None:
        record = last_commit(bucket)
        commit = unseal(read(bucket, commit_path(record.version)), Commit, "")
        alive = SignOfLife(
            run=record.run, epoch=1, version=record.version, commit=commit.sha256, time=Runtime().time() - age
        )
        write(bucket, ALIVE, seal(alive, key).data)

    def test_a_publisher_shows_that_it_is_alive(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        trainer.publish(2)
        until(lambda: ALIVE in paths(bucket))
        with follow(max_age=60) as follower:
            assert follower.once() == 2

    def test_a_publisher_without_a_key_shows_nothing(self, bucket: Troubled) -> None:
        trainer = Trainer(bucket.inner)
        trainer.publish(2)
        trainer.close()
        assert ALIVE not in paths(bucket)

    def test_a_silent_publisher_makes_new_versions_stale(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        trainer.publish(2)
        trainer.close()
        self.show(bucket, age=0)
        with follow(max_age=60) as follower:
            follower.once()
        for age in (61, -600):
            self.show(bucket, age)
            with follow(max_age=60) as follower:
                with pytest.raises(Stale, match="60 s are allowed"):
                    follower.once()
                assert current(follower.replica.directory) == 2
        self.show(bucket, age=30)
        with follow(max_age=60) as follower:
            assert follower.once() == 2

    def test_without_any_sign_of_life_nothing_is_accepted(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        trainer.publish(2)
        trainer.close()
        remove(bucket, ALIVE)
        with follow(max_age=60) as follower, pytest.raises(Stale, match="no sign of life yet"):
            follower.once()

    def test_a_forged_sign_of_life_is_refused(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        trainer.publish(2)
        trainer.close()
        for key in (None, EVIL):
            self.show(bucket, 0, key)
            with follow(max_age=60) as follower, pytest.raises(Untrusted):
                follower.once()

    def test_a_bucket_that_hides_versions_is_noticed(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        trainer.publish(2)
        early = copy_of(bucket)
        trainer.publish(2)
        trainer.close()
        self.show(bucket, age=0)
        hidden = {path: data for path, data in copy_of(bucket).items() if path in early or path == ALIVE}
        put_back(bucket, hidden)
        with follow(max_age=60) as follower, pytest.raises(BrokenChain, match="which its publisher committed"):
            follower.once()

    def test_a_hole_in_the_chain_is_noticed(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any]
    ) -> None:
        trainer.publish(2)
        self.show(bucket, age=0)
        with follow(max_age=60) as follower:
            follower.once()
        trainer.publish(2)
        trainer.close()
        self.show(bucket, age=0)
        remove(bucket, commit_path(3))
        with follow(max_age=60) as follower, pytest.raises(BrokenChain, match="is at version 4, but it shows only 2"):
            follower.once()

    def test_a_running_follower_reports_a_frozen_bucket(
        self, trainer: Trainer, bucket: Troubled, follow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.publish(2)
        trainer.close()
        self.show(bucket, age=0)
        with follow(max_age=600) as follower:
            follower.start()
            until(lambda: settled(follower, 2))
            monkeypatch.setattr(Runtime, "time", lambda self: time.time() + 700)
            until(lambda: "s are allowed" in follower.trouble)
            self.show(bucket, age=0)
            until(lambda: settled(follower, 2))

    def test_max_age_needs_trusted_keys(self, bucket: Troubled, into: Path) -> None:
        with pytest.raises(BadKey, match="needs trusted keys"):
            Follower(bucket, into=into, max_age=60)
