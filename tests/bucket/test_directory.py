"""A directory as a bucket: the contract, and what only files can do wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from weightwire.bucket.bucket import Bucket, ObjectInfo
from weightwire.bucket.registry import open_bucket
from weightwire.errors import AlreadyExists, BucketError, NotFound, PermissionDenied, Unavailable
from weightwire.testing import BucketContract, Opener, in_loop


class TestLocal(BucketContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return lambda: open_bucket(tmp_path / "bucket")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "some" / "bucket"


@pytest.fixture
def bucket(root: Path) -> Bucket:
    return open_bucket(root)


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


# Files and folders


@in_loop
async def test_an_object_is_a_file(bucket: Bucket, root: Path) -> None:
    await bucket.create("commits/1.json", b"one")
    await bucket.put("deltas/1/a", [b"x", b"y"])

    assert files(root) == ["commits/1.json", "deltas/1/a"]
    assert (root / "deltas/1/a").read_bytes() == b"xy"


@in_loop
async def test_reading_makes_nothing(bucket: Bucket, root: Path) -> None:
    assert await bucket.list("") == []
    assert await bucket.list("a/") == []
    assert await bucket.find("a") is None
    await bucket.delete("a/b")
    with pytest.raises(NotFound):
        await bucket.get("a")

    assert not root.parent.exists()


@in_loop
async def test_folders_go_with_their_last_object(bucket: Bucket, root: Path) -> None:
    await bucket.put("deltas/1/a", b"")
    await bucket.put("deltas/2/a", b"")

    await bucket.delete("deltas/1/a")
    assert [path.name for path in (root / "deltas").iterdir()] == ["2"]

    await bucket.delete("deltas/2/a")
    assert list(root.iterdir()) == []


@in_loop
async def test_folders_that_come_and_go_disturb_nobody(root: Path) -> None:
    async def come_and_go(number: int) -> None:
        bucket = open_bucket(root)
        for _ in range(50):
            await bucket.create(f"a/b/{number}", b"")
            await bucket.delete(f"a/b/{number}")

    await asyncio.gather(*map(come_and_go, range(8)))
    assert list(root.iterdir()) == []


@in_loop
async def test_a_file_where_a_folder_should_be(bucket: Bucket) -> None:
    await bucket.put("a", b"")

    for verb in (bucket.create, bucket.put):
        with pytest.raises(BucketError, match="another file is in the way"):
            await verb("a/b", b"")
    with pytest.raises(NotFound):
        await bucket.get("a/b")
    assert await bucket.list("a/") == []


@in_loop
async def test_a_folder_where_an_object_should_be(bucket: Bucket) -> None:
    await bucket.put("a/b", b"")

    with pytest.raises(AlreadyExists):
        await bucket.create("a", b"")
    with pytest.raises(BucketError, match="another file is in the way"):
        await bucket.put("a", b"")


@in_loop
async def test_foreign_files_are_not_listed(bucket: Bucket, root: Path) -> None:
    await bucket.put("a", b"")
    Path(os.fsdecode(bytes(root) + b"/\xff")).touch()
    (root / "b\\c").touch()
    os.mkfifo(root / "fifo")
    (root / "dangling").symlink_to("nowhere")

    assert [entry.path for entry in await bucket.list("")] == ["a"]
    assert await bucket.find("fifo") is None


@in_loop
async def test_links_lead_nowhere(bucket: Bucket, root: Path, tmp_path: Path) -> None:
    """Whoever deletes what is in a bucket must not delete anything else."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(b"precious")
    root.mkdir(parents=True)
    (root / "anchors").symlink_to(tmp_path / "elsewhere")

    assert await bucket.list("") == []
    for verb in (bucket.get, bucket.delete, bucket.find):
        with pytest.raises(BucketError, match="symbolic link"):
            await verb("anchors/a")
    with pytest.raises(BucketError, match="symbolic link"):
        await bucket.put("anchors/a", b"")
    assert (tmp_path / "elsewhere" / "a").read_bytes() == b"precious"


# What is not finished


