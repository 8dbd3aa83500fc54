"""A directory as a bucket: the contract, and problems that only file systems have."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from support.special_files import fifo_at, in_time
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
async def test_objects_are_files(bucket: Bucket, root: Path) -> None:
    await bucket.create("commits/1.json", b"one")
    await bucket.put("deltas/1/a", [b"x", b"y"])

    assert files(root) == ["commits/1.json", "deltas/1/a"]
    assert (root / "deltas/1/a").read_bytes() == b"xy"


@in_loop
async def test_reading_creates_no_directory(bucket: Bucket, root: Path) -> None:
    assert await bucket.list("") == []
    assert await bucket.list("a/") == []
    assert await bucket.find("a") is None
    await bucket.delete("a/b")
    with pytest.raises(NotFound):
        await bucket.get("a")

    assert not root.parent.exists()


@in_loop
async def test_deleting_the_last_object_removes_its_folder(bucket: Bucket, root: Path) -> None:
    await bucket.put("deltas/1/a", b"")
    await bucket.put("deltas/2/a", b"")

    await bucket.delete("deltas/1/a")
    assert [path.name for path in (root / "deltas").iterdir()] == ["2"]

    await bucket.delete("deltas/2/a")
    assert list(root.iterdir()) == []


@in_loop
async def test_concurrent_create_and_delete_in_one_folder(root: Path) -> None:
    async def come_and_go(number: int) -> None:
        bucket = open_bucket(root)
        for _ in range(50):
            await bucket.create(f"a/b/{number}", b"")
            await bucket.delete(f"a/b/{number}")

    await asyncio.gather(*map(come_and_go, range(8)))
    assert list(root.iterdir()) == []


@in_loop
async def test_file_in_place_of_a_folder_is_an_error(bucket: Bucket) -> None:
    await bucket.put("a", b"")

    for verb in (bucket.create, bucket.put):
        with pytest.raises(BucketError, match="another file has this name"):
            await verb("a/b", b"")
    with pytest.raises(NotFound):
        await bucket.get("a/b")
    assert await bucket.list("a/") == []


@in_loop
async def test_folder_in_place_of_an_object_is_an_error(bucket: Bucket) -> None:
    await bucket.put("a/b", b"")

    with pytest.raises(AlreadyExists):
        await bucket.create("a", b"")
    with pytest.raises(BucketError, match="another file has this name"):
        await bucket.put("a", b"")


@in_loop
async def test_other_files_are_not_listed(bucket: Bucket, root: Path) -> None:
    await bucket.put("a", b"")
    Path(os.fsdecode(bytes(root) + b"/\xff")).touch()
    (root / "b\\c").touch()
    os.mkfifo(root / "fifo")
    (root / "dangling").symlink_to("nowhere")

    assert [entry.path for entry in await bucket.list("")] == ["a"]
    assert await bucket.find("fifo") is None


@pytest.fixture
def _removed(root: Path) -> Iterator[None]:
    """Removes nested folders at the end: shutil.rmtree, which pytest uses, is recursive."""
    yield
    subprocess.run(["rm", "-rf", root], check=True)


@pytest.mark.usefixtures("_removed")
@pytest.mark.parametrize("depth", [1500, 3000])
def test_folders_nested_without_end_do_not_stop_a_listing(bucket: Bucket, root: Path, depth: int) -> None:
    """Deeper than Python's stack, and deeper than any path can name."""
    asyncio.run(bucket.put("a", b""))
    asyncio.run(bucket.put("b/c", b""))
    here = os.getcwd()
    os.chdir(root)
    try:
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Path("e").touch()
    finally:
        os.chdir(here)

    found = [entry.path for entry in asyncio.run(bucket.list(""))]
    assert found[:2] == ["a", "b/c"]
    assert len(found) == (3 if depth == 1500 else 2)


@pytest.mark.usefixtures("_removed")
@in_loop
async def test_an_object_in_deeply_nested_folders_is_written_and_listed(bucket: Bucket, root: Path) -> None:
    path = "d/" * 1500 + "e"
    await bucket.put(path, b"1")

    assert [entry.path for entry in await bucket.list("d/")] == [path]
    assert await bucket.get(path) == b"1"
    await bucket.delete(path)
    assert not list(root.iterdir())


def _run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


