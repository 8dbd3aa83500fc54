"""Whatever is wrong with a version is refused, said once, and got over; the version before stays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from support.failing_bucket import Act, Troubled, denied, failed, in_memory
from support.followers import (
    ALWAYS,
    Trainer,
    check,
    commit_in,
    copy_of,
    current,
    ignore,
    initial,
    paths,
    put_back,
    read,
    remove,
    settled,
    until,
    warnings,
    write,
)
from support.records import sha, token
from support.small_run import Bits, bits_of
from weightwire import Follower, diff
from weightwire.chain.records import (
    HEAD,
    commit_path,
    data_path,
    seal,
)
from weightwire.errors import (
    BrokenChain,
    BucketError,
    CorruptDelta,
    DataGone,
    ForeignRun,
    NoBucket,
    PermissionDenied,
    Unavailable,
    UnsupportedFormat,
    WeightwireError,
    WrongBase,
)
from weightwire.telemetry.events import Event

HELD, BAD = 3, 4  # the version that is held, and the one with which something is wrong


@dataclass(frozen=True)
class Harm:
    """Something that happens to version 4, and what a follower says of it."""

    name: str
    do: Callable[[Troubled], None]
    error: type[WeightwireError]
    says: str

    def __str__(self) -> str:
        return self.name


def rewritten(**fields: Any) -> Callable[[Troubled], None]:
    """A commit with other fields."""

    def do(bucket: Troubled) -> None:
        commit = msgspec.structs.replace(commit_in(bucket, BAD), **fields)
        write(bucket, commit_path(BAD), seal(commit).data)

    return do


def replaced(change: Callable[[bytes], bytes]) -> Callable[[Troubled], None]:
    """A commit of other bytes."""
    return lambda bucket: write(bucket, commit_path(BAD), change(read(bucket, commit_path(BAD))))


def spoilt(change: Callable[[bytes], bytes]) -> Callable[[Troubled], None]:
    """A delta of other bytes."""

    def do(bucket: Troubled) -> None:
        [path] = paths(bucket, f"deltas/{BAD}/")
        write(bucket, path, change(read(bucket, path)))

    return do


def of_other_weights(bucket: Troubled) -> None:
    """A commit that names a good delta, with its hash: but one for other weights."""
    old, new = initial(), initial()
    old["norm"][:] = 17
    data = diff(old, new).to_bytes()
    [file] = commit_in(bucket, BAD).files
    sha256 = hashlib.sha256(data).hexdigest()
    write(bucket, data_path("delta", BAD, 2, 0, sha256), data)
    other = msgspec.structs.replace(file, path=data_path("delta", BAD, 2, 0, sha256), size=len(data), sha256=sha256)
    rewritten(files=(other,))(bucket)


def repeated(bucket: Troubled) -> None:
    write(bucket, commit_path(BAD), read(bucket, commit_path(HELD)))


def swapped(bucket: Troubled) -> None:
    """Another good delta in the place of one."""
    [other] = paths(bucket, f"deltas/{HELD}/")
    [path] = paths(bucket, f"deltas/{BAD}/")
    write(bucket, path, read(bucket, other).ljust(len(read(bucket, path)), b" "))


def without_rights(bucket: Troubled) -> None:
    bucket.trouble("get find list read_into", "", denied, ALWAYS)


def out_of_reach(bucket: Troubled) -> None:
    bucket.trouble("get find list read_into", "", failed, ALWAYS)


HARMS = [
    Harm("no JSON", replaced(lambda data: b"hello"), BrokenChain, "it is no JSON"),
    Harm("cut off", replaced(lambda data: data[:-9]), BrokenChain, "cannot be read"),
    Harm(
        "a newer format",
        replaced(lambda data: data.replace(b"weightwire/1", b"weightwire/2")),
        UnsupportedFormat,
        "has format version 2",
    ),
    Harm("another parent", rewritten(parent=sha("other")), BrokenChain, "its parent hash is another"),
    Harm("another state before", rewritten(before=sha("other")), BrokenChain, "starts from another state"),
    Harm("the version before", repeated, BrokenChain, "says it is version 3"),
    Harm("another run", rewritten(run=token("other")), ForeignRun, "belongs to run"),
    Harm("an epoch that is over", rewritten(epoch=1), BrokenChain, "from a publisher that had been replaced"),
    Harm("an epoch without a fence", rewritten(epoch=7), BrokenChain, "must begin with a fence"),
    Harm("another state after", rewritten(after=sha("other")), CorruptDelta, "the result has state"),
    Harm("a delta of other weights", of_other_weights, WrongBase, "was made for"),
    Harm("a delta cut off", spoilt(lambda data: data[:-1]), BucketError, "ends at byte"),
    Harm("a bit of a delta", spoilt(lambda data: data[:-1] + bytes([data[-1] ^ 1])), CorruptDelta, "its bytes are not"),
    Harm("another delta", swapped, CorruptDelta, "its bytes are not those that were published"),
    Harm("a delta that is gone", lambda bucket: remove(bucket, f"deltas/{BAD}/"), DataGone, "no anchor leads"),
    Harm("no network", out_of_reach, Unavailable, "the request failed"),
    Harm("no rights", without_rights, PermissionDenied, "may not do that"),
]


@cache
def a_run() -> tuple[dict[str, bytes], Mapping[int, Bits]]:
    """Four versions, two of them by a second publisher: what is in the bucket, and the bits of each."""
    bucket = in_memory()
    trainer = Trainer(bucket.inner)
    trainer.publish()
    trainer.restart()
    trainer.publish(2)
    trainer.close()
    return copy_of(bucket), trainer.bits


@pytest.mark.parametrize("harm", HARMS, ids=str)
class TestBadInput:
    """The follower holds version 3; then something happens to version 4."""

    @pytest.fixture(autouse=True)
    def _held(self, bucket: Troubled, follower: Follower, harm: Harm) -> None:
        objects = a_run()[0]
        put_back(bucket, {path: data for path, data in objects.items() if path not in (commit_path(BAD), HEAD)})
        assert follower.once() == HELD
        put_back(bucket, objects)
        harm.do(bucket)

    def test_is_refused(self, bucket: Troubled, follower: Follower, into: Path, harm: Harm) -> None:
        objects, bits = a_run()
        for _ in range(2):
            with pytest.raises(harm.error, match=harm.says) as caught:
                follower.once()
            check(follower, bits, HELD)
        if harm.do not in (out_of_reach, without_rights):  # what is said of these is up to the bucket
            assert caught.value.hint
            assert bucket.url in caught.value.message

        follower.close()
        with Follower(bucket, into=into, on_event=ignore) as again:
            with pytest.raises(harm.error):
                again.once()
            assert current(into) == HELD
            assert bits_of(again.checkpoint()) == bits[HELD]
            put_back(bucket, objects)
            assert again.once() == BAD
            check(again, bits, BAD)

    def test_is_said_once_and_got_over(
        self, bucket: Troubled, follower: Follower, heard: list[Event], harm: Harm
    ) -> None:
        objects, bits = a_run()
        heard.clear()
        follower.start()
        until(lambda: follower.trouble)
        said = follower.trouble
        for _ in range(3):
            asked = len(bucket.asked)
            follower.wake()
            until(lambda asked=asked: len(bucket.asked) > asked)  # type: ignore[misc]
        check(follower, bits, HELD)
        assert follower.trouble == said
        [warning] = warnings(heard)
        assert warning.startswith(said)

        put_back(bucket, objects)
        until(lambda: settled(follower, BAD))
        check(follower, bits, BAD)
        assert [event.message for event in heard if event.stage == "recovered"] == [f"over: {said}"]


def test_a_bucket_that_was_deleted(bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
    """Not only the run in it."""

    async def missing(act: Act) -> NoReturn:
        raise NoBucket("there is no such bucket")

    trainer.publish()
    follower.once()
    bucket.trouble("get find list read_into", "", missing, ALWAYS)
    with pytest.raises(NoBucket):
        follower.once()


def test_a_delta_that_would_fill_the_disk(bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
    """By what its commit says."""
    trainer.publish()
    follower.once()
    trainer.publish()
    [file] = commit_in(bucket, 2).files
    commit = msgspec.structs.replace(commit_in(bucket, 2), files=(msgspec.structs.replace(file, size=2**50),))
    write(bucket, commit_path(2), seal(commit).data)
    with pytest.raises(BucketError, match=file.path) as caught:
        follower.once()
    assert caught.value.hint
    check(follower, trainer.bits, 1)


def test_what_is_good_before_something_bad_is_taken(bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
    trainer.publish()
    follower.once()
    trainer.publish(5)
    write(bucket, commit_path(4), b"hello")
    with pytest.raises(BrokenChain):
        follower.once()
    assert follower.version == 3
    assert bits_of(follower.replica.weights) == trainer.bits[3]
    assert bits_of(follower.checkpoint()) == trainer.bits[3]
