"""Writes a checkpoint, completely or not at all.

Plans the files, either like those of another checkpoint or fresh, and moves them into place at once. Callers fill the
weights in through a memory map, so only a few pages need to be in memory.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from weightwire.errors import OutputError
from weightwire.system import open_regular, read_regular
from weightwire.weights.checkpoint import Checkpoint, ShardFile
from weightwire.weights.file_names import MODEL_FILE, is_side_file_name, is_weights_file
from weightwire.weights.safetensors_file import LENGTH_SIZE, Slot, build_header, lay_out
from weightwire.weights.schema import Schema
from weightwire.weights.staging import hold_staging, new_staging, release_staging, sweep_staging
from weightwire.weights.tensor import Tensor

__all__ = ["CheckpointWriter", "file_to_replace", "replacing"]

# transformers refuses files without it.
_METADATA = {"format": "pt"}

_HINTS = {
    errno.ENOENT: "create its directory first",
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space, or write to another disk",
    errno.ENOTEMPTY: "write to a new directory",
}


class CheckpointWriter:
    """Writes one checkpoint.

    Use `with CheckpointWriter(out, schema=..., like=base) as writer:` and set `writer[name].bits[:] = ...` for every
    tensor of the schema. When the block ends, everything is synced to disk and appears at `out` at once. After an
    exception nothing appears. Do not write to the tensors after the block.

    With `like`, `out` becomes a file or a directory as `like` is, with the same shards, metadata and side files. Files
    differ only where bits differ. Tensors that `like` does not have go to its last shard. Without `like`, an `out`
    named *.safetensors becomes a file, any other a directory. `files` are more side files, as relative names and
    contents; they replace those of `like`. A single file has no side files. `weights_file` names the weights in a
    directory without `like`.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        schema: Schema,
        like: Checkpoint | None = None,
        files: Mapping[str, bytes] | None = None,
        weights_file: str = MODEL_FILE,
    ) -> None:
        self.out = Path(out)
        self._like = like
        self._is_dir = like.path.is_dir() if like else self.out.suffix != ".safetensors"
        self._files = _check_names(self.out, files or {}) if self._is_dir else {}
        self._plans = _plan_like(like, schema) if like else [_plan_fresh(weights_file, schema, schema, _METADATA)]
        self._target = Path(os.path.realpath(out))
        self._staging = new_staging(self._target)
        self._lock: int | None = None
        self._places: dict[str, tuple[mmap.mmap, int, Slot]] = {}
        self._untouched = {name for name, (_, shape) in schema.items() if math.prod(shape)}

    def __enter__(self) -> Self:
        with _writing(self.out):
            self._check_target()
            sweep_staging(self._target)
            self._check_space()
            try:
                self._create()
            except BaseException:
                self._discard()
                raise
        return self

    def __getitem__(self, name: str) -> Tensor:
        """A writable tensor, initially zero."""
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
            raise OutputError(f"{self.out}: is a file, not a directory", hint="choose another directory")
        elif self._target.exists() and any(self._target.iterdir()):
            raise OutputError(f"{self.out}: exists and is not empty", hint="write to a new or an empty directory")

    def _check_space(self) -> None:
        """Checked first: allocating a large checkpoint takes time."""
        needed = sum(plan.size for plan in self._plans)
        needed += sum(source.stat().st_size for source, _ in self._side_files())
        needed += sum(map(len, self._files.values()))
        free = shutil.disk_usage(self._target.parent).free
        if needed > free:
            raise OutputError(f"{self.out}: needs {needed:,} bytes, {free:,} are free", hint=_HINTS[errno.ENOSPC])

    def _side_files(self) -> list[tuple[Path, Path]]:
        like = self._like
        return [(like.path / path, self._staging / path) for path in like.side_files] if like else []

    def _create(self) -> None:
        if self._is_dir:
            self._staging.mkdir()
        else:
            self._staging.touch(exist_ok=False)
        self._lock = hold_staging(self._staging)
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
            raise OutputError(
                f"{self.out}: tensor {min(self._untouched)!r} was not written", hint="write every tensor of the schema"
            )
        with _writing(self.out):
            for data in {id(data): data for data, _, _ in self._places.values()}.values():
                data.flush()
            _sync([*self._staging.rglob("*"), self._staging])
            os.replace(self._staging, self._target)
            _sync([self._target.parent])

    def _discard(self) -> None:
        """Removes the memory maps and, after an error, the staged files."""
        self._places.clear()
        with suppress(OSError):
            if self._is_dir:
                shutil.rmtree(self._staging)
            else:
                self._staging.unlink()
        release_staging(self._lock)
        self._lock = None


