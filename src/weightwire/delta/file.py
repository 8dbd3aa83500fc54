"""A version's encoded tensors <-> one safetensors file.

Knows the file (docs/FORMAT.md, "File"): which bytes are which block of which tensor, and what the result must
digest to. Encodes nothing, applies nothing, and reads only the bytes it is asked for, so that a delta may lie in
memory, in a mapped file, or far away.
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
_AGAIN = "it is damaged or was not written by weightwire: fetch or make it again"

Fetch = Callable[[int, int], bytes | memoryview]


@dataclass(frozen=True)
class Entry:
    """What a file says of one tensor (or of its rows from `rows[0]` to before `rows[1]`).

    `fresh` ones need no base: the tensor is new, or of another dtype or shape. `blocks` are the sizes of its encoded
    blocks, none for one that did not change. `digest` is that of the covered rows afterwards.
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
        """The bytes of some blocks, within the file's data part."""
        return self._starts[blocks.start], self._starts[max(blocks.start, blocks.stop)]


@dataclass(frozen=True, slots=True)
class Spooled:
    """An encoded block that lies in a temporary file."""

    file: IO[bytes]
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self, begin: int, end: int) -> bytes:
        return _pread(self.file, self.start + begin, self.start + end, "spool")


class Spool:
    """Keeps encoded blocks in a temporary file instead of in memory.

    Any file with a descriptor that may be read and written will do, buffered or not. Blocks go behind what it holds;
    it must stay open as long as they are wanted. One thread writes; any number read.
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
                f"the spool cannot be written ({problem.strerror})", hint="spool to a disk with more room: set TMPDIR"
            ) from problem
        return Spooled(self._file, start, len(data))


BlockData = bytes | Spooled


@dataclass(frozen=True)
class Packed:
    """An entry and its encoded blocks, ready to be packed."""

    entry: Entry
    parts: Sequence[BlockData]


@dataclass(frozen=True)
class Delta:
    """A delta or an anchor: entries by name, and the bytes behind them.

    `before` and `after` name the whole state; they are empty where the file covers only a part of it.
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
        """Which bytes of the file hold a tensor, or some of its rows (counted from the entry's first)."""
        entry = self.entries[name]
        blocks = entry.layout.blocks_of_rows(*rows) if rows and not entry.coo else range(len(entry.blocks))
        begin, end = entry.span(blocks)
        return len(self.head) + begin, len(self.head) + end

    def advance(self, state: State) -> State:
        """The state after this delta, from the state before it: what changed is all it takes.

        Of a shard's delta it is the state of that shard: the digests are those of the rows it covers.
        """
        if self.before and state.hex != self.before:
            raise WrongBase(
                f"{self.where}: was made for weights with state {self.before[:12]}, not {state.hex[:12]}",
                hint="pass the state of the weights it was made from",
            )
        return state.replace({name: entry.state for name, entry in self.entries.items()}, self.removed)

    def corrupt(self, what: str, name: str | None = None) -> NoReturn:
        place = self.where if name is None else f"{self.where}: tensor {name!r:.200}"
        raise CorruptDelta(f"{place}: {what}", hint=_AGAIN)

    def to_bytes(self) -> bytes:
        return bytes(self.read(0, self.nbytes))

    def read(self, begin: int, end: int) -> bytes | memoryview:
        """Bytes of the file, its header included."""
        size = len(self.head)
        if begin >= size:
            return self.fetch(begin - size, end - size)
        head = self.head[begin:end]
        return head if end <= size else head + bytes(self.fetch(0, end - size))

    def chunks(self, size: int = _CHUNK) -> Iterator[bytes | memoryview]:
        """The bytes of the file, one chunk after the other; all of them have this size, but the last may be shorter."""
        for begin in range(0, self.nbytes, size):
            yield self.read(begin, min(begin + size, self.nbytes))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, all at once."""
        with replacing(path) as file:
            for chunk in self.chunks():
                file.write(chunk)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Delta:
        """A delta in a file, of which no more is read than is needed.

        It is not mapped: a file that is cut short meanwhile is an error then, and not the end of the process.
        """
        where = str(path)
        if Path(path).is_dir():
            raise CheckpointError(
                f"{where}: is a directory, not a delta", hint="pass a file that `weightwire diff` wrote"
            )
        try:
            file = Path(path).open("rb")  # noqa: SIM115 (closed when nothing reads from it any more)
            total = os.fstat(file.fileno()).st_size
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
        """A delta whose bytes come from `read(begin, end)`; its header is read at once, all else on demand."""
        size = read_size(bytes(read(0, min(total, LENGTH_SIZE))), where, total=total, error=CorruptDelta)
        head = bytes(read(0, size))
        header = read_header(head, where, total=total, error=CorruptDelta)
        metadata = header.metadata
        foreign = CorruptDelta(f"{where}: is no weightwire delta", hint="pass a file that `weightwire diff` wrote")
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
                raise ValueError("an anchor needs no base, but this one does")
        except (ValueError, KeyError) as problem:
            reason = f"no {problem} in its metadata" if isinstance(problem, KeyError) else problem
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
    """Puts entries together, in the order of their names: the same weights give the same file."""
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
    """All bytes from `begin` to before `end`, wherever the file's own position is: threads need not take turns."""
    data = os.pread(file.fileno(), end - begin, begin)
    while len(data) < end - begin:
        more = os.pread(file.fileno(), end - begin - len(data), begin + len(data))
        if not more:
            raise CorruptDelta(f"{where}: became shorter while it was read", hint=_AGAIN)
        data += more
    return data


class _Parts:
    """Many small pieces, read as if they lay one behind the other."""

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
        """What one part has of some bytes: usually all of it, as is."""
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
        value, self._at = read_uvarint(self._data, self._at)
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
        raise ValueError("claims more changes than it has weights")
    size = slot.end - slot.start
    if fresh and size * BYTES_PER_BYTE < layout.count * dtype.unit:
        raise ValueError("is too short for what it claims to hold")
    # Read one by one, and no further than there are any: a shape may claim any number of them.
    blocks = tuple(reader.number() for _ in range(1 if coo else layout.blocks))
    if sum(blocks) != size or slot.dtype is not _U8 or len(slot.shape) != 1:
        raise ValueError("its blocks do not add up to its bytes")
    if coo and fresh:
        raise ValueError("cannot be both new and coo")
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
        raise ValueError(f"{dtype.name} {list(shape)} is no possible size")
    rows = (reader.number(), reader.number()) if flags & _ROWS else None
    if rows and not (shape and rows[0] < rows[1] <= shape[0] and nbytes % shape[0] == 0):
        raise ValueError(f"has no rows {rows[0]} to {rows[1]}")
    return dtype, shape, rows


def _read_removed(text: str, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its list of removed tensors is malformed")
    for name in names:
        if name in entries:
            raise ValueError(f"tensor {name!r:.200}: is both changed and removed")
    return tuple(names)


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def check_format(text: str, where: str, foreign: WeightwireError) -> None:
    """Raises UnsupportedFormat for another version of our format, and `foreign` for anything else that is not it."""
    if text == FORMAT:
        return
    name, _, version = text.partition("/")
    if name == FORMAT.partition("/")[0] and version.isdecimal():
        raise UnsupportedFormat(
            f"{where}: has format version {version[:20]}, and this release reads {FORMAT}", hint="upgrade weightwire"
        )
    raise foreign
