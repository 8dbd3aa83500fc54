"""A second decoder of delta files, written from docs/FORMAT.md alone: see `decoder_agreement.py`."""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from delta.second_block_decoder import U64, Array, Dtype, Reader, decode_block, need, strict


@dataclass(frozen=True)
class Weight:
    """One tensor; `data` has all of its bytes, or only those of the rows that the holder has."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


DTYPES = [
    Dtype("BOOL", 8), Dtype("U8", 8), Dtype("I8", 8), Dtype("U16", 16), Dtype("I16", 16), Dtype("U32", 32),
    Dtype("I32", 32), Dtype("U64", 64), Dtype("I64", 64), Dtype("F64", 64, 11, 52), Dtype("F32", 32, 8, 23),
    Dtype("F16", 16, 5, 10), Dtype("BF16", 16, 8, 7), Dtype("F8_E4M3", 8, 4, 3), Dtype("F8_E5M2", 8, 5, 2),
    Dtype("F8_E4M3FNUZ", 8, 4, 3), Dtype("F8_E5M2FNUZ", 8, 5, 2), Dtype("F8_E8M0", 8), Dtype("C64", 64),
    Dtype("F4", 4), Dtype("F6_E2M3", 6), Dtype("F6_E3M2", 6),
]  # fmt: skip
CODES = {dtype.name: code for code, dtype in enumerate(DTYPES)}


class Layout(NamedTuple):
    """How the codec sees a tensor: sizes are in units, but `unit` is in bytes."""

    unit: int
    total: int
    row: int
    line: int
    has_rows: bool


def layout_of(dtype: Dtype, shape: Sequence[int]) -> Layout:
    """The layout of a tensor, which must be a whole number of bytes."""
    bits, width = math.prod(shape) * dtype.bits, max(dtype.bits, 8)
    extent = math.prod(size for size in shape if size) * dtype.bits
    need(bits % 8 == 0 and extent <= 1 << 65, "the size of a tensor")
    row, line = math.prod(shape[1:]) * dtype.bits, (shape[-1] if len(shape) > 1 else 0) * dtype.bits
    has_rows = dtype.bits >= 8 or (len(shape) > 1 and row % 8 == 0)
    has_lines = all(shape) and line % 8 == 0 and 64 <= line // width <= 1 << 21 and line // width * width % 64 == 0
    return Layout(width // 8, bits // width, row // width * has_rows, line // width * has_lines, has_rows)


def digest_of(data: bytes, layout: Layout, first: int = 0) -> bytes:
    """Sums a and b of a tensor, or of its rows from row `first` on."""
    row = layout.row * layout.unit
    size = layout.unit if row % 8 or not row else 8
    words = np.frombuffer(data, f"<u{size}").astype(U64)
    index = np.arange(1, len(words) + 1, dtype=U64) + U64(first * row // size)
    a = words + index * U64(0x9E3779B97F4A7C15)
    b = (words ^ U64(0xC2B2AE3D27D4EB4F)) + index * U64(0xA0761D6478BD642F)
    for factor in (0xD6E8FEB86659FD93, 0xD6E8FEB86659FD93, 1):
        a = (a ^ (a >> U64(32))) * U64(factor)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        b = (b ^ (b >> U64(shift))) * U64(factor)
    return b"".join(int(x.sum(dtype=U64)).to_bytes(8, "little") for x in (a, b))


def uvarint(value: int) -> bytes:
    """The bytes of a number."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + uvarint(value >> 7)


