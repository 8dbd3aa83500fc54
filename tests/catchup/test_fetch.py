"""Files from the bucket: each has the published bytes or is refused, in memory or on disk, in order and ahead."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.failing_bucket import Act, Troubled, denied, failed, in_memory, slow
from support.records import grow
from weightwire import Delta, anchor, diff, digest, patch
from weightwire.catchup import fetch
from weightwire.catchup.fetch import Fetcher
from weightwire.chain.record_paths import data_path
from weightwire.chain.records import Commit, DataFile, Sealed
from weightwire.errors import (
    BucketError,
    CorruptDelta,
    NoBucket,
    NotFound,
    OutputError,
    PermissionDenied,
    Truncated,
    Unavailable,
)
from weightwire.system.runtime import Runtime

Arrays = dict[str, Any]


def weights(version: int) -> Arrays:
    return {"w": np.arange(1000, dtype=np.uint16) ^ np.uint16(version), "b": np.full(7, version, np.float32)}


def delta_to(version: int) -> Delta:
    return diff(weights(version - 1), weights(version))


async def uploaded(bucket: Troubled, kind: str, version: int, made: Delta, rank: int = 0) -> DataFile:
    data = made.to_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    file = DataFile(data_path(kind, version, 1, rank, sha256), len(data), sha256, rank)
    await bucket.inner.put(file.path, data)
    return file


async def chain_in(bucket: Troubled, versions: Iterable[int]) -> list[Sealed[Commit]]:
    """Writes deltas to the bucket, from version 2 on, and returns their commits."""
    commits: list[Sealed[Commit]] = []
    grow(commits, "fence")
    grow(commits, "base")
    for version in versions:
        grow(commits, files=(await uploaded(bucket, "delta", version, delta_to(version)),))
    return commits[2:]


@pytest.fixture(params=["in memory", "on disk"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test twice: with files in memory, and with all files on disk."""
    if request.param == "on disk":
        monkeypatch.setattr(fetch, "_IN_MEMORY", 0)
        monkeypatch.setattr(fetch, "_PIECE", 100)
    return str(request.param)


