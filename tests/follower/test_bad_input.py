"""A bad version is refused and reported once. The follower keeps the version before, and recovers."""

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
from weightwire.chain.record_paths import HEAD, commit_path, data_path
from weightwire.chain.records import seal
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

HELD, BAD = 3, 4  # the version held, and the bad version


@dataclass(frozen=True)
class Harm:
    """A change to version 4, and the follower's error."""

    name: str
    do: Callable[[Troubled], None]
    error: type[WeightwireError]
    says: str

    def __str__(self) -> str:
        return self.name


def rewritten(**fields: Any) -> Callable[[Troubled], None]:
    """Replaces fields of the commit."""

    def do(bucket: Troubled) -> None:
        commit = msgspec.structs.replace(commit_in(bucket, BAD), **fields)
        write(bucket, commit_path(BAD), seal(commit).data)

    return do


def of_epoch(epoch: int) -> Callable[[Troubled], None]:
    """Moves the commit and its data to another epoch."""

    def do(bucket: Troubled) -> None:
        (file,) = commit_in(bucket, BAD).files
        moved = msgspec.structs.replace(file, path=data_path("delta", BAD, epoch, 0, file.sha256))
        write(bucket, moved.path, read(bucket, file.path))
        rewritten(epoch=epoch, files=(moved,))(bucket)

    return do


def replaced(change: Callable[[bytes], bytes]) -> Callable[[Troubled], None]:
    """Replaces the bytes of the commit."""
    return lambda bucket: write(bucket, commit_path(BAD), change(read(bucket, commit_path(BAD))))


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Troubled], None]:
    """Replaces the bytes of the delta."""

    def do(bucket: Troubled) -> None:
        [path] = paths(bucket, f"deltas/{BAD}/")
        write(bucket, path, change(read(bucket, path)))

    return do


def made_for_other_weights(bucket: Troubled) -> None:
    """The commit names a valid delta with its hash, but one that was made for other weights."""
    old, new = initial(), initial()
    old["norm"][:] = 17
    data = diff(old, new).to_bytes()
    [file] = commit_in(bucket, BAD).files
    sha256 = hashlib.sha256(data).hexdigest()
    write(bucket, data_path("delta", BAD, 2, 0, sha256), data)
    other = msgspec.structs.replace(
        file, path=data_path("delta", BAD, 2, 0, sha256), size=len(data), sha256=sha256, head=None
    )
    rewritten(files=(other,))(bucket)


def repeated(bucket: Troubled) -> None:
    write(bucket, commit_path(BAD), read(bucket, commit_path(HELD)))


def swapped(bucket: Troubled) -> None:
    """Replaces the delta with another valid one."""
    [other] = paths(bucket, f"deltas/{HELD}/")
    [path] = paths(bucket, f"deltas/{BAD}/")
    write(bucket, path, read(bucket, other).ljust(len(read(bucket, path)), b" "))


def without_rights(bucket: Troubled) -> None:
    bucket.trouble("get find list read_into", "", denied, ALWAYS)


def out_of_reach(bucket: Troubled) -> None:
    bucket.trouble("get find list read_into", "", failed, ALWAYS)


HARMS = [
    Harm("no JSON", replaced(lambda data: b"hello"), BrokenChain, "it is not JSON"),
    Harm("cut off", replaced(lambda data: data[:-9]), BrokenChain, "cannot be read"),
    Harm(
        "a newer format",
        replaced(lambda data: data.replace(b"weightwire/1", b"weightwire/2")),
        UnsupportedFormat,
        "has format version 2",
    ),
    Harm("another parent", rewritten(parent=sha("other")), BrokenChain, "its parent hash differs"),
    Harm("another state before", rewritten(before=sha("other")), BrokenChain, "does not start from the state"),
    Harm("the version before", repeated, BrokenChain, "claims to be version 3"),
    Harm("another run", rewritten(run=token("other")), ForeignRun, "belongs to run"),
    Harm("an epoch that is over", of_epoch(1), BrokenChain, "from a publisher that was fenced off"),
    Harm("an epoch without a fence", of_epoch(7), BrokenChain, "must begin with a fence"),
    Harm("another state after", rewritten(after=sha("other")), CorruptDelta, "the result has state"),
    Harm("a delta of other weights", made_for_other_weights, WrongBase, "made for weights"),
    Harm("a delta cut off", damaged(lambda data: data[:-1]), BucketError, "truncated"),
    Harm(
        "a bit of a delta", damaged(lambda data: data[:-1] + bytes([data[-1] ^ 1])), CorruptDelta, "corrupt: its hash"
    ),
    Harm("another delta", swapped, CorruptDelta, "corrupt: its hash does not match the record"),
    Harm("a delta that is gone", lambda bucket: remove(bucket, f"deltas/{BAD}/"), DataGone, "no anchor leads"),
    Harm("no network", out_of_reach, Unavailable, "the request failed"),
    Harm("no rights", without_rights, PermissionDenied, "may not do that"),
]


@cache
def published_run() -> tuple[dict[str, bytes], Mapping[int, Bits]]:
    """The objects and the bits of four versions, two of them by a second publisher."""
    bucket = in_memory()
    trainer = Trainer(bucket.inner)
    trainer.publish()
    trainer.restart()
    trainer.publish(2)
    trainer.close()
    return copy_of(bucket), trainer.bits


@pytest.mark.parametrize("harm", HARMS, ids=str)
class TestBadInput:
    """The follower holds version 3, and version 4 is bad."""

    @pytest.fixture(autouse=True)
    def _held(self, bucket: Troubled, follower: Follower, harm: Harm) -> None:
        objects = published_run()[0]
        put_back(bucket, {path: data for path, data in objects.items() if path not in (commit_path(BAD), HEAD)})
        assert follower.once() == HELD
        put_back(bucket, objects)
        harm.do(bucket)

    def test_bad_version_is_refused(self, bucket: Troubled, follower: Follower, into: Path, harm: Harm) -> None:
        objects, bits = published_run()
        for _ in range(2):
            with pytest.raises(harm.error, match=harm.says) as caught:
                follower.once()
            check(follower, bits, HELD)
        if harm.do not in (out_of_reach, without_rights):  # these errors come from the bucket
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

    def test_follower_reports_a_bad_version_once_and_recovers(
        self, bucket: Troubled, follower: Follower, heard: list[Event], harm: Harm
    ) -> None:
        objects, bits = published_run()
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
        assert [event.message for event in heard if event.stage == "recovered"] == [f"recovered: {said}"]


def test_a_deleted_bucket_is_reported(bucket: Troubled, trainer: Trainer, follower: Follower) -> None:

    async def missing(act: Act) -> NoReturn:
        raise NoBucket("the bucket does not exist")

    trainer.publish()
    follower.once()
    bucket.trouble("get find list read_into", "", missing, ALWAYS)
    with pytest.raises(NoBucket):
        follower.once()


def test_a_delta_larger_than_the_disk_is_refused(bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
    """Its commit names the size."""
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


def test_good_versions_before_a_bad_one_are_applied(bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
    trainer.publish()
    follower.once()
    trainer.publish(5)
    write(bucket, commit_path(4), b"hello")
    with pytest.raises(BrokenChain):
        follower.once()
    assert follower.version == 3
    assert bits_of(follower.replica.weights) == trainer.bits[3]
    assert bits_of(follower.checkpoint()) == trainer.bits[3]
