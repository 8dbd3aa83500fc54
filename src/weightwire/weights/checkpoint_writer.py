"""Writes a checkpoint: all of it, or nothing.

Knows how weights are laid out in files, after the model of another checkpoint, and how files appear in their
place all at once. Does not know where the bits come from: they are filled in through a memory map, so that no
more than a few pages of them need be in memory.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from weightwire.errors import OutputError
from weightwire.weights.checkpoint import Checkpoint, ShardFile
from weightwire.weights.file_names import MODEL_FILE, is_side_file_name, is_weights_file
from weightwire.weights.safetensors_file import LENGTH_SIZE, Slot, build_header, lay_out
from weightwire.weights.schema import Schema
from weightwire.weights.tensor import Tensor

__all__ = ["CheckpointWriter", "file_to_replace", "replacing"]

# Without it transformers does not load a file.
_METADATA = {"format": "pt"}

_HINTS = {
    errno.ENOENT: "create the directory it goes into first",
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space, or write to another disk",
    errno.ENOTEMPTY: "write to a new directory",
}


class CheckpointWriter:
    """A checkpoint in the making.

    `with CheckpointWriter(out, schema=..., like=base) as writer:` and then `writer[name].bits[:] = ...` for
    every tensor of the schema. At the end of the block everything is synced to disk and appears at `out` at
    once; after an exception nothing does. Tensors of the writer must not be written to after the block.

    `out` becomes a file or a directory, whichever `like` is, with the same shards, metadata and side files;
    where only bits differ, the files differ only there. Tensors that `like` does not have go to its last
    shard. Without `like`, an `out` called *.safetensors becomes a file, any other a directory. `files` are side
    files besides, or in place of those of `like`: names relative to the directory, and contents. A file has none.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        schema: Schema,
        like: Checkpoint | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.out = Path(out)
        self._like = like
        self._is_dir = like.path.is_dir() if like else self.out.suffix != ".safetensors"
        self._files = _check_names(self.out, files or {}) if self._is_dir else {}
        self._plans = _plan_like(like, schema) if like else [_plan_fresh(MODEL_FILE, schema, schema, _METADATA)]
        # In the same directory, since a rename is atomic only within a file system.
        self._target = Path(os.path.realpath(out))
        self._staging = self._target.parent / f".weightwire-{secrets.token_hex(8)}.partial"
        self._places: dict[str, tuple[mmap.mmap, int, Slot]] = {}
        self._untouched = {name for name, (_, shape) in schema.items() if math.prod(shape)}

    def __enter__(self) -> Self:
        with _writing(self.out):
            self._check_target()
            self._check_space()
            try:
                self._create()
            except BaseException:
                self._discard()
                raise
        return self

    def __getitem__(self, name: str) -> Tensor:
        """A writable tensor, of zeros at first."""
        data, offset, slot = self._places[name]
        self._untouched.discard(name)
        return Tensor.at(data, offset + slot.start, slot.dtype, slot.shape)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._discard()

    def _check_target(self) -> None:
        if not self._is_dir:
            file_to_replace(self.out)
        elif self._target.exists() and not self._target.is_dir():
            raise OutputError(f"{self.out}: is a file already", hint="name the directory to write")
        elif self._target.exists() and any(self._target.iterdir()):
            raise OutputError(
                f"{self.out}: exists and is not empty",
                hint="write to a new directory: one that holds files cannot be replaced all at once",
            )

    def _check_space(self) -> None:
        """Early, since allocating most of a large checkpoint takes time."""
        needed = sum(plan.size for plan in self._plans)
        needed += sum(source.stat().st_size for source, _ in self._side_files())
        needed += sum(map(len, self._files.values()))
        free = shutil.disk_usage(self._target.parent).free
        if needed > free:
            raise OutputError(f"{self.out}: {needed:,} bytes are needed, {free:,} are free", hint=_HINTS[errno.ENOSPC])

    def _side_files(self) -> list[tuple[Path, Path]]:
        like = self._like
        return [(like.path / path, self._staging / path) for path in like.side_files] if like else []

    def _create(self) -> None:
        if self._is_dir:
            self._staging.mkdir()
        for plan in self._plans:
            data = _map_new(self._staging / plan.name if self._is_dir else self._staging, plan.size)
            data[: len(plan.head)] = plan.head
            self._places |= {slot.name: (data, len(plan.head), slot) for slot in plan.slots}
        for source, copy in self._side_files():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
        if self._like and self._like.index:
            index = _build_index(self._like.index, self._like.files, self._plans)
            (self._staging / self._like.index.name).write_bytes(index)
        for name, content in self._files.items():
            (self._staging / name).parent.mkdir(parents=True, exist_ok=True)
            (self._staging / name).write_bytes(content)

    def _finish(self) -> None:
        if self._untouched:
            raise OutputError(f"{self.out}: tensor {min(self._untouched)!r} was never filled in")
        with _writing(self.out):
            for data in {id(data): data for data, _, _ in self._places.values()}.values():
                data.flush()
            _sync([*self._staging.rglob("*"), self._staging])
            os.replace(self._staging, self._target)
            _sync([self._target.parent])

    def _discard(self) -> None:
        """Whatever is left of the work: all of it after an error, only the memory maps after success."""
        self._places.clear()
        with suppress(OSError):
            if self._is_dir:
                shutil.rmtree(self._staging)
            else:
                self._staging.unlink()