@pytest.mark.usefixtures("place")
class TestFile:
    def test_fetched_file_is_the_published_delta(self) -> None:
        async def scene() -> tuple[Arrays, int, int]:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            fetched = await Fetcher(bucket, Runtime()).fetch([file])
            [delta] = fetched.deltas
            assert delta.where == f"{bucket.url}/{file.path}"
            return patch(weights(1), delta, copy=True), fetched.nbytes, file.size

        after, nbytes, size = asyncio.run(scene())
        assert digest(after) == digest(weights(2))
        assert nbytes == size

    def test_changed_file_is_refused(self) -> None:
        async def scene(place: int) -> None:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            data = bytearray(await bucket.inner.get(file.path))
            data[place] ^= 1
            await bucket.inner.put(file.path, bytes(data))
            await Fetcher(bucket, Runtime()).fetch([file])

        for place in (0, 100, -1):
            with pytest.raises(CorruptDelta, match=r"memory://.*: corrupt: its hash"):
                asyncio.run(scene(place))

    def test_truncated_file_is_refused(self) -> None:
        async def scene() -> None:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            await bucket.inner.put(file.path, (await bucket.inner.get(file.path))[:-1])
            await Fetcher(bucket, Runtime()).fetch([file])

        with pytest.raises(BucketError, match="truncated"):
            asyncio.run(scene())

    def test_missing_file_is_added_to_lost(self) -> None:
        async def scene() -> set[str]:
            bucket = in_memory()
            here = await uploaded(bucket, "delta", 2, delta_to(2))
            gone = await uploaded(bucket, "delta", 3, delta_to(3))
            await bucket.inner.delete(gone.path)
            fetcher = Fetcher(bucket, Runtime())
            with pytest.raises(NotFound):
                await fetcher.fetch([here, gone])
            assert set(fetcher.lost) == {gone.path}
            return set(fetcher.lost)

        assert len(asyncio.run(scene())) == 1

    @pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:-1] + b"?"])
    def test_damaged_file_is_added_to_lost(self, change: Callable[[bytes], bytes]) -> None:
        async def scene() -> None:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            await bucket.inner.put(file.path, change(await bucket.inner.get(file.path)))
            fetcher = Fetcher(bucket, Runtime())
            with pytest.raises((Truncated, CorruptDelta)) as caught:
                await fetcher.fetch([file])
            assert fetcher.lost == {file.path: caught.value}

        asyncio.run(scene())

    def test_denied_file_counts_as_missing_if_run_json_can_be_read(self) -> None:
        """S3 denies access to a missing object if the key has no list permission."""

        async def scene() -> None:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            bucket.trouble("read_into", "", denied)
            fetcher = Fetcher(bucket, Runtime())
            await bucket.inner.put("run.json", b"{}")
            with pytest.raises(NotFound, match="not found"):
                await fetcher.fetch([file])
            assert set(fetcher.lost) == {file.path}
            bucket.trouble("read_into get", "", denied, times=2)
            fetcher.lost.clear()
            with pytest.raises(PermissionDenied):
                await fetcher.fetch([file])
            assert not fetcher.lost

        asyncio.run(scene())

    def test_file_in_a_missing_bucket_is_not_lost(self) -> None:
        async def missing(act: Act) -> Any:
            raise NoBucket("the bucket does not exist")

        async def scene() -> set[str]:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            bucket.trouble("read_into", "", missing)
            fetcher = Fetcher(bucket, Runtime())
            with pytest.raises(NoBucket):
                await fetcher.fetch([file])
            return set(fetcher.lost)

        assert not asyncio.run(scene())

    def test_file_in_an_unreachable_bucket_is_not_lost(self) -> None:
        async def scene() -> set[str]:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            bucket.trouble("read_into", "", failed)
            fetcher = Fetcher(bucket, Runtime())
            with pytest.raises(Unavailable):
                await fetcher.fetch([file])
            await fetcher.fetch([file])
            return set(fetcher.lost)

        assert not asyncio.run(scene())

    def test_version_may_have_a_file_per_rank(self) -> None:
        async def scene() -> list[int]:
            bucket = in_memory()
            files = [await uploaded(bucket, "anchor", 1, anchor({"w": np.full(5, rank)}), rank) for rank in range(3)]
            fetched = await Fetcher(bucket, Runtime()).fetch(files)
            return [int(patch({"w": np.zeros(5, int)}, delta, copy=True)["w"][0]) for delta in fetched.deltas]

        assert asyncio.run(scene()) == [0, 1, 2]

    def test_a_version_may_have_no_files(self) -> None:
        async def scene() -> tuple[int, int]:
            fetched = await Fetcher(in_memory(), Runtime()).fetch([])
            return len(fetched.deltas), fetched.nbytes

        assert asyncio.run(scene()) == (0, 0)


class TestBuffers:
    def test_released_buffers_are_reused(self) -> None:
        async def scene() -> tuple[int, int]:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            fetcher = Fetcher(bucket, Runtime())
            places = set()
            for _ in range(5):
                fetched = await fetcher.fetch([file])
                [buffer] = fetched.close()
                places.add(id(buffer))
                fetcher.release(fetched)
            return len(places), len(buffer)

        assert asyncio.run(scene()) == (1, delta_to(2).nbytes)

    def test_buffers_are_not_reused_before_they_are_released(self) -> None:
        async def scene() -> list[bytes]:
            bucket = in_memory()
            files = [await uploaded(bucket, "delta", version, delta_to(version)) for version in (2, 3)]
            fetcher = Fetcher(bucket, Runtime())
            both = [await fetcher.fetch([file]) for file in files]
            return [fetched.deltas[0].to_bytes() for fetched in both]

        assert asyncio.run(scene()) == [delta_to(2).to_bytes(), delta_to(3).to_bytes()]

    def test_a_large_buffer_is_reused_for_a_smaller_file(self) -> None:
        async def scene() -> None:
            bucket = in_memory()
            large = await uploaded(bucket, "anchor", 1, anchor(weights(1)))
            small = await uploaded(bucket, "delta", 2, delta_to(2))
            assert small.size < large.size
            fetcher = Fetcher(bucket, Runtime())
            fetcher.release(await fetcher.fetch([large]))
            fetched = await fetcher.fetch([small])
            assert fetched.deltas[0].to_bytes() == delta_to(2).to_bytes()
            assert [len(buffer) for buffer in fetched.close()] == [large.size]

        asyncio.run(scene())