@in_loop
async def test_what_is_not_finished_is_not_seen(bucket: Bucket, root: Path) -> None:
    seen: list[Sequence[ObjectInfo]] = []

    def data() -> Iterator[bytes]:
        yield b"half"
        assert len(files(root)) == 1
        seen.append(asyncio.run(open_bucket(root).list("")))

    await bucket.put("a", data())

    assert seen == [[]]
    assert files(root) == ["a"]


WRITER = """
import asyncio, sys, time
from weightwire.bucket import open_bucket

def data():
    yield b"half"
    print("written", flush=True)
    time.sleep(60)

asyncio.run(open_bucket(sys.argv[1]).put("a", data()))
"""


def test_who_is_killed_leaves_no_object(root: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == b"written\n"
        writer.kill()
    bucket = open_bucket(root)
    (left,) = files(root)

    assert asyncio.run(bucket.list("")) == []
    assert files(root) == [left]

    # A day later.
    then = time.time() - 25 * 3600
    os.utime(root / left, (then, then))
    assert asyncio.run(bucket.list("")) == []
    assert files(root) == []


@in_loop
async def test_all_is_synced_before_it_is_said_to_be_there(
    bucket: Bucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_file = path.is_file()
        synced.append("file" if is_file else path.relative_to(root.parent.parent).as_posix())
        # The file before its name, so that no name is ever of a file without its bytes.
        assert not (is_file and path.stat().st_nlink > 1)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    await bucket.create("a/b/c", b"1")
    assert synced == [".", "some", "some/bucket", "some/bucket/a", "file", "some/bucket/a/b"]

    synced.clear()
    await bucket.create("a/b/d", b"1")
    assert synced == ["file", "some/bucket/a/b"]


# What file systems say


@pytest.mark.parametrize(
    ("number", "error", "hint"),
    [
        (errno.ENOSPC, Unavailable, "free some space"),
        (errno.EDQUOT, Unavailable, "free some space"),
        (errno.EACCES, PermissionDenied, "who may write there"),
        (errno.EROFS, PermissionDenied, "who may write there"),
        (errno.EIO, Unavailable, "is it mounted and healthy?"),
        (errno.ESTALE, Unavailable, "is it mounted and healthy?"),
    ],
)
@in_loop
async def test_a_write_that_fails(
    number: int, error: type[BucketError], hint: str, bucket: Bucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bucket.put("a", b"before")
    monkeypatch.setattr(os, "write", failing(number))

    for verb in (bucket.create, bucket.put):
        with pytest.raises(error, match=hint) as caught:
            await verb("b", b"after")
        assert type(caught.value) is error
        assert caught.value.message == f"{root.as_uri()}/b: {os.strerror(number)}"

    monkeypatch.undo()
    assert files(root) == ["a"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
@in_loop
async def test_a_file_system_without_links(
    number: int, bucket: Bucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(number))

    with pytest.raises(BucketError, match="has no hard links") as caught:
        await bucket.create("a", b"1")
    assert type(caught.value) is BucketError
    assert files(root) == []


@in_loop
async def test_a_file_system_that_cannot_sync_folders(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    await bucket.create("a/b", b"1")
    assert await bucket.get("a/b") == b"1"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
@in_loop
async def test_a_directory_of_someone_else(bucket: Bucket, root: Path) -> None:
    await bucket.put("a", b"")
    root.chmod(0o500)
    try:
        with pytest.raises(PermissionDenied):
            await bucket.create("b", b"")
        with pytest.raises(PermissionDenied):
            await bucket.delete("a")
    finally:
        root.chmod(0o700)


@in_loop
async def test_a_name_that_is_too_long(bucket: Bucket, root: Path) -> None:
    with pytest.raises(BucketError, match="too long"):
        await bucket.create("x" * 300, b"")
    with pytest.raises(BucketError, match="too long"):
        await bucket.get("x" * 300)


@in_loop
async def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bucket = open_bucket(tmp_path / "file")

    with pytest.raises(BucketError, match="in the way"):
        await bucket.create("a", b"")
    assert await bucket.list("") == []


@in_loop
async def test_a_root_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")

    with pytest.raises(Unavailable, match="No such file"):
        await open_bucket(tmp_path / "link").create("a", b"")
