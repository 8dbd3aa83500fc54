"""The `full` encoding: byte planes, coded if that is shorter and raw otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from support.crafted_files import Planes, parse_planes
from support.samples import BASES, LAYOUTS, base, change
from weightwire.codec import _kernel, numpy_kernel
from weightwire.codec.full_encoding import decode_full, encode_full
from weightwire.weights.dtypes import DTYPES, Dtype

BF16, U8 = DTYPES["BF16"], DTYPES["U8"]


@pytest.mark.parametrize("dtype", LAYOUTS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", BASES)
def test_blocks_round_trip(dtype: Dtype, kind: str) -> None:
    old = base(dtype, 700, kind)
    for how in ("one", "half", "all", "signs"):
        new = change(old, dtype, how)
        assert (decode_full(memoryview(encode_full(new, dtype)), 700, dtype) == new).all()


def test_exponents_compress_and_mantissas_do_not() -> None:
    """The sign moves to the lowest bit, so the upper byte holds only exponent bits."""
    block = parse_planes(encode_full(base(BF16, 20_000), BF16), 20_000, 2)
    assert block.raw_planes == 0b01
    assert len(block.build()) < 0.70 * 40_000


def test_random_bits_stay_raw() -> None:
    units = base(DTYPES["F64"], 2000, "bits")
    data = encode_full(units, DTYPES["F64"])
    # Tag, no words, one state, the mask of raw planes, the planes.
    assert data == b"\3\0" + (1 << 16).to_bytes(4, "little") + b"\xff" + rotated_planes(units)


def test_random_bits_hardly_grow() -> None:
    """A table that costs more than it saves is not sent: many norms have only a few hundred weights."""
    sizes = {}
    for name in ("U8", "BF16", "F32", "F64"):
        for count in (1, 16, 100, 1000, 1400, 5000):
            units = base(DTYPES[name], count, "bits", count)
            sizes[name, count] = len(encode_full(units, DTYPES[name])) - units.nbytes
    assert max(sizes.values()) <= 8, sizes


def rotated_planes(units: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> bytes:
    rotated = units << np.uint64(1) | units >> np.uint64(63)
    return rotated.view(np.uint8).reshape(-1, 8).T.tobytes()


def test_a_block_has_at_least_one_byte_per_1024() -> None:
    """Zeros cost nothing to code. Padding limits what a small file can claim."""
    for count, size in ((1 << 18, 1 << 8), ((1 << 18) + 1, (1 << 8) + 1)):
        data = encode_full(np.zeros(count, np.uint8), U8)
        assert len(data) == size
        assert not decode_full(memoryview(data), count, U8).any()


# Malformed blocks


OLD = base(BF16, 2000)
NEW = change(OLD, BF16, "most")


def honest() -> Planes:
    return parse_planes(encode_full(NEW, BF16), 2000, 2)


def no_plane(block: Planes) -> None:
    block.raw_planes |= 4


def a_plane_that_is_not_there(block: Planes) -> None:
    block.planes[0] = block.planes[0][:-1]


def a_coded_plane_too_short(block: Planes) -> None:
    block.planes[1] = block.planes[1][:-1]


def a_coded_plane_too_long(block: Planes) -> None:
    block.planes[1] += block.planes[1][:1]


def raw_where_it_is_coded(block: Planes) -> None:
    block.raw_planes = 3


def coded_where_it_is_raw(block: Planes) -> None:
    block.raw_planes = 0


def too_many_levels(block: Planes) -> None:
    block.levels[1] = (40,) * 257


def no_top_level(block: Planes) -> None:
    levels = block.levels[1]
    assert levels
    block.levels[1] = tuple(max(0, level - 1) if level > 1 else level for level in levels)


def a_byte_too_many(block: Planes) -> None:
    block.tail += b"\0"


def a_bit_too_many(block: Planes) -> None:
    block.tail = b"\1"


def words_that_are_not_there(block: Planes) -> None:
    block.words = 100_000


def lines(block: Planes) -> None:
    block.tag |= 16


LIES: list[Callable[[Planes], None]] = [
    no_plane, a_plane_that_is_not_there, a_coded_plane_too_short, a_coded_plane_too_long, raw_where_it_is_coded,
    coded_where_it_is_raw, too_many_levels, no_top_level, a_byte_too_many, a_bit_too_many, words_that_are_not_there,
    lines,
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_malformed_blocks_are_rejected_by_both_kernels(lie: Callable[[Planes], None]) -> None:
    block = honest()
    lie(block)
    for one in (numpy_kernel, _kernel):
        with pytest.raises(ValueError, match=r"\w"):
            one.decode_block(block.build(), OLD, 2000, 2, 8, 7, 0)


def test_the_unchanged_block_is_accepted() -> None:
    assert honest().build() == encode_full(NEW, BF16)
    for one in (numpy_kernel, _kernel):
        assert one.decode_block(honest().build(), None, 2000, 2, 8, 7, 0) == (None, bytearray(NEW.tobytes()))


@pytest.mark.parametrize("count", [1 << 16, 1 << 22])
def test_a_small_block_cannot_claim_much(count: int) -> None:
    """A hundred bytes of well-formed zeros, for 64 thousand or 4 million of them."""
    data = encode_full(np.zeros(1024, np.uint8), U8)
    for one in (numpy_kernel, _kernel):
        with pytest.raises(ValueError, match="too short for what it claims"):
            one.decode_block(data, None, count, 1, 0, 0, 0)


def test_padding_is_for_blocks_of_the_least_size_only() -> None:
    data = encode_full(np.zeros(1 << 18, np.uint8), U8)
    for one in (numpy_kernel, _kernel):
        one.decode_block(data, None, 1 << 18, 1, 0, 0, 0)
        with pytest.raises(ValueError, match="bit stream"):
            one.decode_block(data + b"\0", None, 1 << 18, 1, 0, 0, 0)
        with pytest.raises(ValueError, match="bit stream"):
            one.decode_block(data[:-1] + b"\1", None, 1 << 18, 1, 0, 0, 0)
