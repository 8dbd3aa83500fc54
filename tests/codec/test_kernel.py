"""The C kernel against the executable specification: the same bytes, values, counts and digests on everything."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from support.crafted import parse_ulp
from support.samples import (
    BASES,
    CHANGES,
    LAYOUTS,
    Units,
    base,
    below,
    change,
    lines_of,
    units_of,
    vector_widths,
    vectors_of,
    words,
    words_of,
)
from weightwire.codec import _kernel, numpy_kernel
from weightwire.codec.ulp_encoding import encode_ulp
from weightwire.weights.dtypes import DTYPES, Dtype

BF16 = DTYPES["BF16"]

each_layout = pytest.mark.parametrize("dtype", LAYOUTS, ids=lambda dtype: dtype.name)


def check(old: Units | None, new: Units, dtype: Dtype, line: int = 0, word: int = 0, start: int = 0) -> bytes:
    """Encodes and decodes a block with both, with every width of vectors; returns its bytes."""
    floats = dtype.unit, dtype.exponent, dtype.mantissa
    expected = numpy_kernel.encode_block(old, new, *floats, line, word or dtype.unit, start)
    data = expected[0]
    decoded = numpy_kernel.decode_block(data, old, len(new), *floats, line) if data else None
    for width in vector_widths():
        with vectors_of(width):
            assert _kernel.encode_block(old, new, *floats, line, word or dtype.unit, start) == expected
            if decoded:
                assert _kernel.decode_block(data, old, len(new), *floats, line) == decoded
                check_patch(data, old, new, dtype, line, word or dtype.unit, start)
    if decoded:
        assert landed(old, *decoded, dtype).tobytes() == new.tobytes()
    else:
        assert old is not None
        assert old.tobytes() == new.tobytes()
    return data


def check_patch(data: bytes, old: Units | None, new: Units, dtype: Dtype, line: int, word: int, start: int) -> None:
    """That the kernel decodes into the base what it should, and gives back what was there and what the digest gains."""
    fresh = old is None
    target = np.zeros_like(new) if old is None else old.copy()
    before = target.copy()
    positions, values, *added = _kernel.patch_block(
        data, target, fresh, dtype.unit, dtype.exponent, dtype.mantissa, line, word, start
    )
    assert target.tobytes() == new.tobytes()
    assert landed(target, positions, values, dtype).tobytes() == before.tobytes()
    lanes = (one.digest(two, word, start) for one, two in ((_kernel, before), (_kernel, new)))
    gained = [(b - a) % 2**64 for a, b in zip(*lanes, strict=True)]
    assert added == gained


def landed(old: Units | None, positions: bytes | None, values: bytearray, dtype: Dtype) -> Units:
    """A decoded block, written onto its base."""
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
            for word in words_of(dtype, count):
                check(old, new, dtype, line, word, start=2**40)
    for kind in BASES:
        check(None, base(dtype, count, kind), dtype)


# Blocks


@each_layout
@pytest.mark.parametrize("count", [1, 65])
def test_small_blocks(dtype: Dtype, count: int) -> None:
    check_size(dtype, count)


@each_layout
def test_a_block_of_lines_and_a_rest(dtype: Dtype) -> None:
    old = base(dtype, 1152, "weights")
    for how in CHANGES:
        for line in lines_of(dtype, len(old)):
            check(old, change(old, dtype, how, line=line), dtype, line)


@pytest.mark.slow
@each_layout
@pytest.mark.parametrize("count", [2, 63, 64, 255, 256, 257, 1000])
def test_all_small_blocks(dtype: Dtype, count: int) -> None:
    check_size(dtype, count)


@each_layout
@pytest.mark.parametrize("count", [4095, 4096, 4097])
def test_blocks_around_what_the_kernel_does_at_once(dtype: Dtype, count: int) -> None:
    for kind, how in (("weights", "likely"), ("special", "one"), ("equal", "most")):
        old = base(dtype, count, kind)
        new = change(old, dtype, how)
        new[-1] = ~old[-1]
        check(old, new, dtype)


def test_lines_longer_than_what_the_kernel_does_at_once() -> None:
    old = base(BF16, 5 * 4160)
    for at in (0, 4095, 4096, 4159, 4160, 3 * 4160 + 4100, 5 * 4160 - 1):
        new = old.copy()
        new[at] += 1
        check(old, new, BF16, line=4160, word=8)
    check(old, change(old, BF16, "rows", line=4160), BF16, line=4160)


@pytest.mark.slow
@each_layout
def test_blocks_of_tens_of_thousands(dtype: Dtype) -> None:
    for old, new in pairs(dtype, 18_000, 72):
        for line in (0, 72):
            check(old, new, dtype, line)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BF16", "F32", "F64", "U8"])
def test_blocks_whose_window_is_chosen_from_a_sample(name: str) -> None:
    """From 65,537 units on; with few changes all are looked at after all."""
    dtype = DTYPES[name]
    for count in (65_536, 65_544, 80_000):
        for how in ("one", "few", "likely", "most", "rows"):
            old = base(dtype, count, "weights", seed=count)
            check(old, change(old, dtype, how, line=80), dtype, line=80 if count == 80_000 else 0)


def test_no_change() -> None:
    old = base(BF16, 300)
    assert check(old, old.copy(), BF16) == b""


@pytest.mark.parametrize("at", [0, 63, 64, 255, 256, 511, 999])
def test_one_change_wherever_it_is(at: int) -> None:
    old = base(BF16, 1000)
    new = old.copy()
    new[at] += 1
    check(old, new, BF16, word=8)


@pytest.mark.parametrize("unchanged", [0, 63, 64, 255, 256, 511, 999])
def test_all_but_one_change_wherever_it_is(unchanged: int) -> None:
    old = base(BF16, 1000, "equal")
    new = old + np.uint16(1)
    new[unchanged] = old[unchanged]
    check(old, new, BF16)


@each_layout
def test_every_size_of_step(dtype: Dtype) -> None:
    """Powers of two and their neighbours, up and down, from everywhere."""
    powers = [2**k + d for k in range(8 * dtype.unit) for d in (-1, 0, 1)]
    steps = units_of([s % 2**64 for p in powers for s in (p, -p)], dtype)
    for kind in ("weights", "zeros", "special"):
        old = base(dtype, len(steps), kind)
        check(old, old + steps, dtype)


@each_layout
def test_each_exponent_alone(dtype: Dtype) -> None:
    """The window must fit wherever the exponents are, the largest and the denormals included."""
    exponents = range(0, 1 << dtype.exponent, max(1, (1 << dtype.exponent) // 16))
    for exponent in (*exponents, (1 << dtype.exponent) - 1):
        old = units_of(words(exponent, 96) % np.uint64(1 << dtype.mantissa), dtype) + units_of(
            [exponent << dtype.mantissa], dtype
        )
        check(old, change(old, dtype, "half", exponent), dtype)


def test_every_pair_of_exponents_far_apart() -> None:
    """Most of a block has one exponent, and outliers another."""
    for most in (0, 1, 20, 127, 254, 255):
        for few in (0, 1, 90, 127, 255):
            old = np.full(600, most << 7, "<u2")
            old[::29] = few << 7
            check(old, change(old, BF16, "few", most), BF16)


def test_all_of_16_bits_to_all_of_16_bits() -> None:
    for name in ("BF16", "F16", "U16"):
        everything = np.arange(65_536, dtype="<u2")
        check(everything, everything[::-1].copy(), DTYPES[name])


@each_layout
def test_full_blocks(dtype: Dtype) -> None:
    for count in (1, 2, 1000, 3000):
        for kind in BASES:
            check(None, base(dtype, count, kind), dtype)


def test_a_constant_block_is_padded_to_its_least_size() -> None:
    data = check(None, np.zeros(300_000, "<u2"), BF16)
    assert len(data) == -(-600_000 // 1024)


@pytest.mark.slow
def test_a_whole_block_of_the_largest_size() -> None:
    """All that a block may hold, with changes in its first and last unit."""
    old = base(DTYPES["U8"], 1 << 22, "equal")
    new = old.copy()
    new[[0, 1 << 21, (1 << 22) - 1]] += 1
    check(old, new, DTYPES["U8"], word=8)
    check(old, new, DTYPES["U8"], line=1 << 21)


def test_buffers_at_odd_addresses() -> None:
    """Safetensors files need not align their tensors."""
    for dtype in LAYOUTS:
        old, new = base(dtype, 600), change(base(dtype, 600), dtype, "half")
        floats = dtype.unit, dtype.exponent, dtype.mantissa
        expected = numpy_kernel.encode_block(old, new, *floats, 0, dtype.unit, 7)
        for offset in (1, 3, 7):
            was, now = (memoryview(bytearray(offset) + one.tobytes())[offset:] for one in (old, new))
            data = memoryview(bytearray(offset) + expected[0])[offset:]
            for width in vector_widths():
                with vectors_of(width):
                    assert _kernel.encode_block(was, now, *floats, 0, dtype.unit, 7) == expected
                    positions, values = _kernel.decode_block(data, was, 600, *floats, 0)
                    assert landed(old, positions, values, dtype).tobytes() == new.tobytes()
                    assert _kernel.digest(was, dtype.unit, 5) == numpy_kernel.digest(old, dtype.unit, 5)
                    target = bytearray(offset) + old.tobytes()
                    _kernel.swap_block(memoryview(target)[offset:], positions, values, dtype.unit, dtype.unit, 0)
                    assert target[offset:] == new.tobytes()


# Digests and swaps


@each_layout
def test_digests(dtype: Dtype) -> None:
    for count in (1, 2, 8, 63, 64, 256, 1000):
        units = base(dtype, count, "bits", count)
        for word in words_of(dtype, count):
            for start in (0, 1, 2**32 - 3, 2**63 - 5):
                for width in vector_widths():
                    with vectors_of(width):
                        assert _kernel.digest(units, word, start) == numpy_kernel.digest(units, word, start)


def test_the_digest_of_nothing() -> None:
    assert _kernel.digest(b"", 8, 5) == numpy_kernel.digest(b"", 8, 5) == (0, 0)


@each_layout
def test_a_change_adds_to_the_digest_what_it_should(dtype: Dtype) -> None:
    old = base(dtype, 640)
    for how in CHANGES:
        new = change(old, dtype, how)
        for word in words_of(dtype, 640):
            added = _kernel.encode_block(old, new, dtype.unit, dtype.exponent, dtype.mantissa, 0, word, 99)[2:]
            before, after = (_kernel.digest(one, word, 99) for one in (old, new))
            assert tuple((b + x) % 2**64 for b, x in zip(before, added, strict=True)) == after


@each_layout
@pytest.mark.parametrize("how", ["few", "all"])
def test_swaps(dtype: Dtype, how: str) -> None:
    """Both write the same, leave the same behind, and undo it when asked again."""
    old, count = base(dtype, 640), 640
    new = change(old, dtype, how)
    at = np.flatnonzero(old != new).astype("<u4").tobytes() if how == "few" else None
    incoming = new[old != new].tobytes() if how == "few" else new.tobytes()
    for word in words_of(dtype, count):
        targets, values = [old.copy(), old.copy()], [bytearray(incoming), bytearray(incoming)]
        for expected in (new, old):
            lanes = [
                one.swap_block(target, at, value, dtype.unit, word, 11)
                for one, target, value in zip((numpy_kernel, _kernel), targets, values, strict=True)
            ]
            assert lanes[0] == lanes[1]
            assert targets[0].tobytes() == targets[1].tobytes() == expected.tobytes()
            assert values[0] == values[1]


@each_layout
@pytest.mark.parametrize("steps", [-1, 1])
def test_a_patch_that_fails_leaves_its_target_as_it_was(dtype: Dtype, steps: int) -> None:
    """One step too few or too many, which shows only when all others have been written."""
    old = base(dtype, 9000, "equal")
    block = parse_ulp(encode_ulp(old, change(old, dtype, "most"), dtype, 0), dtype.unit)
    ((marks, told),) = block.classes
    assert marks.complement
    told.symbols = told.symbols[:-1] if steps < 0 else [*told.symbols, told.symbols[0]]
    for width in vector_widths():
        with vectors_of(width):
            target = old.copy()
            with pytest.raises(ValueError, match="another number of steps than of changes"):
                _kernel.patch_block(
                    block.build(), target, False, dtype.unit, dtype.exponent, dtype.mantissa, 0, dtype.unit, 0
                )
            assert target.tobytes() == old.tobytes()


# What is taken over from another buffer


UNITS = (1, 2, 4, 8)
AROUND = sorted({n + d for n in (64, 128, 256, 512, 4096, 8192) for d in (-1, 0, 1)} | {0, 1, 5, 1000, 20_000})


def check_take(old: Units, new: Units, offset: int = 0) -> tuple[bytes | None, bytearray]:
    """Both make the same of it with every width of vectors, touch nothing around it, and it can be undone."""
    unit, nbytes = old.dtype.itemsize, old.nbytes
    target = old.copy()
    expected = numpy_kernel.replace_block(target, new, unit)
    assert target.tobytes() == new.tobytes()
    for width in vector_widths():
        with vectors_of(width):
            around = bytearray(offset) + old.tobytes() + b"?" * 64
            source = memoryview(bytes(offset) + new.tobytes())[offset:]
            place = memoryview(around)[offset : offset + nbytes]
            assert _kernel.replace_block(place, source, unit) == expected
            assert around == bytearray(offset) + new.tobytes() + b"?" * 64
            assert _kernel.replace_block(place, source, unit) == (b"", bytearray())
            _kernel.swap_block(place, expected[0], bytearray(expected[1]), unit, unit, 0)
            assert place.tobytes() == old.tobytes()
    return expected


def some_changed(old: Units, share: float, seed: int) -> Units:
    """Each unit differs, in one bit or in all, with this chance."""
    chosen = below(seed, len(old), 1000) < 1000 * share
    bits = np.where(below(seed + 1, len(old), 2) == 0, ~old.dtype.type(0), old.dtype.type(1))
    return np.where(chosen, old ^ bits, old).astype(old.dtype)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("count", AROUND)
def test_taking(unit: int, count: int) -> None:
    old = words(count, count).astype(f"<u{unit}")
    for seed, share in enumerate((0, 0.002, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999, 1)):
        new = some_changed(old, share, seed)
        positions, values = check_take(old, new)
        at = np.flatnonzero(old != new)
        assert positions is None or positions == at.astype("<u4").tobytes()
        assert values == (old if positions is None else old[at]).tobytes()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("offset", [1, 3, 7, 31, 63])
def test_taking_at_odd_addresses(unit: int, offset: int) -> None:
    for count in (1, 63, 65, 4096, 5003):
        old = words(count, count).astype(f"<u{unit}")
        for share in (0.01, 0.2, 1):
            check_take(old, some_changed(old, share, offset), offset)


@pytest.mark.parametrize("unit", UNITS)
def test_what_takes_less_room_is_kept(unit: int) -> None:
    """Old units and their positions, or all old units; whatever is where."""
    count = 9000
    most = count * unit // (unit + 4)
    old = np.zeros(count, f"<u{unit}")
    for changed, where in ((most, slice(None)), (most + 1, slice(None)), (most + 1, slice(None, None, -1))):
        new = old.copy()
        new[where][:changed] += new.dtype.type(1)
        positions, values = check_take(old, new)
        assert (positions is None) == (changed > most)
        assert len(values) == unit * (count if positions is None else changed)
        assert len(positions or b"") + len(values) <= count * unit


@pytest.mark.parametrize("unit", UNITS)
def test_taking_one_unit_wherever_it_is(unit: int) -> None:
    old = np.zeros(4300, f"<u{unit}")
    for at in (0, 1, 63, 64, 127, 4095, 4096, 4159, 4160, 4299):
        new = old.copy()
        new[at] = 1
        assert check_take(old, new)[0] == np.uint32(at).tobytes()


def test_taking_what_changes_line_by_line() -> None:
    """Whole chunks that are the same between others, when few are listed and when all are kept."""
    for every in (2, 5):
        old = np.zeros(64 * 4096, "<u2")
        new = old.copy()
        new.reshape(-1, 4096)[::every] = 7
        check_take(old, new)


def test_taking_most_of_the_largest_block() -> None:
    old = np.zeros(1 << 22, "u1")
    new = old.copy()
    new[:: 3 << 10] = 1
    check_take(old, new)
    new[1 << 20 :] = 1
    check_take(old, new)


# What the kernel refuses: mistakes of ours, never of a file


LENT = bytearray(100)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _kernel.encode_block(b"12", b"123", 1, 0, 0, 0, 1, 0),  # different lengths
        lambda: _kernel.encode_block(b"", b"", 1, 0, 0, 0, 1, 0),  # nothing
        lambda: _kernel.encode_block(None, bytes((1 << 22) + 1), 1, 0, 0, 0, 1, 0),  # too many units
        lambda: _kernel.encode_block(None, b"123456", 3, 0, 0, 0, 3, 0),  # no such width
        lambda: _kernel.encode_block(None, b"12345678", 4, 8, 22, 0, 4, 0),  # bits that do not add up
        lambda: _kernel.encode_block(None, b"1234", 2, 0, 0, 0, 8, 0),  # half a word
        lambda: _kernel.encode_block(None, b"1234", 2, 0, 0, 0, 4, 0),  # a word that is neither 8 bytes nor a unit
        lambda: _kernel.encode_block(b"1234", b"1235", 1, 0, 0, 3, 1, 0),  # lines that do not fill the block
        lambda: _kernel.encode_block(b"1234", b"1235", 1, 0, 0, -2, 1, 0),
        lambda: _kernel.decode_block(b"", None, 1, 1, 0, 0, 0),
        lambda: _kernel.decode_block(b"\3", None, 0, 1, 0, 0, 0),
        lambda: _kernel.decode_block(b"\3", None, -1, 1, 0, 0, 0),
        lambda: _kernel.decode_block(b"\1", b"123", 4, 1, 0, 0, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(4), True, 1, 0, 0, 3, 1, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(), True, 1, 0, 0, 0, 1, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(3), True, 2, 0, 0, 0, 2, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(4), True, 0, 0, 0, 0, 1, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(4), True, 2, 0, 0, 0, 8, 0),
        lambda: _kernel.patch_block(b"\3", b"read", True, 1, 0, 0, 0, 1, 0),
        lambda: _kernel.patch_block(b"", bytearray(4), True, 1, 0, 0, 0, 1, 0),
        lambda: _kernel.swap_block(bytearray(4), b"\4\0\0\0", bytearray(1), 1, 1, 0),  # outside
        lambda: _kernel.swap_block(bytearray(4), b"\0\0\0\0", bytearray(2), 1, 1, 0),  # one position, two values
        lambda: _kernel.swap_block(bytearray(4), None, bytearray(3), 1, 1, 0),
        lambda: _kernel.swap_block(b"read", None, bytearray(4), 1, 1, 0),  # read-only
        lambda: _kernel.replace_block(bytearray(4), bytes(5), 1),  # different lengths
        lambda: _kernel.replace_block(bytearray(4), bytes(3), 1),
        lambda: _kernel.replace_block(bytearray(5), bytes(5), 2),  # half a unit
        lambda: _kernel.replace_block(bytearray(6), bytes(6), 3),  # no such width
        lambda: _kernel.replace_block(bytearray(6), bytes(6), 0),
        lambda: _kernel.replace_block(b"read", bytes(4), 1),  # read-only
        lambda: _kernel.replace_block(bytearray((1 << 22) + 1), bytes((1 << 22) + 1), 1),  # too many units
        lambda: _kernel.replace_block(LENT, LENT, 1),  # itself
        lambda: _kernel.replace_block(memoryview(LENT)[:50], memoryview(LENT)[49:99], 1),
        lambda: _kernel.replace_block(memoryview(LENT)[49:99], memoryview(LENT)[:50], 1),
        lambda: _kernel.digest(b"123", 2, 0),
        lambda: _kernel.digest(b"123", 3, 0),
    ],
)
def test_calls_that_make_no_sense(call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, BufferError)):
        call()


def test_buffers_are_released() -> None:
    """A bytearray that is still lent to someone cannot be resized."""
    old, new = bytearray(range(100)), bytearray(range(1, 101))
    data = bytearray(_kernel.encode_block(old, new, 1, 0, 0, 0, 1, 0)[0])
    positions, values = _kernel.decode_block(data, old, 100, 1, 0, 0, 0)
    with pytest.raises(ValueError, match="unknown encoding"):
        _kernel.decode_block(bytearray(b"\xff"), old, 100, 1, 0, 0, 0)
    with pytest.raises(TypeError):
        _kernel.decode_block(data, old, 99, 1, 0, 0, 0)
    _kernel.swap_block(old, positions, values, 1, 1, 0)
    _kernel.swap_block(old, positions, values, 1, 1, 0)
    _kernel.patch_block(data, old, False, 1, 0, 0, 0, 1, 0)
    with pytest.raises(ValueError, match="unknown encoding"):
        _kernel.patch_block(b"\xff", old, False, 1, 0, 0, 0, 1, 0)
    _kernel.digest(old, 1, 0)
    _kernel.replace_block(old, bytearray(100), 1)
    with pytest.raises(TypeError):
        _kernel.replace_block(old, old, 1)
    for lent in (old, new, data, values):
        lent.append(0)


LEAK = """
import resource
import numpy as np
from weightwire.codec import _kernel

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

