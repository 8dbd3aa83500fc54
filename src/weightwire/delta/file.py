"""The delta file: encoded tensors in one safetensors file (docs/FORMAT.md, "File").

Maps blocks to bytes and holds the digests of the result. Reads bytes only on demand, so a delta may be in memory, in a
file or in a bucket.
"""

from __future__ import annotations

import base64
import bisect
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, NoReturn

from weightwire.codec import BYTES_PER_BYTE, Digest, Layout, read_uvarint, uvarint
from weightwire.delta.state import State, TensorState
from weightwire.errors import CheckpointError, CorruptDelta, OutputError, UnsupportedFormat, WeightwireError, WrongBase
from weightwire.system import NotRegularFile, open_regular
from weightwire.weights import (
    BY_CODE,
    DTYPES,
    LENGTH_SIZE,
    MAX_DIMS,
    MAX_INT,
    Dtype,
    Rows,
    Slot,
    build_header,
    is_unicode,
    read_header,
    read_size,
    replacing,
)

__all__ = ["FORMAT", "BlockData", "Delta", "Entry", "Packed", "Spool", "Spooled", "check_format", "pack"]

FORMAT = "weightwire/1"
ANCHOR, DELTA = "anchor", "delta"

_U8 = DTYPES["U8"]
_CODE, _ROWS, _COO, _FRESH = 0x1F, 0x20, 0x40, 0x80
_MOST_BYTES = 1 << 62
_CHUNK = 8 << 20
_AGAIN = "the delta is damaged: fetch it or make it again"

Fetch = Callable[[int, int], bytes | memoryview]


@dataclass(frozen=True)
class Entry:
    """A tensor in a delta file, or its rows from `rows[0]` to before `rows[1]`.

    A `fresh` entry needs no base: the tensor is new, or has another dtype or shape. `blocks` are the sizes of its
    encoded blocks, 0 for an unchanged block. `digest` is that of the covered rows after the change.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    rows: Rows | None
    coo: bool
    fresh: bool
    changed: int
    blocks: tuple[int, ...]
    digest: Digest
    start: int = 0

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.dtype, self.shape, self.rows)

    @property
    def nbytes(self) -> int:
        return sum(self.blocks)

    @property
    def state(self) -> TensorState:
        return TensorState(self.dtype, self.shape, self.digest)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.blocks, initial=self.start))

    def span(self, blocks: range) -> tuple[int, int]:
        """The byte range of some blocks in the data part."""
        return self._starts[blocks.start], self._starts[max(blocks.start, blocks.stop)]


@dataclass(frozen=True, slots=True)
class Spooled:
    """An encoded block in a temporary file."""

    file: IO[bytes]
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self, begin: int, end: int) -> bytes:
        return _pread(self.file, self.start + begin, self.start + end, "temporary file")


class Spool:
    """Keeps encoded blocks in a temporary file instead of in memory.

    The file must be open for reading and writing, and stay open while the blocks are used. Blocks are appended. One
    thread writes; any number of threads read.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._end = file.seek(0, os.SEEK_END)

    def keep(self, data: bytes) -> Spooled:
        start, rest = self._end, memoryview(data)
        try:
            while rest:
                written = os.pwrite(self._file.fileno(), rest, self._end)
                self._end, rest = self._end + written, rest[written:]
        except OSError as problem:
            raise OutputError(
                f"temporary file: cannot be written ({problem.strerror})", hint="set TMPDIR to a disk with more space"
            ) from problem
        return Spooled(self._file, start, len(data))


BlockData = bytes | Spooled


@dataclass(frozen=True)
class Packed:
    """An entry and its encoded blocks, ready to pack."""

    entry: Entry
    parts: Sequence[BlockData]


