"""Symbol frequencies: the fixed tables for gaps, and the small tables that are stored in a block.

Part of the executable specification (docs/FORMAT.md, "Tables"). Integer arithmetic only, so results are the same on
every machine. A table gives each symbol a share of 4096 slots for the entropy coder.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from weightwire.codec.bit_stream import BitReader, BitWriter, unzigzag, zigzag

__all__ = [
    "SCALE",
    "Levels",
    "entropy_of",
    "gap_table",
    "j_of",
    "lg",
    "quantise",
    "read_levels",
    "shares",
    "split",
    "write_levels",
]

SCALE = 4096

# Gap table t is for a geometric distribution with continuation probability 2^-(2^-(t/4)): for t = 0 half of the
# members are marked, and every four tables halve the rate. In units of 2^-32.
_GO_ON = (
    2147483648, 2397865488, 2630870735, 2844240754, 3037000500, 3209167158, 3361473452,
    3495128183, 3611622603, 3712582389, 3799660319, 3874462704, 3938502376,
)  # fmt: skip
# The symbol that means "this many, and read on". The probability of reaching it is 1/128.
_GO_ON_SYMBOL = (7, 8, 10, 12, 14, 17, 20, 24, 28, 33, 40, 47, 56)
# The marked share halfway between gap parameters j and j + 1, in units of 2^-32. Past the end it halves every four.
_BETWEEN = (
    2020319617, 1778252501, 1554869531, 1351751591, 1169341376, 1007231337, 864423565, 739546759,
    631026644, 537212857, 456468484, 387229468, 328040869, 277576050, 234643803, 198187320,
)  # fmt: skip
_LAST_TABLE = len(_GO_ON) - 1

# 2^(i/4) in units of 2^-16.
_QUARTERS = (65536, 77936, 92682, 110218)
_TOP_LEVEL = 40

Levels = tuple[int, ...]  # per symbol: 0 if absent, else its frequency as a power of 2^(1/4); 40 = most frequent
Shares = tuple[int, ...]  # per symbol: slots out of 4096


def _lg_by_squaring(value: int) -> int:
    """log2 with 24 fractional bits, rounded down."""
    whole = value.bit_length() - 1
    mantissa = value << (31 - whole) if whole <= 31 else value >> (whole - 31)
    result = whole
    for _ in range(24):
        mantissa = mantissa * mantissa >> 31
        result <<= 1
        if mantissa >> 32:
            result |= 1
            mantissa >>= 1
    return result


_LOGS = tuple(_lg_by_squaring(256 + i) - (8 << 24) for i in range(257))  # of 1 + i / 256


@functools.lru_cache(1 << 16)
def lg(value: int) -> int:
    """log2 with 24 fractional bits, interpolated between 257 points of an octave."""
    whole = value.bit_length() - 1
    mantissa = value << (31 - whole) if whole <= 31 else value >> (whole - 31)
    index, rest = mantissa >> 23 & 0xFF, mantissa & 0x7FFFFF
    return (whole << 24) + _LOGS[index] + ((_LOGS[index + 1] - _LOGS[index]) * rest >> 23)


def entropy_of(counts: Iterable[int]) -> int:
    """The cost of coding symbols that occur so often, in units of 2^-24 bits."""
    present = [count for count in counts if count]
    total = sum(present)
    return total * lg(total) - sum(count * lg(count) for count in present) if total else 0


def j_of(members: int, marked: int) -> int:
    """The gap parameter for `marked` of `members`."""
    j = 0
    while j < 127:
        past = max(0, (j - 12) // 4)
        if marked << 32 >= members * (_BETWEEN[j - 4 * past] >> past):
            break
        j += 1
    return j


@functools.cache
def gap_table(j: int) -> tuple[int, int, Shares]:
    """For parameter j: the number of low bits that are sent raw, the go-on symbol, and the shares of all symbols."""
    raw = max(0, -(-(j - _LAST_TABLE) // 4))
    table = j - 4 * raw
    left = [1 << 32]
    for _ in range(_GO_ON_SYMBOL[table]):
        left.append(left[-1] * _GO_ON[table] >> 32)
    bounds = [(x + (1 << 19)) >> 20 for x in left] + [0]
    return raw, _GO_ON_SYMBOL[table], tuple(a - b for a, b in itertools.pairwise(bounds))


def quantise(counts: npt.NDArray[np.int64]) -> Levels:
    """Converts counts to levels: relative to the largest, in steps of 2^(1/4)."""
    most = lg(int(counts.max()))
    used = np.flatnonzero(counts)[-1] + 1
    return tuple(
        max(1, _TOP_LEVEL - ((4 * (most - lg(count)) + (1 << 23)) >> 24)) if count else 0
        for count in counts[:used].tolist()
    )


def shares(levels: Levels, least: int) -> Shares:
    """Converts levels to slots: in proportion, at least `least` each. The largest absorb the rounding."""
    weights = [_QUARTERS[v % 4] << (v // 4) if v else 0 for v in levels]
    total = sum(weights)
    slots = [max(least, w * SCALE // total) if w else 0 for w in weights]
    excess = sum(slots) - SCALE
    while excess:
        largest = slots.index(max(slots))
        taken = min(excess, slots[largest] - least)
        slots[largest] -= taken
        excess -= taken
    return tuple(slots)


def split(magnitudes: Shares, plus: int) -> Shares:
    """Shares of signed symbols, + and - of each magnitude in turn. A + has probability `plus` / 256."""
    out: list[int] = []
    for share in magnitudes:
        one_sign = plus in (0, 256) or share == 0
        above = share * (plus > 0) if one_sign else min(share - 1, max(1, share * plus >> 8))
        out += [above, share - above]
    return tuple(out)


def write_levels(bits: BitWriter, levels: Levels) -> None:
    """Each level as a difference to the one before. After a 0 comes the number of further zeros."""
    bits.golomb(len(levels) - 1, 2)
    previous, at = _TOP_LEVEL, 0
    while at < len(levels):
        bits.golomb(zigzag(levels[at] - previous), 2)
        previous = levels[at]
        at += 1
        if previous == 0:
            more = next(i for i, level in enumerate(levels[at:]) if level)
            bits.golomb(more, 1)
            at += more


def read_levels(bits: BitReader, most: int) -> Levels:
    """At most `most` symbols. The last one must be present, and one must have the top level."""
    count = bits.golomb(2) + 1
    if count > most:
        raise ValueError("a table has too many symbols")
    levels: list[int] = []
    while len(levels) < count:
        before = levels[-1] if levels else _TOP_LEVEL
        levels.append(before + unzigzag(bits.golomb(2)))
        if not 0 <= levels[-1] <= _TOP_LEVEL:
            raise ValueError("a table level is out of range")
        if before == levels[-1] == 0:
            raise ValueError("a table is not in its canonical form")
        if levels[-1] == 0:
            levels += [0] * min(bits.golomb(1), count)
    if len(levels) != count or levels[-1] == 0 or max(levels) != _TOP_LEVEL:
        raise ValueError("a table is not in its canonical form")
    return tuple(levels)
