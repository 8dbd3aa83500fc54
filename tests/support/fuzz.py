"""Hostile input: golden files and their blocks, damaged in a thousand ways, against a kernel that watches itself.

    python tests/support/fuzz.py --count 5000 --seed 1           # with the kernel under ASan and UBSan
    python tests/support/fuzz.py --count 1000 --seed 1 --spec    # NumPy as well, which must come to the same verdict
    python tests/support/fuzz.py --seed 1 --only 4711            # one mutation again
    python tests/support/fuzz.py --count 5000 --collect DIR      # keep the smallest input for every reason to refuse

Every outcome must be a result whose digest is right, or a typed error; and nothing may be changed that was not to be.
Most mutations are of blocks, and half of these are told as well-formed lies (crafted.py), since a file that is damaged
at random mostly dies in its JSON. Mutation i of a seed is always the same, whatever the count.

The kernel is compiled into a temporary directory, and the work done in a process of its own that has the sanitizers
preloaded: the first read or write outside a buffer ends it.
"""

from __future__ import annotations

import argparse
import base64
import copy
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
KERNEL = "weightwire.codec._kernel"
FLAGS = "-std=c11 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -shared -fPIC"


# --- the process that is watched ---------------------------------------------------------------------------------


def compile_watched(source: Path, out: Path) -> None:
    """An extension under ASan and UBSan."""
    include = sysconfig.get_paths()["include"]
    command = ["cc", *FLAGS.split(), f"-I{include}", str(source), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)


def build_kernel(directory: Path) -> Path:
    compile_watched(TESTS.parent / "src" / "weightwire" / "codec" / "_kernel.c", directory / "_kernel.abi3.so")
    return directory / "_kernel.abi3.so"


def watched_environment(kernel: Path | None) -> dict[str, str]:
    """Python's own allocator hides what is read past the end of a small object: it is switched off."""
    runtime = subprocess.check_output(["cc", "-print-file-name=libasan.so"], text=True).strip()
    environment = {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
        "PYTHONMALLOC": "malloc",
    }
    return os.environ | environment | ({"WEIGHTWIRE_FUZZ_KERNEL": str(kernel)} if kernel else {})


