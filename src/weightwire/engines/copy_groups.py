"""Tensors that were fused into one, such as experts: their changes are located together.

The tensors of a group differ only by where their copies start in the model. So the work for a patch grows with its
changes, and hardly with the number of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire.codec import Layout
from weightwire.delta import Delta, Entry, coo_changes
from weightwire.engines.weight_map import Copy, storage_of
from weightwire.engines.weight_writes import ScatterPart, digested_copy, widen
from weightwire.weights import Bits, Schema

__all__ = ["CopyGroups"]

_UnsignedPositions = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class _CopyGroup:
    copies: tuple[Copy, ...]  # of its first tensor
    starts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each tensor's copies, in the model

    def parts(self, names: list[str], positions: list[_UnsignedPositions], values: list[Bits]) -> Iterator[ScatterPart]:
        """The changes of some of its tensors, one part per copy."""
        counts = [len(one) for one in positions]
        starts = np.array([self.starts[name] for name in names], np.int64)
        at, units = np.concatenate(positions), np.concatenate(values)
        for number, copy in enumerate(self.copies):
            found = copy.box.locate(at)
            if len(found.chosen):
                targets = found.positions + np.repeat(starts[:, number], counts)[found.chosen]
                chosen = units[found.chosen]
                yield ScatterPart(names[0], copy.target, targets, widen(chosen) if copy.is_widened else chosen)


class CopyGroups:
    """Groups the copies of a model's tensors, except of those that the model holds in one piece.

    Such a tensor is written alone, because its digest is computed there.
    """

    def __init__(self, copies: Mapping[str, tuple[Copy, ...]], schema: Schema) -> None:
        self._group_of: dict[str, _CopyGroup] = {}
        known: dict[tuple[object, ...], _CopyGroup] = {}
        for name, several in copies.items():
            if digested_copy(several, Layout.of(*schema[name])) is None:
                key = tuple((replace(one.box, target_start=0), storage_of(one.target)) for one in several)
                group = known.setdefault((schema[name][0], *key), _CopyGroup(several))
                group.starts[name] = tuple(one.box.target_start for one in several)
                self._group_of[name] = group

    def covers(self, entry: Entry) -> bool:
        return entry.coo and entry.name in self._group_of

    def parts_of(self, patch: Delta) -> Iterator[ScatterPart]:
        """The changes of all tensors in groups, except of those that the patch holds as a whole."""
        found: dict[int, tuple[list[str], list[_UnsignedPositions], list[Bits]]] = {}
        for entry, positions, values in coo_changes(patch, filter(self.covers, patch.entries.values())):
            several = found.setdefault(id(self._group_of[entry.name]), ([], [], []))
            several[0].append(entry.name)
            several[1].append(positions)
            several[2].append(values)
        for names, at, units in found.values():
            yield from self._group_of[names[0]].parts(names, at, units)
