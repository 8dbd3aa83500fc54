"""Parses blocks and files into fields and builds them again (docs/FORMAT.md), to craft malformed ones.

Every field can be changed while the entropy coding stays valid, so an error reaches the check that is meant for it.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire import Delta
from weightwire.codec import rans
from weightwire.codec.bit_stream import BitReader, BitWriter, read_uvarint, unzigzag, uvarint, zigzag
from weightwire.codec.exponent_classes import Units, classes_of
from weightwire.codec.frequency_tables import SCALE, Shares, gap_table, read_levels, shares, split, write_levels
from weightwire.delta import EncodedStack
from weightwire.delta.decoder import BlockJob
from weightwire.delta.encoded_stack import HASH_SIZE
from weightwire.delta.file import block_hash
from weightwire.delta.index import pack_index
from weightwire.weights.dtypes import Dtype

LANES = (1, 4, 16, 1)  # the last is invalid
TOKENS = {1: 31, 2: 63, 4: 79, 8: 111}  # of floats by width
PLAIN_TOKENS = 128  # of bytes that are not floats
BALANCED = 128


@dataclass
class Marks:
    """Gap symbols, and the raw bits of each gap. `claimed` overrides the number of symbols in the header."""

    complement: bool
    j: int
    symbols: list[int]
    low: list[int]
    claimed: int | None = None

    def write_head(self, bits: BitWriter, expected: int) -> None:
        claimed = len(self.symbols) if self.claimed is None else self.claimed
        bits.number(self.complement, 1)
        bits.golomb(claimed, 8)
        if claimed:
            bits.golomb(zigzag(self.j - expected), 1)

    def write_raw(self, bits: BitWriter) -> None:
        for low in self.low:
            bits.number(low, self.raw)

    @property
    def raw(self) -> int:
        return gap_table(min(max(self.j, 0), 127))[0]

    @property
    def table(self) -> Shares:
        return gap_table(min(max(self.j, 0), 127))[2]


@dataclass
class Steps:
    """Step symbols and their raw bits. `claimed` overrides the number of steps, which is written for a complement."""

    symbols: list[int]
    low: list[tuple[int, int]]  # value, width
    levels: tuple[int, ...]
    plus: int
    claimed: int | None = None
    same: bool = False  # the table of the class before, which must be equal

    def write_table(self, bits: BitWriter) -> None:
        write_step_table(bits, self.levels, self.plus)

    @property
    def table(self) -> Shares:
        plus = max(0, self.plus)
        return split_by_sign(shares(self.levels, 1 if plus in (0, 256) else 2), plus)


def split_by_sign(slots: Shares, plus: int) -> Shares:
    return split(slots[: PLAIN_TOKENS - 1], plus) + slots[PLAIN_TOKENS - 1 :]


def write_step_table(bits: BitWriter, levels: tuple[int, ...], plus: int) -> None:
    write_levels(bits, levels)
    bits.number({BALANCED: 0, 256: 1, -1: 2}.get(plus, 3), 2)
    if plus not in (BALANCED, 256, -1):
        bits.number(plus, 8)


def read_step_table(bits: BitReader, dtype: Dtype, *, dense: bool = False) -> tuple[tuple[int, ...], int]:
    levels = read_levels(bits, (TOKENS[dtype.unit] if dtype.is_float else PLAIN_TOKENS) + dense)
    mode = bits.number(2)
    return levels, bits.number(8) if mode == 3 else (BALANCED, 256, -1)[mode]


def write_classes(bits: BitWriter, exponent: int, bounds: Sequence[int], present: set[int]) -> None:
    bits.number(len(bounds), 4)
    for i, bound in enumerate(bounds):
        if i == 0:
            bits.number(bound, exponent)
        else:
            bits.golomb(max(0, bounds[i - 1] - bound - 1), 0)
    for c in (*range(len(bounds) + 1), 15):
        bits.number(c in present, 1)


def read_classes(bits: BitReader, exponent: int) -> tuple[list[int], set[int]]:
    bounds: list[int] = []
    for _ in range(bits.number(4)):
        bounds.append(bounds[-1] - bits.golomb(0) - 1 if bounds else bits.number(exponent))
    return bounds, {c for c in (*range(len(bounds) + 1), 15) if bits.number(1)}


@dataclass
class Ulp:
    """An `ulp` block. In a valid one, `classes` has one pair for each of `present`."""

    tag: int
    exponent: int  # bits
    bounds: list[int]
    present: set[int]
    lines: Marks | None
    classes: list[tuple[Marks, Steps]]
    tail: bytes = b""
    words: int | None = None

    def build(self) -> bytes:
        bits = BitWriter()
        write_classes(bits, self.exponent, self.bounds, self.present)
        if self.lines:
            self.lines.write_head(bits, 0)
        expected = 20
        for marks, steps in self.classes:
            marks.write_head(bits, expected)
            if marks.complement:
                bits.golomb((len(steps.symbols) if steps.claimed is None else steps.claimed) - 1, 8)
            empty = marks.claimed == 0 if marks.claimed is not None else not marks.symbols
            expected = max(0, (expected if empty else marks.j) - 4)
        for i, (_, steps) in enumerate(self.classes):
            before = self.classes[i - 1][1]
            same = steps.same and (before.levels, before.plus) == (steps.levels, steps.plus)
            if i:
                bits.number(same, 1)
            if not i or not same:
                steps.write_table(bits)
        every = ([self.lines] if self.lines else []) + [marks for marks, _ in self.classes]
        for marks in every:
            marks.write_raw(bits)
        for _, steps in self.classes:
            for value, width in steps.low:
                bits.number(value, width)
        sections = [section(marks.symbols, marks.table) for marks in every]
        sections += [section(steps.symbols, steps.table) for _, steps in self.classes]
        return frame(self.tag, sections, self.words) + bits.to_bytes() + self.tail


@dataclass
class DenseTable:
    """The table of a class of a `dense` block. The first level is that of unchanged units."""

    levels: tuple[int, ...]
    plus: int
    same: bool = False  # the table of the class before, which must be equal

    @property
    def shares(self) -> Shares:
        plus = max(0, self.plus)
        slots = shares(self.levels, 1 if plus in (0, 256) else 2)
        return (slots[0], *split_by_sign(slots[1:], plus))


@dataclass
class Dense:
    """A `dense` block. In a valid one, `tables` has one table for each of `present`, in their order."""

    tag: int
    exponent: int  # bits
    bounds: list[int]
    present: set[int]
    lines: Marks | None
    tables: list[DenseTable]
    classes: list[int]  # of the units of active lines
    symbols: list[int]  # of these units
    low: list[tuple[int, int]]  # value, width
    tail: bytes = b""
    words: int | None = None

    def build(self) -> bytes:
        bits = BitWriter()
        write_classes(bits, self.exponent, self.bounds, self.present)
        if self.lines:
            self.lines.write_head(bits, 0)
        for i, table in enumerate(self.tables):
            before = self.tables[i - 1]
            same = table.same and (before.levels, before.plus) == (table.levels, table.plus)
            if i:
                bits.number(same, 1)
            if not i or not same:
                write_step_table(bits, table.levels, table.plus)
        if self.lines:
            self.lines.write_raw(bits)
        for value, width in self.low:
            bits.number(value, width)
        tables, which = dense_tables(self.present, self.tables, self.classes)
        sections = [section(self.lines.symbols, self.lines.table)] if self.lines else []
        sections.append(rans.Section(np.array(self.symbols, np.uint8), tables, which[: len(self.symbols)]))
        return frame(self.tag, sections, self.words) + bits.to_bytes() + self.tail


def dense_tables(
    present: set[int], tables: Sequence[DenseTable], classes: Sequence[int]
) -> tuple[list[Shares], npt.NDArray[np.uint8]]:
    """All tables, and which of them each unit has. The last is that of classes without a change."""
    number = {c: i for i, c in enumerate(sorted(present)) if i < len(tables)}
    which = np.array([number.get(c, len(tables)) for c in classes], np.uint8)
    return [*(table.shares for table in tables), (SCALE,)], which


@dataclass
class Planes:
    """A `full` block: for each plane its bytes and, if it is coded, its levels."""

    tag: int
    raw_planes: int
    planes: list[bytes]
    levels: list[tuple[int, ...] | None]
    tail: bytes = b""
    words: int | None = None

    def build(self) -> bytes:
        bits = BitWriter()
        sections, raw = [], b""
        for plane, levels in zip(self.planes, self.levels, strict=True):
            if levels is None:
                raw += plane
            else:
                write_levels(bits, levels)
                sections.append(section(list(plane), shares(levels, 1)))
        return frame(self.tag, sections, self.words) + bytes([self.raw_planes]) + raw + bits.to_bytes() + self.tail


def section(symbols: list[int], table: Shares) -> rans.Section:
    return rans.Section.of(np.array(symbols, np.uint8), table)


def frame(tag: int, sections: list[rans.Section], claimed: int | None = None) -> bytes:
    """The start of a block. Raises ValueError if a table has no slot for a symbol."""
    for one in sections:
        for symbol, which in zip(one.symbols.tolist(), one.which.tolist(), strict=True):
            if symbol >= len(one.tables[which]) or not one.tables[which][symbol]:
                raise ValueError("a symbol has no share")
    states, words = rans.encode(sections, LANES[tag >> 2 & 3])
    count = uvarint(len(words) if claimed is None else claimed)
    return bytes([tag]) + count + np.array(states, "<u4").tobytes() + np.array(words, "<u2").tobytes()


# --- taking apart ------------------------------------------------------------------------------------------------


def _open(data: bytes) -> tuple[rans.Decoder, bytes]:
    words, at = read_uvarint(data, 1)
    lanes = LANES[data[0] >> 2 & 3]
    states = np.frombuffer(data, "<u4", lanes, at).tolist()
    at += 4 * lanes
    return rans.Decoder(states, np.frombuffer(data, "<u2", words, at)), data[at + 2 * words :]


def _head(bits: BitReader, expected: int) -> tuple[bool, int, int]:
    complement, symbols = bool(bits.number(1)), bits.golomb(8)
    return complement, symbols, expected + unzigzag(bits.golomb(1)) if symbols else expected


def parse_ulp(data: bytes, dtype: Dtype) -> Ulp:
    """Parses a well-formed block."""
    decoder, rest = _open(data)
    bits = BitReader(rest)
    bounds, present = read_classes(bits, dtype.exponent)
    heads = [_head(bits, 0)] if data[0] & 16 else []
    counts = []
    expected = 20
    for _ in present:
        heads.append(_head(bits, expected))
        counts.append(bits.golomb(8) + 1 if heads[-1][0] else 0)
        expected = max(0, heads[-1][2] - 4)
    tables: list[Steps] = []
    for _ in counts:
        if tables and bits.number(1):
            tables.append(replace(tables[-1], symbols=[], low=[], same=True))
            continue
        tables.append(Steps([], [], *read_step_table(bits, dtype)))
    marks = [_marks(decoder, bits, *head) for head in heads]
    lines = marks.pop(0) if data[0] & 16 else None
    steps = [
        _steps(decoder, bits, table, count if one.complement else len(one.low), dtype)
        for one, count, table in zip(marks, counts, tables, strict=True)
    ]
    return Ulp(data[0], dtype.exponent, bounds, present, lines, list(zip(marks, steps, strict=True)))


def _marks(decoder: rans.Decoder, bits: BitReader, complement: bool, symbols: int, j: int) -> Marks:
    raw, go_on, table = gap_table(j)
    found = decoder.section(symbols, table).tolist()
    return Marks(complement, j, found, [bits.number(raw) for symbol in found if symbol != go_on])


def _steps(decoder: rans.Decoder, bits: BitReader, steps: Steps, count: int, dtype: Dtype) -> Steps:
    steps.symbols = decoder.section(count, steps.table).tolist()
    for symbol in steps.symbols:
        if width := raw_bits(symbol >> 1, dtype.exponent):
            steps.low.append((bits.number(width), width))
    return steps


def raw_bits(token: int, exponent: int) -> int:
    """The number of raw bits of a step token."""
    return 0 if token < 15 or not exponent else (token - 15) // 4 + 2 if token < 63 else token - 47


def parse_dense(data: bytes, old: Units, dtype: Dtype, line: int) -> Dense:
    """Parses a well-formed block."""
    if not dtype.is_float:
        old, line = old.view(np.uint8), line * old.itemsize
    decoder, rest = _open(data)
    bits = BitReader(rest)
    bounds, present = read_classes(bits, dtype.exponent)
    head = _head(bits, 0) if data[0] & 16 else None
    tables: list[DenseTable] = []
    for _ in present:
        same = bool(tables) and bool(bits.number(1))
        tables.append(replace(tables[-1], same=True) if same else DenseTable(*read_step_table(bits, dtype, dense=True)))
    lines = _marks(decoder, bits, *head) if head else None
    if lines:
        old = old.reshape(-1, line)[_listed(lines, len(old) // line)].ravel()
    classes = classes_of(old, dtype, tuple(bounds)).tolist()
    symbols = decoder.mixed(*dense_tables(present, tables, classes)).tolist()
    widths = [raw_bits((symbol - 1) >> 1, dtype.exponent) for symbol in symbols if symbol]
    low = [(bits.number(width), width) for width in widths if width]
    return Dense(data[0], dtype.exponent, bounds, present, lines, tables, classes, symbols, low)


def _listed(marks: Marks, members: int) -> npt.NDArray[np.bool_]:
    """Which members are marked."""
    go_on = len(marks.table) - 1
    ranks, rank, quotient, low = [], -1, 0, iter(marks.low)
    for symbol in marks.symbols:
        quotient += symbol
        if symbol != go_on:
            rank += (quotient << marks.raw) + next(low) + 1
            ranks.append(rank)
            quotient = 0
    found = np.full(members, marks.complement)
    found[ranks] = not marks.complement
    return found


def parse_planes(data: bytes, count: int, unit: int) -> Planes:
    """Parses a well-formed block."""
    decoder, rest = _open(data)
    raw_planes, at = rest[0], 1
    planes: list[bytes] = [b""] * unit
    for index in range(unit):
        if raw_planes >> index & 1:
            planes[index] = rest[at : at + count]
            at += count
    bits = BitReader(rest[at:])
    levels = [None if raw_planes >> index & 1 else read_levels(bits, 256) for index in range(unit)]
    for index, one in enumerate(levels):
        if one is not None:
            planes[index] = decoder.section(count, shares(one, 1)).tobytes()
    block = Planes(data[0], raw_planes, planes, levels)
    block.tail = bytes(len(data) - len(block.build()))
    return block


# --- files -------------------------------------------------------------------------------------------------------


Header = dict[str, Any]


def taken_apart(delta: Delta) -> tuple[Header, bytes]:
    """The JSON header, and the data of a file: its index and its blocks."""
    data = delta.to_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:size]), data[size:]


def put_together(header: Header, data: bytes) -> bytes:
    text = json.dumps(header, ensure_ascii=False).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_index(delta: Delta, index: bytes) -> bytes:
    """The file with another index."""
    header, data = taken_apart(delta)
    blocks = data[header["blocks"]["data_offsets"][0] :]
    end = len(index) + len(blocks)
    header["index"] |= {"shape": [len(index)], "data_offsets": [0, len(index)]}
    header["blocks"] |= {"data_offsets": [len(index), end]}
    return put_together(header, index + blocks)


def index_of(delta: Delta) -> bytes:
    header, data = taken_apart(delta)
    return data[: header["index"]["data_offsets"][1]]


def with_stacks(delta: Delta, stacks: Sequence[EncodedStack]) -> bytes:
    """The file with other claims about its stacks. Each block has some hash of the file."""
    hashes = itertools.cycle([one for stack in delta.stacks for one in stack.hashes if one] or [bytes(HASH_SIZE)])
    listed = [replace(one, hashes=tuple(next(hashes) for size in one.blocks if size)) for one in stacks]
    return with_index(delta, pack_index(listed))


def with_block(delta: Delta, job: BlockJob, data: bytes, *, is_hashed: bool = True) -> bytes:
    """The file with another block, and its hash and size in the index."""
    stack, at = job.stack, job.index
    sizes, hashes = list(stack.blocks), list(stack.hashes)
    sizes[at] = len(data)
    if is_hashed or not data:
        hashes[at] = block_hash(data)
    other = replace(stack, blocks=tuple(sizes), hashes=tuple(hashes))
    index = pack_index([other if one is stack else one for one in delta.stacks])
    begin, end = stack.span(range(at, at + 1))
    total = delta.nbytes - len(delta.head)
    blocks = bytes(delta.fetch(0, begin)) + data + bytes(delta.fetch(end, total))
    header, _ = taken_apart(delta)
    header["index"] |= {"shape": [len(index)], "data_offsets": [0, len(index)]}
    header["blocks"] |= {"shape": [len(blocks)], "data_offsets": [len(index), len(index) + len(blocks)]}
    return put_together(header, index + blocks)


@dataclass(frozen=True)
class PlainIndex:
    """An index whose columns are not compressed. `rest` are the digests and hashes."""

    options: bytes
    columns: bytes
    rest: bytes

    @staticmethod
    def of(delta: Delta) -> PlainIndex:
        index = index_of(delta)
        size, at = read_uvarint(index, 1)
        return PlainIndex(index[:1], zlib.decompress(index[at : at + size]), index[at + size :])

    def pack(self) -> bytes:
        packed = zlib.compress(self.columns, 9)
        return self.options + uvarint(len(packed)) + packed + self.rest


def with_stack(delta: Delta, name: str, **lies: Any) -> bytes:
    """The file with another claim about the stack that begins with a tensor: fields of its entries, or of the stack."""
    stacks = [_lying(stack, dict(lies)) if stack.first.name == name else stack for stack in delta.stacks]
    return with_index(delta, pack_index(stacks))


def _lying(stack: EncodedStack, lies: dict[str, Any]) -> EncodedStack:
    blocks = lies.pop("blocks", stack.blocks)
    hashes = lies.pop("hashes", tuple(stack.hashes[0] for size in blocks if size))
    names = lies.pop("names", [entry.name for entry in stack.entries])
    per = lies.pop("per", stack.per)
    entries = tuple(replace(stack.first, **{"name": name, **lies}) for name in names)
    return EncodedStack(entries, per, blocks, hashes)