old = np.arange(50_000, dtype="<u2")
new = old + (np.arange(50_000) % 3 == 0).astype("<u2")
blocks = []
for base, line in ((old, 0), (old, 1000), (None, 0)):
    good = _kernel.encode_block(base, new, 2, 8, 7, line, 8, 0)[0]
    # Wrong in its tag, its words, its bits, and in its length.
    bad = [bytes([good[0] ^ 4]) + good[1:], good[:-1], good + b"\\0", good[:9] + good[10:], good[:40] + b"\\xff" * 99]
    blocks += [(base, line, good)] + [(base, line, one) for one in bad]

def round():
    refused = 0
    for base, line, data in blocks:
        try:
            positions, values = _kernel.decode_block(data, base, 50_000, 2, 8, 7, line)
            _kernel.swap_block(old.copy(), positions, values, 2, 8, 0)
            _kernel.patch_block(data, old.copy(), base is None, 2, 8, 7, line, 8, 0)
        except ValueError:
            refused += 1
        _kernel.encode_block(base, new, 2, 8, 7, line, 8, 0)
        for source in (new, old ^ 1, old):
            _kernel.replace_block(old.copy(), source, 2)
    return refused

for _ in range(10):
    refused = round()
before = resident()
for _ in range(40):
    round()
print(refused, resident() - before)
"""


def test_nothing_leaks() -> None:
    """Good and bad blocks in a process of its own: a leak of one buffer a round would be 4 MB."""
    gc.collect()
    output = subprocess.run([sys.executable, "-c", LEAK], capture_output=True, text=True, check=True).stdout
    refused, grown = map(int, output.split())
    assert refused >= 9
    assert grown < 2_000_000