def state_digest(weights: Mapping[str, Weight]) -> str:
    """The digest of all weights of a version, in hex."""
    digest = hashlib.sha256(b"weightwire state 1\n")
    for key, weight in sorted((utf8(name), weight) for name, weight in weights.items()):
        need(weight.dtype in CODES, "a dtype that the format does not know")
        layout = layout_of(DTYPES[CODES[weight.dtype]], weight.shape)
        need(len(weight.data) == layout.total * layout.unit, "a state digest needs whole tensors")
        digest.update(uvarint(len(key)) + key + bytes([CODES[weight.dtype]]))
        digest.update(b"".join(map(uvarint, (len(weight.shape), *weight.shape))) + digest_of(weight.data, layout))
    return digest.hexdigest()


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys."""
    need(len(dict(pairs)) == len(pairs), "a JSON key occurs twice")
    return dict(pairs)


def parse_json(text: str) -> Any:
    """Strict JSON, without NaN and Infinity."""
    return strict("bad JSON", json.loads, text, object_pairs_hook=unique, parse_constant=lambda name: need(False, name))


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text."""
    return bytes(strict("a text that is not Unicode", text.encode))


def check_metadata(items: Any) -> set[str]:
    """Check `__metadata__`, and return the removed names."""
    need(isinstance(items, dict) and all(isinstance(text, str) for text in items.values()), "__metadata__")
    utf8("".join((*items, *items.values())))
    form, kind = items.get("format", ""), items.get("kind")
    need(not re.fullmatch("weightwire/[0-9]+", form) or form == "weightwire/1", f"a newer format: {form[:40]}")
    need(form == "weightwire/1" and kind in ("delta", "anchor"), "not a delta or anchor")
    need(all(re.fullmatch("([0-9a-f]{64})?", items.get(key, "?")) for key in ("before", "after")), "before and after")
    need(kind == "delta" or (items["before"] == "" and "removed" not in items), "an anchor has a base")
    names = parse_json(items.get("removed", '[""]'))
    need(isinstance(names, list) and names and all(isinstance(name, str) for name in names), "removed")
    need(names == sorted(set(names), key=utf8), "the order of removed names")
    return set(names) if "removed" in items else set()


def open_container(file: bytes) -> tuple[dict[str, str], set[str], bytes, bytes]:
    """Metadata, removed names, index and blocks."""
    reader, parts, begin = Reader(file), [], 0
    size = int.from_bytes(reader.take(8), "little")
    need(size <= 100_000_000, "the header is too long")
    text = strict("the header is not UTF-8", reader.take(size).decode)
    need(text.startswith("{"), "the header is not JSON")
    header = parse_json(text)
    removed = check_metadata(header.get("__metadata__"))
    need(set(header) == {"__metadata__", "index", "blocks"}, "the tensors of the file")
    for item in (header["index"], header["blocks"]):
        need(isinstance(item, dict) and set(item) == {"dtype", "shape", "data_offsets"}, "the keys of a tensor")
        for numbers in (item["shape"], item["data_offsets"]):
            need(isinstance(numbers, list) and all(type(number) is int for number in numbers), "numbers of a tensor")
        need(item["dtype"] == "U8" and len(item["shape"]) == 1 and item["shape"][0] >= 0, "dtype and shape of a tensor")
        need(item["data_offsets"] == [begin, begin + item["shape"][0]], "the place of a tensor")
        parts.append(reader.take(item["shape"][0]))
        begin += item["shape"][0]
    need(reader.at == len(file), "bytes after the blocks")
    return header["__metadata__"], removed, parts[0], parts[1]


