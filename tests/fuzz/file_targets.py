"""Targets for files: deltas, the journal and the state of a replica, and safetensors headers of checkpoints."""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from fuzz.blocks import File
from fuzz.json_mutations import mutate_json
from fuzz.mutations import damage, damage_file
from fuzz.target import ACCEPTED, Target, demand, verdict_of, with_both
from fuzz.verdicts import judge_file
from support.samples import base, change
from weightwire import Delta, Tensor, WeightwireError, anchor, diff, digest
from weightwire.delta.absolute import make_absolute
from weightwire.delta.encoded_stack import EncodedStack
from weightwire.delta.file import Packed, block_hash, pack
from weightwire.replica.workdir import Position, Workdir
from weightwire.weights.checkpoint_writer import CheckpointWriter
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.safetensors_file import Slot, build_header, lay_out, read_header

Shapes = dict[str, tuple[str, tuple[int, ...]]]

SHAPES: Shapes = {
    "a": ("BF16", (4, 64)),
    "b": ("F32", (20,)),
    "c": ("I64", ()),
    "é": ("F4", (2, 4)),
    "none": ("U8", (0, 3)),
}
STACKED: Shapes = {f"s.{k}": ("BF16", (4, 64)) for k in range(2)} | {f"t.{k}": ("U8", (3,)) for k in range(2)}
MEMORY = Path("/dev/shm")


def weights(seed: int = 0, shapes: Shapes = SHAPES) -> dict[str, Tensor]:
    made = {}
    for index, (name, (dtype, shape)) in enumerate(shapes.items()):
        count = (DTYPES[dtype].nbytes(shape) or 0) // DTYPES[dtype].unit
        made[name] = Tensor(DTYPES[dtype], shape, base(DTYPES[dtype], count, seed=seed * 100 + index))
    return made


def changed(old: dict[str, Tensor], how: str, seed: int) -> dict[str, Tensor]:
    return {
        name: replace(tensor, bits=change(tensor.bits, tensor.dtype, how, seed + index))
        for index, (name, tensor) in enumerate(old.items())
    }


# --- deltas ------------------------------------------------------------------------------------------------------


@cache
def delta_base() -> dict[str, Tensor]:
    """Tensors of their own kind, and two stacks."""
    return weights(0, SHAPES | STACKED)


def check_delta(data: bytes) -> str:
    """Opens a file, packs it again, and applies it."""
    opened = verdict_of(lambda: pack_again(data))
    return with_both(lambda: judge_file(File("delta", data, delta_base()), data)) if opened == ACCEPTED else opened


def pack_again(data: bytes) -> None:
    """Whatever can be opened can be packed again."""
    delta = Delta.from_bytes(data)
    demand(delta.to_bytes() == data, "a delta does not give its own bytes")
    packed = [Packed(one, [bytes(delta.fetch(*one.span(range(len(one.blocks)))))]) for one in delta.stacks]
    again = pack(packed, kind=delta.kind, before=delta.before, after=delta.after, removed=delta.removed)
    again = Delta.from_bytes(again.to_bytes())
    unplaced = [{one.first.name: replace(one, start=0) for one in each.stacks} for each in (delta, again)]
    demand(unplaced[0] == unplaced[1] and sorted(again.removed) == sorted(delta.removed), "a delta does not round-trip")


def delta_seeds() -> Iterator[bytes]:
    old = delta_base()
    for seed, how in enumerate(("few", "half", "all", "one")):
        yield diff(old, changed(old, how, seed)).to_bytes()
    yield diff({}, {name: old[name] for name in ("a", "c")}).to_bytes()
    yield diff({}, {name: old[name] for name in STACKED}).to_bytes()
    yield diff(old, old | {"s.1": changed(old, "few", 6)["s.1"]}).to_bytes()
    yield diff(old, changed(old, "few", 7), coo=True).to_bytes()
    yield anchor(old).to_bytes()
    yield anchor({"a": old["a"]}, part=True).to_bytes()
    yield diff(old, {name: old[name] for name in ("a", "b")} | {"new": old["c"]}).to_bytes()
    yield make_absolute(old, [diff(old, changed(old, "few", 9))], digest(old)).to_bytes()
    yield one_member_per_block(old, changed(old, "few", 8)).to_bytes()


def one_member_per_block(old: dict[str, Tensor], new: dict[str, Tensor]) -> Delta:
    """A stack of small tensors in several blocks. weightwire itself fills blocks."""
    names = ("a", "s.0", "s.1")
    single = [diff({name: old[name]}, {name: new[name]}) for name in names]
    alone = [delta.stacks[0] for delta in single]
    parts = [bytes(delta.block(delta.stacks[0], 0)) for delta in single]
    entries = tuple(stack.first for stack in alone)
    stack = EncodedStack(entries, 1, tuple(map(len, parts)), tuple(map(block_hash, parts)))
    after = old | {name: new[name] for name in names}
    return pack([Packed(stack, parts)], before=digest(old).hex, after=digest(after).hex)


