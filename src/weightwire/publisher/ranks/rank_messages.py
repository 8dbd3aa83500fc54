"""The messages between the ranks of one publisher: a few kilobytes each, never weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from weightwire.chain import Commit, DataFile, Run, StageTiming
from weightwire.codec import Digest
from weightwire.delta import State, TensorState, add_digests
from weightwire.errors import NotPublished, WeightwireError
from weightwire.weights import Schema

__all__ = [
    "EVERY_RANK",
    "AnchorPart",
    "Committed",
    "News",
    "RankPart",
    "RankRun",
    "Recalled",
    "Turn",
    "different_steps",
    "slowest",
    "sum_states",
]

EVERY_RANK = "call publish() for every step on every rank, and close every publisher at the end"


class RankRun(msgspec.Struct, frozen=True):
    """The run that rank 0 found, if any. It has an epoch once rank 0 has claimed it."""

    run: Run | None = None
    epoch: int = 0
    head: Commit | None = None

    @property
    def is_claimed(self) -> bool:
        return self.epoch > 0


class AnchorPart(msgspec.Struct, frozen=True):
    """A rank's part of an anchor. `files` is empty if the rank has no rows, or if it `failed`."""

    version: int
    files: tuple[DataFile, ...] = ()
    failed: bool = False


class News(msgspec.Struct, frozen=True):
    """Whether a rank has weights to publish, and its uploaded anchors. `order` is set by rank 0."""

    order: str = ""
    waiting: bool = False
    anchors: tuple[AnchorPart, ...] = ()


class Turn(msgspec.Struct, frozen=True):
    """The turn of a rank's capture, and its training step."""

    turn: int
    step: int | None = None


class Recalled(msgspec.Struct, frozen=True):
    """The digests of a rank's rows of `published` or `base`; None if they were not given or do not fit."""

    digests: dict[str, Digest] | None = None


class RankPart(msgspec.Struct, frozen=True):
    """A rank's uploaded part of a version. `added` is the change of the tensors' digests."""

    added: dict[str, Digest]
    changed: int = 0
    files: tuple[DataFile, ...] = ()
    stages: dict[str, StageTiming] = {}


class Committed(msgspec.Struct, frozen=True):
    """A committed version, whether an anchor of it is due, and the run if this commit started it."""

    commit: Commit
    anchor: bool = False
    run: Run | None = None


def different_steps(turns: Sequence[Turn]) -> WeightwireError | None:
    steps = {one.step for one in turns}
    if len(steps) == 1:
        return None
    listed = ", ".join(f"rank {rank}: {one.step}" for rank, one in enumerate(turns))
    return NotPublished(f"the ranks publish different steps ({listed})", hint=EVERY_RANK)


def sum_states(schema: Schema, digests: Sequence[Mapping[str, Digest]], known: State | None = None) -> State:
    """The state of the whole model: the known state plus the changes of all ranks."""
    sums = {name: one.digest for name, one in known.tensors.items()} if known else {}
    for name, added in ((name, added) for one in digests for name, added in one.items()):
        sums[name] = add_digests(sums.get(name, (0, 0)), added)
    return State({name: TensorState(*kind, sums.get(name, (0, 0))) for name, kind in schema.items()})


def slowest(stages: Sequence[Mapping[str, StageTiming]]) -> dict[str, StageTiming]:
    """Stage timings of all ranks, which work in parallel: the longest time and the sum of the bytes."""
    names = dict.fromkeys(name for one in stages for name in one)
    found = {name: [one[name] for one in stages if name in one] for name in names}
    return {
        name: StageTiming(max(one.seconds for one in each), sum(one.bytes for one in each), max(one.at for one in each))
        for name, each in found.items()
    }
