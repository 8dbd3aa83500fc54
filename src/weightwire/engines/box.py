"""Regular sets of units: the same units in a checkpoint tensor and in a model's memory.

A box is a slice, a transposition or a blocked layout, described by strides. Whatever a loader or a kernel does to a
tensor without computing anything is a few boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Box", "PositionArray", "Selection", "boxes_of"]

PositionArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Selection:
    """Some of a tensor's changes: their indices, and their positions from the target's first unit."""

    chosen: slice | npt.NDArray[np.int64]
    positions: PositionArray


@dataclass(frozen=True)
class LocatedPositions:
    """Like a Selection, always with the indices of the changes."""

    chosen: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Box:
    """The same units in a checkpoint tensor (`start`, `strides`) and in a model's storage (`target_...`).

    Dimensions are sorted by descending stride in the checkpoint tensor. Those that are contiguous in both are joined.
    """

    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    target_start: int
    target_strides: tuple[int, ...]

    @staticmethod
    def of(source: torch.Tensor, target: torch.Tensor) -> Box:
        dims = [
            (size, *strides)
            for size, *strides in zip(source.shape, source.stride(), target.stride(), strict=True)
            if size > 1
        ]
        joined: list[tuple[int, int, int]] = []
        for size, stride, target_stride in sorted(dims, key=lambda dim: -dim[1]):
            if joined and joined[-1][1:] == (size * stride, size * target_stride):
                size *= joined.pop()[0]
            joined.append((size, stride, target_stride))
        return Box(
            tuple(dim[0] for dim in joined) if source.numel() else (0,),
            source.storage_offset(),
            tuple(dim[1] for dim in joined) if source.numel() else (1,),
            target.storage_offset(),
            tuple(dim[2] for dim in joined) if source.numel() else (1,),
        )

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def reach(self) -> int:
        """The number of units from its first to its last in the checkpoint tensor."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_run(self) -> bool:
        """Whether it is contiguous on both sides."""
        return not self.shape or (self.strides == (1,) and self.target_strides == (1,))

    @property
    def is_nested(self) -> bool:
        """Whether a position has unique coordinates, as in a slice of a tensor."""
        reach = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if stride < reach:
                return False
            reach = stride * size
        return True

    def select(self, positions: PositionArray) -> Selection:
        """Selects those of the ascending positions in the checkpoint tensor that are in this box."""
        if self.is_run:
            first, last = np.searchsorted(positions, [self.start, self.start + self.count])
            return Selection(slice(int(first), int(last)), positions[first:last] - positions.dtype.type(self.start))
        first, last = np.searchsorted(positions, [self.start, self.start + self.reach])
        found = self.locate(positions[first:last])
        return Selection(found.chosen + first, found.positions)

    def locate(self, positions: PositionArray) -> LocatedPositions:
        """Like `select`, for positions in any order. Looks at all of them."""
        rest = positions.astype(np.int64) - self.start
        inside = rest >= 0
        target = np.zeros(len(rest), np.int64)
        for size, stride, target_stride in zip(self.shape, self.strides, self.target_strides, strict=True):
            at = rest // stride  # quicker than divmod
            rest -= at * stride
            inside &= at < size
            target += at * target_stride
        inside &= rest == 0
        chosen = np.flatnonzero(inside)
        return LocatedPositions(chosen, target[chosen])


# --- boxes from positions ----------------------------------------------------------------------------------------

_Dims = tuple[tuple[int, int, int], ...]  # size, stride and target stride, the outermost first


def boxes_of(sources: PositionArray, targets: PositionArray) -> Iterator[Box]:
    """The boxes that map each source position (ascending) to its target, as few as a greedy search finds."""
    todo: list[tuple[PositionArray, PositionArray, _Dims]] = [(sources, targets, ())]
    while todo:
        source, target, inner = todo.pop()
        if len(source) == 0:
            continue
        size, is_regular = _first_run(source, target)
        if size == len(source):
            yield _box(source, target, inner)
            continue
        rows = is_regular.nonzero()[0]  # the first rows that are not like the first one
        whole = size * (int(rows[0]) if len(rows) else len(source) // size)
        todo.append((source[whole:], target[whole:], inner))
        dim = (size, int(source[1] - source[0]), int(target[1] - target[0]))
        todo.append((source[:whole:size], target[:whole:size], (dim, *inner)))


def _first_run(source: PositionArray, target: PositionArray) -> tuple[int, npt.NDArray[np.bool_]]:
    """The number of positions in the first arithmetic run, and which of the later rows of that size differ from it."""
    if len(source) == 1:
        return 1, np.zeros(1, np.bool_)
    steps, target_steps = np.diff(source), np.diff(target)
    breaks = (steps != steps[0]) | (target_steps != target_steps[0])
    size = int(breaks.argmax()) + 1 if breaks.any() else len(source)
    count = len(source) // size
    inside = np.append(breaks, True)[: count * size].reshape(count, size)[:, :-1]
    return size, np.asarray(inside.any(axis=1))


def _box(source: PositionArray, target: PositionArray, inner: _Dims) -> Box:
    dims = inner
    if len(source) > 1:
        dims = ((len(source), int(source[1] - source[0]), int(target[1] - target[0])), *inner)
    return Box(
        tuple(dim[0] for dim in dims),
        int(source[0]),
        tuple(dim[1] for dim in dims),
        int(target[0]),
        tuple(dim[2] for dim in dims),
    )
