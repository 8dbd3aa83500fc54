"""The index of a delta file: its stacks and entries, packed in columns (docs/FORMAT.md, "Index")."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from weightwire.codec import BLOCK, BYTES_PER_BYTE, Layout, read_uvarint, uvarint
from weightwire.delta.encoded_stack import HASH_SIZE, EncodedStack, Entries, Entry
from weightwire.weights import BY_CODE, MAX_DIMS, MAX_INT, METADATA, Dtype, Rows

__all__ = ["pack_index", "unpack_index"]

Result = TypeVar("Result")

_CODE, _ROWS, _COO, _FRESH = 0x1F, 0x20, 0x40, 0x80
_HAS_DIGESTS = 1
_DIGEST_SIZE = 16
_MOST_BYTES = 1 << 62  # of a tensor
_MOST_COLUMNS = 1 << 26  # bytes; a zlib stream expands up to 1000 times
_MOST_NAMES = 1 << 26  # bytes of all names, which share prefixes
_MOST_ENTRIES = 1 << 20
_MOST_BLOCKS = 1 << 22
_MOST_DIMENSIONS = 1 << 22  # of all shapes
_LEVEL = 9


# --- packing -----------------------------------------------------------------------------------------------------


def pack_index(stacks: Sequence[EncodedStack]) -> bytes:
    """Digests are packed if all entries have one."""
    digests = [stack.columns.digests for stack in stacks]
    sums = [one.astype("<u8").tobytes() for one in digests if one is not None]
    has_digests = len(sums) == len(stacks)
    columns = zlib.compress(b"".join(_columns(stacks)), _LEVEL)
    hashes = [one for stack in stacks for one in stack.hashes]
    sums = sums if has_digests else []
    return bytes([_HAS_DIGESTS * has_digests]) + uvarint(len(columns)) + columns + b"".join(sums + hashes)


def _columns(stacks: Sequence[EncodedStack]) -> Iterator[bytes]:
    yield uvarint(len(stacks))
    yield from (uvarint(len(stack.entries)) for stack in stacks)
    yield _name_columns(tuple(name for stack in stacks for name in stack.names))
    yield bytes(_flags(stack.first) for stack in stacks)
    yield from (uvarint(stack.per) for stack in stacks if len(stack.entries) > 1)
    yield from (uvarint(len(stack.first.shape)) for stack in stacks)
    yield from (uvarint(size) for stack in stacks for size in stack.first.shape)
    yield from (uvarint(row) for stack in stacks for row in stack.first.rows or ())
    yield from (uvarint(size) for stack in stacks for size in stack.blocks)
    yield _uvarints([k for stack in stacks if not stack.fresh for k in stack.columns.changed.tolist()])


@lru_cache(2)  # most steps change the same tensors
def _name_columns(names: tuple[str, ...]) -> bytes:
    raw = [name.encode() for name in names]
    shared = [_shared(*pair) for pair in itertools.pairwise((b"", *raw))]
    rest = [name[k:] for name, k in zip(raw, shared, strict=True)]
    return _uvarints(shared) + _uvarints([len(one) for one in rest]) + b"".join(rest)


def _uvarints(numbers: list[int]) -> bytes:
    if max(numbers, default=0) < 128:
        return bytes(numbers)
    return b"".join(map(uvarint, numbers))


def _shared(one: bytes, other: bytes) -> int:
    """The number of bytes at the beginning that are equal."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(k for k in range(most) if one[k] != other[k])


def _flags(entry: Entry) -> int:
    return entry.dtype.code | _ROWS * (entry.rows is not None) | _COO * entry.coo | _FRESH * entry.fresh


# --- reading -----------------------------------------------------------------------------------------------------


