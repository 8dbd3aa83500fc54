"""The delta file: encoded blocks in a safetensors file (docs/FORMAT.md, "File").

Maps blocks to bytes, and verifies every block that it reads. Reads bytes only on demand, so a delta may be in memory,
in a file or in a bucket.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from weightwire.delta.encoded_stack import HASH_SIZE, EncodedStack, Entry
from weightwire.delta.index import pack_index, unpack_index
from weightwire.delta.spool import AGAIN, BlockData, Pieces, read_exactly
from weightwire.delta.state import State
from weightwire.errors import CheckpointError, CorruptDelta, UnsupportedFormat, WeightwireError, WrongBase
from weightwire.system import NotRegularFile, open_regular
from weightwire.weights import (
    DTYPES,
    LENGTH_SIZE,
    Header,
    Rows,
    Slot,
    build_header,
    is_unicode,
    read_header,
    read_size,
    replacing,
)

__all__ = ["FORMAT", "Delta", "Packed", "block_hash", "check_format", "head_size", "pack"]

FORMAT = "weightwire/1"
ANCHOR, DELTA = "anchor", "delta"

_U8 = DTYPES["U8"]
_INDEX, _BLOCKS = "index", "blocks"
_CHUNK = 8 << 20

Fetch = Callable[[int, int], bytes | memoryview]


@dataclass(frozen=True)
class Packed:
    """A stack and its encoded blocks, ready to pack."""

    stack: EncodedStack
    parts: Sequence[BlockData]


def block_hash(data: bytes | memoryview) -> bytes:
    """The hash of an encoded block. An empty block has none."""
    return hashlib.sha256(data).digest()[:HASH_SIZE] if len(data) else b""


@dataclass(frozen=True)
class Delta:
    """A delta or an anchor: stacks of entries, and their bytes.

    `head` is all that precedes the blocks: the safetensors header and the index, which has the hash of every block.
    `before` and `after` identify the state of all weights. They are empty if the file covers only a part.
    """

    where: str
    head: bytes = field(repr=False)
    kind: str
    before: str
    after: str
    stacks: tuple[EncodedStack, ...] = field(repr=False)
    removed: tuple[str, ...]
    nbytes: int
    fetch: Fetch = field(repr=False, compare=False)
    result: State | None = field(default=None, repr=False, compare=False)  # known to the maker of a delta

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        return {entry.name: entry for stack in self.stacks for entry in stack.entries}

    @cached_property
    def stack_of(self) -> Mapping[str, EncodedStack]:
        return {entry.name: stack for stack in self.stacks for entry in stack.entries}

    @property
    def changed(self) -> int:
        return sum(sum(stack.columns.changed.tolist()) for stack in self.stacks)

    def block(self, stack: EncodedStack, index: int) -> bytes | memoryview:
        """The bytes of a block. Raises CorruptDelta if they do not have the hash in the index."""
        data = self.fetch(*stack.span(range(index, index + 1)))
        self.check_hash(stack, index, data)
        return data

    def check_hash(self, stack: EncodedStack, index: int, data: bytes | memoryview) -> None:
        if block_hash(data) != stack.hashes[index]:
            self.corrupt(f"{stack.label}: block {index}: its hash does not match the index")

    def byte_range(self, name: str, rows: Rows | None = None) -> tuple[int, int]:
        """The byte range in the file that a reader needs for a tensor, or for some of its rows.

        Rows are counted from the first row of the entry. The range consists of whole blocks.
        """
        stack = self.stack_of[name]
        begin, end = stack.span(self.blocks_of(name, rows))
        return len(self.head) + begin, len(self.head) + end

    def blocks_of(self, name: str, rows: Rows | None = None) -> range:
        """The blocks of its stack that hold a tensor, or some of its rows."""
        stack = self.stack_of[name]
        if len(stack.entries) > 1:
            index = stack.entries.index(self.entries[name]) // stack.per
            return range(index, index + 1)
        if rows is None or stack.coo:
            return range(len(stack.blocks))
        return stack.layout.blocks_of_rows(*rows)

    def advance(self, state: State) -> State:
        """The state after this delta, given the state before it.

        A delta that was read must have digests, as anchors, parts and patches do. For the delta of a shard, it is the
        state of that shard.
        """
        if self.before and state.hex != self.before:
            raise WrongBase(
                f"{self.where}: made for weights with state {self.before[:12]}, not {state.hex[:12]}",
                hint="pass the state of the weights that it was made from",
            )
        if self.result is not None:
            return self.result
        changed = []
        for stack in self.stacks:
            if (digests := stack.columns.digests) is None:
                raise CheckpointError(
                    f"{self.where}: has no digests of tensors, so the state is known only once it is applied",
                    hint="apply it, then call digest(weights)",
                )
            changed.append((stack.names, stack.kind, digests))
        return state.after(changed, self.removed)

    def corrupt(self, what: str, name: str | None = None) -> NoReturn:
        place = self.where if name is None else f"{self.where}: tensor {name!r:.200}"
        raise CorruptDelta(f"{place}: {what}", hint=AGAIN)

    def to_bytes(self) -> bytes:
        return bytes(self.read(0, self.nbytes))

    def read(self, begin: int, end: int) -> bytes | memoryview:
        """Bytes of the file, including its head. They are not verified."""
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
        """Opens a delta file. Reads the head now and the rest on demand.

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
            raise CorruptDelta(f"{where}: is empty", hint=AGAIN)
        return cls.remote(lambda begin, end: read_exactly(file, begin, end, where), total, where)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, where: str = "delta") -> Delta:
        view = memoryview(data)
        return cls.remote(lambda begin, end: view[begin:end], len(view), where)

    @classmethod
    def remote(cls, read: Fetch, total: int, where: str) -> Delta:
        """A delta whose bytes come from `read(begin, end)`. Reads the head now and the rest on demand."""
        size = read_size(bytes(read(0, min(total, LENGTH_SIZE))), where, total=total, error=CorruptDelta)
        header = read_header(bytes(read(0, size)), where, total=total, error=CorruptDelta)
        metadata = header.metadata
        foreign = CorruptDelta(f"{where}: not a weightwire delta", hint="pass a file written by `weightwire diff`")
        check_format(metadata.get("format", ""), where, foreign)
        try:
            begin = size + _index_slot(header).end
            head = bytes(read(0, begin))
            stacks = unpack_index(head[size:], total - begin)
            names = {name for stack in stacks for name in stack.names}
            removed = _read_removed(metadata["removed"], names) if "removed" in metadata else ()
            kind, before, after = metadata["kind"], metadata["before"], metadata["after"]
            if kind not in (ANCHOR, DELTA):
                raise ValueError(f"unknown kind {kind!r:.40}")
            if any(text and not _is_digest(text) for text in (before, after)):
                raise ValueError("a state digest is malformed")
            if kind == ANCHOR and (removed or before or not all(stack.fresh for stack in stacks)):
                raise ValueError("an anchor must not need a base")
            if not after and any(stack.columns.digests is None for stack in stacks):
                raise ValueError("it has neither a state nor digests to check the result with")
        except (ValueError, KeyError) as problem:
            reason = f"{problem} is missing in its metadata" if isinstance(problem, KeyError) else problem
            raise CorruptDelta(f"{where}: {reason}", hint=AGAIN) from problem
        return cls(where, head, kind, before, after, stacks, removed, total, lambda b, e: read(begin + b, begin + e))