def _check_names(out: Path, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Names may come from a bucket: they must stay in the directory and not replace weights."""
    for name in files:
        if not is_side_file_name(name) or is_weights_file(name):
            raise OutputError(f"{out}: {name!r} cannot be a side file", hint="use a plain relative name")
    return files


def _begins_like_safetensors(start: bytes) -> bool:
    return start[LENGTH_SIZE : LENGTH_SIZE + 1] == b"{"


def file_to_replace(
    out: str | os.PathLike[str],
    kind: str = "safetensors file",
    is_kind: Callable[[bytes], bool] = _begins_like_safetensors,
) -> Path:
    """The path to write to, with links resolved. Refuses to replace a file of another kind.

    A new file, an empty file or a file of the same kind is fine. `is_kind` recognizes the kind by the first bytes.
    """
    target = Path(os.path.realpath(out))
    if not target.parent.is_dir():
        raise OutputError(f"{out}: directory {target.parent} does not exist", hint="create it first")
    if not os.access(target.parent, os.W_OK):
        raise OutputError(f"{out}: no permission to write to {target.parent}", hint="choose another directory")
    if target.is_dir():
        raise OutputError(f"{out}: is a directory, not a file", hint="choose a file name")
    if target.exists():
        start = _start_of(target) if target.is_file() else None
        if start is None or (start and not is_kind(start)):
            raise OutputError(f"{out}: exists and is not a {kind}", hint="choose another file name")
    return target


def _start_of(path: Path) -> bytes:
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(64)
    except OSError as problem:
        raise OutputError(f"{path}: cannot be read ({problem.strerror})", hint="choose another file name") from problem


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends without an exception."""
    with _writing(Path(path)):
        target = file_to_replace(path)
        sweep_staging(target)
        staging, lock = new_staging(target), None
        try:
            with staging.open("xb") as file:
                lock = hold_staging(staging)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(staging, target)
            _sync([target.parent])
        finally:
            release_staging(lock)
            staging.unlink(missing_ok=True)


# Layout


@dataclass(frozen=True)
class _ShardPlan:
    """A file to write: its name, its header, and where its tensors go."""

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
    # Drop shards without tensors, but keep at least one file.
    return [plan for plan in plans if plan.slots] or plans[-1:]


def _plan_shard(file: ShardFile, names: Sequence[str], schema: Schema) -> _ShardPlan:
    slots = file.header.slots
    if [(name, *schema[name]) for name in names] == [(slot.name, slot.dtype, slot.shape) for slot in slots]:
        return _ShardPlan(file.path.name, file.head, slots)
    return _plan_fresh(file.path.name, names, schema, file.header.metadata)


def _plan_fresh(name: str, names: Iterable[str], schema: Schema, metadata: Mapping[str, str]) -> _ShardPlan:
    """Wide dtypes first, as stock safetensors does, to keep every tensor aligned."""
    order = sorted(names, key=lambda name: (-schema[name][0].unit, name))
    slots = lay_out((name, *schema[name]) for name in order)
    return _ShardPlan(name, build_header(slots, metadata), slots)


def _build_index(index_file: Path, files: Sequence[ShardFile], plans: Sequence[_ShardPlan]) -> bytes:
    """The index of the original, updated if the tensors differ."""
    raw = read_regular(index_file)
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
    with path.open("a+b") as file:
        _allocate(file.fileno(), size)
        return mmap.mmap(file.fileno(), size)


def _allocate(fd: int, size: int) -> None:
    """Allocates real blocks: on a full disk this raises here, where a sparse file would cause a SIGBUS later."""
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
            hint=_HINTS.get(problem.errno or 0, "check the permissions, or choose another place"),
        ) from problem
