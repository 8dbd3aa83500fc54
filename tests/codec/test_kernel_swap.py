"""Swaps, replacements and digests: the C kernel against the executable specification, with every width of vectors."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from support.cases import case
from support.samples import (
    CHANGES,
    LAYOUTS,
    Units,
    base,
    below,
    change,
    pair,
    vector_widths,
    vectors_of,
    whole_digest,
    words,
    words_of,
)
from weightwire.codec import _kernel, numpy_kernel
from weightwire.weights.dtypes import Dtype

UNITS = (1, 2, 4, 8)

each_layout = pytest.mark.parametrize("dtype", LAYOUTS, ids=lambda dtype: dtype.name)


@each_layout
def test_both_kernels_give_the_same_digest(dtype: Dtype) -> None:
    for count in (1, 2, 8, 63, 64, 256, 1000):
        units = base(dtype, count, "bits", count)
        for word in words_of(dtype, count):
            for start in (0, 1, 2**32 - 3, 2**63 - 5):
                for width in vector_widths():
                    with vectors_of(width):
                        expected = whole_digest(numpy_kernel, units, word, start)
                        assert whole_digest(_kernel, units, word, start) == expected


def test_no_bytes_have_no_digest() -> None:
    assert _kernel.digest(b"", 8, 1, 8, 5) == numpy_kernel.digest(b"", 8, 1, 8, 5) == b""


@each_layout
def test_encoding_returns_the_change_of_the_digest(dtype: Dtype) -> None:
    old = base(dtype, 640)
    for how in CHANGES:
        new = change(old, dtype, how)
        for word in words_of(dtype, 640):
            floats = dtype.unit, dtype.exponent, dtype.mantissa
            added = pair(_kernel.encode_block(old, new, *floats, 0, 640, word, 99)[2])
            before, after = (whole_digest(_kernel, one, word, 99) for one in (old, new))
            assert tuple((b + x) % 2**64 for b, x in zip(before, added, strict=True)) == after


@each_layout
@pytest.mark.parametrize("how", ["few", "all"])
def test_a_swap_writes_the_values_and_a_second_one_undoes_it(dtype: Dtype, how: str) -> None:
    """Both kernels write the same, return the same, and undo it in a second call."""
    old, count = base(dtype, 640), 640
    new = change(old, dtype, how)
    at = np.flatnonzero(old != new).astype("<u4").tobytes() if how == "few" else None
    incoming = new[old != new].tobytes() if how == "few" else new.tobytes()
    for word in words_of(dtype, count):
        targets, values = [old.copy(), old.copy()], [bytearray(incoming), bytearray(incoming)]
        for expected in (new, old):
            added = [
                one.swap_block(target, at, value, dtype.unit, count, word, 11)
                for one, target, value in zip((numpy_kernel, _kernel), targets, values, strict=True)
            ]
            assert added[0] == added[1]
            assert targets[0].tobytes() == targets[1].tobytes() == expected.tobytes()
            assert values[0] == values[1]


# The change of a digest, without writing

CHANGE_COUNTS = (8, 4096 + 8)


def check_digest_change(old: Units, new: Units, word: int, start: int) -> None:
    """Both kernels return what a swap into a copy would add, for listed units and for all."""
    unit, count = old.dtype.itemsize, len(old)
    at = np.flatnonzero(old != new)
    before = old.copy()
    for positions, values in ((at.astype("<u4").tobytes(), new[at]), (None, new)):
        expected = numpy_kernel.swap_block(old.copy(), positions, bytearray(values.tobytes()), unit, count, word, start)
        assert numpy_kernel.digest_change(old, positions, values, unit, count, word, start) == expected
        for width in vector_widths():
            with vectors_of(width):
                assert _kernel.digest_change(old, positions, values, unit, count, word, start) == expected
    assert old.tobytes() == before.tobytes()


@each_layout
def test_digest_change_is_what_a_swap_into_a_copy_adds(dtype: Dtype) -> None:
    for how, count in product(CHANGES, CHANGE_COUNTS):
        old = base(dtype, count)
        new = change(old, dtype, how)
        for word, start in product(words_of(dtype, count), (0, 2**63 - 5)):
            with case(how, count, word, start):
                check_digest_change(old, new, word, start)


@pytest.mark.parametrize("unit", UNITS)
def test_digest_change_counts_a_word_once(unit: int) -> None:
    """Every subset of the units of one word, in words on both sides of a full batch of 256."""
    per_word = 8 // unit
    old = words(unit, 600).view(f"<u{unit}")
    for chosen in range(1, 1 << per_word):
        within = [i for i in range(per_word) if chosen >> i & 1]
        for touched in ([0], [599], range(254, 258), range(600)):
            new = old.copy()
            new.reshape(-1, per_word)[np.ix_(list(touched), within)] ^= new.dtype.type(0x55)
            check_digest_change(old, new, 8, 7)


@pytest.mark.parametrize("unit", UNITS)
def test_digest_change_is_correct_for_units_that_do_not_fill_words(unit: int) -> None:
    """If units do not fill 8-byte words, each unit is a word."""
    for count, share in product((1, 3, 5, 7, 63, 4097), (0.1, 1)):
        with case(count, share):
            old = words(count, count).astype(f"<u{unit}")
            check_digest_change(old, some_changed(old, share, count), unit, 3)


def test_digest_change_of_equal_values_is_zero() -> None:
    old = words(1, 100)
    for kernel in (numpy_kernel, _kernel):
        assert kernel.digest_change(old, np.arange(100, dtype="<u4"), old, 8, 100, 8, 0) == bytes(16)
        assert kernel.digest_change(old, None, old, 8, 100, 8, 0) == bytes(16)
        assert kernel.digest_change(old, b"", b"", 8, 100, 8, 0) == bytes(16)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_digest_change_is_correct_at_odd_addresses(unit: int, offset: int) -> None:
    old = words(5, 500).view(f"<u{unit}")
    new = some_changed(old, 0.3, offset)
    at = np.flatnonzero(old != new).astype("<u4").tobytes()
    moved = [memoryview(bytes(offset) + data)[offset:] for data in (old.tobytes(), new[old != new].tobytes())]
    expected = numpy_kernel.digest_change(old, at, new[old != new], unit, len(old), 8, 5)
    assert _kernel.digest_change(moved[0], at, moved[1], unit, len(old), 8, 5) == expected


# Replacements

AROUND = sorted({n + d for n in (64, 128, 256, 512, 4096, 8192) for d in (-1, 0, 1)} | {0, 1, 5, 1000, 20_000})


def check_replace(old: Units, new: Units, offset: int = 0) -> tuple[bytes | None, bytearray]:
    """Both kernels give the same result with all vector widths, write nothing else, and the result can be undone."""
    unit, nbytes = old.dtype.itemsize, old.nbytes
    target = old.copy()
    expected = numpy_kernel.replace_block(target, new, unit, max(1, len(old)))
    assert target.tobytes() == new.tobytes()
    for width in vector_widths():
        with vectors_of(width):
            around = bytearray(offset) + old.tobytes() + b"?" * 64
            source = memoryview(bytes(offset) + new.tobytes())[offset:]
            place = memoryview(around)[offset : offset + nbytes]
            assert _kernel.replace_block(place, source, unit, max(1, len(old))) == expected
            assert around == bytearray(offset) + new.tobytes() + b"?" * 64
            assert _kernel.replace_block(place, source, unit, max(1, len(old))) == (b"", bytearray())
            _kernel.swap_block(place, expected[0], bytearray(expected[1]), unit, max(1, len(old)), unit, 0)
            assert place.tobytes() == old.tobytes()
    return expected


def some_changed(old: Units, share: float, seed: int) -> Units:
    """Each unit differs with this probability, in one bit or in all."""
    chosen = below(seed, len(old), 1000) < 1000 * share
    bits = np.where(below(seed + 1, len(old), 2) == 0, ~old.dtype.type(0), old.dtype.type(1))
    return np.where(chosen, old ^ bits, old).astype(old.dtype)


@pytest.mark.parametrize("unit", UNITS)
def test_replace_copies_the_source_and_returns_the_old_units(unit: int) -> None:
    for count, (seed, share) in product(AROUND, enumerate((0, 0.002, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999, 1))):
        with case(count, share):
            old = words(count, count).astype(f"<u{unit}")
            new = some_changed(old, share, seed)
            positions, values = check_replace(old, new)
            at = np.flatnonzero(old != new)
            assert positions is None or positions == at.astype("<u4").tobytes()
            assert values == (old if positions is None else old[at]).tobytes()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("offset", [1, 3, 7, 31, 63])
def test_replace_works_at_odd_addresses(unit: int, offset: int) -> None:
    for count in (1, 63, 65, 4096, 5003):
        old = words(count, count).astype(f"<u{unit}")
        for share in (0.01, 0.2, 1):
            check_replace(old, some_changed(old, share, offset), offset)


@pytest.mark.parametrize("unit", UNITS)
def test_all_old_units_are_returned_if_that_takes_less_space(unit: int) -> None:
    """Old units with positions, or all old units, for any distribution."""
    count = 9000
    most = count * unit // (unit + 4)
    old = np.zeros(count, f"<u{unit}")
    for changed, where in ((most, slice(None)), (most + 1, slice(None)), (most + 1, slice(None, None, -1))):
        new = old.copy()
        new[where][:changed] += new.dtype.type(1)
        positions, values = check_replace(old, new)
        assert (positions is None) == (changed > most)
        assert len(values) == unit * (count if positions is None else changed)
        assert len(positions or b"") + len(values) <= count * unit


@pytest.mark.parametrize("unit", UNITS)
def test_replace_returns_one_changed_unit_at_any_position(unit: int) -> None:
    old = np.zeros(4300, f"<u{unit}")
    for at in (0, 1, 63, 64, 127, 4095, 4096, 4159, 4160, 4299):
        new = old.copy()
        new[at] = 1
        assert check_replace(old, new)[0] == np.uint32(at).tobytes()


def test_replace_works_with_unchanged_chunks_between_changed_ones() -> None:
    """Equal chunks between others, with few changes and with many."""
    for every in (2, 5):
        old = np.zeros(64 * 4096, "<u2")
        new = old.copy()
        new.reshape(-1, 4096)[::every] = 7
        check_replace(old, new)


def test_replace_works_on_most_of_the_largest_block() -> None:
    old = np.zeros(1 << 22, "u1")
    new = old.copy()
    new[:: 3 << 10] = 1
    check_replace(old, new)
    new[1 << 20 :] = 1
    check_replace(old, new)