class TestOnDisk:
    @pytest.fixture(autouse=True)
    def _large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetch, "_IN_MEMORY", 0)

    def test_fetch_to_disk_leaves_no_file_behind(self, tmp_path: Path) -> None:
        async def scene() -> None:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            fetcher = Fetcher(bucket, Runtime(), tmp_path)
            fetched = await fetcher.fetch([file])
            assert fetched.deltas[0].to_bytes() == delta_to(2).to_bytes()
            fetcher.release(fetched)

        asyncio.run(scene())
        assert not [*tmp_path.iterdir()]

    def test_fetch_to_disk_fails_without_a_temporary_directory(self, tmp_path: Path) -> None:
        async def scene() -> None:
            bucket = in_memory()
            file = await uploaded(bucket, "delta", 2, delta_to(2))
            await Fetcher(bucket, Runtime(), tmp_path / "gone").fetch([file])

        with pytest.raises(OutputError, match=r"cannot be written to a temporary file \(No such file"):
            asyncio.run(scene())


@pytest.mark.usefixtures("place")
class TestSeveralVersions:
    def test_versions_arrive_in_order(self) -> None:
        async def scene() -> tuple[list[int], Arrays]:
            bucket = in_memory()
            commits = await chain_in(bucket, range(2, 20))
            bucket.trouble("read_into", commits[3].record.files[0].path, slow(0.02))
            seen, held = [], weights(1)
            async for commit, fetched in Fetcher(bucket, Runtime()).in_turn(commits):
                seen.append(commit.record.version)
                patch(held, fetched.deltas[0])
            return seen, held

        seen, held = asyncio.run(scene())
        assert seen == list(range(2, 20))
        assert digest(held) == digest(weights(19))

    def test_versions_without_files_are_returned(self) -> None:
        async def scene() -> list[tuple[int, int]]:
            commits: list[Sealed[Commit]] = []
            for kind in ("fence", "base", "fence", "fence"):
                grow(commits, kind)
            fetcher = Fetcher(in_memory(), Runtime())
            return [(commit.record.version, fetched.nbytes) async for commit, fetched in fetcher.in_turn(commits)]

        assert asyncio.run(scene()) == [(0, 0), (1, 0), (2, 0), (3, 0)]

    def test_versions_before_a_lost_file_still_arrive(self) -> None:
        async def scene() -> list[int]:
            bucket = in_memory()
            commits = await chain_in(bucket, range(2, 10))
            await bucket.inner.delete(commits[4].record.files[0].path)
            seen: list[int] = []

            async def follow() -> None:
                async for commit, _ in Fetcher(bucket, Runtime()).in_turn(commits):
                    seen.append(commit.record.version)

            with pytest.raises(NotFound):
                await follow()
            return seen

        assert asyncio.run(scene()) == [2, 3, 4, 5]

    def test_closed_fetch_leaves_no_task_behind(self) -> None:
        async def scene() -> int:
            bucket = in_memory()
            commits = await chain_in(bucket, range(2, 10))
            turns = Fetcher(bucket, Runtime()).in_turn(commits)
            async for _ in turns:
                break
            await turns.aclose()  # type: ignore[attr-defined]
            return len(asyncio.all_tasks())

        assert asyncio.run(scene()) == 1


class TestPrefetch:
    def test_the_next_versions_are_fetched_ahead(self) -> None:
        async def scene() -> int:
            bucket = in_memory()
            commits = await chain_in(bucket, range(2, 20))
            most, running = 0, 0

            async def counted(act: Act) -> None:
                nonlocal most, running
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.002)
                await act()
                running -= 1

            bucket.trouble("read_into", "", counted, times=100)
            async for _ in Fetcher(bucket, Runtime()).in_turn(commits):
                pass
            return most

        assert asyncio.run(scene()) == 4

    def test_large_versions_are_not_fetched_ahead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetch, "_IN_MEMORY", 0)

        async def scene() -> int:
            bucket = in_memory()
            commits = await chain_in(bucket, range(2, 6))
            async for _ in Fetcher(bucket, Runtime()).in_turn(commits):
                await asyncio.sleep(0.01)
                return len({path for verb, path in bucket.asked if verb == "read_into"})
            return 0

        assert asyncio.run(scene()) == 1
