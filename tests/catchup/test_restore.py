"""The weights of a version, from the bucket alone: bit for bit, or an error that says what is wrong."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.failing_bucket import Troubled, in_memory
from support.records import grow, shortcut_to
from weightwire import Delta, Tensor, anchor, diff, digest
from weightwire.catchup.fetch import Fetcher
from weightwire.catchup.plan import ChainPath
from weightwire.catchup.restore import apply_version, restore_weights
from weightwire.chain.records import Commit, DataFile, Sealed, data_path
from weightwire.delta.state import State
from weightwire.errors import CheckpointError, CorruptDelta, WrongBase
from weightwire.system.runtime import Runtime
from weightwire.weights.source import read_weights

Arrays = dict[str, Any]


def weights(version: int) -> Arrays:
    return {
        "w": np.arange(1000, dtype=np.uint16).reshape(100, 10) ^ np.uint16(version),
        "b": np.full(7, version, np.float32),
    }


def room() -> Arrays:
    """Where weights are to go; with what was there before."""
    return {name: np.full_like(array, 99) for name, array in weights(0).items()}


class Scene:
    """A run of real weights: a fence, an anchor or base at version 1, and deltas."""

    def __init__(self, versions: int, first: str = "anchor", source: str = "") -> None:
        self.bucket = in_memory()
        self.commits: list[Sealed[Commit]] = []
        asyncio.run(self._fill(versions, first, source))

    async def _fill(self, versions: int, first: str, source: str) -> None:
        grow(self.commits, "fence")
        after = digest(weights(1)).hex
        files = (await self.upload("anchor", 1, anchor(weights(1))),) if first == "anchor" else ()
        grow(self.commits, first, after=after, files=files, source=source)
        for version in range(2, versions + 1):
            made = diff(weights(version - 1), weights(version))
            grow(self.commits, after=made.after, files=(await self.upload("delta", version, made),))

    async def upload(self, kind: str, version: int, made: Delta, rank: int = 0) -> DataFile:
        return await uploaded(self.bucket, kind, version, made, rank)

    def way(self, start: int = 1) -> ChainPath:
        return ChainPath(self.commits[start].record, self.commits[start], tuple(self.commits[start + 1 :]))

    def restore_weights(self, way: ChainPath, targets: Arrays, **given: Any) -> State:
        runtime = Runtime()
        self.fetcher = Fetcher(self.bucket, runtime)
        return asyncio.run(restore_weights(way, self.fetcher, read_weights(targets), runtime, **given))


async def uploaded(bucket: Troubled, kind: str, version: int, made: Delta, rank: int = 0) -> DataFile:
    data = made.to_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    file = DataFile(data_path(kind, version, 1, rank, sha256), len(data), sha256, rank)
    await bucket.inner.put(file.path, data)
    return file


def same(held: Arrays, version: int) -> bool:
    return all(np.array_equal(held[name], array) for name, array in weights(version).items())


class TestFromAnAnchor:
    def test_alone(self) -> None:
        scene, held = Scene(1), room()
        assert scene.restore_weights(scene.way(), held) == digest(weights(1))
        assert same(held, 1)

    def test_and_deltas(self) -> None:
        scene, held = Scene(9), room()
        assert scene.restore_weights(scene.way(), held) == digest(weights(9))
        assert same(held, 9)

    def test_over_fences(self) -> None:
        scene, held = Scene(2), room()
        grow(scene.commits, "fence")
        assert scene.restore_weights(scene.way(), held) == digest(weights(2))

    def test_beside_the_chain(self) -> None:
        scene, held = Scene(6), room()
        file = asyncio.run(scene.upload("anchor", 4, anchor(weights(4))))
        shortcut = shortcut_to(scene.commits[4], files=(file,))
        way = ChainPath(shortcut, scene.commits[4], tuple(scene.commits[5:]))
        assert scene.restore_weights(way, held) == digest(weights(6))
        assert same(held, 6)

    def test_tells_how_far_it_is(self) -> None:
        scene, heard = Scene(4), list[int]()
        scene.restore_weights(scene.way(), room(), told=heard.append)
        assert heard == [1, 2, 3, 4]

    def test_that_leads_elsewhere(self) -> None:
        """The file is as it was published, but it is not what the commit says."""
        scene = Scene(1)
        file = asyncio.run(scene.upload("anchor", 1, anchor(weights(5))))
        grow(scene.commits[:1], "anchor")
        commits = scene.commits[:1]
        grow(commits, "anchor", after=digest(weights(1)).hex, files=(file,))
        with pytest.raises(CorruptDelta, match="leads to another state"):
            scene.restore_weights(ChainPath(commits[1].record, commits[1], ()), room())
        assert set(scene.fetcher.lost) == {file.path}

    def test_whose_delta_leads_elsewhere(self) -> None:
        scene = Scene(2)
        file = asyncio.run(scene.upload("delta", 3, diff(weights(2), weights(7))))
        grow(scene.commits, after=digest(weights(3)).hex, files=(file,))
        with pytest.raises(CorruptDelta, match=r"deltas/3/.*: leads to another state"):
            scene.restore_weights(scene.way(), room())
        assert set(scene.fetcher.lost) == {file.path}

    def test_whose_delta_starts_elsewhere(self) -> None:
        scene = Scene(2)
        file = asyncio.run(scene.upload("delta", 3, diff(weights(6), weights(3))))
        grow(scene.commits, after=digest(weights(3)).hex, files=(file,))
        with pytest.raises(WrongBase):
            scene.restore_weights(scene.way(), room())

    def test_for_other_weights_than_there_is_room_for(self) -> None:
        scene = Scene(1)
        with pytest.raises(CheckpointError):
            scene.restore_weights(scene.way(), {"w": room()["w"]})
        with pytest.raises(CheckpointError):
            scene.restore_weights(scene.way(), room() | {"b": np.zeros(8, np.float32)})

    def test_not_from_where_one_is(self) -> None:
        scene = Scene(2)
        with pytest.raises(ValueError, match="does not begin from nothing"):
            scene.restore_weights(ChainPath(None, scene.commits[1], (scene.commits[2],)), room())


class TestFromABase:
    def test_that_is_given(self) -> None:
        scene, held = Scene(5, "base"), room()
        assert scene.restore_weights(scene.way(), held, base=read_weights(weights(1))) == digest(weights(5))
        assert same(held, 5)

    def test_that_stays_as_it_is(self) -> None:
        scene, base = Scene(5, "base"), weights(1)
        scene.restore_weights(scene.way(), room(), base=read_weights(base))
        assert same(base, 1)

    def test_that_lies_where_the_run_says(self, tmp_path: Path) -> None:
        safetensors.numpy.save_file(weights(1), tmp_path / "model.safetensors")
        scene, held = Scene(5, "base", source=str(tmp_path)), room()
        assert scene.restore_weights(scene.way(), held) == digest(weights(5))

    def test_that_is_another(self) -> None:
        scene = Scene(5, "base", source="hf://org/model")
        with pytest.raises(WrongBase, match=digest(weights(2)).hex[:12]) as caught:
            scene.restore_weights(scene.way(), room(), base=read_weights(weights(2)))
        assert caught.value.hint == "get them from hf://org/model"

    def test_that_is_not_here(self, tmp_path: Path) -> None:
        for source in ("", "hf://org/model", str(tmp_path / "gone")):
            scene = Scene(2, "base", source=source)
            with pytest.raises(WrongBase, match="that is not here") as caught:
                scene.restore_weights(scene.way(), room())
            assert source in caught.value.message
            assert caught.value.hint


class TestOneVersionFurther:
    def test_a_delta(self) -> None:
        held = weights(1)
        made = diff(weights(1), weights(2))
        after = apply_version(read_weights(held), [made], digest(held), made.after)
        assert after == digest(weights(2)) == digest(held)

    def test_nothing_changed(self) -> None:
        held = weights(1)
        state = digest(held)
        assert apply_version(read_weights(held), [], state, state.hex) == state

    def test_nothing_came_but_something_should_have(self) -> None:
        with pytest.raises(CorruptDelta, match="this version: leads to another state"):
            apply_version(read_weights(weights(1)), [], digest(weights(1)), digest(weights(2)).hex)

    def test_the_parts_of_several_ranks(self) -> None:
        """Each rank diffs its own rows; together they lead to the version's state."""
        old, new, held = weights(1), weights(2), weights(1)
        ranks = [{"w": (0, 60), "b": (0, 5)}, {"w": (60, 100), "b": (5, 7)}]
        made = [diff(shard(old, rows), shard(new, rows)) for rows in ranks]
        after = apply_version(read_weights(held), made, digest(held), digest(new).hex)
        assert after == digest(held)
        assert same(held, 2)


def shard(arrays: Arrays, rows: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    whole = read_weights(arrays)
    lines = {name: whole[name].count // whole[name].shape[0] for name in whole}
    return {
        name: Tensor(tensor.dtype, tensor.shape, tensor.bits[first * lines[name] : last * lines[name]], (first, last))
        for name, tensor in whole.items()
        for first, last in [rows[name]]
    }
