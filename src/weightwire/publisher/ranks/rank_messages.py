"""What the ranks of one publisher tell each other: records of records, a few kilobytes each. Never weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from weightwire.chain import Commit, DataFile, Run, StageTiming
from weightwire.codec import Digest
from weightwire.delta import State, TensorState, add_digests
from weightwire.errors import WeightwireError
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

EVERY_RANK = "every rank must call publish() for every step, and close the publisher in the end"


class RankRun(msgspec.Struct, frozen=True):
    """The run that rank 0 has found, if there is one. It has an epoch once rank 0 has claimed it."""

    run: Run | None = None
    epoch: int = 0
    head: Commit | None = None

    @property
    def is_claimed(self) -> bool:
        return self.epoch > 0


class AnchorPart(msgspec.Struct, frozen=True):
    """A rank's part of an anchor: a file, or none if it holds nothing; or it failed."""

    version: int
    files: tuple[DataFile, ...] = ()
    failed: bool = False


class News(msgspec.Struct, frozen=True):
    """That a rank has weights to publish, and anchors it has uploaded. `go` is what rank 0 wants all to do next."""

    go: str = ""
    waiting: bool = False
    anchors: tuple[AnchorPart, ...] = ()


class Turn(msgspec.Struct, frozen=True):
    """The capture that a rank holds, and which of the trainer's steps it is."""

    turn: int
    step: int | None = None


class Recalled(msgspec.Struct, frozen=True):
    """The digests of a rank's rows of weights that were given; None if there were none, or other ones."""

    digests: dict[str, Digest] | None = None


class RankPart(msgspec.Struct, frozen=True):
    """A rank's part of a version, uploaded: what is to be added to the digests of the tensors that it changes."""

    added: dict[str, Digest]
    changed: int = 0
    files: tuple[DataFile, ...] = ()
    stages: dict[str, StageTiming] = {}


class Committed(msgspec.Struct, frozen=True):
    """What has become a version; that an anchor is to be made of it; and the run, if this has started it."""

    commit: Commit
    anchor: bool = False
    run: Run | None = None


def different_steps(said: Sequence[Turn]) -> WeightwireError | None:
    steps = {one.step for one in said}
    if len(steps) == 1:
        return None
    listed = ", ".join(f"rank {rank}: {one.step}" for rank, one in enumerate(said))
    return WeightwireError(f"the ranks publish different steps ({listed})", hint=EVERY_RANK)


def sum_states(schema: Schema, digests: Sequence[Mapping[str, Digest]], known: State | None = None) -> State:
    """The state of the whole, from what each rank adds to it."""
    sums = {name: one.digest for name, one in known.tensors.items()} if known else {}
    for name, added in ((name, added) for one in digests for name, added in one.items()):
        sums[name] = add_digests(sums.get(name, (0, 0)), added)
    return State({name: TensorState(*kind, sums.get(name, (0, 0))) for name, kind in schema.items()})


def slowest(stages: Sequence[Mapping[str, StageTiming]]) -> dict[str, StageTiming]:
    """All ranks work at the same time: the slowest counts, and the bytes of all."""
    names = dict.fromkeys(name for one in stages for name in one)
    found = {name: [one[name] for one in stages if name in one] for name in names}
    return {
        name: StageTiming(max(one.seconds for one in each), sum(one.bytes for one in each), max(one.at for one in each))
        for name, each in found.items()
    }
