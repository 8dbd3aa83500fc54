"""Blocks: the encoding that should be shortest is used, and the tag identifies it."""

from __future__ import annotations

import numpy as np
import pytest

from support.encoded import encode_dense, encode_ulp
from support.samples import BASES, CHANGES, LAYOUTS, Units, base, change
from weightwire.codec.block_codec import encoding
from weightwire.codec.encodings import decode_block, encode_block
from weightwire.codec.full_encoding import encode_full
from weightwire.weights.dtypes import DTYPES, Dtype

BF16 = DTYPES["BF16"]


def after(data: bytes, old: Units | None, count: int, dtype: Dtype, line: int = 0) -> Units:
    positions, values = decode_block(memoryview(data), old, count, dtype, line)
    if positions is None:
        return values
    assert old is not None
    new = old.copy()
    new[positions] = values
    return new


@pytest.mark.parametrize("dtype", LAYOUTS, ids=lambda dtype: dtype.name)
def test_blocks_round_trip(dtype: Dtype) -> None:
    for seed, kind in enumerate(BASES):
        old = base(dtype, 200, kind, seed)
        for how in CHANGES:
            new = change(old, dtype, how, seed)
            assert after(encode_block(old, new, dtype, 0), old, 200, dtype).tobytes() == new.tobytes()


def test_an_unchanged_block_is_empty() -> None:
    old = base(BF16, 100)
    assert encode_block(old, old.copy(), BF16, 0) == b""


def test_a_few_small_steps_are_encoded_as_ulp() -> None:
    old = base(BF16, 5000)
    assert encoding(encode_block(old, change(old, BF16, "few"), BF16, 0)) == "ulp"


def test_small_changes_of_all_floats_are_encoded_as_dense() -> None:
    old = base(DTYPES["F32"], 5000)
    new = old + np.uint32(1000) + (old & np.uint32(0xFF))
    assert encoding(encode_block(old, new, DTYPES["F32"], 0)) == "dense"


def test_unrelated_weights_are_encoded_as_full() -> None:
    old, new = base(BF16, 5000, seed=1), base(BF16, 5000, seed=2)
    assert encoding(encode_block(old, new, BF16, 0)) == "full"


def test_blocks_without_a_base_are_encoded_as_full() -> None:
    assert encoding(encode_block(None, base(BF16, 10), BF16, 0)) == "full"


@pytest.mark.parametrize("how", CHANGES)
def test_no_other_encoding_is_much_shorter(how: str) -> None:
    old = base(BF16, 3000)
    new = change(old, BF16, how)
    others = [encode_ulp(old, new, BF16, 0), encode_dense(old, new, BF16, 0), encode_full(new, BF16)]
    assert len(encode_block(old, new, BF16, 0)) <= 1.02 * min(map(len, others)) + 32


def test_a_block_that_hardly_compresses_is_full_if_that_is_shorter() -> None:
    """Also if the sample saw few of its changes."""
    old = base(BF16, 1 << 20)
    new = base(BF16, 1 << 20, seed=9)
    for i in range(128):
        start = i * (len(old) - 1024) // 127
        new[start : start + 1024] = old[start : start + 1024]
    assert encoding(encode_block(old, new, BF16, 0)) == "full"


@pytest.mark.parametrize("tag", [0, 4, 8, 16, 12 | 1, 12 | 2, 12 | 3, 32 | 1, 0xFF, 3 | 16])
def test_unknown_tags_are_rejected(tag: int) -> None:
    with pytest.raises(ValueError, match="unknown encoding"):
        decode_block(memoryview(bytes([tag]) + bytes(30)), base(BF16, 10), 10, BF16, 0)
