"""Checks that a delta gives the right result, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import weightwire
from support.samples import base, change
from weightwire import (
    Delta,
    Tensor,
    diff,
    digest,
    patch,
)
from weightwire.weights.dtypes import DTYPES, Dtype

Arrays = dict[str, npt.NDArray[Any]]


BF16, F32, U8, U16 = (DTYPES[name] for name in ("BF16", "F32", "U8", "U16"))


def shape_of(dtype: Dtype, *shape: int) -> tuple[int, ...]:
    """A shape with this many units."""
    return (*shape[:-1], shape[-1] * 8 * dtype.unit // dtype.bits)


def bytes_of(weights: Any) -> dict[str, bytes]:
    return {name: t.bits.tobytes() for name, t in weightwire.weights.read_weights(weights).items()}


def check(old: dict[str, Any], new: dict[str, Any], **how: Any) -> Delta:
    """Checks that the delta turns a copy of `old` into `new`, and does not change `old`."""
    before = bytes_of(old)
    delta = Delta.from_bytes(diff(old, new, **how).to_bytes())
    result = patch(old, delta, copy=True)
    assert bytes_of(result) == bytes_of(new)
    assert digest(result).hex == delta.after
    assert bytes_of(old) == before
    return delta


def check_in_place(old: dict[str, Any], new: dict[str, Any], **how: Any) -> Delta:
    """Like `check`, and also in place."""
    delta = check(old, new, **how)
    assert patch(old, delta) is old
    assert bytes_of(old) == bytes_of(new)
    return delta


def shard(array: npt.NDArray[Any], first: int, last: int) -> dict[str, Tensor]:
    rows = array[first:last].reshape(-1).view(np.uint16)
    return {"x": Tensor(U16, array.shape, rows, (first, last))}


def three_tensors() -> tuple[Arrays, Arrays]:
    """Of three shapes, so each has blocks of its own."""
    old = {name: base(BF16, 640 * 100, seed=i).reshape(640 >> i, 100 << i) for i, name in enumerate("abc")}
    return old, {name: change(array.reshape(-1), BF16, "few").reshape(array.shape) for name, array in old.items()}
