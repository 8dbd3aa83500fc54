"""Groups tensors into the rows of the heat map: layers, embeddings, norms and heads, in model order.

Pure: uses only names and shapes. Knows no commits and no bucket.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["HeatRow", "rows_of"]

_MOST = 130
_FEW = 40  # rows other than layers; leaves room for the layers
_NUMBERED = re.compile(r"(.*?)\.?(?<![0-9A-Za-z_-])([0-9]{1,6})(?:\.|$)")
_EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b", re.IGNORECASE)
_HEAD = re.compile(r"head|\boutput\b|score|classifier", re.IGNORECASE)
_LEAF = re.compile(r"(.+)\.(?:weight|bias|gamma|beta)")


@dataclass(frozen=True)
class HeatRow:
    """Tensors that share a row."""

    label: str
    tensors: tuple[str, ...]
    parameters: int


def rows_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[HeatRow, ...]:
    """The rows of a run's tensors (name -> dtype, shape): embeddings, layers by number, norms, heads."""
    stacks: dict[str, dict[int, list[str]]] = {}
    others: dict[str, list[str]] = {}
    for name in tensors:
        found = _NUMBERED.match(name)
        if found:
            stacks.setdefault(found[1], {}).setdefault(int(found[2]), []).append(name)
        else:
            leaf = _LEAF.fullmatch(name)
            others.setdefault(leaf[1] if leaf else name, []).append(name)

    def row(label: str, names: Iterable[str]) -> HeatRow:
        members = tuple(names)
        return HeatRow(label, members, sum(math.prod(tensors[name][1]) for name in members))

    alone = [row(label, names) for label, names in sorted(others.items(), key=lambda one: (_place(one[0]), one[0]))]
    if len(alone) > _FEW:
        rest = alone[_FEW - 1 :]
        alone = [*alone[: _FEW - 1], row(f"{len(rest)} others", (name for one in rest for name in one.tensors))]
    numbered = [
        [row(f"{stack}.{number}".lstrip("."), names) for number, names in sorted(layers.items())]
        for stack, layers in sorted(stacks.items())
    ]
    layers = _merged(numbered, _MOST - len(alone))
    first = sum(_place(one.label) == 0 for one in alone)
    return (*alone[:first], *layers, *alone[first:])


def _place(label: str) -> int:
    """0: before the layers, 1: after them, 2: last."""
    return 0 if _EMBEDDING.search(label) else 2 if _HEAD.search(label) else 1


def _merged(stacks: Sequence[Sequence[HeatRow]], room: int) -> list[HeatRow]:
    """The layers of all stacks in at most `room` rows. If there are too many layers, neighbours share a row."""
    if len(stacks) > room:
        rows = [one for stack in stacks for one in stack]
        return [_together(rows, f"{len(rows)} layers")]
    size = 1
    while sum(math.ceil(len(stack) / size) for stack in stacks) > room:
        size += 1
    parts = [stack[begin : begin + size] for stack in stacks for begin in range(0, len(stack), size)]
    return [
        part[0] if len(part) == 1 else _together(part, f"{part[0].label}-{part[-1].label.rpartition('.')[2]}")
        for part in parts
    ]


def _together(rows: Sequence[HeatRow], label: str) -> HeatRow:
    return HeatRow(label, tuple(name for one in rows for name in one.tensors), sum(one.parameters for one in rows))