@dataclass(frozen=True)
class Delta:
    """A delta or an anchor: entries by name, and their bytes.

    `before` and `after` identify the state of all weights. They are empty if the file covers only a part.
    """

    where: str
    head: bytes = field(repr=False)
    kind: str
    before: str
    after: str
    entries: Mapping[str, Entry] = field(repr=False)
    removed: tuple[str, ...]
    nbytes: int
    fetch: Fetch = field(repr=False, compare=False)

    @property
    def changed(self) -> int:
        return sum(entry.changed for entry in self.entries.values())

    def block(self, entry: Entry, index: int) -> bytes | memoryview:
        return self.fetch(*entry.span(range(index, index + 1)))

    def byte_range(self, name: str, rows: Rows | None = None) -> tuple[int, int]:
        """The byte range of a tensor in the file, or of some of its rows, counted from the first row of the entry."""
        entry = self.entries[name]
        blocks = entry.layout.blocks_of_rows(*rows) if rows and not entry.coo else range(len(entry.blocks))
        begin, end = entry.span(blocks)
        return len(self.head) + begin, len(self.head) + end

    def advance(self, state: State) -> State:
        """The state after this delta, computed from the state before it and the entries.

        For the delta of a shard, it is the state of that shard.
        """
        if self.before and state.hex != self.before:
            raise WrongBase(
                f"{self.where}: made for weights with state {self.before[:12]}, not {state.hex[:12]}",
                hint="pass the state of the weights that it was made from",
            )
        return state.replace({name: entry.state for name, entry in self.entries.items()}, self.removed)

    def corrupt(self, what: str, name: str | None = None) -> NoReturn:
        place = self.where if name is None else f"{self.where}: tensor {name!r:.200}"
        raise CorruptDelta(f"{place}: {what}", hint=_AGAIN)

    def to_bytes(self) -> bytes:
        return bytes(self.read(0, self.nbytes))

    def read(self, begin: int, end: int) -> bytes | memoryview:
        """Bytes of the file, including its header."""
        size = len(self.head)
        if begin >= size:
            return self.fetch(begin - size, end - size)
        head = self.head[begin:end]
        return head if end <= size else head + bytes(self.fetch(0, end - size))

    def chunks(self, size: int = _CHUNK) -> Iterator[bytes | memoryview]:
        """The bytes of the file in chunks of this size. The last one may be shorter."""
        for begin in range(0, self.nbytes, size):
            yield self.read(begin, min(begin + size, self.nbytes))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, which appears at once."""
        with replacing(path) as file:
            for chunk in self.chunks():
                file.write(chunk)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Delta:
        """Opens a delta file. Reads the header now and the rest on demand.

        The file is not mapped: if it is truncated meanwhile, reading raises an error instead of a SIGBUS.
        """
        where = str(path)
        if Path(path).is_dir():
            raise CheckpointError(
                f"{where}: is a directory, not a delta", hint="pass a file written by `weightwire diff`"
            )
        try:
            file = open(open_regular(path), "rb")  # noqa: SIM115 (closed with the delta)
            total = os.fstat(file.fileno()).st_size
        except NotRegularFile as problem:
            raise CheckpointError(f"{where}: not a regular file", hint="check the path") from problem
        except FileNotFoundError as problem:
            raise CheckpointError(f"{where}: no such file or directory", hint="check the path") from problem
        except OSError as problem:
            raise CheckpointError(f"{where}: cannot be read ({problem.strerror})", hint="check the path") from problem

        if not total:
            raise CorruptDelta(f"{where}: is empty", hint=_AGAIN)
        return cls.remote(lambda begin, end: _pread(file, begin, end, where), total, where)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, where: str = "delta") -> Delta:
        view = memoryview(data)
        return cls.remote(lambda begin, end: view[begin:end], len(view), where)

    @classmethod
    def remote(cls, read: Fetch, total: int, where: str) -> Delta:
        """A delta whose bytes come from `read(begin, end)`. Reads the header now and the rest on demand."""
        size = read_size(bytes(read(0, min(total, LENGTH_SIZE))), where, total=total, error=CorruptDelta)
        head = bytes(read(0, size))
        header = read_header(head, where, total=total, error=CorruptDelta)
        metadata = header.metadata
        foreign = CorruptDelta(f"{where}: not a weightwire delta", hint="pass a file written by `weightwire diff`")
        check_format(metadata.get("format", ""), where, foreign)
        try:
            entries = _unpack_index(header.slots, metadata["index"])
            removed = _read_removed(metadata.get("removed", "[]"), entries)
            kind, before, after = metadata["kind"], metadata["before"], metadata["after"]
            if kind not in (ANCHOR, DELTA):
                raise ValueError(f"unknown kind {kind!r:.40}")
            if any(text and not _is_digest(text) for text in (before, after)):
                raise ValueError("a state digest is malformed")
            if kind == ANCHOR and (removed or before or not all(entry.fresh for entry in entries.values())):
                raise ValueError("an anchor must not need a base")
        except (ValueError, KeyError) as problem:
            reason = f"{problem} is missing in its metadata" if isinstance(problem, KeyError) else problem
            raise CorruptDelta(f"{where}: {reason}", hint=_AGAIN) from problem
        return cls(where, head, kind, before, after, entries, removed, total, lambda b, e: read(size + b, size + e))


def pack(
    packed: Iterable[Packed],
    *,
    kind: str = DELTA,
    before: str = "",
    after: str = "",
    removed: Iterable[str] = (),
) -> Delta:
    """Makes a file of entries, sorted by name. The same weights give the same file."""
    ordered = sorted(packed, key=lambda one: one.entry.name.encode())
    slots: list[Slot] = []
    entries: dict[str, Entry] = {}
    at = 0
    for one in ordered:
        name, size = one.entry.name, one.entry.nbytes
        slots.append(Slot(name, _U8, (size,), at, at + size))
        entries[name] = replace(one.entry, start=at)
        at += size
    gone = tuple(sorted(removed, key=str.encode))
    index = base64.b85encode(b"".join(_pack_entry(one.entry) for one in ordered)).decode()
    metadata = {"format": FORMAT, "kind": kind, "before": before, "after": after, "index": index}
    if gone:
        metadata["removed"] = json.dumps(gone, ensure_ascii=False, separators=(",", ":"))
    head = build_header(slots, metadata)
    parts = _Parts([part for one in ordered for part in one.parts if part])
    return Delta("delta", head, kind, before, after, entries, gone, len(head) + at, parts.fetch)


def _pread(file: IO[bytes], begin: int, end: int, where: str) -> bytes:
    """All bytes from `begin` to before `end`. Does not use the position of the file, so threads can share it."""
    data = os.pread(file.fileno(), end - begin, begin)
    while len(data) < end - begin:
        more = os.pread(file.fileno(), end - begin - len(data), begin + len(data))
        if not more:
            raise CorruptDelta(f"{where}: truncated while it was read", hint=_AGAIN)
        data += more
    return data


class _Parts:
    """Many pieces, read as one sequence of bytes."""

    def __init__(self, parts: Sequence[BlockData]) -> None:
        self._parts = parts
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))

    def fetch(self, begin: int, end: int) -> bytes | memoryview:
        first = bisect.bisect_right(self._starts, begin) - 1
        last = bisect.bisect_left(self._starts, end)
        pieces = [self._piece(index, begin, end) for index in range(first, last)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _piece(self, index: int, begin: int, end: int) -> bytes | memoryview:
        """The bytes of one part within a range."""
        part, start = self._parts[index], self._starts[index]
        begin, end = max(begin - start, 0), min(end - start, len(part))
        if isinstance(part, Spooled):
            return part.read(begin, end)
        return part if (begin, end) == (0, len(part)) else memoryview(part)[begin:end]


# --- metadata ----------------------------------------------------------------------------------------------------


def _pack_entry(entry: Entry) -> bytes:
    flags = entry.dtype.code | _ROWS * (entry.rows is not None) | _COO * entry.coo | _FRESH * entry.fresh
    numbers = [len(entry.shape), *entry.shape, *(entry.rows or ()), entry.changed, *entry.blocks]
    digest = b"".join(one.to_bytes(8, "little") for one in entry.digest)
    return bytes([flags]) + b"".join(map(uvarint, numbers)) + digest


class _IndexReader:
    def __init__(self, text: str) -> None:
        self._data = base64.b85decode(text)
        self._at = 0
        if base64.b85encode(self._data).decode() != text:
            raise ValueError("its index is not in canonical form")

    def number(self) -> int:
        try:
            value, self._at = read_uvarint(self._data, self._at)
        except ValueError as problem:
            raise ValueError(f"its index is damaged: {problem}") from None
        return value

    def raw(self, size: int) -> bytes:
        if len(self._data) - self._at < size:
            raise ValueError("its index is too short")
        self._at += size
        return self._data[self._at - size : self._at]

    def finish(self) -> None:
        if self._at != len(self._data):
            raise ValueError("its index is too long")


def _unpack_index(slots: Sequence[Slot], text: str) -> dict[str, Entry]:
    reader = _IndexReader(text)
    entries: dict[str, Entry] = {}
    for slot in slots:
        try:
            entries[slot.name] = _unpack_entry(reader, slot)
        except ValueError as problem:
            raise ValueError(f"tensor {slot.name!r:.200}: {problem}") from problem
    reader.finish()
    return entries


def _unpack_entry(reader: _IndexReader, slot: Slot) -> Entry:
    flags = reader.raw(1)[0]
    coo, fresh = bool(flags & _COO), bool(flags & _FRESH)
    dtype, shape, rows = _unpack_shape(reader, flags)
    layout = Layout.of(dtype, shape, rows)
    changed = reader.number()
    if changed > layout.count:
        raise ValueError("claims more changes than weights")
    size = slot.end - slot.start
    if fresh and size * BYTES_PER_BYTE < layout.count * dtype.unit:
        raise ValueError("is too short for what it claims to hold")
    # Read one by one: a hostile shape may claim any number of blocks.
    blocks = tuple(reader.number() for _ in range(1 if coo else layout.blocks))
    if sum(blocks) != size or slot.dtype is not _U8 or len(slot.shape) != 1:
        raise ValueError("the sizes of its blocks do not match its bytes")
    if coo and fresh:
        raise ValueError("cannot be both fresh and coo")
    sums = reader.raw(16)
    digest = int.from_bytes(sums[:8], "little"), int.from_bytes(sums[8:], "little")
    return Entry(slot.name, dtype, shape, rows, coo, fresh, changed, blocks, digest, slot.start)


def _unpack_shape(reader: _IndexReader, flags: int) -> tuple[Dtype, tuple[int, ...], Rows | None]:
    dtype = BY_CODE.get(flags & _CODE)
    if dtype is None:
        raise ValueError("unknown dtype")
    dims = reader.number()
    if dims > MAX_DIMS:
        raise ValueError("has too many dimensions")
    shape = tuple(reader.number() for _ in range(dims))
    if max(shape, default=0) > MAX_INT:
        raise ValueError("has an impossible dimension")
    nbytes = dtype.nbytes(shape)
    if nbytes is None or nbytes > _MOST_BYTES:
        raise ValueError(f"{dtype.name} {list(shape)} is not a possible size")
    rows = (reader.number(), reader.number()) if flags & _ROWS else None
    if rows and not (shape and rows[0] < rows[1] <= shape[0] and nbytes % shape[0] == 0):
        raise ValueError(f"does not have rows {rows[0]} to {rows[1]}")
    return dtype, shape, rows


def _read_removed(text: str, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) and is_unicode(name) for name in names):
        raise ValueError("its list of removed tensors is malformed")
    for name in names:
        if name in entries:
            raise ValueError(f"tensor {name!r:.200}: is both changed and removed")
    return tuple(names)


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def check_format(text: str, where: str, foreign: WeightwireError) -> None:
    """Raises UnsupportedFormat for another version of the format, and `foreign` for any other text."""
    if text == FORMAT:
        return
    name, _, version = text.partition("/")
    if name == FORMAT.partition("/")[0] and version.isdecimal():
        raise UnsupportedFormat(
            f"{where}: has format version {version[:20]}, but this release reads {FORMAT}", hint="upgrade weightwire"
        )
    raise foreign
