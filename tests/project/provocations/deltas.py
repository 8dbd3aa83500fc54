"""Errors of deltas: damaged files, wrong bases, patches that do not fit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.blocks import Block
from fuzz.verdicts import exact
from project.provocations.case import OTHER, WEIGHTS, Case, Provocation
from support.crafted_files import index_of, put_together, taken_apart, with_index
from weightwire import Delta, Tensor, anchor, diff, digest, patch
from weightwire.codec import _kernel
from weightwire.delta import BlockJob, changes, make_absolute, merge_absolute, patch_checkpoint, write_absolute
from weightwire.delta.decoder import naming
from weightwire.weights import DTYPES, read_weights

HOSTILE = Path(__file__).parent.parent.parent / "hostile"
F32 = DTYPES["F32"]
DELTA = diff(WEIGHTS, OTHER)
WHOLE = anchor(WEIGHTS)
FIRST, SECOND = read_weights(WEIGHTS), read_weights(OTHER)


def opened(case: Case, content: bytes) -> Delta:
    return Delta.open(case.file("delta.safetensors", content))


def rewritten(delta: Delta = DELTA, **metadata: str | None) -> Provocation:
    """Opens a delta whose metadata was changed."""

    def provoke(case: Case) -> None:
        header, data = taken_apart(delta)
        header["__metadata__"].update(metadata)
        header["__metadata__"] = {key: text for key, text in header["__metadata__"].items() if text is not None}
        opened(case, put_together(header, data))

    return provoke


def without_index(case: Case) -> None:
    header, data = taken_apart(DELTA)
    del header["index"]
    header["blocks"] |= {"shape": [len(data)], "data_offsets": [0, len(data)]}
    opened(case, put_together(header, data))


def unknown_digests(case: Case) -> None:
    """A delta that was read has no digests of tensors."""
    opened(case, DELTA.to_bytes()).advance(digest(WEIGHTS))


def wrong_hash(case: Case) -> None:
    data = bytearray(DELTA.to_bytes())
    data[-1] ^= 1
    patch(dict(WEIGHTS), opened(case, bytes(data)), copy=True)


def hostile(path: Path) -> Provocation:
    """Applies one of the files in tests/hostile to a copy of its base."""

    def provoke(case: Case) -> None:
        copy = case.file("delta.safetensors", path.read_bytes())
        patch({"x": np.zeros((10, 64), np.uint8)}, copy, copy=True)

    return provoke


def hostile_block(path: Path) -> Provocation:
    """Decodes one of the blocks in tests/hostile."""

    def provoke(case: Case) -> None:
        block = Block.from_json(path.read_text())
        base = None if block.old is None else exact(block.old)
        kind = block.kind
        with naming(DELTA, BlockJob(DELTA.stack_of["w"], 0)):
            _kernel.decode_block(
                exact(block.data), base, block.count, kind.unit, kind.exponent, kind.mantissa, block.line
            )

    return provoke


def directory_as_delta(case: Case) -> None:
    Delta.open(case.here)


def shrinking_file(case: Case) -> None:
    delta = opened(case, DELTA.to_bytes())
    os.truncate(case.here / "delta.safetensors", 300)
    patch(dict(WEIGHTS), delta, copy=True)


def full_spool(case: Case) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (case.here / "spool").open("w+b") as spool:
        case.patch.setattr(os, "pwrite", fail)
        diff(WEIGHTS, OTHER, spool=spool)


def shard(first: int, last: int, value: int = 0) -> dict[str, Tensor]:
    bits = np.full((last - first) * 2, value, np.uint32)
    return {"w": Tensor(F32, (4, 2), bits, (first, last))}


def rows_missing_in_the_base(case: Case) -> None:
    patch(shard(2, 4), diff(shard(0, 2), shard(0, 2, 1)))


def rows_of_a_new_tensor(case: Case) -> None:
    patch({}, diff({}, shard(0, 2)), copy=True)


def read_only_weights(case: Case) -> None:
    weights = {name: value.copy() for name, value in WEIGHTS.items()}
    for value in weights.values():
        value.flags.writeable = False
    patch(weights, DELTA)


def tied_weights_that_differ(case: Case) -> None:
    shared = np.zeros(4, np.float32)
    before, after = {"a": np.zeros(4, np.float32)}, {"a": np.ones(4, np.float32)}
    patch({"a": shared, "b": shared}, diff(before | {"b": shared}, after | {"b": shared}))


def same_rows_twice(case: Case) -> None:
    delta = diff(shard(0, 2), shard(0, 2, 1))
    weights = read_weights({"w": np.zeros((4, 2), np.float32)})
    make_absolute(weights, [delta, delta], digest(weights))


def delta_to_another_state(case: Case) -> None:
    make_absolute(FIRST, [DELTA], digest(FIRST), digest(FIRST).hex)


def relative_delta_written_as_absolute(case: Case) -> None:
    write_absolute(FIRST, DELTA)


def delta_that_links_to_itself(case: Case) -> None:
    path = case.here / "loop.safetensors"
    path.symlink_to(path)
    Delta.open(path)


def fifo_as_delta(case: Case) -> None:
    os.mkfifo(case.here / "delta.safetensors")
    Delta.open(case.here / "delta.safetensors")


PROVOCATIONS: list[Provocation] = [
    *(hostile(path) for path in sorted((HOSTILE / "files").glob("*.safetensors")) if "deeply" not in path.stem),
    *(hostile_block(path) for path in sorted((HOSTILE / "blocks").glob("*.json")) if "accepted" not in path.stem),
    directory_as_delta,
    lambda case: Delta.open(case.here / "delta.safetensors"),
    delta_that_links_to_itself,
    fifo_as_delta,
    lambda case: opened(case, b""),
    shrinking_file,
    full_spool,
    rewritten(format=None),
    without_index,
    lambda case: opened(case, with_index(DELTA, b"0000")),
    lambda case: opened(case, with_index(DELTA, b"")),
    lambda case: opened(case, with_index(DELTA, index_of(DELTA)[:-1])),
    unknown_digests,
    wrong_hash,
    rewritten(kind="other"),
    rewritten(before="text"),
    rewritten(removed='["w"]'),
    # The wrong base
    lambda case: DELTA.advance(digest(OTHER)),
    lambda case: patch(dict(OTHER), DELTA),
    lambda case: patch({"norm": WEIGHTS["norm"]}, DELTA),
    lambda case: patch(WEIGHTS | {"w": np.zeros(7, np.float32)}, DELTA),
    lambda case: patch({"w": WEIGHTS["w"]}, diff(WEIGHTS, {"w": OTHER["w"]}), copy=True),
    lambda case: patch(dict(WEIGHTS), DELTA, before=digest({"norm": WEIGHTS["norm"]})),
    rows_missing_in_the_base,
    lambda case: diff(WEIGHTS, OTHER, before=digest({"v": WEIGHTS["w"]})),
    # Patches that do not fit
    lambda case: patch(DELTA, WEIGHTS),  # type: ignore[arg-type]
    lambda case: changes(shard(0, 4), diff(shard(0, 4), shard(0, 4, 1)), "w", (2, 9)),
    lambda case: patch(dict(WEIGHTS), diff(WEIGHTS, WEIGHTS | {"v": OTHER["w"]})),
    read_only_weights,
    rows_of_a_new_tensor,
    tied_weights_that_differ,
    # Patches of absolute values
    delta_to_another_state,
    lambda case: make_absolute(FIRST, [diff(WEIGHTS, WEIGHTS | {"v": OTHER["w"]})], digest(FIRST)),
    lambda case: make_absolute(FIRST, [], digest(FIRST), digest(SECOND).hex),
    lambda case: merge_absolute(FIRST, [DELTA, DELTA], digest(FIRST)),
    lambda case: merge_absolute(FIRST, [DELTA], digest(FIRST)),
    same_rows_twice,
    relative_delta_written_as_absolute,
    lambda case: patch_checkpoint(case.here / "base", DELTA, case.here / "out"),
]
