"""The verdict on a damaged block or file: a correct result, a typed error, or a Failure."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

import weightwire
from fuzz.blocks import Block, File
from fuzz.target import Failure
from support.samples import Units, pair, vectors_of
from weightwire import Delta, WeightwireError
from weightwire.codec import _kernel, numpy_kernel
from weightwire.delta import changes
from weightwire.weights import Weights
from weightwire.weights.source import read_weights

Verdict = tuple[bytes | None, bytearray] | str


def exact(data: bytes) -> Units:
    """A copy in a buffer of exactly its size: sanitizers notice a read past its end."""
    return np.frombuffer(data, np.uint8).copy()


def decode_with(kernel: Any, block: Block) -> Verdict:
    dtype = block.kind
    base = None if block.old is None else base_of(block)
    try:
        found: Verdict = kernel.decode_block(
            exact(block.data), base, block.count, dtype.unit, dtype.exponent, dtype.mantissa, block.line
        )
    except ValueError as problem:
        return str(problem)
    if base is not None and base.tobytes() != block.old:
        raise Failure("decoding wrote into the base")
    return found


def judge_block(block: Block, widths: tuple[int, ...], compare: bool) -> str:
    """The reason to reject a block, or "accepted"."""
    if not block.data:
        return "empty"  # which never reaches the codec
    verdicts = []
    for width in widths:
        with vectors_of(width):
            verdicts.append(decode_with(_kernel, block))
    if any(verdict != verdicts[0] for verdict in verdicts):
        raise Failure(f"the widths of vectors disagree: {[summary(verdict) for verdict in verdicts]}")
    verdict = verdicts[0]
    if compare:
        expected = decode_with(numpy_kernel, block)
        if isinstance(expected, str) != isinstance(verdict, str) or (
            expected != verdict and not isinstance(verdict, str)
        ):
            raise Failure(f"NumPy says {summary(expected)}, the kernel {summary(verdict)}")
    if isinstance(verdict, str):
        check_refused(block, verdict)
        return verdict
    check_result(block, *verdict)
    return "accepted"


def summary(verdict: Verdict) -> str:
    return verdict if isinstance(verdict, str) else f"accepted, {len(verdict[1])} bytes"


def check_result(block: Block, positions: bytes | None, values: bytearray) -> None:
    """Checks that an accepted block can be applied, undone, encoded and decoded again."""
    dtype = block.kind
    floats = dtype.unit, dtype.exponent, dtype.mantissa, block.line
    where = block.count, dtype.unit, 0
    at = np.arange(block.count) if positions is None else np.frombuffer(positions, "<u4").astype(np.int64)
    if len(values) != len(at) * dtype.unit or (np.diff(at) <= 0).any() or (len(at) and at[-1] >= block.count):
        raise Failure("positions are not ascending or past the end")
    old, target, kept = base_of(block), base_of(block), bytes(values)
    foretold = _kernel.digest_change(old, positions, values, dtype.unit, *where)
    swapped = _kernel.swap_block(target, positions, values, dtype.unit, *where)
    before, after = (pair(_kernel.digest(units, dtype.unit, *where)) for units in (old, target))
    if tuple((a + b) % 2**64 for a, b in zip(before, pair(swapped), strict=True)) != after or foretold != swapped:
        raise Failure("the digest was not brought up to date")
    copied = base_of(block)
    places, what, added = _kernel.patch_block(exact(block.data), copied, block.old is None, *floats, *where)
    if copied.tobytes() != target.tobytes() or added != swapped:
        raise Failure("patching comes to another result than decoding and swapping")
    _kernel.swap_block(copied, places, what, dtype.unit, *where)
    if copied.tobytes() != old.tobytes():
        raise Failure("a patch was not undone")
    copied = base_of(block)
    places, what = _kernel.replace_block(copied, target, dtype.unit, block.count)
    if copied.tobytes() != target.tobytes():
        raise Failure("a replaced target is not its source")
    _kernel.swap_block(copied, places, what, dtype.unit, *where)
    if copied.tobytes() != old.tobytes():
        raise Failure("a replacement was not undone")
    again = _kernel.encode_block(old, target, *floats, *where)[0]
    if again:
        copied = base_of(block)
        _kernel.patch_block(again, copied, False, *floats, *where)
        if copied.tobytes() != target.tobytes():
            raise Failure("what was decoded does not survive being encoded")
    _kernel.swap_block(target, positions, values, dtype.unit, *where)
    if target.tobytes() != old.tobytes() or bytes(values) != kept:
        raise Failure("a swap was not undone")


def check_refused(block: Block, reason: str) -> None:
    """Checks that a rejected block is also rejected as a patch, and that the target is unchanged."""
    dtype, target = block.kind, base_of(block)
    floats = dtype.unit, dtype.exponent, dtype.mantissa, block.line
    try:
        _kernel.patch_block(exact(block.data), target, block.old is None, *floats, block.count, dtype.unit, 0)
    except ValueError as problem:
        if str(problem) == reason and target.tobytes() == base_of(block).tobytes():
            return
    raise Failure("a patch that should be refused was not, or has left its traces")


def base_of(block: Block) -> Units:
    return exact(block.old if block.old is not None else bytes(block.count * block.kind.unit))


def judge_file(file: File, data: bytes) -> str:
    """The class of error for a file, or "accepted"."""
    verdicts = []
    for in_place in (False, True):
        base = copy.deepcopy(file.old)
        before = contents(base)
        try:
            delta = Delta.from_bytes(data, file.name)
            result = weightwire.patch(base, delta, copy=not in_place, threads=1)
        except WeightwireError as problem:
            if not problem.message or contents(base) != before:
                raise Failure("an error without a message, or weights that were changed") from problem
            verdicts.append(type(problem).__name__)
            continue
        if delta.after and weightwire.digest(result).hex != delta.after:
            raise Failure("the result has another state than the file says")
        if not in_place and contents(base) != before:
            raise Failure("the base of a copy was changed")
        if not in_place:
            check_ranges(file.old, delta, read_weights(result))
        verdicts.append("accepted")
    return " / ".join(verdicts)


def check_ranges(old: Any, delta: Delta, result: Weights) -> None:
    """Checks that reading one tensor, or one row of it, gives what the whole file gives."""
    base = read_weights(old)
    for name, entry in delta.entries.items():
        first, last = entry.rows or (0, entry.shape[0] if entry.shape else 1)
        for rows in [None, (first, first + 1), (last - 1, last)] if first < last else [None]:
            at, new = changes(base, delta, name, rows)
            bits = np.zeros_like(result[name].bits) if entry.fresh else base[name].bits.copy()
            held = result[name].rows
            begin = held[0] * entry.layout.row if held else 0
            bits[at - begin] = new
            unit = slice(None)
            if rows and entry.layout.row:
                unit = slice(*(row * entry.layout.row - begin for row in rows))
            if bits[unit].tobytes() != result[name].bits[unit].tobytes():
                raise Failure(f"{name!r}: rows {rows} are not those of the whole")


def contents(weights: Any) -> dict[str, bytes]:
    return {name: tensor.bits.tobytes() for name, tensor in read_weights(weights).items()}
