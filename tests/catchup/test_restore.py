"""Restores the weights of a version from the bucket: exact bits, or a clear error."""

from __future__ import annotations

import asyncio
import hashlib
import os
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
from weightwire.chain.record_paths import data_path
from weightwire.chain.records import Commit, DataFile, Sealed
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
    """Targets for weights, filled with old values."""
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


class TestRestoreFromAnchor:
    def test_restore_works_without_deltas(self) -> None:
        scene, held = Scene(1), room()
        assert scene.restore_weights(scene.way(), held) == digest(weights(1))
        assert same(held, 1)

    def test_restore_applies_deltas(self) -> None:
        scene, held = Scene(9), room()
        assert scene.restore_weights(scene.way(), held) == digest(weights(9))
        assert same(held, 9)

    def test_restore_skips_fences(self) -> None:
        scene, held = Scene(2), room()
        grow(scene.commits, "fence")
        assert scene.restore_weights(scene.way(), held) == digest(weights(2))

    def test_restore_starts_from_an_anchor_beside_the_chain(self) -> None:
        scene, held = Scene(6), room()
        file = asyncio.run(scene.upload("anchor", 4, anchor(weights(4))))
        shortcut = shortcut_to(scene.commits[4], files=(file,))
        way = ChainPath(shortcut, scene.commits[4], tuple(scene.commits[5:]))
        assert scene.restore_weights(way, held) == digest(weights(6))
        assert same(held, 6)

    def test_restore_reports_each_version(self) -> None:
        scene, heard = Scene(4), list[int]()
        scene.restore_weights(scene.way(), room(), on_version=heard.append)
        assert heard == [1, 2, 3, 4]

    def test_restore_refuses_an_anchor_of_another_state(self) -> None:
        """The file has the published bytes, but not the state that the commit names."""
        scene = Scene(1)
        file = asyncio.run(scene.upload("anchor", 1, anchor(weights(5))))
        grow(scene.commits[:1], "anchor")
        commits = scene.commits[:1]
        grow(commits, "anchor", after=digest(weights(1)).hex, files=(file,))
        with pytest.raises(CorruptDelta, match="leads to another state"):
            scene.restore_weights(ChainPath(commits[1].record, commits[1], ()), room())
        assert set(scene.fetcher.lost) == {file.path}

    def test_restore_refuses_a_delta_to_another_state(self) -> None:
        scene = Scene(2)
        file = asyncio.run(scene.upload("delta", 3, diff(weights(2), weights(7))))
        grow(scene.commits, after=digest(weights(3)).hex, files=(file,))
        with pytest.raises(CorruptDelta, match=r"deltas/3/.*: leads to another state"):
            scene.restore_weights(scene.way(), room())
        assert set(scene.fetcher.lost) == {file.path}

    def test_restore_refuses_a_delta_from_another_state(self) -> None:
        scene = Scene(2)
        file = asyncio.run(scene.upload("delta", 3, diff(weights(6), weights(3))))
        grow(scene.commits, after=digest(weights(3)).hex, files=(file,))
        with pytest.raises(WrongBase):
            scene.restore_weights(scene.way(), room())

    def test_restore_refuses_targets_of_another_schema(self) -> None:
        scene = Scene(1)
        with pytest.raises(CheckpointError):
            scene.restore_weights(scene.way(), {"w": room()["w"]})
        with pytest.raises(CheckpointError):
            scene.restore_weights(scene.way(), room() | {"b": np.zeros(8, np.float32)})

    def test_restore_refuses_a_path_without_a_start(self) -> None:
        scene = Scene(2)
        with pytest.raises(ValueError, match="has no start"):
            scene.restore_weights(ChainPath(None, scene.commits[1], (scene.commits[2],)), room())


class TestRestoreFromBase:
    def test_restore_uses_the_given_base(self) -> None:
        scene, held = Scene(5, "base"), room()
        assert scene.restore_weights(scene.way(), held, base=read_weights(weights(1))) == digest(weights(5))
        assert same(held, 5)

    def test_restore_does_not_change_the_base(self) -> None:
        scene, base = Scene(5, "base"), weights(1)
        scene.restore_weights(scene.way(), room(), base=read_weights(base))
        assert same(base, 1)

    def test_restore_finds_the_base_at_its_source(self, tmp_path: Path) -> None:
        safetensors.numpy.save_file(weights(1), tmp_path / "model.safetensors")
        scene, held = Scene(5, "base", source=str(tmp_path)), room()
        scene.bucket.url = "/data/run"  # a directory
        assert scene.restore_weights(scene.way(), held) == digest(weights(5))

    def test_restore_opens_no_path_that_a_remote_bucket_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not even to see whether it exists: it may be on a network mount."""
        safetensors.numpy.save_file(weights(1), tmp_path / "model.safetensors")
        scene, held = Scene(5, "base", source=str(tmp_path)), room()
        looked: list[str] = []

        def isdir(path: Any) -> bool:
            looked.append(str(path))
            return Path(path).is_dir()

        monkeypatch.setattr(os.path, "isdir", isdir)
        with pytest.raises(WrongBase, match="that is not in the bucket") as caught:
            scene.restore_weights(scene.way(), held)
        assert str(tmp_path) in caught.value.message
        assert caught.value.hint is not None
        assert "--base DIR" in caught.value.hint
        assert str(tmp_path) not in looked
        base = read_weights(tmp_path)
        assert scene.restore_weights(scene.way(), held, base=base) == digest(weights(5))

    def test_a_relative_source_is_not_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        safetensors.numpy.save_file(weights(1), tmp_path / "model.safetensors")
        monkeypatch.chdir(tmp_path.parent)
        scene = Scene(5, "base", source=tmp_path.name)
        scene.bucket.url = "/data/run"
        with pytest.raises(WrongBase, match="that is not on this machine"):
            scene.restore_weights(scene.way(), room())

    def test_restore_refuses_another_base(self) -> None:
        scene = Scene(5, "base", source="hf://org/model")
        with pytest.raises(WrongBase, match=digest(weights(2)).hex[:12]) as caught:
            scene.restore_weights(scene.way(), room(), base=read_weights(weights(2)))
        assert caught.value.hint == "get the base from hf://org/model"

    def test_restore_fails_without_the_base(self, tmp_path: Path) -> None:
        for source in ("", "hf://org/model", str(tmp_path / "gone")):
            scene = Scene(2, "base", source=source)
            scene.bucket.url = "/data/run"
            with pytest.raises(WrongBase, match="that is not on this machine") as caught:
                scene.restore_weights(scene.way(), room())
            assert source in caught.value.message
            assert caught.value.hint


class TestApplyVersion:
    def test_delta_of_a_version_is_applied(self) -> None:
        held = weights(1)
        made = diff(weights(1), weights(2))
        after = apply_version(read_weights(held), [made], digest(held), made.after)
        assert after == digest(weights(2)) == digest(held)

    def test_unchanged_version_is_accepted(self) -> None:
        held = weights(1)
        state = digest(held)
        assert apply_version(read_weights(held), [], state, state.hex) == state

    def test_changed_state_without_a_delta_is_refused(self) -> None:
        with pytest.raises(CorruptDelta, match="this version: leads to another state"):
            apply_version(read_weights(weights(1)), [], digest(weights(1)), digest(weights(2)).hex)

    def test_parts_of_several_ranks_are_applied(self) -> None:
        """Each rank publishes the changes of its own rows. Together they give the version's state."""
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
