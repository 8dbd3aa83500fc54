"""The C kernel: see numpy_kernel.py for the meaning of the functions they share."""

from typing import Any

def encode_block(
    old: Any,
    new: Any,
    unit: int,
    exponent: int,
    mantissa: int,
    line: int,
    segment: int,
    word: int,
    start: int,
    /,
) -> tuple[bytes, bytes, bytes]: ...
def decode_block(
    data: Any, old: Any, count: int, unit: int, exponent: int, mantissa: int, line: int, /
) -> tuple[bytes | None, bytearray]: ...
def patch_block(
    data: Any,
    target: Any,
    fresh: bool,
    unit: int,
    exponent: int,
    mantissa: int,
    line: int,
    segment: int,
    word: int,
    start: int,
    /,
) -> tuple[bytes | None, bytearray, bytes]: ...
def swap_block(
    target: Any, positions: Any, values: Any, unit: int, segment: int, word: int, start: int, /
) -> bytes: ...
def digest_change(
    old: Any, positions: Any, values: Any, unit: int, segment: int, word: int, start: int, /
) -> bytes: ...
def replace_block(target: Any, source: Any, unit: int, segment: int, /) -> tuple[bytes | None, bytearray]: ...
def digest(data: Any, unit: int, segment: int, word: int, start: int, /) -> bytes: ...
def vectors(most: int, /) -> int: ...
def trim() -> None: ...