def _check_names(out: Path, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """That they stay in their directory, and out of the way of the weights: names may come from a bucket."""
    for name in files:
        if not is_side_file_name(name) or is_weights_file(name):
            raise OutputError(f"{out}: {name!r} cannot be a file beside weights", hint="use plain relative names")
    return files


def _begins_like_safetensors(start: bytes) -> bool:
    return start[LENGTH_SIZE : LENGTH_SIZE + 1] == b"{"


def file_to_replace(
    out: str | os.PathLike[str],
    kind: str = "safetensors file",
    is_kind: Callable[[bytes], bool] = _begins_like_safetensors,
) -> Path:
    """Where a file is to appear: a new one, or in place of an empty one or one of its kind, wherever a link leads.

    `is_kind` tells the kind by a file's first bytes. Anything else that is there (a device, a config, notes) was
    hardly meant.
    """
    target = Path(os.path.realpath(out))
    if not target.parent.is_dir():
        raise OutputError(f"{out}: there is no directory {target.parent}", hint="create it first")
    if not os.access(target.parent, os.W_OK):
        raise OutputError(f"{out}: {target.parent} cannot be written to", hint="choose another place")
    if target.is_dir():
        raise OutputError(f"{out}: is a directory already", hint="name the file to write")
    if target.exists():
        start = _start_of(target) if target.is_file() else None
        if start is None or (start and not is_kind(start)):
            raise OutputError(f"{out}: exists, and is no {kind}", hint="name another file to write")
    return target


def _start_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as problem:
        raise OutputError(f"{path}: cannot be read ({problem.strerror})", hint="choose another place") from problem


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that appears at `path`, in place of what was there, when the block ends well; else nothing does."""
    with _writing(Path(path)):
        target = file_to_replace(path)
        staging = target.parent / f".weightwire-{secrets.token_hex(8)}.partial"
        try:
            with staging.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(staging, target)
            _sync([target.parent])
        finally:
            staging.unlink(missing_ok=True)


# Layout


@dataclass(frozen=True)
class _ShardPlan:
    """A file to be: the bytes before its data part, and where its tensors go."""

    name: str
    head: bytes
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return len(self.head) + sum(slot.end - slot.start for slot in self.slots)


def _plan_like(like: Checkpoint, schema: Schema) -> list[_ShardPlan]:
    shards = [[slot.name for slot in file.header.slots if slot.name in schema] for file in like.files]
    shards[-1] += [name for name in schema if name not in like]
    plans = [_plan_shard(file, names, schema) for file, names in zip(like.files, shards, strict=True)]
    # A shard that has lost all its tensors goes too, but for the last.
    return [plan for plan in plans if plan.slots] or plans[-1:]


def _plan_shard(file: ShardFile, names: Sequence[str], schema: Schema) -> _ShardPlan:
    slots = file.header.slots
    if [(name, *schema[name]) for name in names] == [(slot.name, slot.dtype, slot.shape) for slot in slots]:
        return _ShardPlan(file.path.name, file.head, slots)
    return _plan_fresh(file.path.name, names, schema, file.header.metadata)


def _plan_fresh(name: str, names: Iterable[str], schema: Schema, metadata: Mapping[str, str]) -> _ShardPlan:
    """Wide units first, as stock safetensors does: so that every tensor is aligned."""
    order = sorted(names, key=lambda name: (-schema[name][0].unit, name))
    slots = lay_out((name, *schema[name]) for name in order)
    return _ShardPlan(name, build_header(slots, metadata), slots)


def _build_index(index_file: Path, files: Sequence[ShardFile], plans: Sequence[_ShardPlan]) -> bytes:
    """The index as it is, or one of the same kind where the tensors are not the same."""
    raw = index_file.read_bytes()
    if [plan.head for plan in plans] == [file.head for file in files]:
        return raw
    index: dict[str, Any] = json.loads(raw)
    slots = [slot for plan in plans for slot in plan.slots]
    totals = {
        "total_size": sum(slot.end - slot.start for slot in slots),
        "total_parameters": sum(math.prod(slot.shape) for slot in slots),
    }
    metadata = index.get("metadata")
    if isinstance(metadata, dict):
        metadata.update({key: total for key, total in totals.items() if key in metadata})
    index["weight_map"] = {slot.name: plan.name for plan in plans for slot in plan.slots}
    return (json.dumps(index, ensure_ascii=False, indent=2, sort_keys=True) + "\n").encode()


# Files


def _map_new(path: Path, size: int) -> mmap.mmap:
    with path.open("x+b") as file:
        _allocate(file.fileno(), size)
        return mmap.mmap(file.fileno(), size)


def _allocate(fd: int, size: int) -> None:
    """Real blocks, not a sparse file: a disk that fills up must be an error here, not a SIGBUS later."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as problem:
            if problem.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.truncate(fd, size)


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise OutputError(
            f"{out}: cannot be written ({problem.strerror or problem})",
            hint=_HINTS.get(problem.errno or 0, "check that you may write there, or choose another place"),
        ) from problem