def use_kernel(path: str) -> None:
    """Puts another build of the kernel in its place, before weightwire looks for it."""
    loader = importlib.machinery.ExtensionFileLoader(KERNEL, path)
    spec = importlib.util.spec_from_file_location(KERNEL, path, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[KERNEL] = module


if "WEIGHTWIRE_FUZZ_KERNEL" in os.environ:
    use_kernel(os.environ["WEIGHTWIRE_FUZZ_KERNEL"])

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is run as a script

import numpy as np  # noqa: E402

import weightwire  # noqa: E402
from golden.make import CASES, HERE  # noqa: E402
from support.crafted import (  # noqa: E402
    Marks,
    Planes,
    Steps,
    Ulp,
    packed_entry,
    parse_planes,
    parse_ulp,
    put_together,
    raw_bits,
    taken_apart,
)
from support.samples import Units, vector_widths, vectors_of  # noqa: E402
from weightwire import Delta, WeightwireError  # noqa: E402
from weightwire.codec import _kernel, numpy_kernel  # noqa: E402
from weightwire.codec.frequency_tables import gap_table  # noqa: E402
from weightwire.delta import Entry  # noqa: E402
from weightwire.weights.dtypes import DTYPES, Dtype  # noqa: E402
from weightwire.weights.source import read_weights  # noqa: E402

SECONDS = 20  # of work for one mutation; the slowest honest one takes a fraction of one


class Failure(Exception):
    """What must never happen."""


# --- what is damaged ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A block and all that is needed to decode it."""

    name: str
    data: bytes
    old: bytes | None
    count: int
    dtype: str
    line: int

    @property
    def kind(self) -> Dtype:
        return DTYPES[self.dtype]

    def to_json(self) -> str:
        fields = asdict(self) | {"data": self.data.hex(), "old": self.old.hex() if self.old is not None else None}
        return json.dumps(fields, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Block:
        fields = json.loads(text)
        old = bytes.fromhex(fields["old"]) if fields["old"] is not None else None
        return Block(**fields | {"data": bytes.fromhex(fields["data"]), "old": old})


@dataclass(frozen=True)
class File:
    """A delta file and its base."""

    name: str
    data: bytes
    old: dict[str, Any]


def golden_blocks(most: int) -> list[Block]:
    """Every block of at most so many units in the golden files."""
    blocks = []
    for name, case in CASES.items():
        delta, old = Delta.open(HERE / f"{name}.safetensors"), read_weights(case()[0])
        for entry in delta.entries.values():
            for index in range(0 if entry.coo else len(entry.blocks)):
                begin, end = entry.layout.span(index)
                if entry.blocks[index] and end - begin <= most:
                    base = None if entry.fresh else old[entry.name].bits[begin:end].tobytes()
                    data = bytes(delta.block(entry, index))
                    blocks.append(Block(name, data, base, end - begin, entry.dtype.name, entry.layout.line))
    return blocks


def golden_files() -> list[File]:
    files = []
    for name, case in CASES.items():
        old = case()[0]
        if sum(tensor.nbytes for tensor in read_weights(old).values()) < 1 << 20:
            files.append(File(name, (HERE / f"{name}.safetensors").read_bytes(), old))
    return files


# --- damage to bytes ---------------------------------------------------------------------------------------------


def damage(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """One to three accidents."""
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
    """Another number behind the tag."""
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


# --- lies in good form -------------------------------------------------------------------------------------------


def lie(block: Block, rng: random.Random) -> bytes:
    """The block with one to three fields changed, and all else as it must be then."""
    if block.data[0] & 3 == 1:
        told: Ulp | Planes = parse_ulp(block.data, block.kind.unit)
        lies: list[Callable[[Any, random.Random], None]] = [lie_in_head, lie_in_marks, lie_in_marks, lie_in_steps]
    else:
        told = parse_planes(block.data, block.count, block.kind.unit)
        lies = [lie_in_planes]
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(lies)(told, rng)
    if isinstance(told, Ulp) and rng.random() < 0.8:
        make_consistent(told, rng)
    try:
        return told.build()
    except (ValueError, OverflowError):  # it cannot be coded: some symbol has no share
        return damage(block.data, rng, block.data)


def nearby(rng: random.Random, value: int, most: int) -> int:
    """A number that is a little or a lot off."""
    return max(0, rng.choice((value - 1, value + 1, 0, 1, most, most + 1, rng.randrange(most + 1))))


def lie_in_head(block: Ulp, rng: random.Random) -> None:
    what = rng.randrange(8)
    if what == 0:
        block.top = min(2047, nearby(rng, block.top, 255))
    elif what == 1:
        block.width = min(15, nearby(rng, block.width, 15))
    elif what == 2:
        block.present ^= 1 << rng.randrange(16)
    elif what == 3:
        block.tag ^= 4
    elif what == 4 and block.classes:
        block.classes.pop(rng.randrange(len(block.classes)))
        block.present &= block.present - 1
    elif what == 5 and block.classes:
        free = [c for c in range(16) if not block.present >> c & 1]
        block.classes.append(copy.deepcopy(rng.choice(block.classes)))
        block.present |= 1 << rng.choice(free) if free else 0
    elif what == 6:
        block.tail = rng.choice((b"\0", b"\1", rng.randbytes(3), bytes(9)))
    elif block.lines or rng.random() < 0.3:
        block.tag ^= 8
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
        levels = list(steps.levels)
        levels[rng.randrange(len(levels))] = rng.choice((0, 1, 20, 39, 40, 41))
        levels += [rng.choice((1, 40))] * rng.choice((0, 0, 1, 30, 100))
        steps.levels = tuple(levels) if levels[-1] else (*levels, 40)
    else:
        steps.plus = rng.choice((-1, 0, 1, 77, 127, 128, 129, 255, 256))
        if rng.random() < 0.7:
            steps.symbols = [one_with_share(symbol, steps) for symbol in steps.symbols]


def one_with_share(symbol: int, steps: Steps) -> int:
    """The same magnitude, with the sign that the table has."""
    return symbol if steps.table[symbol] else symbol ^ 1


def make_consistent(block: Ulp, rng: random.Random) -> None:
    """Raw bits for every symbol that has some, and as many steps as marks where the marks tell."""
    for marks, steps in block.classes:
        if not marks.complement and 0 <= marks.j <= 127:
            wanted = sum(symbol != gap_table(marks.j)[1] for symbol in marks.symbols)
            usable = [symbol for symbol, share in enumerate(steps.table) if share]
            steps.symbols = (steps.symbols + [rng.choice(usable)] * max(0, wanted - len(steps.symbols)))[:wanted]
        widths = [width for width in (raw_bits(symbol >> 1) for symbol in steps.symbols) if width]
        if [width for _, width in steps.low] != widths:
            steps.low = [(rng.getrandbits(width), width) for width in widths]
    for one in [marks for marks, _ in block.classes] + ([block.lines] if block.lines else []):
        gaps = sum(symbol != len(one.table) - 1 for symbol in one.symbols)
        one.low = (one.low + [rng.getrandbits(max(1, one.raw)) for _ in range(gaps)])[:gaps]


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
        block.tag ^= rng.choice((1, 4))
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


# --- damage to files ---------------------------------------------------------------------------------------------


def damage_file(file: File, rng: random.Random, other: File) -> bytes:
    what = rng.randrange(4)
    if what == 0:
        return damage(file.data, rng, other.data)
    delta = Delta.from_bytes(file.data)
    header, data = taken_apart(delta)
    if what == 1:  # the data only
        return put_together(header, damage(data, rng, other.data))
    if what == 2 and delta.entries:
        entries = list(delta.entries.values())
        at = rng.randrange(len(entries))
        entries[at] = replace(entries[at], **lie_in_entry(rng.choice(entries), rng))
        packed = b"".join(map(packed_entry, entries))
        header["__metadata__"]["index"] = base64.b85encode(packed).decode()
    else:
        lie_in_header(header, rng)
    return put_together(header, data)


def lie_in_entry(entry: Entry, rng: random.Random) -> dict[str, Any]:
    number = rng.choice((0, 1, 2, 127, 128, 1 << 22, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
    at = rng.randrange(max(1, len(entry.shape)))
    index = rng.randrange(max(1, len(entry.blocks)))
    return rng.choice(
        [
            {"dtype": rng.choice(list(DTYPES.values()))},
            {"shape": (*entry.shape[:at], number, *entry.shape[at + 1 :])},
            {"shape": entry.shape[::-1]},
            {"shape": entry.shape + (1,) * rng.choice((1, 70))},
            {"rows": rng.choice((None, (0, 1), (0, number), (number, 5)))},
            {"coo": not entry.coo},
            {"fresh": not entry.fresh},
            {"changed": rng.choice((number, entry.changed + 1))},
            {"blocks": (*entry.blocks[:index], number, *entry.blocks[index + 1 :])},
            {"blocks": (*entry.blocks, *entry.blocks)},
            {"blocks": entry.blocks[:-1]},
            {"digest": (entry.digest[0] ^ 1 << rng.randrange(64), entry.digest[1])},
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
        metadata[rng.choice(("removed", "before", "after", "more"))] = rng.choice((json.dumps(names[:1]), "", "f" * 64))
    elif what == 2:
        header[rng.choice(names)][rng.choice(("dtype", "shape", "data_offsets"))] = rng.choice(
            ("U8", "F4", [], [0], [1 << 62], [-1], [0, 0], [0, 1 << 40], None, "U9", [1.5], {})
        )
    else:
        one, other = rng.choice(names), rng.choice([*names, "new", ""])
        header[other] = header.pop(one) if rng.random() < 0.5 else copy.deepcopy(header[one])


# --- judgement ---------------------------------------------------------------------------------------------------


Verdict = tuple[bytes | None, bytearray] | str


def exact(data: bytes) -> Units:
    """A copy in a buffer of exactly its size, so that one byte past its end is somebody else's."""
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
    """The reason for which a block is refused, or "accepted"."""
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
    """What was accepted makes sense, can be applied and undone, and encoded and decoded again."""
    dtype = block.kind
    floats = dtype.unit, dtype.exponent, dtype.mantissa, block.line
    at = np.arange(block.count) if positions is None else np.frombuffer(positions, "<u4").astype(np.int64)
    if len(values) != len(at) * dtype.unit or (np.diff(at) <= 0).any() or (len(at) and at[-1] >= block.count):
        raise Failure("positions are not ascending or past the end")
    old, target, kept = base_of(block), base_of(block), bytes(values)
    lanes = _kernel.swap_block(target, positions, values, dtype.unit, dtype.unit, 0)
    before, after = _kernel.digest(old, dtype.unit, 0), _kernel.digest(target, dtype.unit, 0)
    if tuple((a + b) % 2**64 for a, b in zip(before, lanes, strict=True)) != after:
        raise Failure("the digest was not brought up to date")
    copied = base_of(block)
    where, what, *added = _kernel.patch_block(exact(block.data), copied, block.old is None, *floats, dtype.unit, 0)
    if copied.tobytes() != target.tobytes() or tuple(added) != lanes:
        raise Failure("patching comes to another result than decoding and swapping")
    _kernel.swap_block(copied, where, what, dtype.unit, dtype.unit, 0)
    if copied.tobytes() != old.tobytes():
        raise Failure("a patch was not undone")
    copied = base_of(block)
    where, what = _kernel.replace_block(copied, target, dtype.unit)
    if copied.tobytes() != target.tobytes():
        raise Failure("what was taken is not what was there")
    _kernel.swap_block(copied, where, what, dtype.unit, dtype.unit, 0)
    if copied.tobytes() != old.tobytes():
        raise Failure("what was taken was not undone")
    again = _kernel.encode_block(old, target, *floats, dtype.unit, 0)[0]
    if again:
        copied = base_of(block)
        _kernel.patch_block(again, copied, False, *floats, dtype.unit, 0)
        if copied.tobytes() != target.tobytes():
            raise Failure("what was decoded does not survive being encoded")
    _kernel.swap_block(target, positions, values, dtype.unit, dtype.unit, 0)
    if target.tobytes() != old.tobytes() or bytes(values) != kept:
        raise Failure("a swap was not undone")


def check_refused(block: Block, reason: str) -> None:
    """What was refused is refused as a patch too, which leaves its target as it was."""
    dtype, target = block.kind, base_of(block)
    floats = dtype.unit, dtype.exponent, dtype.mantissa, block.line
    try:
        _kernel.patch_block(exact(block.data), target, block.old is None, *floats, dtype.unit, 0)
    except ValueError as problem:
        if str(problem) == reason and target.tobytes() == base_of(block).tobytes():
            return
    raise Failure("a patch that should be refused was not, or has left its traces")


def base_of(block: Block) -> Units:
    return exact(block.old if block.old is not None else bytes(block.count * block.kind.unit))


def judge_file(file: File, data: bytes) -> str:
    """The kind of error that a file gets, or "accepted"."""
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
        verdicts.append("accepted")
    return " / ".join(verdicts)


def contents(weights: Any) -> dict[str, bytes]:
    return {name: tensor.bits.tobytes() for name, tensor in read_weights(weights).items()}


# --- the run -----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One seed's mutations, and what came of them."""

    seed: int
    compare: bool
    collect: Path | None

    def __post_init__(self) -> None:
        self.blocks = golden_blocks(8_000 if self.compare else 80_000)
        self.files = [] if self.compare else golden_files()
        self.widths = vector_widths()
        self.counts: Counter[str] = Counter()

    def mutation(self, index: int) -> Block | tuple[File, bytes]:
        rng = random.Random(f"{self.seed}:{index}")
        if self.files and rng.random() < 0.1:
            file = rng.choice(self.files)
            return file, damage_file(file, rng, rng.choice(self.files))
        block = rng.choice(self.blocks)
        other = rng.choice(self.blocks).data
        data = lie(block, rng) if rng.random() < 0.5 else damage(block.data, rng, other)
        block = replace(block, data=data)
        if block.old is not None and rng.random() < 0.1:
            block = replace(block, old=rng.randbytes(len(block.old)))
        return block

    def judge(self, index: int) -> str:
        mutated = self.mutation(index)
        if isinstance(mutated, Block):
            verdict = judge_block(mutated, self.widths, self.compare)
            if self.collect:
                keep_smallest(self.collect, verdict, mutated)
        else:
            verdict = "file: " + judge_file(*mutated)
        self.counts[verdict] += 1
        return verdict


def keep_smallest(directory: Path, verdict: str, block: Block) -> None:
    """One input for every verdict and encoding."""
    encoding = {1: "ulp", 2: "dense", 3: "full"}.get(block.data[0] & 3, "none") if block.data else "none"
    path = directory / f"{encoding}-{verdict.replace(' ', '-')}.json"
    text = replace(block, name=verdict).to_json()
    if not path.exists() or len(text) < path.stat().st_size:
        path.write_text(text)


def work(arguments: argparse.Namespace) -> None:
    """In the process that is watched. Where it is, is kept in a file, should it not come back."""
    run = Run(arguments.seed, arguments.spec, arguments.collect)
    signal.signal(signal.SIGPROF, too_long)
    indices = [arguments.only] if arguments.only is not None else range(arguments.count)
    with Path(arguments.at).open("r+b", buffering=0) as at:
        for index in indices:
            os.pwrite(at.fileno(), index.to_bytes(8, "little"), 0)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            verdict = run.judge(index)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if arguments.only is not None:
        print(verdict, file=sys.stderr)
    print(json.dumps(dict(run.counts.most_common()), indent=1))


def too_long(*_: object) -> None:
    raise Failure(f"took more than {SECONDS} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage golden files and see what becomes of them.")
    parser.add_argument("--count", type=int, default=5000, help="how many mutations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this mutation only")
    parser.add_argument("--spec", action="store_true", help="blocks through NumPy too: the verdict must be the same")
    parser.add_argument("--collect", type=Path, help="keep the smallest input for every verdict in this directory")
    parser.add_argument("--kernel", type=Path, help="a kernel that was built before")
    parser.add_argument("--at", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.at:
        work(arguments)
        return
    if arguments.collect:
        arguments.collect.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weightwire-fuzz-") as directory:
        at = Path(directory, "at")
        at.write_bytes(bytes(8))
        kernel = arguments.kernel or build_kernel(Path(directory))
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--at", str(at)]
        code = subprocess.run(command, env=watched_environment(kernel), check=False).returncode
        if code:
            index = int.from_bytes(at.read_bytes(), "little")
            again = f"python tests/support/fuzz.py --seed {arguments.seed} --only {index}{' --spec' * arguments.spec}"
            raise SystemExit(f"mutation {index} of seed {arguments.seed} failed ({code}). Again: {again}")


if __name__ == "__main__":
    main()
