"""Damages a block or a file: at random, or by changing fields of a well-formed one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import weightwire
from fuzz.blocks import Block, File, block_of
from fuzz.verdicts import decode_with
from support.crafted_files import (
    Dense,
    Marks,
    PlainIndex,
    Planes,
    Steps,
    Ulp,
    dense_tables,
    parse_dense,
    parse_planes,
    parse_ulp,
    put_together,
    raw_bits,
    taken_apart,
    with_block,
    with_index,
    with_stacks,
)
from support.samples import unit_dtype
from weightwire import Delta
from weightwire.codec import _kernel
from weightwire.codec.block_frame import DENSE, ULP
from weightwire.codec.frequency_tables import gap_table
from weightwire.delta import EncodedStack, Entry
from weightwire.delta.decoder import BlockJob
from weightwire.errors import CorruptDelta
from weightwire.weights import Weights, read_weights
from weightwire.weights.dtypes import DTYPES


def damage(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """One to three random changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(ACCIDENTS)(data, rng, other)
    return data


def flip(data: bytes, rng: random.Random, _: bytes) -> bytes:
    out = bytearray(data)
    for _bit in range(rng.choice((1, 1, 2, 8)) if out else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwrite(data: bytes, rng: random.Random, _: bytes) -> bytes:
    out = bytearray(data)
    at, length = rng.randrange(len(out) + 1), rng.choice((1, 2, 4, 8))
    values = rng.choice((b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff", rng.randbytes(1)))
    out[at : at + length] = (values * length)[: max(0, len(out) - at)]
    return bytes(out)


def cut(data: bytes, rng: random.Random, _: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def insert(data: bytes, rng: random.Random, _: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice((rng.randbytes(rng.randrange(1, 20)), bytes(rng.randrange(1, 9)))) + data[at:]


def remove(data: bytes, rng: random.Random, _: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 3, 16)) :]


def repeat(data: bytes, rng: random.Random, _: bytes) -> bytes:
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:to] + data[at:to] + data[to:]


def splice(data: bytes, rng: random.Random, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def count_words(data: bytes, rng: random.Random, _: bytes) -> bytes:
    """Changes the number of words."""
    end = next((i for i in range(1, len(data)) if data[i] < 0x80), len(data) - 1) + 1
    value = int.from_bytes(data[1:end], "little") + rng.choice((-1, 1, 128, 1 << 35))
    return (
        data[:1] + rng.choice((weightwire.codec.bit_stream.uvarint(abs(value)), b"\x80\x00", b"\xff" * 10)) + data[end:]
    )


def retag(data: bytes, rng: random.Random, _: bytes) -> bytes:
    return bytes([data[0] ^ rng.choice((1, 2, 3, 4, 8, 12, 16, 128))]) + data[1:] if data else b""


ACCIDENTS: list[Callable[[bytes, random.Random, bytes], bytes]] = [
    flip, flip, flip, overwrite, overwrite, cut, insert, remove, repeat, splice, count_words, retag,
]  # fmt: skip


def lie(block: Block, rng: random.Random) -> bytes:
    """The block with one to three changed fields. Everything else is consistent."""
    lies: list[Callable[[Any, random.Random], None]]
    told: Ulp | Dense | Planes
    if block.data[0] & 3 == ULP:
        told, lies = parse_ulp(block.data, block.kind), [lie_in_head, lie_in_marks, lie_in_marks, lie_in_steps]
    elif block.data[0] & 3 == DENSE:
        old = np.frombuffer(block.old or b"", unit_dtype(block.kind))
        told, lies = parse_dense(block.data, old, block.kind, block.line), [lie_in_dense]
    else:
        told, lies = parse_planes(block.data, block.count, block.kind.unit), [lie_in_planes]
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(lies)(told, rng)
    if isinstance(told, Ulp) and rng.random() < 0.8:
        make_consistent(told, rng)
    if isinstance(told, Dense) and rng.random() < 0.8:
        make_dense_consistent(told, rng)
    try:
        return told.build()
    except (ValueError, OverflowError):  # it cannot be coded: some symbol has no share
        return damage(block.data, rng, block.data)


def nearby(rng: random.Random, value: int, most: int) -> int:
    """A number that is a little or a lot off."""
    return max(0, rng.choice((value - 1, value + 1, 0, 1, most, most + 1, rng.randrange(most + 1))))


def lie_in_head(block: Ulp, rng: random.Random) -> None:
    what = rng.randrange(8)
    most = (1 << block.exponent) - 1
    if what == 0:
        bounds = {rng.randrange(most + 1) for _ in range(rng.randrange(16))}
        block.bounds = sorted(bounds, reverse=True)
    elif what == 1 and block.bounds:
        at = rng.randrange(len(block.bounds))
        block.bounds[at] = min(most, max(0, nearby(rng, block.bounds[at], most)))
    elif what == 2:
        block.present ^= {rng.randrange(16)}
    elif what == 3:
        block.tag ^= rng.choice((4, 8))
    elif what == 4 and block.classes:
        block.classes.pop(rng.randrange(len(block.classes)))
        block.present -= {min(block.present, default=0)}
    elif what == 5 and block.classes:
        free = [c for c in (*range(len(block.bounds) + 1), 15) if c not in block.present]
        block.classes.append(copy.deepcopy(rng.choice(block.classes)))
        block.present |= {rng.choice(free)} if free else set()
    elif what == 6:
        block.tail = rng.choice((b"\0", b"\1", rng.randbytes(3), bytes(9)))
    elif block.lines or rng.random() < 0.3:
        block.tag ^= 16
        block.lines = None if block.lines else Marks(rng.random() < 0.5, 3, [0, 1], [])


def lie_in_marks(block: Ulp, rng: random.Random) -> None:
    every = [marks for marks, _ in block.classes] + [block.lines] * 3
    marks = rng.choice([one for one in every if one] or [None])
    if marks is None:
        return
    what = rng.randrange(7)
    if what == 0:
        marks.complement = not marks.complement
    elif what == 1:
        marks.j = rng.choice((marks.j - 1, marks.j + 1, 0, 12, 13, 60, 127, 128, -1, rng.randrange(128)))
    elif what == 2 and marks.symbols:
        marks.symbols[rng.randrange(len(marks.symbols))] = rng.randrange(len(marks.table))
    elif what == 3:
        marks.symbols += [rng.randrange(len(marks.table)) for _ in range(rng.choice((1, 2, 30)))]
    elif what == 4 and marks.symbols:
        del marks.symbols[rng.randrange(len(marks.symbols)) :]
    elif what == 5 and marks.low:
        marks.low[rng.randrange(len(marks.low))] = rng.getrandbits(max(1, marks.raw))
    else:
        marks.claimed = nearby(rng, len(marks.symbols), rng.choice((64, 4000, 1 << 22, 1 << 32)))


def lie_in_steps(block: Ulp, rng: random.Random) -> None:
    if not block.classes:
        return
    _, steps = rng.choice(block.classes)
    what = rng.randrange(6)
    usable = [symbol for symbol, share in enumerate(steps.table) if share]
    if what == 0 and steps.symbols:
        steps.symbols[rng.randrange(len(steps.symbols))] = rng.choice(usable)
    elif what == 1:
        steps.symbols += [rng.choice(usable) for _ in range(rng.choice((1, 5)))]
    elif what == 2 and steps.symbols:
        steps.symbols.pop()
    elif what == 3:
        steps.claimed = nearby(rng, len(steps.symbols), rng.choice((64, 4000, 1 << 22, 1 << 32))) or 1
    elif what == 4:
        steps.levels = lying_levels(steps.levels, rng)
    else:
        steps.plus = rng.choice((-1, 0, 1, 77, 127, 128, 129, 255, 256))
        if rng.random() < 0.7:
            steps.symbols = [one_with_share(symbol, steps) for symbol in steps.symbols]


def lying_levels(levels: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    changed = list(levels)
    changed[rng.randrange(len(changed))] = rng.choice((0, 1, 20, 39, 40, 41))
    changed += [rng.choice((1, 40))] * rng.choice((0, 0, 1, 30, 100))
    return tuple(changed) if changed[-1] else (*changed, 40)


def one_with_share(symbol: int, steps: Steps) -> int:
    """The same magnitude with a sign that the table has."""
    return symbol if steps.table[symbol] else symbol ^ 1


def make_consistent(block: Ulp, rng: random.Random) -> None:
    """Adds the raw bits of every symbol, and as many steps as marks."""
    for marks, steps in block.classes:
        if not marks.complement and 0 <= marks.j <= 127:
            wanted = sum(symbol != gap_table(marks.j)[1] for symbol in marks.symbols)
            usable = [symbol for symbol, share in enumerate(steps.table) if share]
            steps.symbols = (steps.symbols + [rng.choice(usable)] * max(0, wanted - len(steps.symbols)))[:wanted]
        widths = [width for width in (raw_bits(symbol >> 1, block.exponent) for symbol in steps.symbols) if width]
        if [width for _, width in steps.low] != widths:
            steps.low = [(rng.getrandbits(width), width) for width in widths]
    for one in [marks for marks, _ in block.classes] + ([block.lines] if block.lines else []):
        gaps = sum(symbol != len(one.table) - 1 for symbol in one.symbols)
        one.low = (one.low + [rng.getrandbits(max(1, one.raw)) for _ in range(gaps)])[:gaps]


def lie_in_dense(block: Dense, rng: random.Random) -> None:
    what = rng.randrange(9)
    table = rng.choice(block.tables)
    if what == 0:
        most = (1 << block.exponent) - 1
        block.bounds = sorted({rng.randrange(most + 1) for _ in range(rng.randrange(16))}, reverse=True)
    elif what == 1:
        block.present ^= {rng.randrange(16)}
    elif what == 2:
        block.tag ^= rng.choice((4, 8, 16))
    elif what == 3:
        block.tail = rng.choice((b"\0", b"\1", rng.randbytes(3), bytes(9)))
    elif what == 4:
        table.levels = lying_levels(table.levels, rng)
    elif what == 5:
        table.plus = rng.choice((-1, 0, 1, 77, 127, 128, 129, 255, 256))
    elif what == 6 and block.symbols:
        block.symbols[rng.randrange(len(block.symbols))] = rng.randrange(2 * len(table.levels))
    elif what == 7:
        block.symbols = block.symbols[:-1] if rng.random() < 0.5 else [*block.symbols, 0]
        block.classes = (block.classes + block.classes[-1:])[: len(block.symbols)]
    elif block.lines:
        block.lines.claimed = nearby(rng, len(block.lines.symbols), rng.choice((64, 1 << 22, 1 << 32)))


def make_dense_consistent(block: Dense, rng: random.Random) -> None:
    """Only symbols that the tables have, and the raw bits of every step."""
    tables, which = dense_tables(block.present, block.tables, block.classes)
    for i, (symbol, at) in enumerate(zip(block.symbols, which.tolist(), strict=True)):
        usable = [one for one, share in enumerate(tables[at]) if share]
        block.symbols[i] = symbol if symbol in usable else rng.choice(usable)
    widths = [width for symbol in block.symbols if symbol and (width := raw_bits((symbol - 1) >> 1, block.exponent))]
    if [width for _, width in block.low] != widths:
        block.low = [(rng.getrandbits(width), width) for width in widths]


def lie_in_planes(block: Planes, rng: random.Random) -> None:
    at = rng.randrange(len(block.planes))
    what = rng.randrange(8)
    if what == 0:
        block.raw_planes ^= 1 << rng.randrange(8)
    elif what == 1:
        block.planes[at] = damage(block.planes[at], rng, block.planes[at])
    elif what == 2:
        block.planes[at] = block.planes[at][:-1] + rng.choice((b"", b"\0\0"))
    elif what == 3:
        block.tag ^= rng.choice((1, 4, 8))
    elif what == 4:
        block.tail = rng.choice((b"", b"\0", b"\1", block.tail + b"\0", block.tail[:-1], block.tail[:-1] + b"\x80"))
    elif what == 5:  # coded where it need not be
        block.levels[at] = (40,) * 256
        block.raw_planes &= ~(1 << at)
    elif what == 6:  # raw where it could be coded
        block.levels[at] = None
        block.raw_planes |= 1 << at
    elif levels := block.levels[at]:
        changed = list(levels)
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 20, 39, 40))
        block.levels[at] = tuple(changed) if changed[-1] else (*changed, 40)


def damage_file(file: File, rng: random.Random, other: File) -> bytes:
    """Mostly keeps the hashes of blocks right and the index well-formed: otherwise few mutations reach a decoder."""
    what = rng.randrange(10)
    if what == 0:
        return damage(file.data, rng, other.data)
    delta = Delta.from_bytes(file.data)
    header, data = taken_apart(delta)
    if what == 1:
        return put_together(header, damage(data, rng, other.data))
    if what <= 5:
        return damage_block(delta, file.old, rng)
    if what <= 6:  # the columns
        index = PlainIndex.of(delta)
        columns = damage(index.columns, rng, index.columns)
        rest = damage(index.rest, rng, index.rest) if rng.random() < 0.2 else index.rest
        return with_index(delta, replace(index, columns=columns, rest=rest).pack())
    if what <= 8 and delta.stacks:
        return with_stacks(delta, lie_in_stacks(list(delta.stacks), rng))
    lie_in_header(header, rng)
    return put_together(header, data)


def damage_block(delta: Delta, old: Any, rng: random.Random) -> bytes:
    """One to three other blocks, mostly with the right hash."""
    data = delta.to_bytes()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        try:
            opened = Delta.from_bytes(data)
        except CorruptDelta:  # after the damage so far
            return data
        jobs = [BlockJob(one, at) for one in opened.stacks for at, size in enumerate(one.blocks) if size]
        if not jobs:
            return damage(data, rng, data)
        job = rng.choice(jobs)
        data = with_block(opened, job, other_block(opened, job, read_weights(old), rng), is_hashed=rng.random() < 0.9)
    return data


def other_block(delta: Delta, job: BlockJob, old: Weights, rng: random.Random) -> bytes:
    data = bytes(delta.fetch(*job.stack.span(range(job.index, job.index + 1))))
    if job.stack.coo:
        return lie_in_coo(data, rng)
    if rng.random() < 0.6 and (job.stack.fresh or all(entry.name in old for entry in job.members)):
        block = block_of("block", delta, job, old)
        if not isinstance(decode_with(_kernel, block), str):
            return lie(block, rng)
    return damage(data, rng, data)


def lie_in_coo(data: bytes, rng: random.Random) -> bytes:
    """Moves a position, or changes a value: both are 2 bytes or more."""
    out = bytearray(data)
    what = rng.randrange(4)
    if what == 0 or len(out) <= 8:
        return damage(data, rng, data)
    at = 8 + rng.randrange(len(out) - 8)
    out[at] = out[at] + rng.choice((1, -1)) & 0xFF if what < 3 else rng.choice((0, 0xFF))
    return bytes(out)


def lie_in_stacks(stacks: list[EncodedStack], rng: random.Random) -> list[EncodedStack]:
    at, other = rng.randrange(len(stacks)), rng.randrange(len(stacks))
    what = rng.randrange(8)
    if what == 0:
        stacks[at], stacks[other] = stacks[other], stacks[at]
    elif what == 1:
        del stacks[at]
    elif what == 2:
        stacks[at] = replace(stacks[at], entries=lie_in_members(stacks[at].entries, stacks[other].entries, rng))
    elif what <= 5:
        lies = lie_in_entry(stacks[other].first, rng)
        stacks[at] = replace(stacks[at], entries=tuple(replace(entry, **lies) for entry in stacks[at].entries))
    else:
        stacks[at] = replace(stacks[at], **lie_in_stack(stacks[at], rng))
    return stacks


NUMBERS = (0, 1, 2, 3, 127, 128, 1 << 22, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def lie_in_members(entries: Sequence[Entry], others: Sequence[Entry], rng: random.Random) -> tuple[Entry, ...]:
    """Other members, or another claim about one of them."""
    at, other = rng.randrange(len(entries)), rng.randrange(len(others))
    entry, members = entries[at], list(entries)
    a, b = entry.digest or (0, 0)
    name = rng.choice((others[other].name, "", "new", "\0\x1b[2J", "x" * 300))
    choices: list[list[Entry]] = [
        [*members[:at], *members[at + 1 :]] or members,
        [*members, replace(entry, name=name)],
        [*members, entry],
        members[::-1],
        [*members[:at], replace(entry, name=name), *members[at + 1 :]],
        [*members[:at], replace(entry, changed=rng.choice((*NUMBERS, entry.changed + 1))), *members[at + 1 :]],
        [*members[:at], replace(entry, digest=(a ^ 1 << rng.randrange(64), b)), *members[at + 1 :]],
        [replace(one, digest=None if one.digest else (a, b)) for one in members],
    ]
    if len(members) > 1:  # two members count for each other
        next_one = members[at - 1]
        members[at - 1] = replace(next_one, changed=entry.changed, digest=entry.digest)
        members[at] = replace(entry, changed=next_one.changed, digest=next_one.digest)
        choices += [members] * 4
    return tuple(rng.choice(choices))


def lie_in_stack(stack: EncodedStack, rng: random.Random) -> dict[str, Any]:
    number, sizes = rng.choice(NUMBERS), stack.blocks
    index = rng.randrange(max(1, len(sizes)))
    return rng.choice(
        [
            {"per": number},
            {"per": stack.per + rng.choice((-1, 1)) if stack.per else 0},
            {"per": len(stack.entries)},
            {"blocks": (*sizes[:index], number, *sizes[index + 1 :])},
            {"blocks": (*sizes, *sizes)},
            {"blocks": sizes[:-1]},
            {"blocks": (*sizes, 0)},
            {"blocks": (sum(sizes),)},
            {"blocks": sizes[::-1]},
        ]
    )


def lie_in_entry(entry: Entry, rng: random.Random) -> dict[str, Any]:
    """Other claims about what a stack is."""
    number = rng.choice(NUMBERS)
    at = rng.randrange(max(1, len(entry.shape)))
    return rng.choice(
        [
            {"dtype": rng.choice(list(DTYPES.values()))},
            {"dtype": entry.dtype},
            {"shape": entry.shape},
            {"shape": (*entry.shape[:at], number, *entry.shape[at + 1 :])},
            {"shape": entry.shape[::-1]},
            {"shape": entry.shape + (1,) * rng.choice((1, 70))},
            {"rows": rng.choice((None, (0, 1), (0, number), (number, 5)))},
            {"coo": not entry.coo},
            {"fresh": not entry.fresh},
        ]
    )


def lie_in_header(header: dict[str, Any], rng: random.Random) -> None:
    metadata = header["__metadata__"]
    names = [name for name in header if name != "__metadata__"]
    what = rng.randrange(4)
    if what == 0 or not names:
        key = rng.choice(sorted(metadata))
        words = [
            "",
            "delta",
            "anchor",
            "weightwire/1",
            "weightwire/2",
            "0" * 64,
            "[]",
            '["x"]',
            "[1]",
            "{",
            metadata[key][:-1],
        ]
        metadata[key] = rng.choice(words)
    elif what == 1:
        metadata[rng.choice(("removed", "before", "after", "more"))] = rng.choice(('["a"]', '["new"]', "", "f" * 64))
    elif what == 2:
        header[rng.choice(names)][rng.choice(("dtype", "shape", "data_offsets"))] = rng.choice(
            ("U8", "F4", [], [0], [1 << 62], [-1], [0, 0], [0, 1 << 40], None, "U9", [1.5], {})
        )
    else:
        one, other = rng.choice(names), rng.choice([*names, "new", ""])
        header[other] = header.pop(one) if rng.random() < 0.5 else copy.deepcopy(header[one])
