"""The public functions of the codec, on blocks of a layout."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from support.samples import base, change, flat, whole_digest
from weightwire import codec
from weightwire.codec import _kernel, block_codec
from weightwire.codec.block_layout import BLOCK, Layout
from weightwire.weights.dtypes import DTYPES

BF16 = DTYPES["BF16"]


def test_the_kernel_is_used_if_it_was_built() -> None:
    assert block_codec.KERNEL is _kernel


def test_numpy_is_used_without_the_kernel() -> None:
    code = (
        "import sys; sys.modules['weightwire.codec._kernel'] = None;"
        "from weightwire.codec import block_codec; print(block_codec.KERNEL.__name__)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "weightwire.codec.numpy_kernel"


def test_a_tensor_is_encoded_and_decoded_block_by_block(implementation: str) -> None:
    layout = Layout.of(BF16, (3, 1400, 1000))  # two blocks of 2,100 lines
    assert layout.blocks == 2
    old = np.zeros(layout.count, "<u2")
    new = old.copy()
    new[[5, 3_000_000]] = [0x3F80, 0x8000]
    target, total = old.copy(), np.zeros((1, 2), np.uint64)
    for index in range(2):
        encoded = codec.encode(old, new, layout, index)
        assert encoded.changed.tolist() == [1]
        assert codec.encoding(encoded.data) == "ulp"
        patch = codec.decode(encoded.data, old, layout, index)
        assert (codec.swap(target, patch, layout, index) == encoded.digests).all()
        before, after = codec.digest(old, layout, index), codec.digest(new, layout, index)
        assert (after == before + encoded.digests).all()
        total += after
    assert (target == new).all()
    assert codec.digest_of(total) == whole_digest(block_codec.KERNEL, new, 8, 0)


def test_swapping_twice_undoes_it(implementation: str) -> None:
    layout = flat(BF16, 1000)
    old = base(BF16, 1000)
    new = change(old, BF16, "half")
    patch = codec.decode(codec.encode(old, new, layout, 0).data, old, layout, 0)
    target = old.copy()
    there = codec.swap(target, patch, layout, 0)
    assert (target == new).all()
    back = codec.swap(target, patch, layout, 0)
    assert (target == old).all()
    assert not (there + back).any()


@pytest.mark.parametrize("how", ["few", "all"])
def test_apply_equals_decode_and_swap(implementation: str, how: str) -> None:
    layout = flat(BF16, 1000)
    old, new = base(BF16, 1000), change(base(BF16, 1000), BF16, how)
    encoded = codec.encode(old, new, layout, 0)
    target = old.copy()
    patch, added = codec.apply(encoded.data, target, layout, 0, fresh=False)
    assert (target == new).all()
    assert (added == encoded.digests).all()
    codec.swap(target, patch, layout, 0)
    assert (target == old).all()


def test_applying_a_fresh_block_needs_no_base(implementation: str) -> None:
    layout = flat(BF16, 1000)
    old, new = base(BF16, 1000), base(BF16, 1000, seed=2)
    target = old.copy()
    codec.apply(codec.encode(None, new, layout, 0).data, target, layout, 0, fresh=True)
    assert (target == new).all()
    with pytest.raises(ValueError, match="needs a base"):
        codec.apply(codec.encode(old, change(old, BF16, "one"), layout, 0).data, target, layout, 0, fresh=True)
    assert (target == new).all()


@pytest.mark.parametrize("how", ["few", "all"])
def test_replace_is_undone_by_swap(implementation: str, how: str) -> None:
    layout = Layout.of(BF16, (3, 1400, 1000))  # two blocks
    old = np.zeros(layout.count, "<u2")
    new = change(old, BF16, how)
    target = old.copy()
    begin, end = layout.span(1)
    patch = codec.replace(target, new, layout, 1)
    assert (patch.positions is None) == (how == "all")
    assert (target[:begin] == old[:begin]).all()
    assert (target[begin:end] == new[begin:end]).all()
    assert codec.replace(target, new, layout, 1) == codec.Patch(b"", bytearray())
    codec.swap(target, patch, layout, 1)
    assert (target == old).all()


def test_a_single_block_is_encoded_the_same() -> None:
    layout = Layout.of(BF16, (4200, 1024), (1, 4200))
    assert layout.blocks == 2
    old = np.tile(base(BF16, 1024), 4199)
    new = change(old, BF16, "likely")
    for index in range(2):
        begin, end = layout.span(index)
        alone = codec.encode(old[begin:end], new[begin:end], layout.alone(index), 0)
        assert alone == codec.encode(old, new, layout, index)


def test_decoding_writes_nothing(implementation: str) -> None:
    layout = flat(BF16, 1000)
    old = base(BF16, 1000)
    data = codec.encode(old, change(old, BF16, "half"), layout, 0).data
    old.flags.writeable = False
    codec.decode(data, old, layout, 0)


def test_an_unknown_encoding_is_named_unknown() -> None:
    assert codec.encoding(b"\0") == "unknown"


def test_blocks_are_small_enough_for_32_bit_positions() -> None:
    assert BLOCK == 1 << 22
    with pytest.raises(TypeError):
        _kernel.decode_block(b"\3", None, BLOCK + 1, 1, 0, 0, 0)