def mutate_delta(old: Callable[[], dict[str, Tensor]], data: bytes, rng: random.Random) -> bytes:
    file = File("delta", data, old())
    try:
        return damage_file(file, rng, file)
    except (WeightwireError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return mutate_header(data, rng)


DELTA_WORDS = (
    "__metadata__",
    "format",
    "weightwire/1",
    "kind",
    "before",
    "after",
    "index",
    "blocks",
    "removed",
    "anchor",
    "delta",
)
HEADER_WORDS = ("dtype", "shape", "data_offsets", "__metadata__", *DTYPES)

# --- safetensors headers -----------------------------------------------------------------------------------------


def check_header(data: bytes) -> str:
    """A header that is accepted can be built again, and places every byte once."""

    def decode() -> None:
        header = read_header(data, "file")
        demand(sum(slot.end - slot.start for slot in header.slots) == len(data) - header.size, "the bytes of a header")
        for slot in header.slots:
            tensor = Tensor.at(data, header.size + slot.start, slot.dtype, slot.shape)
            demand(tensor.nbytes == slot.end - slot.start, "the size of a tensor")
        again = read_header(build_header(header.slots, header.metadata) + data[header.size :], "file")
        demand((again.slots, again.metadata) == (header.slots, header.metadata), "a header does not round-trip")

    return verdict_of(decode)


def header_seeds() -> Iterator[bytes]:
    yield build_header([], {})
    shapes: list[tuple[str, Any, tuple[int, ...]]] = [(n, DTYPES[dtype], shape) for n, (dtype, shape) in SHAPES.items()]
    slots = lay_out(shapes)
    yield build_header(slots, {"format": "pt"}) + bytes(slots[-1].end)
    yield build_header([Slot("x", DTYPES["F8_E4M3"], (2,), 0, 2)], {}) + b"ab"


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """Changes the JSON, and mostly keeps the length in front of it right."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data) or rng.random() < 0.2:
        return damage(data, rng, data)
    text, rest = data[8 : 8 + size], data[8 + size :]
    text = mutate_json(text, rng, HEADER_WORDS)
    length = len(text) + (rng.choice((-1, 1, 1 << 20, 1 << 40)) if rng.random() < 0.05 else 0)
    return max(0, length).to_bytes(8, "little") + text + (damage(rest, rng, rest) if rng.random() < 0.1 else rest)


# --- replicas ----------------------------------------------------------------------------------------------------

RUN = "0" * 32


@dataclass(frozen=True)
class Story:
    """A work directory at version 1, and a journal record that leads to version 2."""

    path: Path
    old: dict[str, Tensor]
    model: bytes
    state: bytes
    record: bytes

    @property
    def journal(self) -> Path:
        return self.path / "journal" / Position(RUN, 2, "b" * 64).record


@cache
def story() -> Story:
    path = Path(tempfile.mkdtemp(prefix="weightwire-fuzz-", dir=MEMORY if MEMORY.is_dir() else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    old = weights(1)
    with CheckpointWriter(path / "work", schema={n: (t.dtype, t.shape) for n, t in old.items()}) as writer:
        for name, tensor in old.items():
            writer[name].bits[:] = tensor.bits
    work = path / "work"
    Workdir.complete(work, Position(RUN, 1, "a" * 64), digest(old))
    record = make_absolute(old, [diff(old, changed(old, "few", 5))], digest(old)).to_bytes()
    return Story(work, old, (work / "model.safetensors").read_bytes(), (work / "state.json").read_bytes(), record)


def reopened(*, state: bytes | None = None, record: bytes | None = None) -> Workdir:
    """Opens the directory as a follower does after a crash, with other bytes in one of its files."""
    told = story()
    (told.path / "model.safetensors").write_bytes(told.model)
    (told.path / "state.json").write_bytes(told.state if state is None else state)
    told.journal.unlink(missing_ok=True)
    if record is not None:
        told.journal.write_bytes(record)
    return Workdir.open(told.path, threads=1)


def check_journal(data: bytes) -> str:
    def decode() -> None:
        work = reopened(record=data)
        demand(work.position.version == 2 and digest(work.weights).hex == work.state.hex, "a replayed record")

    if (opened := verdict_of(lambda: Delta.from_bytes(data))) != ACCEPTED:  # no implementation gets to see it
        demand(verdict_of(decode) == opened, "another error as a journal record")
        return opened
    return with_both(lambda: verdict_of(decode))


def journal_seeds() -> Iterator[bytes]:
    told = story()
    yield told.record
    for seed, how in enumerate(("one", "all")):
        yield make_absolute(told.old, [diff(told.old, changed(told.old, how, seed))], digest(told.old)).to_bytes()
    yield make_absolute(told.old, [], digest(told.old)).to_bytes()


def check_state_file(data: bytes) -> str:
    def decode() -> None:
        work = reopened(state=data)
        held = work.position
        demand(type(held.run) is str and type(held.version) is int and type(held.commit) is str, "types of a position")
        Workdir.complete(work.path, held, work.state)
        again = Workdir.open(work.path, threads=1)
        demand((again.position, again.state) == (held, work.state), "a state does not round-trip")

    return verdict_of(decode)


STATE_WORDS = ("run", "version", "commit", "state", "tensors", *SHAPES)


def mutate_state(data: bytes, rng: random.Random) -> bytes:
    return mutate_json(data, rng, STATE_WORDS)


TARGETS = [
    Target("delta", check_delta, partial(mutate_delta, delta_base), delta_seeds, (*DELTA_WORDS, *HEADER_WORDS)),
    Target("header", check_header, mutate_header, header_seeds, HEADER_WORDS),
    Target(
        "journal",
        check_journal,
        partial(mutate_delta, lambda: story().old),
        journal_seeds,
        (*DELTA_WORDS, *HEADER_WORDS),
    ),
    Target("state", check_state_file, mutate_state, lambda: [story().state], STATE_WORDS),
]