@dataclass
class Stack:
    """One entry, or several that are encoded together."""

    names: list[str]
    flags: int
    per: int
    shape: tuple[int, ...]
    rows: tuple[int, int] | None
    blocks: list[bytes] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the stack and compute its layout: `count` units in a member, `block` in each of `number` blocks."""
        need(self.flags & 31 < len(DTYPES) and self.flags < 192, "dtype and flags")
        need(all(size < 1 << 63 for size in self.shape), "a dimension is too large")
        self.dtype, self.coo, self.fresh = DTYPES[self.flags & 31], self.flags & 64 > 0, self.flags & 128 > 0
        self.layout = layout_of(self.dtype, self.shape)
        self.begin, self.count, self.block = 0, self.layout.total, self.per * self.layout.total
        if self.rows:
            need(self.layout.has_rows and self.shape and self.rows[0] < self.rows[1] <= self.shape[0], "rows")
            self.begin, self.count = self.rows[0], (self.rows[1] - self.rows[0]) * self.layout.row
        if len(self.names) == 1:
            grain = self.layout.line or 8
            grains = -(-self.count // grain)
            self.block = -(-grains // max(1, -(-grains // ((1 << 22) // grain)))) * grain
        else:
            need(not (self.coo or self.rows) and self.count and 1 <= self.block <= 1 << 22, "members of a stack")
            need(self.per <= len(self.names), "more members in a block than there are")
        self.size = self.count * self.layout.unit
        self.number = 1 if self.coo else -(-self.count * len(self.names) // max(1, self.block))


def read_names(reader: Reader, count: int) -> list[str]:
    """The columns shared, rest and text."""
    shared, rest = reader.uvarints(count), reader.uvarints(count)
    need(sum(shared) + sum(rest) <= 1 << 26, "the names are too long")
    names, last = [], b""
    for same, more in zip(shared, rest, strict=True):
        need(same <= len(last), "a name shares more than there is")
        last = last[:same] + reader.take(more)
        names.append(strict("a name is not UTF-8", last.decode))
    need(len(set(names)) == count and "__metadata__" not in names, "a name occurs twice, or is reserved")
    return names


def read_columns(reader: Reader, source: Reader) -> list[Stack]:
    """The stacks of the index, with their blocks."""
    members = reader.uvarints(reader.uvarint())
    need(all(members) and sum(members) <= 1 << 20, "the number of entries")
    names = iter(read_names(reader, sum(members)))
    flags = reader.take(len(members))
    per = [reader.uvarint() if count > 1 else 1 for count in members]
    dimensions = reader.uvarints(len(members))
    need(max(dimensions, default=0) <= 64 and sum(dimensions) <= 1 << 22, "too many dimensions")
    shapes = [tuple(reader.uvarints(count)) for count in dimensions]
    rows = [(reader.uvarint(), reader.uvarint()) if flag & 32 else None for flag in flags]
    stacks = [
        Stack([next(names) for _ in range(members[i])], flags[i], per[i], shapes[i], rows[i])
        for i in range(len(members))
    ]
    need(sum(stack.number for stack in stacks) <= 1 << 22, "too many blocks")
    for stack in stacks:
        stack.blocks = [source.take(size) for size in reader.uvarints(stack.number)]
        size = sum(map(len, stack.blocks)) if all(stack.blocks) else -1
        need(not stack.fresh or size * 1024 >= stack.size * len(stack.names), "a fresh stack is too small")
    for stack in stacks:
        stack.changed = [] if stack.fresh else reader.uvarints(len(stack.names))
    need(reader.take() == source.take() == b"", "bytes after the columns or the blocks")
    return stacks


def parse_index(index: bytes, blocks: bytes) -> list[Stack]:
    """The stacks with their blocks, whose hashes are right."""
    reader, stream = Reader(index), zlib.decompressobj()
    options, packed = reader.take(1)[0], reader.take(reader.uvarint())
    need(options < 2, "unknown options")
    columns = strict("the columns are damaged", stream.decompress, packed, (1 << 26) + 1)
    need(len(columns) <= 1 << 26 and stream.eof and not stream.unused_data, "the size of the columns")
    stacks = read_columns(Reader(columns), Reader(blocks))
    for stack in stacks if options else []:
        stack.digests = [reader.take(16) for _ in stack.names]
    for block in (block for stack in stacks for block in stack.blocks if block):
        need(hashlib.sha256(block).digest()[:16] == reader.take(16), "the hash of a block")
    need(reader.at == len(index), "bytes after the index")
    return stacks


def decode_coo(block: bytes, old: Array, stack: Stack) -> Array:
    """The new units of a `coo` entry."""
    reader, number, unit, new = Reader(block), stack.changed[0], stack.layout.unit, old.copy()
    width = int.from_bytes(reader.take(8), "little")
    need(width == (4 if stack.count <= 1 << 32 else 8), "the width of positions")
    need(len(block) == 8 + number * (width + unit), "the size of a coo entry")
    positions = np.frombuffer(reader.take(number * width), f"<u{width}")
    need(np.all(positions[:-1] < positions[1:]) and np.all(positions < stack.count), "the positions")
    new[positions.astype(np.int64)] = np.frombuffer(reader.take(), f"<u{unit}")
    return new


def covered(weight: Weight | None, stack: Stack) -> tuple[bytes, bytes, bytes] | None:
    """The data of a weight before, in and after the covered rows; None if it is another tensor or lacks them."""
    if weight is None or (weight.dtype, tuple(weight.shape)) != (stack.dtype.name, stack.shape):
        return None
    begin = stack.begin * stack.layout.row * stack.layout.unit
    if len(weight.data) == stack.layout.total * stack.layout.unit:
        return weight.data[:begin], weight.data[begin : begin + stack.size], weight.data[begin + stack.size :]
    return (b"", weight.data, b"") if len(weight.data) == stack.size else None


def decode_stack(stack: Stack, base: Mapping[str, Weight]) -> list[bytes]:
    """The covered bytes of each member after the change."""
    old, kind, total = None, f"<u{stack.layout.unit}", stack.count * len(stack.names)
    if not stack.fresh:
        pieces = [piece[1] for name in stack.names if (piece := covered(base.get(name), stack))]
        need(len(pieces) == len(stack.names), "the base does not hold what the entry covers")
        old = np.frombuffer(b"".join(pieces), kind)
    new = np.zeros(total, kind) if old is None else old.copy()
    if stack.coo and old is not None:
        new = decode_coo(stack.blocks[0], old, stack)
    else:
        for i, block in enumerate(stack.blocks):
            part = slice(i * stack.block, (i + 1) * stack.block)
            if block:
                new[part] = decode_block(
                    block, None if old is None else old[part], len(new[part]), stack.dtype, stack.layout.line
                )
    if old is not None and not stack.coo:
        counts = np.count_nonzero((old != new).reshape(len(stack.names), stack.count), axis=1)
        need(counts.tolist() == stack.changed, "the number of changed units")
    data = new.tobytes()
    return [data[i * stack.size : (i + 1) * stack.size] for i in range(len(stack.names))]


def apply(file: bytes, base: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights that a delta makes of its base, or that an anchor holds."""
    metadata, removed, index, data = open_container(file)
    stacks = parse_index(index, data)
    anchor, before, after = metadata["kind"] == "anchor", metadata["before"], metadata["after"]
    need(removed.isdisjoint(name for stack in stacks for name in stack.names), "a removed name has an entry")
    need(not anchor or all(stack.fresh for stack in stacks), "an anchor has an entry that is not fresh")
    need(not before or state_digest(base) == before, "the base is not the one before")
    need(removed <= set(base), "a removed tensor is not in the base")
    need(after or all(stack.digests for stack in stacks), "nothing to compare the result with")
    result = {} if anchor else {name: weight for name, weight in base.items() if name not in removed}
    for stack in stacks:
        for i, part in enumerate(decode_stack(stack, base)):
            need(not stack.digests or digest_of(part, stack.layout, stack.begin) == stack.digests[i], "a digest")
            around = covered(result.get(stack.names[i]), stack)
            need(around or not stack.rows or anchor, "rows without a place in the base")
            around = around if around and stack.rows else (b"", b"", b"")
            result[stack.names[i]] = Weight(stack.dtype.name, stack.shape, around[0] + part + around[2])
    need(not after or state_digest(result) == after, "the result is not the one after")
    return result
