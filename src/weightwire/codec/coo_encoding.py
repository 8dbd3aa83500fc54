"""The `coo` encoding: raw positions and absolute values (docs/FORMAT.md, "coo").

Needs no base, and applying it twice is harmless. Works on a whole tensor or range of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire.codec.block_layout import Layout

__all__ = ["BlockChanges", "decode_coo", "encode_coo", "read_coo"]

BlockChanges = tuple[int, npt.NDArray[np.int64], npt.NDArray[Any]]
"""The index of a block, the changed positions in it, and the new units."""

_HEAD = 8


def _width(layout: Layout) -> int:
    return 4 if layout.count <= 1 << 32 else 8


def encode_coo(changes: list[BlockChanges], layout: Layout) -> bytes:
    width = _width(layout)
    at = [positions + layout.span(index)[0] for index, positions, _ in changes]
    positions = np.concatenate(at).astype(f"<u{width}")
    values = np.concatenate([units for _, _, units in changes])
    return width.to_bytes(_HEAD, "little") + positions.tobytes() + values.tobytes()


def read_coo(
    data: memoryview, layout: Layout, changed: int
) -> tuple[npt.NDArray[np.unsignedinteger[Any]], npt.NDArray[Any]]:
    """The ascending positions in the whole tensor or range of rows, and the new units, as views of the data."""
    width, unit = _width(layout), layout.dtype.unit
    if len(data) != _HEAD + changed * (width + unit) or bytes(data[:_HEAD]) != width.to_bytes(_HEAD, "little"):
        raise ValueError("its size does not fit its number of changes")
    positions = np.frombuffer(data, f"<u{width}", changed, _HEAD)
    values = np.frombuffer(data, f"<u{unit}", changed, _HEAD + changed * width)
    if (positions[1:] <= positions[:-1]).any() or (changed and int(positions[-1]) >= layout.count):
        raise ValueError("its positions are not ascending or lie past its end")
    return positions, values


def decode_coo(data: memoryview, layout: Layout, changed: int) -> Iterator[tuple[int, bytes, bytearray]]:
    """For each changed block: its index, 32-bit positions in it, and the new units."""
    positions, values = read_coo(data, layout, changed)
    begin = 0
    while begin < changed:
        index = int(positions[begin]) // layout.block
        first = layout.span(index)[0]
        # With the dtype of the positions: otherwise NumPy converts all of them for every block.
        last = positions.dtype.type(min(first + layout.block, int(positions[-1]) + 1) - 1)
        end = int(np.searchsorted(positions, last, "right"))
        inside = (positions[begin:end] - positions.dtype.type(first)).astype("<u4")
        yield index, inside.tobytes(), bytearray(values[begin:end].tobytes())
        begin = end
