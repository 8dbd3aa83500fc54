"""The C kernel: see numpy_kernel.py for the meaning of the functions they share."""

from typing import Any

def encode_block(
    old: Any, new: Any, unit: int, exponent: int, mantissa: int, line: int, word: int, start: int, /
) -> tuple[bytes, int, int, int]: ...
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
    word: int,
    start: int,
    /,
) -> tuple[bytes | None, bytearray, int, int]: ...
def swap_block(target: Any, positions: Any, values: Any, unit: int, word: int, start: int, /) -> tuple[int, int]: ...
def digest_change(old: Any, positions: Any, values: Any, unit: int, word: int, start: int, /) -> tuple[int, int]: ...
def replace_block(target: Any, source: Any, unit: int, /) -> tuple[bytes | None, bytearray]: ...
def digest(data: Any, word: int, start: int, /) -> tuple[int, int]: ...
def vectors(most: int, /) -> int: ...
