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

from weightwire import Delta
from weightwire.codec import rans
from weightwire.codec.bit_stream import BitReader, BitWriter, read_uvarint, unzigzag, uvarint, zigzag
from weightwire.codec.frequency_tables import Shares, gap_table, read_levels, shares, split, write_levels
from weightwire.delta import EncodedStack
from weightwire.delta.decoder import BlockJob
from weightwire.delta.encoded_stack import HASH_SIZE
from weightwire.delta.file import block_hash
from weightwire.delta.index import pack_index
from weightwire.weights.dtypes import Dtype

LANES = (1, 4, 16, 1)  # the last is invalid
TOKENS = {1: 31, 2: 63, 4: 79, 8: 111}
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
        write_levels(bits, self.levels)
        bits.number({BALANCED: 0, 256: 1, -1: 2}.get(self.plus, 3), 2)
        if self.plus not in (BALANCED, 256, -1):
            bits.number(self.plus, 8)

    @property
    def table(self) -> Shares:
        plus = max(0, self.plus)
        return split(shares(self.levels, 1 if plus in (0, 256) else 2), plus)


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
        bits.number(len(self.bounds), 4)
        for i, bound in enumerate(self.bounds):
            if i == 0:
                bits.number(bound, self.exponent)
            else:
                bits.golomb(max(0, self.bounds[i - 1] - bound - 1), 0)
        for c in (*range(len(self.bounds) + 1), 15):
            bits.number(c in self.present, 1)
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
        sections = [(marks.symbols, marks.table) for marks in every]
        sections += [(steps.symbols, steps.table) for _, steps in self.classes]
        return frame(self.tag, sections, self.words) + bits.to_bytes() + self.tail


@dataclass
class Planes:
    """A `dense` or `full` block: for each plane its bytes and, if it is coded, its levels."""

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
                sections.append((list(plane), shares(levels, 1)))
        return frame(self.tag, sections, self.words) + bytes([self.raw_planes]) + raw + bits.to_bytes() + self.tail


def frame(tag: int, sections: list[tuple[list[int], Shares]], claimed: int | None = None) -> bytes:
    """The start of a block. Raises ValueError if a table has no slot for a symbol."""
    for symbols, table in sections:
        if any(symbol >= len(table) or not table[symbol] for symbol in symbols):
            raise ValueError("a symbol has no share")
    coded = [(np.array(symbols, np.uint8), table) for symbols, table in sections]
    states, words = rans.encode(coded, LANES[tag >> 2 & 3])
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
    bounds: list[int] = []
    for _ in range(bits.number(4)):
        bounds.append(bounds[-1] - bits.golomb(0) - 1 if bounds else bits.number(dtype.exponent))
    present = {c for c in (*range(len(bounds) + 1), 15) if bits.number(1)}
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
        levels = read_levels(bits, TOKENS[dtype.unit])
        mode = bits.number(2)
        tables.append(Steps([], [], levels, bits.number(8) if mode == 3 else (BALANCED, 256, -1)[mode]))
    marks = []
    for complement, symbols, j in heads:
        raw, go_on, table = gap_table(j)
        found = decoder.section(symbols, table).tolist()
        low = [bits.number(raw) for symbol in found if symbol != go_on]
        marks.append(Marks(complement, j, found, low))
    lines = marks.pop(0) if data[0] & 16 else None
    steps = [
        _steps(decoder, bits, table, count if one.complement else len(one.low))
        for one, count, table in zip(marks, counts, tables, strict=True)
    ]
    return Ulp(data[0], dtype.exponent, bounds, present, lines, list(zip(marks, steps, strict=True)))


def _steps(decoder: rans.Decoder, bits: BitReader, steps: Steps, count: int) -> Steps:
    steps.symbols = decoder.section(count, steps.table).tolist()
    for symbol in steps.symbols:
        if width := raw_bits(symbol >> 1):
            steps.low.append((bits.number(width), width))
    return steps


def raw_bits(token: int) -> int:
    """The number of raw bits of a step token."""
    return 0 if token < 15 else (token - 15) // 4 + 2 if token < 63 else token - 47


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
