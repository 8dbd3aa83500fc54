"""Blocks in an encoding that the caller names, with the classes that the codec would choose."""

from __future__ import annotations

from weightwire.codec import dense_encoding, ulp_encoding
from weightwire.codec.exponent_classes import Units, choose_classes
from weightwire.weights.dtypes import Dtype

__all__ = ["encode_dense", "encode_ulp"]


def encode_ulp(old: Units, new: Units, dtype: Dtype, line: int) -> bytes:
    return ulp_encoding.encode_ulp(old, new, dtype, line, choose_classes(old, new, dtype).bounds)


def encode_dense(old: Units, new: Units, dtype: Dtype, line: int) -> bytes:
    return dense_encoding.encode_dense(old, new, dtype, line, choose_classes(old, new, dtype).bounds)
