"""The NumPy kernel has the same functions, results and errors as the C kernel."""

from __future__ import annotations

import numpy as np
import pytest

from support.samples import base, change
from weightwire.codec import _kernel, numpy_kernel
from weightwire.weights.dtypes import DTYPES

BF16 = DTYPES["BF16"]


def test_numpy_kernel_has_the_functions_of_the_kernel() -> None:
    offered = {name for name in vars(_kernel) if not name.startswith("_")}
    assert set(numpy_kernel.__all__) == offered - {"vectors"}


def test_a_block_round_trips() -> None:
    old = base(BF16, 640)
    new = change(old, BF16, "likely")
    data, changed, *added = numpy_kernel.encode_block(old, new, 2, 8, 7, 64, 8, 1000)
    assert changed == int((old != new).sum())

    positions, values = numpy_kernel.decode_block(data, old, 640, 2, 8, 7, 64)
    assert positions is not None
    target = old.copy()
    lanes = numpy_kernel.swap_block(target, positions, values, 2, 8, 1000)
    assert target.tobytes() == new.tobytes()
    assert values == old[old != new].tobytes()
    assert list(lanes) == added


def test_the_digest_depends_on_the_index() -> None:
    words = base(DTYPES["U64"], 10, "bits")
    assert numpy_kernel.digest(words, 8, 0) != numpy_kernel.digest(words, 8, 1)
    apart = numpy_kernel.digest(words[:4], 8, 7), numpy_kernel.digest(words[4:], 8, 11)
    assert numpy_kernel.digest(words, 8, 7) == tuple(sum(lanes) % 2**64 for lanes in zip(*apart, strict=True))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_accepted(kind: type) -> None:
    old = base(BF16, 100)
    new = change(old, BF16, "few")
    data = numpy_kernel.encode_block(kind(old.tobytes()), kind(new.tobytes()), 2, 8, 7, 0, 2, 0)[0]
    assert data == numpy_kernel.encode_block(old, new, 2, 8, 7, 0, 2, 0)[0]
    as_array = np.frombuffer(data, np.uint8)
    assert numpy_kernel.decode_block(as_array, old, 100, 2, 8, 7, 0) == numpy_kernel.decode_block(
        kind(data), old, 100, 2, 8, 7, 0
    )


def test_replace_makes_the_target_equal_to_the_source() -> None:
    target = bytearray(b"abcdefgh")
    assert numpy_kernel.replace_block(target, b"abcDefgh", 1) == (b"\3\0\0\0", bytearray(b"d"))
    assert target == b"abcDefgh"
    assert numpy_kernel.replace_block(target, b"abcDefgh", 1) == (b"", bytearray())
    # Shorter than two of them with their positions.
    assert numpy_kernel.replace_block(target, b"ABcDefgh", 1) == (None, bytearray(b"abcDefgh"))
    assert target == b"ABcDefgh"
    with pytest.raises(TypeError):
        numpy_kernel.replace_block(target, b"ABcDefg", 1)
    with pytest.raises(TypeError):
        numpy_kernel.replace_block(memoryview(target)[:4], memoryview(target)[3:7], 1)


def test_replace_may_change_all_units() -> None:
    target, values = bytearray(b"abcdefgh"), bytearray(b"ABCDEFGH")
    before = numpy_kernel.digest(target, 8, 3)
    lanes = numpy_kernel.swap_block(target, None, values, 1, 8, 3)
    assert target == b"ABCDEFGH"
    assert values == b"abcdefgh"
    assert tuple((a + b) % 2**64 for a, b in zip(before, lanes, strict=True)) == numpy_kernel.digest(target, 8, 3)
