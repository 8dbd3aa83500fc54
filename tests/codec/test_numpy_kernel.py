"""The NumPy kernel has the same functions, results and errors as the C kernel."""

from __future__ import annotations

import numpy as np
import pytest

from support.samples import base, change, pair, whole_digest
from weightwire.codec import _kernel, numpy_kernel
from weightwire.weights.dtypes import DTYPES

BF16 = DTYPES["BF16"]


def test_numpy_kernel_has_the_functions_of_the_kernel() -> None:
    offered = {name for name in vars(_kernel) if not name.startswith("_")}
    assert set(numpy_kernel.__all__) == offered - {"vectors"}


def test_a_block_round_trips() -> None:
    old = base(BF16, 640)
    new = change(old, BF16, "likely")
    data, changed, added = numpy_kernel.encode_block(old, new, 2, 8, 7, 64, 640, 8, 1000)
    assert np.frombuffer(changed, "<u4").tolist() == [int((old != new).sum())]

    positions, values = numpy_kernel.decode_block(data, old, 640, 2, 8, 7, 64)
    assert positions is not None
    target = old.copy()
    lanes = numpy_kernel.swap_block(target, positions, values, 2, 640, 8, 1000)
    assert target.tobytes() == new.tobytes()
    assert values == old[old != new].tobytes()
    assert lanes == added


def test_the_digest_depends_on_the_index() -> None:
    words = base(DTYPES["U64"], 10, "bits")
    assert whole_digest(numpy_kernel, words, 8, 0) != whole_digest(numpy_kernel, words, 8, 1)
    apart = whole_digest(numpy_kernel, words[:4], 8, 7), whole_digest(numpy_kernel, words[4:], 8, 11)
    total = tuple(sum(lanes) % 2**64 for lanes in zip(*apart, strict=True))
    assert whole_digest(numpy_kernel, words, 8, 7) == total


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_accepted(kind: type) -> None:
    old = base(BF16, 100)
    new = change(old, BF16, "few")
    data = numpy_kernel.encode_block(kind(old.tobytes()), kind(new.tobytes()), 2, 8, 7, 0, 100, 2, 0)[0]
    assert data == numpy_kernel.encode_block(old, new, 2, 8, 7, 0, 100, 2, 0)[0]
    as_array = np.frombuffer(data, np.uint8)
    assert numpy_kernel.decode_block(as_array, old, 100, 2, 8, 7, 0) == numpy_kernel.decode_block(
        kind(data), old, 100, 2, 8, 7, 0
    )


def test_replace_makes_the_target_equal_to_the_source() -> None:
    target = bytearray(b"abcdefgh")
    assert numpy_kernel.replace_block(target, b"abcDefgh", 1, 8) == (b"\3\0\0\0", bytearray(b"d"))
    assert target == b"abcDefgh"
    assert numpy_kernel.replace_block(target, b"abcDefgh", 1, 8) == (b"", bytearray())
    # Shorter than two of them with their positions.
    assert numpy_kernel.replace_block(target, b"ABcDefgh", 1, 8) == (None, bytearray(b"abcDefgh"))
    assert target == b"ABcDefgh"
    with pytest.raises(TypeError):
        numpy_kernel.replace_block(target, b"ABcDefg", 1, 8)
    with pytest.raises(TypeError):
        numpy_kernel.replace_block(memoryview(target)[:4], memoryview(target)[3:7], 1, 4)


def test_replace_may_change_all_units() -> None:
    target, values = bytearray(b"abcdefgh"), bytearray(b"ABCDEFGH")
    before = whole_digest(numpy_kernel, target, 8, 3)
    lanes = pair(numpy_kernel.swap_block(target, None, values, 1, 8, 8, 3))
    assert target == b"ABCDEFGH"
    assert values == b"abcdefgh"
    after = tuple((a + b) % 2**64 for a, b in zip(before, lanes, strict=True))
    assert after == whole_digest(numpy_kernel, target, 8, 3)