def test_a_fifo_in_place_of_an_object_is_not_found_at_once(bucket: Bucket, root: Path) -> None:
    asyncio.run(bucket.put("a", b"1234"))
    buffer = memoryview(bytearray(4))
    with fifo_at(root / "a"):
        for read in (partial(bucket.get, "a"), partial(bucket.read_into, "a", buffer)):
            found = in_time(partial(_run, read))
            assert isinstance(found, NotFound)
            assert "not a regular file" in found.message

    asyncio.run(bucket.read_into("a", buffer))
    assert bytes(buffer) == b"1234"


@in_loop
async def test_a_link_that_appears_after_the_check_is_not_followed(
    bucket: Bucket, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"1234")
    (root / "a").symlink_to(tmp_path / "secret")
    monkeypatch.setattr(os.path, "realpath", lambda path: os.fspath(path))  # as it was before the link

    with pytest.raises(BucketError):
        await bucket.get("a")
    with pytest.raises(BucketError):
        await bucket.read_into("a", memoryview(bytearray(4)))


@in_loop
async def test_symbolic_links_are_rejected(bucket: Bucket, root: Path, tmp_path: Path) -> None:
    """Deleting objects of a bucket must not delete files outside it."""
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


# Unfinished writes


@in_loop
async def test_unfinished_writes_are_invisible(bucket: Bucket, root: Path) -> None:
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


def test_killed_writer_leaves_no_object(root: Path) -> None:
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
async def test_create_syncs_file_and_folders_before_it_returns(
    bucket: Bucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_file = path.is_file()
        synced.append("file" if is_file else path.relative_to(root.parent.parent).as_posix())
        # The file is synced before it gets its name: a name must never point to a file without its bytes.
        assert not (is_file and path.stat().st_nlink > 1)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    await bucket.create("a/b/c", b"1")
    assert synced == [".", "some", "some/bucket", "some/bucket/a", "file", "some/bucket/a/b"]

    synced.clear()
    await bucket.create("a/b/d", b"1")
    assert synced == ["file", "some/bucket/a/b"]


# File system errors


@pytest.mark.parametrize(
    ("number", "error", "hint"),
    [
        (errno.ENOSPC, Unavailable, "free space"),
        (errno.EDQUOT, Unavailable, "free space"),
        (errno.EACCES, PermissionDenied, "owner and the permissions"),
        (errno.EROFS, PermissionDenied, "owner and the permissions"),
        (errno.EIO, Unavailable, "mounted and healthy"),
        (errno.ESTALE, Unavailable, "mounted and healthy"),
    ],
)
@in_loop
async def test_failed_write_leaves_no_file(
    number: int, error: type[BucketError], hint: str, bucket: Bucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bucket.put("a", b"before")
    monkeypatch.setattr(os, "write", failing(number))

    for verb in (bucket.create, bucket.put):
        with pytest.raises(error, match=hint) as caught:
            await verb("b", b"after")
        assert type(caught.value) is error
        assert caught.value.message == f"{root}/b: {os.strerror(number)}"

    monkeypatch.undo()
    assert files(root) == ["a"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
@in_loop
async def test_file_system_without_hard_links_is_rejected(
    number: int, bucket: Bucket, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(number))

    with pytest.raises(BucketError, match="does not support hard links") as caught:
        await bucket.create("a", b"1")
    assert type(caught.value) is BucketError
    assert files(root) == []


@in_loop
async def test_file_system_without_folder_sync_works(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    await bucket.create("a/b", b"1")
    assert await bucket.get("a/b") == b"1"


@pytest.mark.skipif(os.geteuid() == 0, reason="root has all permissions")
@in_loop
async def test_read_only_directory_is_permission_denied(bucket: Bucket, root: Path) -> None:
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
async def test_too_long_name_is_an_error(bucket: Bucket, root: Path) -> None:
    with pytest.raises(BucketError, match="too long"):
        await bucket.create("x" * 300, b"")
    with pytest.raises(BucketError, match="too long"):
        await bucket.get("x" * 300)


@in_loop
async def test_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bucket = open_bucket(tmp_path / "file")

    with pytest.raises(BucketError, match=r"file: not a directory"):
        await bucket.create("a", b"")
    assert await bucket.list("") == []


@in_loop
async def test_root_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (Path("/proc/foo"), tmp_path / "file" / "run"):
        with pytest.raises(BucketError) as caught:
            await open_bucket(root).create("probe/a", b"")
        assert caught.value.message.startswith(f"cannot create {root}: ")


@in_loop
async def test_root_that_is_a_dangling_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")

    with pytest.raises(Unavailable, match="No such file"):
        await open_bucket(tmp_path / "link").create("a", b"")
