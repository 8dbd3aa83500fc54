"""The blocks of the second decoder, which was written from docs/FORMAT.md alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, repeat
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Table = tuple[list[int], list[int], list[int]]  # the symbol, its share, and slot - start, of each of 4096 slots
U64 = np.uint64


class Invalid(Exception):
    """The file breaks a rule of the format, or does not fit the base."""


def need(condition: object, message: str) -> None:
    """Refuse the file unless the condition holds."""
    if not condition:
        raise Invalid(message)


def strict(message: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a parser of a library, whose errors mean that the file is bad."""
    try:
        return call(*args, **options)
    except (ValueError, RecursionError, zlib.error) as error:
        raise Invalid(message) from error


class Dtype(NamedTuple):
    """A data type; `exponent` is 0 for what is not a float for the codec."""

    name: str
    bits: int
    exponent: int = 0
    mantissa: int = 0


@dataclass
class Reader:
    """Reads bytes from front to back."""

    data: bytes
    at: int = 0

    def take(self, size: int | None = None) -> bytes:
        """The next bytes, or all that remain."""
        size = len(self.data) - self.at if size is None else size
        need(size <= len(self.data) - self.at, "the data ends too early")
        self.at += size
        return self.data[self.at - size : self.at]

    def uvarint(self) -> int:
        """The next number, in its shortest form."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                break
        need(byte < 128 and (byte or not shift) and value < 1 << 64, "a uvarint that is too long")
        return value

    def uvarints(self, count: int) -> list[int]:
        """The next numbers; each has at least a byte."""
        need(count <= len(self.data) - self.at, "the data ends too early")
        return [self.uvarint() for _ in range(count)]


@dataclass
class Bits:
    """A bit stream."""

    data: bytes
    at: int = 0

    def take(self, width: int) -> int:
        """The next number of so many bits."""
        self.at += width
        need(self.at <= 8 * len(self.data), "the bits end too early")
        begin = self.at - width
        value = int.from_bytes(self.data[begin // 8 : (self.at + 7) // 8], "little")
        return value >> begin % 8 & (1 << width) - 1

    def golomb(self, k: int) -> int:
        """The next golomb(k) number."""
        width = k
        while self.take(1):
            width += 1
            need(width <= 32, "a golomb number is too long")
        return (1 << width) + self.take(width) - (1 << k)

    def zigzag(self, k: int) -> int:
        """The next signed number."""
        value = self.golomb(k)
        return -(value + 1 >> 1) if value & 1 else value >> 1

    def many(self, widths: Array) -> Array:
        """The next numbers, of 0 to 63 bits each."""
        places = self.at + np.cumsum(widths) - widths
        self.at += int(widths.sum())
        need(self.at <= 8 * len(self.data), "the bits end too early")
        padded = self.data + bytes(16)
        first = np.ndarray((len(padded) - 8,), "<u8", padded, 0, (1,))[places >> 3]
        ninth = np.frombuffer(padded, np.uint8)[(places >> 3) + 8].astype(U64)
        shift = (places & 7).astype(U64)
        mask: Array = (U64(1) << widths.astype(U64)) - U64(1)
        value: Array = first >> shift | ninth << (U64(63) - shift) << U64(1)
        return np.bitwise_and(value, mask)

    def end(self, short: bool = True) -> None:
        """Only zero bits remain, and less than a byte of them if `short`."""
        left = 8 * len(self.data) - self.at
        need(left < 8 or not short, "bytes after the bits")
        need(not self.take(left % 8) and not any(self.data[self.at // 8 :]), "padding is not zero")


def make_table(shares: Sequence[int]) -> Table:
    """The table of these shares of the symbols 0, 1, 2, ..."""
    rows = np.array([range(len(shares)), shares, np.cumsum(shares) - shares]).repeat(shares, axis=1)
    return rows[0].tolist(), rows[1].tolist(), (np.arange(4096) - rows[2]).tolist()


def read_shares(bits: Bits, least: int, most: int) -> tuple[list[int], list[int]]:
    """Read `least` to `most` levels, and return their shares for L = 1 and for L = 2."""
    count, last = bits.golomb(2) + 1, 40
    levels: list[int] = []
    need(least <= count <= most, "the number of levels")
    while len(levels) < count:
        before, last = last, last + bits.zigzag(2)
        need(0 <= last <= 40 and (before or last), "a level is out of range, or follows other zeros")
        more = bits.golomb(1) if last == 0 else 0
        need(len(levels) + more < count, "too many levels")
        levels += [last] + [0] * more
    need(max(levels) == 40 and levels[-1], "the levels of a table")
    weights = [(65536, 77936, 92682, 110218)[level % 4] << level // 4 if level else 0 for level in levels]
    return shares_of(weights, 1), shares_of(weights, 2)


def shares_of(weights: list[int], least: int) -> list[int]:
    """The shares of weights."""
    total = sum(weights)
    shares = [max(least, weight * 4096 // total) if weight else 0 for weight in weights]
    while excess := sum(shares) - 4096:
        top = shares.index(max(shares))
        shares[top] = max(least, shares[top] - excess)
    return shares


GAP_G = (
    2147483648,
    2397865488,
    2630870735,
    2844240754,
    3037000500,
    3209167158,
    3361473452,
    3495128183,
    3611622603,
    3712582389,
    3799660319,
    3874462704,
    3938502376,
)
GAP_S = (7, 8, 10, 12, 14, 17, 20, 24, 28, 33, 40, 47, 56)


def gap_shares(t: int) -> list[int]:
    """The shares of the gap symbols 0 to s."""
    y, b = 1 << 32, []
    for _ in range(GAP_S[t] + 1):
        b.append((y + (1 << 19)) >> 20)
        y = y * GAP_G[t] >> 32
    return [high - low for high, low in zip(b, [*b[1:], 0], strict=True)]


@dataclass
class Coder:
    """The states and words of a block."""

    states: list[int]
    words: list[int]
    at: int = 0

    def section(self, tables: Sequence[Table], count: int, picks: Array | None = None) -> Array:
        """The symbols of a section; `picks` says which of several tables each symbol has."""
        if picks is None and tables[0][1][0] == 4096:
            return np.full(count, tables[0][0][0], np.int64)
        symbols, shares, offsets = (list(chain(*parts)) for parts in zip(*tables, strict=True))
        states, words, at, out = self.states, self.words, self.at, [0] * count
        which = repeat(0, count) if picks is None else (picks * 4096).tolist()
        try:
            for i, lane, pick in zip(range(count), cycle(range(len(states))), which):
                x = states[lane]
                slot = pick + (x & 4095)
                x = shares[slot] * (x >> 12) + offsets[slot]
                if x < 65536:
                    x = x << 16 | words[at]
                    at += 1
                states[lane] = x
                out[i] = symbols[slot]
        except IndexError as error:
            raise Invalid("the words end too early") from error
        self.at = at
        return np.array(out, np.int64)


class Marks:
    """Coded marks; the constructor reads their head."""

    def __init__(self, bits: Bits, expected: int, is_class: bool, most: int) -> None:
        """Read the head."""
        self.complement, self.symbols = bits.take(1), bits.golomb(8)
        self.j = expected + (bits.zigzag(1) if self.symbols else 0)
        self.raw = max(0, -(-(self.j - 12) // 4))
        self.steps = bits.golomb(8) + 1 if is_class and self.complement else 0
        need(0 <= self.j <= 127 and self.symbols <= most, "j is out of range, or too many gaps")
        need(self.complement or self.symbols or not is_class, "a class without changes")

    def read_gaps(self, coder: Coder) -> None:
        """Decode the gap symbols; the low bits come later."""
        t = self.j - 4 * self.raw
        symbols = coder.section([make_table(gap_shares(t))], self.symbols)
        need(not self.symbols or symbols[-1] != GAP_S[t], "the last gap does not end")
        self.gaps = np.diff(np.cumsum(symbols)[symbols != GAP_S[t]], prepend=0)

    def marked(self, bits: Bits, members: int) -> Array:
        """Which members are marked."""
        low = bits.many(np.full(len(self.gaps), self.raw)).astype(np.int64)
        ranks = np.cumsum((self.gaps << self.raw) + low + 1) - 1
        need(not len(ranks) or ranks[-1] < members, "a rank is too large")
        marked = np.full(members, self.complement > 0)
        marked[ranks] = not self.complement
        return marked


def read_classes(bits: Bits, old: Array, dtype: Dtype) -> tuple[Array, list[int]]:
    """The class of each unit, and the present classes."""
    count = bits.take(4)
    bounds: list[int] = []
    need(count <= (14 if dtype.exponent else 0), "the number of bounds")
    for i in range(count):
        bounds.append(bounds[-1] - 1 - bits.golomb(0) if i else bits.take(dtype.exponent))
        need(bounds[-1] >= 1, "a bound is too low")
    present = [number for number in (*range(count + 1), 15) if bits.take(1)]
    need(present, "no class is present")
    lookup = np.array([15] + [sum(bound > e for bound in bounds) for e in range(1, 1 << dtype.exponent)], np.uint8)
    kind = old.dtype.type
    return lookup[old >> kind(dtype.mantissa) & kind((1 << dtype.exponent) - 1)], present


# The magnitude of each float token without its raw bits, and the number of these.
STEPS = np.array(
    [
        (token + 1, 0)
        if token < 15
        else (1 << token - 47, token - 47)
        if token >= 63
        else (4 + (token - 15) % 4 << (token - 7) // 4, (token - 7) // 4)
        for token in range(111)
    ],
    U64,
)


def read_step_tables(bits: Bits, dtype: Dtype, present: list[int], dense: bool) -> list[Table]:
    """The step tables of the present classes; those of `dense` begin with the symbol of no change."""
    most = {1: 31, 2: 63, 4: 79, 8: 111}[dtype.bits // 8] if dtype.exponent else 128
    tables: list[Table] = []
    for i in range(len(present)):
        if i and bits.take(1):
            tables.append(tables[-1])
            continue
        one_sign, two_signs = read_shares(bits, 1 + dense, most + dense)
        bias = bits.take(2)
        p = bits.take(8) if bias == 3 else 128
        need(p, "a sign bias of 0")
        shares = one_sign if bias in (1, 2) else two_signs
        slots = shares[:dense]
        for token, share in enumerate(shares[dense:]):
            positive = {1: share, 2: 0}.get(bias, min(share - 1, max(1, share * p // 256)))
            positive = share if token == 127 or not share else positive
            slots += [positive, share - positive]
        tables.append(make_table(slots))
    return tables


def move(bits: Bits, old: Array, symbols: Array, dtype: Dtype) -> Array:
    """Old units after the steps of these symbols."""
    tokens = symbols >> 1
    if dtype.exponent:
        steps = STEPS[tokens, 0] | bits.many(STEPS[tokens, 1].astype(np.int64))
    else:
        steps = (tokens + 1).astype(U64)
    steps = np.where(symbols & 1, ~steps + U64(1), steps).astype(old.dtype)
    sign = old.dtype.type(1 << dtype.bits - 1 if dtype.exponent else 0)
    order: Array = old + steps
    if not sign:
        return order
    order = np.where(old & sign, ~old, old ^ sign) + steps
    return np.where(order & sign, order ^ sign, ~order)


def decode_ulp(bits: Bits, coder: Coder, old: Array, line: int | None, dtype: Dtype) -> Array:
    """The new units of a `ulp` block; `line` is None if there are no marks of lines."""
    classes, present = read_classes(bits, old, dtype)
    lines, new = None if line is None else Marks(bits, 0, False, len(old) // line), old.copy()
    heads: list[Marks] = []
    for _ in present:
        heads.append(Marks(bits, max(0, heads[-1].j - 4) if heads else 20, True, len(old)))
    for number in (sum(head.symbols for head in heads), sum(head.steps for head in heads)):
        need(number <= len(old), "too many gaps or steps")
    tables = read_step_tables(bits, dtype, present, False)
    for head in [lines, *heads] if lines else heads:
        head.read_gaps(coder)
    symbols = [
        coder.section([table], head.steps if head.complement else len(head.gaps))
        for head, table in zip(heads, tables, strict=True)
    ]
    if lines and line:
        classes = np.where(np.repeat(lines.marked(bits, len(old) // line), line), classes, np.uint8(255))
    places = [np.flatnonzero(classes == number) for number in present]
    places = [place[head.marked(bits, len(place))] for place, head in zip(places, heads, strict=True)]
    for place, found in zip(places, symbols, strict=True):
        need(len(place) == len(found), "the number of steps")
        new[place] = move(bits, old[place], found, dtype)
    return new


def decode_dense(bits: Bits, coder: Coder, old: Array, line: int | None, dtype: Dtype) -> Array:
    """The new units of a `dense` block."""
    classes, present = read_classes(bits, old, dtype)
    lines, new = None if line is None else Marks(bits, 0, False, len(old) // line), old.copy()
    places = np.arange(len(old))
    tables = [make_table([4096]), *read_step_tables(bits, dtype, present, True)]
    if lines and line:
        lines.read_gaps(coder)
        places = np.flatnonzero(np.repeat(lines.marked(bits, len(old) // line), line))
    lookup = np.zeros(16, np.int64)
    lookup[present] = np.arange(len(present)) + 1
    symbols = coder.section(tables, len(places), lookup[classes[places]])
    places = places[symbols > 0]
    new[places] = move(bits, old[places], symbols[symbols > 0] - 1, dtype)
    return new


def decode_full(reader: Reader, coder: Coder, count: int, dtype: Dtype) -> Array:
    """The new units of a `full` block."""
    unit, raw = max(1, dtype.bits // 8), reader.take(1)[0]
    spare = len(reader.data) - -(-count * unit // 1024)
    need(spare >= 0 and raw < 1 << unit, "the size of a full block, or a raw plane that does not exist")
    planes = np.zeros((count, unit), np.uint8)
    coded = [b for b in range(unit) if not raw >> b & 1]
    for b in sorted(set(range(unit)) - set(coded)):
        planes[:, b] = np.frombuffer(reader.take(count), np.uint8)
    bits = Bits(reader.take())
    tables = [make_table(read_shares(bits, 1, 256)[0]) for _ in coded]
    bits.end(short=spare > 0)
    for b, table in zip(coded, tables, strict=True):
        planes[:, b] = coder.section([table], count)
    units = planes.reshape(-1).view(f"<u{unit}")
    one, top = units.dtype.type(1), units.dtype.type(8 * unit - 1)
    return units >> one | units << top if dtype.exponent else units


def decode_block(block: bytes, old: Array | None, count: int, dtype: Dtype, line: int) -> Array:
    """The new units of a block; only `full` is possible without old units."""
    reader, unit = Reader(block), max(1, dtype.bits // 8)
    tag = reader.take(1)[0]
    encoding, lanes, lines = tag & 3, tag >> 2 & 3, tag >> 4
    need(encoding and lanes < 3 and lines <= (encoding != 3 and line > 0), "the tag of a block")
    words = reader.uvarint()
    states = np.frombuffer(reader.take(4 * 4**lanes), "<u4").tolist()
    need(min(states) >= 1 << 16, "a state is too low")
    coder = Coder(states, np.frombuffer(reader.take(2 * words), "<u2").tolist())
    if encoding == 3:
        new = decode_full(reader, coder, count, dtype)
    elif old is not None:
        seen = old if dtype.exponent else old.view(np.uint8)
        bits, line = Bits(reader.take()), line if dtype.exponent else line * unit
        new = (decode_ulp if encoding == 1 else decode_dense)(bits, coder, seen, line if lines else None, dtype)
        bits.end()
    else:
        raise Invalid("a fresh block that is not full")
    need(coder.at == len(coder.words) and set(coder.states) == {1 << 16}, "words or states are left")
    return new.view(f"<u{unit}")
