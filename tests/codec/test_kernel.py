"""The C kernel against the executable specification: the same bytes, values, counts and digests on everything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from support.cases import case
from support.crafted_files import parse_ulp
from support.encoded import encode_ulp
from support.samples import (
    BASES,
    CHANGES,
    LAYOUTS,
    Units,
    base,
    change,
    lines_of,
    units_of,
    vector_widths,
    vectors_of,
    whole_digest,
    words,
    words_of,
)
from weightwire.codec import _kernel, numpy_kernel
from weightwire.weights.dtypes import DTYPES, Dtype

BF16 = DTYPES["BF16"]

each_layout = pytest.mark.parametrize("dtype", LAYOUTS, ids=lambda dtype: dtype.name)


def check(
    old: Units | None, new: Units, dtype: Dtype, line: int = 0, words: tuple[int, ...] = (), start: int = 0
) -> bytes:
    """Encodes and decodes a block with both kernels, all vector widths and all word widths. Returns its bytes."""
    floats, words = (dtype.unit, dtype.exponent, dtype.mantissa), words or (dtype.unit,)
    count = len(new)
    data, changed, added = numpy_kernel.encode_block(old, new, *floats, line, count, words[0], start)
    decoded = numpy_kernel.decode_block(data, old, len(new), *floats, line) if data else None
    for word in words:
        if old is not None:
            before, after = (whole_digest(numpy_kernel, units, word, start) for units in (old, new))
            assert word != words[0] or added == gained(before, after)
            added = gained(before, after)
        for width in vector_widths():
            with vectors_of(width):
                assert _kernel.encode_block(old, new, *floats, line, count, word, start) == (data, changed, added)
                if decoded:
                    assert _kernel.decode_block(data, old, len(new), *floats, line) == decoded
                    check_patch(data, old, new, dtype, line, word, start)
    if decoded:
        assert landed(old, *decoded, dtype).tobytes() == new.tobytes()
    else:
        assert old is not None
        assert old.tobytes() == new.tobytes()
    return data


def gained(before: tuple[int, int], after: tuple[int, int]) -> bytes:
    """The difference of two digests."""
    return b"".join(((b - a) % 2**64).to_bytes(8, "little") for a, b in zip(before, after, strict=True))


def check_patch(data: bytes, old: Units | None, new: Units, dtype: Dtype, line: int, word: int, start: int) -> None:
    """Checks the result of patching in place, the old units, and the change of the digest."""
    fresh = old is None
    target = np.zeros_like(new) if old is None else old.copy()
    before = target.copy()
    positions, values, added = _kernel.patch_block(
        data, target, fresh, dtype.unit, dtype.exponent, dtype.mantissa, line, len(new), word, start
    )
    assert target.tobytes() == new.tobytes()
    assert landed(target, positions, values, dtype).tobytes() == before.tobytes()
    assert added == gained(*(whole_digest(_kernel, units, word, start) for units in (before, new)))


def landed(old: Units | None, positions: bytes | None, values: bytearray, dtype: Dtype) -> Units:
    """The base with a decoded block written into it."""
    units: Units = np.frombuffer(values, f"<u{dtype.unit}")
    if positions is None:
        return units
    assert old is not None
    result = old.copy()
    result[np.frombuffer(positions, "<u4")] = units
    return result


def pairs(dtype: Dtype, count: int, line: int = 0) -> Iterator[tuple[Units, Units]]:
    for seed, kind in enumerate(BASES):
        old = base(dtype, count, kind, seed)
        for how in CHANGES:
            yield old, change(old, dtype, how, seed, line)


def check_size(dtype: Dtype, count: int) -> None:
    for line in lines_of(dtype, count):
        for old, new in pairs(dtype, count, line):
            check(old, new, dtype, line, words_of(dtype, count), start=2**40)
    for kind in BASES:
        check(None, base(dtype, count, kind), dtype)


# Blocks


@each_layout
def test_both_kernels_agree_on_small_blocks(dtype: Dtype) -> None:
    for count in (1, 65):
        with case(count):
            check_size(dtype, count)


@each_layout
def test_both_kernels_agree_on_lines_with_a_remainder(dtype: Dtype) -> None:
    old = base(dtype, 1152, "weights")
    for how in CHANGES:
        for line in lines_of(dtype, len(old)):
            check(old, change(old, dtype, how, line=line), dtype, line)


@pytest.mark.slow
@each_layout
@pytest.mark.parametrize("count", [2, 63, 64, 255, 256, 257, 1000])
def test_both_kernels_agree_on_more_small_blocks(dtype: Dtype, count: int) -> None:
    check_size(dtype, count)


@each_layout
def test_both_kernels_agree_around_the_chunk_size(dtype: Dtype) -> None:
    kinds = (("weights", "likely"), ("special", "one"), ("equal", "most"))
    for count, (kind, how) in product((4095, 4096, 4097), kinds):
        with case(count, kind, how):
            old = base(dtype, count, kind)
            new = change(old, dtype, how)
            new[-1] = ~old[-1]
            check(old, new, dtype)


def test_both_kernels_agree_on_lines_longer_than_a_chunk() -> None:
    old = base(BF16, 5 * 4160)
    for at in (0, 4095, 4096, 4159, 4160, 3 * 4160 + 4100, 5 * 4160 - 1):
        new = old.copy()
        new[at] += 1
        check(old, new, BF16, line=4160, words=(8,))
    check(old, change(old, BF16, "rows", line=4160), BF16, line=4160)


@pytest.mark.slow
@each_layout
def test_both_kernels_agree_on_blocks_of_tens_of_thousands_of_units(dtype: Dtype) -> None:
    for old, new in pairs(dtype, 18_000, 72):
        for line in (0, 72):
            check(old, new, dtype, line)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BF16", "F32", "F64", "U8"])
def test_both_kernels_agree_if_the_classes_are_chosen_from_a_sample(name: str) -> None:
    """From 131,073 units on. With few changes, all of them count."""
    dtype = DTYPES[name]
    for count in (131_072, 131_080, 160_000):
        for how in ("one", "few", "likely", "most", "rows"):
            old = base(dtype, count, "weights", seed=count)
            check(old, change(old, dtype, how, line=80), dtype, line=80 if count == 160_000 else 0)


def test_an_unchanged_block_is_empty() -> None:
    old = base(BF16, 300)
    assert check(old, old.copy(), BF16) == b""


@pytest.mark.parametrize("at", [0, 63, 64, 255, 256, 511, 999])
def test_both_kernels_agree_on_one_change_at_any_position(at: int) -> None:
    old = base(BF16, 1000)
    new = old.copy()
    new[at] += 1
    check(old, new, BF16, words=(8,))


@pytest.mark.parametrize("unchanged", [0, 63, 64, 255, 256, 511, 999])
def test_both_kernels_agree_if_all_units_but_one_change(unchanged: int) -> None:
    old = base(BF16, 1000, "equal")
    new = old + np.uint16(1)
    new[unchanged] = old[unchanged]
    check(old, new, BF16)


@each_layout
def test_both_kernels_agree_on_every_size_of_step(dtype: Dtype) -> None:
    """Powers of two and their neighbours, up and down, from any value."""
    powers = [2**k + d for k in range(8 * dtype.unit) for d in (-1, 0, 1)]
    steps = units_of([s % 2**64 for p in powers for s in (p, -p)], dtype)
    for kind in ("weights", "zeros", "special"):
        old = base(dtype, len(steps), kind)
        check(old, old + steps, dtype)


@each_layout
def test_both_kernels_agree_on_each_exponent_alone(dtype: Dtype) -> None:
    """The classes must fit any exponents, including the largest and denormals."""
    exponents = range(0, 1 << dtype.exponent, max(1, (1 << dtype.exponent) // 16))
    for exponent in (*exponents, (1 << dtype.exponent) - 1):
        old = units_of(words(exponent, 96) % np.uint64(1 << dtype.mantissa), dtype) + units_of(
            [exponent << dtype.mantissa], dtype
        )
        check(old, change(old, dtype, "half", exponent), dtype)


def test_both_kernels_agree_on_exponents_far_apart() -> None:
    """Most of a block has one exponent, and outliers another."""
    for most in (0, 1, 20, 127, 254, 255):
        for few in (0, 1, 90, 127, 255):
            old = np.full(600, most << 7, "<u2")
            old[::29] = few << 7
            check(old, change(old, BF16, "few", most), BF16)


def test_both_kernels_agree_on_all_16_bit_values() -> None:
    for name in ("BF16", "F16", "U16"):
        everything = np.arange(65_536, dtype="<u2")
        check(everything, everything[::-1].copy(), DTYPES[name])


@each_layout
def test_both_kernels_agree_on_blocks_without_a_base(dtype: Dtype) -> None:
    for count in (1, 2, 1000, 3000):
        for kind in BASES:
            check(None, base(dtype, count, kind), dtype)


def test_a_constant_block_is_padded_to_the_minimum_size() -> None:
    data = check(None, np.zeros(300_000, "<u2"), BF16)
    assert len(data) == -(-600_000 // 1024)


@pytest.mark.slow
def test_both_kernels_agree_on_the_largest_block() -> None:
    """As many units as a block can hold, with changes in the first and the last."""
    old = base(DTYPES["U8"], 1 << 22, "equal")
    new = old.copy()
    new[[0, 1 << 21, (1 << 22) - 1]] += 1
    check(old, new, DTYPES["U8"], words=(8,))
    check(old, new, DTYPES["U8"], line=1 << 21)


def test_both_kernels_agree_at_odd_addresses() -> None:
    """Safetensors files need not align their tensors."""
    for dtype in LAYOUTS:
        old, new = base(dtype, 600), change(base(dtype, 600), dtype, "half")
        floats = dtype.unit, dtype.exponent, dtype.mantissa
        expected = numpy_kernel.encode_block(old, new, *floats, 0, 600, dtype.unit, 7)
        for offset in (1, 3, 7):
            was, now = (memoryview(bytearray(offset) + one.tobytes())[offset:] for one in (old, new))
            data = memoryview(bytearray(offset) + expected[0])[offset:]
            for width in vector_widths():
                with vectors_of(width):
                    assert _kernel.encode_block(was, now, *floats, 0, 600, dtype.unit, 7) == expected
                    positions, values = _kernel.decode_block(data, was, 600, *floats, 0)
                    assert landed(old, positions, values, dtype).tobytes() == new.tobytes()
                    assert whole_digest(_kernel, was, dtype.unit, 5) == whole_digest(numpy_kernel, old, dtype.unit, 5)
                    target = bytearray(offset) + old.tobytes()
                    _kernel.swap_block(memoryview(target)[offset:], positions, values, dtype.unit, 600, dtype.unit, 0)
                    assert target[offset:] == new.tobytes()


@each_layout
@pytest.mark.parametrize("steps", [-1, 1])
def test_a_failed_patch_leaves_its_target_unchanged(dtype: Dtype, steps: int) -> None:
    """One step too few or too many: detected only after all others were written."""
    old = base(dtype, 9000, "equal")
    new = change(old, dtype, "most")
    new = new if dtype.is_float else np.where(new == old, old, ~old)  # all bytes of a unit
    block = parse_ulp(encode_ulp(old, new, dtype, 0), dtype)
    ((marks, told),) = block.classes
    assert marks.complement
    told.symbols = told.symbols[:-1] if steps < 0 else [*told.symbols, told.symbols[0]]
    for width in vector_widths():
        with vectors_of(width):
            target = old.copy()
            with pytest.raises(ValueError, match="the number of steps differs from the number of changes"):
                _kernel.patch_block(
                    block.build(), target, False, dtype.unit, dtype.exponent, dtype.mantissa, 0, 9000, dtype.unit, 0
                )
            assert target.tobytes() == old.tobytes()


# Segments


@each_layout
def test_each_segment_has_its_own_counts_and_digests(dtype: Dtype) -> None:
    """A block of several segments has the bytes of one segment of all units. Only counts and digests are apart."""
    segments = ((1, 0), (3, 0), (8, 0), (72, 0), (72, 72), (5000, 0), (4160, 2080))
    for (segment, line), (seed, how) in product(segments, enumerate(("few", "most", "all", "rows"))):
        count = segment * max(2, 600 // segment)
        old = base(dtype, count, "weights", seed)
        new = change(old, dtype, how, seed, line)
        for word in words_of(dtype, segment):
            with case(segment, line, how, word):
                check_segments(old, new, dtype, line, segment, word)


def check_segments(old: Units, new: Units, dtype: Dtype, line: int, segment: int, word: int) -> None:
    floats, where = (dtype.unit, dtype.exponent, dtype.mantissa, line), (segment, word, 3)
    data = numpy_kernel.encode_block(old, new, *floats, len(new), word, 3)[0]
    pieces = [slice(begin, begin + segment) for begin in range(0, len(old), segment)]
    before, after = ([whole_digest(numpy_kernel, units[one], word, 3) for one in pieces] for units in (old, new))
    added = b"".join(gained(*both) for both in zip(before, after, strict=True))
    digests = b"".join(gained((0, 0), one) for one in before)
    counts = np.array([(old[one] != new[one]).sum() for one in pieces], "<u4").tobytes()
    for kernel, width in [(numpy_kernel, 0), *((_kernel, width) for width in vector_widths())]:
        with vectors_of(width):
            for apart in (False, True):
                was, now = (in_pieces(units, segment) if apart else units.copy() for units in (old, new))
                assert kernel.encode_block(was, now, *floats, *where) == (data, counts, added)
                assert kernel.digest(was, dtype.unit, *where) == digests
                if data:
                    check_patched_segments(kernel, data, was, old, new, floats, where, added)


def check_patched_segments(
    kernel: Any,
    data: bytes,
    was: Units | tuple[Units, ...],
    old: Units,
    new: Units,
    floats: tuple[int, int, int, int],
    where: tuple[int, int, int],
    added: bytes,
) -> None:
    """Patching, undoing it, replacing and undoing that: `was` holds the old units before and after."""
    unit = floats[0]
    positions, values, patched = kernel.patch_block(data, was, False, *floats, *where)
    assert (joined(was), patched) == (new.tobytes(), added)
    undone = kernel.swap_block(was, positions, values, unit, *where)
    assert joined(was) == old.tobytes()
    assert not (np.frombuffer(undone, "<u8") + np.frombuffer(added, "<u8")).any()
    positions, values = kernel.decode_block(data, was, len(old), *floats)
    assert kernel.digest_change(was, positions, values, unit, *where) == added
    given = kernel.replace_block(was, in_pieces(new, where[0]) if isinstance(was, tuple) else new, unit, where[0])
    assert given == numpy_kernel.replace_block(old.copy(), new, unit, len(old))
    assert joined(was) == new.tobytes()
    kernel.swap_block(was, *given, unit, *where)
    assert joined(was) == old.tobytes()


def in_pieces(units: Units, segment: int) -> tuple[Units, ...]:
    """Each segment in memory of its own."""
    return tuple(units[begin : begin + segment].copy() for begin in range(0, len(units), segment))


def joined(units: Units | tuple[Units, ...]) -> bytes:
    return b"".join(one.tobytes() for one in units) if isinstance(units, tuple) else units.tobytes()


@each_layout
def test_segments_may_lie_apart_in_a_block_without_a_base(dtype: Dtype) -> None:
    new = base(dtype, 640, "weights")
    data = numpy_kernel.encode_block(None, new, dtype.unit, dtype.exponent, dtype.mantissa, 0, 640, dtype.unit, 0)[0]
    for kernel in (numpy_kernel, _kernel):
        floats, where = (dtype.unit, dtype.exponent, dtype.mantissa, 0), (80, dtype.unit, 0)
        assert kernel.encode_block(None, in_pieces(new, 80), *floats, *where)[0] == data
        target = in_pieces(np.zeros_like(new), 80)
        positions, values, _ = kernel.patch_block(data, target, True, *floats, *where)
        assert joined(target) == new.tobytes()
        kernel.swap_block(target, positions, values, dtype.unit, *where)
        assert not any(joined(target))


def test_a_sample_crosses_segments_that_lie_apart() -> None:
    """From 131,073 units on, the classes are chosen from a sample of stretches."""
    old = base(BF16, 160_000)
    new = change(old, BF16, "likely")
    data = numpy_kernel.encode_block(old, new, 2, 8, 7, 0, 160_000, 2, 0)[0]
    assert _kernel.encode_block(in_pieces(old, 1000), in_pieces(new, 1000), 2, 8, 7, 0, 1000, 2, 0)[0] == data