def pack(
    packed: Iterable[Packed],
    *,
    kind: str = DELTA,
    before: str = "",
    after: str = "",
    removed: Iterable[str] = (),
) -> Delta:
    """Makes a file of stacks, sorted by their first names."""
    ordered = sorted(packed, key=lambda one: one.stack.first.name.encode())
    stacks: list[EncodedStack] = []
    at = 0
    for one in ordered:
        stacks.append(replace(one.stack, start=at))
        at += sum(one.stack.blocks)
    gone = tuple(sorted(removed, key=str.encode))
    index = pack_index(stacks)
    metadata = {"format": FORMAT, "kind": kind, "before": before, "after": after}
    if gone:
        metadata["removed"] = json.dumps(gone, ensure_ascii=False, separators=(",", ":"))
    slots = [
        Slot(_INDEX, _U8, (len(index),), 0, len(index)),
        Slot(_BLOCKS, _U8, (at,), len(index), len(index) + at),
    ]
    head = build_header(slots, metadata) + index
    pieces = Pieces([part for one in ordered for part in one.parts if part])
    return Delta("delta", head, kind, before, after, tuple(stacks), gone, len(head) + at, pieces.fetch)


def head_size(beginning: bytes, where: str, total: int) -> int:
    """The size of the head, from the first bytes of a file, which hold at least its safetensors header."""
    header = read_header(beginning, where, total=total, error=CorruptDelta)
    try:
        return header.size + _index_slot(header).end
    except ValueError as problem:
        raise CorruptDelta(f"{where}: {problem}", hint=AGAIN) from problem


# --- metadata ----------------------------------------------------------------------------------------------------


def _index_slot(header: Header) -> Slot:
    """The place of the index. Raises ValueError if the file does not consist of the index and the blocks."""
    names = [slot.name for slot in header.slots]
    if names != [_INDEX, _BLOCKS] or any(slot.dtype is not _U8 or len(slot.shape) != 1 for slot in header.slots):
        raise ValueError(f"does not consist of the tensors {_INDEX!r} and {_BLOCKS!r}")
    return header.slots[0]


def _read_removed(text: str, names: set[str]) -> tuple[str, ...]:
    try:
        removed = json.loads(text)
    except (ValueError, RecursionError):
        removed = None
    if not isinstance(removed, list) or not all(isinstance(name, str) and is_unicode(name) for name in removed):
        raise ValueError("its list of removed tensors is malformed")
    if not removed or removed != sorted({*removed}, key=str.encode):
        raise ValueError("its list of removed tensors is empty or not in order")
    for name in removed:
        if name in names:
            raise ValueError(f"tensor {name!r:.200}: is both changed and removed")
    return tuple(removed)


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
