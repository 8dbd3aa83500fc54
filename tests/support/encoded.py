"""Blocks in an encoding that the caller names, with the classes that the codec would choose."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weightwire.codec import dense_encoding, ulp_encoding
from weightwire.codec.exponent_classes import Bounds, Units, choose_classes
from weightwire.weights.dtypes import Dtype

__all__ = ["encode_dense", "encode_ulp"]


def encode_ulp(old: Units, new: Units, dtype: Dtype, line: int) -> bytes:
    return _encode(ulp_encoding.encode_ulp, old, new, dtype, line)


def encode_dense(old: Units, new: Units, dtype: Dtype, line: int) -> bytes:
    return _encode(dense_encoding.encode_dense, old, new, dtype, line)


def _encode(
    how: Callable[[Units, Units, Dtype, int, Bounds], bytes], old: Units, new: Units, dtype: Dtype, line: int
) -> bytes:
    if dtype.coded is not dtype:
        old, new, line = old.view(np.uint8), new.view(np.uint8), line * dtype.unit
    return how(old, new, dtype.coded, line, choose_classes(old, new, dtype.coded).bounds)