class _Fields:
    """Reads fields one behind the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self) -> int:
        try:
            value, self._at = read_uvarint(self._data, self._at)
        except ValueError as problem:
            raise ValueError(f"its index is damaged: {problem}") from None
        return value

    def numbers(self, count: int) -> Sequence[int]:
        """A hostile count may be any number."""
        if count > len(self._data) - self._at:
            raise ValueError("its index is too short")
        if self._data[self._at : self._at + count].isascii():  # most numbers are one byte
            return self.raw(count)
        return [self.number() for _ in range(count)]

    def raw(self, size: int) -> bytes:
        if len(self._data) - self._at < size:
            raise ValueError("its index is too short")
        self._at += size
        return self._data[self._at - size : self._at]

    def finish(self) -> None:
        if self._at != len(self._data):
            raise ValueError("its index is too long")


def unpack_index(data: bytes, nbytes: int) -> tuple[EncodedStack, ...]:
    """Raises ValueError if the index is malformed, or does not describe `nbytes` bytes of blocks."""
    whole = _Fields(data)
    options = whole.raw(1)[0]
    if options & ~_HAS_DIGESTS:
        raise ValueError("its index has an unknown option")
    columns = _Fields(_decompress(whole.raw(whole.number())))
    stacks = _read_stacks(columns)
    columns.finish()
    if options & _HAS_DIGESTS:
        stacks = _with_digests(stacks, whole)
    placed, start = [], 0
    for stack in stacks:
        hashes = tuple(whole.raw(HASH_SIZE) if size else b"" for size in stack.blocks)
        placed.append(EncodedStack(stack.entries, stack.per, stack.blocks, hashes, start))
        start += sum(stack.blocks)
    whole.finish()
    if start != nbytes:
        raise ValueError("the sizes of its blocks do not match its bytes")
    return tuple(placed)


def _decompress(packed: bytes) -> bytes:
    reader = zlib.decompressobj()
    try:
        columns = reader.decompress(packed, _MOST_COLUMNS)
    except zlib.error:
        raise ValueError("its index is damaged") from None
    if not reader.eof or reader.unused_data:
        raise ValueError("its index is damaged or too large")
    return columns


@dataclass(frozen=True)
class _Claim:
    """What the columns say about a stack, column by column."""

    names: tuple[str, ...]
    flags: int
    per: int = 1
    shape: tuple[int, ...] = ()
    rows: Rows | None = None

    @property
    def members(self) -> int:
        return len(self.names)

    @property
    def dtype(self) -> Dtype:
        return BY_CODE[self.flags & _CODE]

    @property
    def is_coo(self) -> bool:
        return bool(self.flags & _COO)

    @property
    def is_fresh(self) -> bool:
        return bool(self.flags & _FRESH)

    @property
    def alone(self) -> Layout:
        """The layout of one member."""
        return Layout.of(self.dtype, self.shape, self.rows)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        if self.is_coo:
            return 1
        if self.members == 1:
            return self.alone.blocks
        return Layout.stack(self.dtype, self.shape, self.members, self.per).blocks


def _read_stacks(columns: _Fields) -> list[EncodedStack]:
    count = columns.number()
    members = columns.numbers(count) if count <= _MOST_ENTRIES else ()
    if len(members) < count or sum(members) > _MOST_ENTRIES:
        raise ValueError("its index has too many entries")
    if 0 in members:
        raise ValueError("a stack has no members")
    names = _read_names(columns, sum(members))
    flags = columns.raw(len(members))
    claims = [_Claim(tuple(itertools.islice(names, k)), flag) for k, flag in zip(members, flags, strict=True)]
    per = iter(columns.numbers(sum(k > 1 for k in members)))
    claims = [replace(one, per=next(per)) if one.members > 1 else one for one in claims]
    dimensions = columns.numbers(len(claims))
    if sum(dimensions) > _MOST_DIMENSIONS:
        raise ValueError("its index has too many dimensions")
    shapes = [_each(one, _read_shape, columns, count) for one, count in zip(claims, dimensions, strict=True)]
    claims = [replace(one, shape=shape) for one, shape in zip(claims, shapes, strict=True)]
    claims = [_each(one, _read_rows, columns) if one.flags & _ROWS else one for one in claims]
    for one in claims:
        _each(one, _check_members)
    if sum(one.blocks for one in claims) > _MOST_BLOCKS:
        raise ValueError("its index has too many blocks")
    blocks = [_each(one, _read_blocks, columns) for one in claims]
    return [
        EncodedStack(_each(one, _read_entries, columns), one.per, sizes, ())
        for one, sizes in zip(claims, blocks, strict=True)
    ]


def _each(claim: _Claim, read: Callable[..., Result], *arguments: Any) -> Result:
    """Adds the tensor to errors."""
    try:
        return read(claim, *arguments)
    except ValueError as problem:
        raise ValueError(f"tensor {claim.names[0]!r:.200}: {problem}") from problem


def _read_shape(claim: _Claim, columns: _Fields, dimensions: int) -> tuple[int, ...]:
    if dimensions > MAX_DIMS:
        raise ValueError("has too many dimensions")
    shape = tuple(columns.numbers(dimensions))
    dtype = BY_CODE.get(claim.flags & _CODE)
    if dtype is None:
        raise ValueError("unknown dtype")
    if max(shape, default=0) > MAX_INT:
        raise ValueError("has an impossible dimension")
    nbytes = dtype.nbytes(shape)
    # Also without elements: readers multiply dimensions to get the size of a row.
    extent_bits = dtype.bits * math.prod(size for size in shape if size)
    if nbytes is None or extent_bits > 8 * _MOST_BYTES:
        raise ValueError(f"{dtype.name} {list(shape)} is not a possible size")
    return shape


def _read_rows(claim: _Claim, columns: _Fields) -> _Claim:
    first, last = columns.numbers(2)
    shape, nbytes = claim.shape, claim.dtype.nbytes(claim.shape) or 0
    if not (shape and first < last <= shape[0] and nbytes % shape[0] == 0):
        raise ValueError(f"does not have rows {first} to {last}")
    return replace(claim, rows=(first, last))


def _check_members(claim: _Claim) -> None:
    if claim.is_coo and claim.is_fresh:
        raise ValueError("cannot be both fresh and coo")
    is_sized = 0 < claim.per * claim.alone.count <= BLOCK and claim.per <= claim.members
    if claim.members > 1 and (claim.is_coo or claim.rows or not is_sized):
        raise ValueError("cannot be stacked")
    if claim.blocks > _MOST_BLOCKS:
        raise ValueError("has too many blocks")


def _read_blocks(claim: _Claim, columns: _Fields) -> tuple[int, ...]:
    blocks = tuple(columns.numbers(claim.blocks))
    if claim.is_fresh and sum(blocks) * BYTES_PER_BYTE < claim.members * claim.alone.count * claim.dtype.unit:
        raise ValueError("is too short for what it claims to hold")
    return blocks


def _read_entries(claim: _Claim, columns: _Fields) -> Entries:
    count = claim.alone.count
    changed = [count] * claim.members if claim.is_fresh else columns.numbers(claim.members)
    if max(changed) > count:
        raise ValueError("claims more changes than weights")
    like = Entry(claim.names[0], claim.dtype, claim.shape, claim.rows, claim.is_coo, claim.is_fresh, 0)
    return Entries(claim.names, like, np.array(list(changed), np.uint64), None)


def _read_names(columns: _Fields, count: int) -> Iterator[str]:
    """The names of all entries. Each begins with a part of the name before it."""
    shared, rest = columns.numbers(count), columns.numbers(count)
    if sum(shared) + sum(rest) > _MOST_NAMES:
        raise ValueError("its names are too long")
    return iter(_join_names(tuple(shared), tuple(rest), columns.raw(sum(rest))) if count else ())


@lru_cache(2)  # most deltas of a run name the same tensors
def _join_names(shared: tuple[int, ...], rest: tuple[int, ...], text: bytes) -> tuple[str, ...]:
    names, last, at = [], b"", 0
    for k, size in zip(shared, rest, strict=True):
        if k > len(last):
            raise ValueError("a name is malformed")
        last = last[:k] + text[at : at + size]
        at += size
        try:
            names.append(last.decode())
        except UnicodeDecodeError:
            raise ValueError("a name is not valid Unicode") from None
    if len({*names}) != len(names):
        raise ValueError("it names a tensor twice")
    if METADATA in names:
        raise ValueError(f"a tensor cannot be named {METADATA}")
    return tuple(names)


def _with_digests(stacks: Sequence[EncodedStack], whole: _Fields) -> list[EncodedStack]:
    def with_digests(stack: EncodedStack) -> EncodedStack:
        sums = np.frombuffer(whole.raw(_DIGEST_SIZE * len(stack.entries)), "<u8").reshape(-1, 2)
        return replace(stack, entries=replace(stack.columns, digests=sums))

    return [with_digests(stack) for stack in stacks]
