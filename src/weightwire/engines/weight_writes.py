"""Writes to a running model's memory: prepared while it serves, then swapped in, and swapped back by `undo`.

A checkpoint tensor that fills its place as a whole is written block by block, and its digest is verified. All other
changes of one storage are joined, however many tensors they come from: a fused layer of 128 experts takes as many
writes as one of 8. They are verified by reading back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from weightwire import codec
from weightwire.codec import Digest, Layout, Patch
from weightwire.delta import BlockJob, Delta, Entry, decode_job
from weightwire.engines.weight_map import Copy, storage_of
from weightwire.errors import EngineError
from weightwire.weights import Bits, as_torch_integers, torch_integer_dtype

__all__ = ["ScatterPart", "Write", "changed_outside", "digested_copy", "join_parts", "widen", "writes_of"]

_U4 = np.dtype("<u4")
_LARGEST = 1 << 20  # units in a joined write: enough to be quick, small enough for several threads


class Write(Protocol):
    """Units of the model's memory and their new values. A second `swap` undoes the first."""

    @property
    def name(self) -> str: ...

    def swap(self) -> Digest | None:
        """Returns what it adds to the tensor's digest, if that is known."""

    def check(self) -> None:
        """Reads the written values back, where no digest covers them."""


def changed_outside(name: str) -> EngineError:
    return EngineError(
        f"tensor {name!r}: does not have the expected digest after the patch",
        hint="reload the model: its weights were changed from outside",
    )


# --- from patches ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScatterPart:
    """Changes of one tensor somewhere in a storage of the model."""

    name: str
    target: torch.Tensor  # any tensor in that storage
    at: npt.NDArray[np.int64]  # positions in the storage
    values: Bits


def writes_of(patch: Delta, job: BlockJob, copies: tuple[Copy, ...]) -> Iterator[Write | ScatterPart]:
    """The changes of one block of a tensor in each of its places."""
    entry, layout = job.entry, job.entry.layout
    found = decode_job(patch, job, None)
    begin, end = layout.span(job.index)
    digested = digested_copy(copies, layout)
    if digested is not None:
        first = digested.box.target_start + begin
        memory = _memory(digested.target)[first : first + end - begin]
        if digested.is_widened:
            yield _WidenedWrite(_widened(entry.name, memory, found), layout, begin)
        else:
            yield _HostWrite(entry.name, memory, found.positions, bytearray(found.values), layout, begin)
    yield from _parts(entry, [copy for copy in copies if copy is not digested], found, begin, end)


def digested_copy(copies: Iterable[Copy], layout: Layout) -> Copy | None:
    """The first copy that holds the whole tensor in one piece: the digest is computed there."""
    for copy in copies:
        if copy.target.device.type == "cpu" and copy.box.is_run and copy.box.count == layout.count:
            return copy
    return None


def _parts(entry: Entry, copies: list[Copy], found: codec.Patch, begin: int, end: int) -> Iterator[ScatterPart]:
    if not copies:
        return
    if found.positions is None:
        positions = np.arange(begin, end)
    else:
        positions = np.frombuffer(found.positions, _U4).astype(np.int64) + begin
    whole: Bits = np.frombuffer(bytes(found.values), f"<u{entry.dtype.unit}")
    for copy in copies:
        selection = copy.box.select(positions)
        values = whole[selection.chosen]
        if len(values):
            at = selection.positions.astype(np.int64) + copy.box.target_start
            yield ScatterPart(entry.name, copy.target, at, widen(values) if copy.is_widened else values)


def widen(values: Bits) -> Bits:
    """bfloat16 as float32."""
    wide: Bits = np.left_shift(values.astype("<u4"), np.uint32(16))
    return wide


def _widened(name: str, memory: Bits, found: codec.Patch) -> _HostWrite:
    values = widen(np.frombuffer(bytes(found.values), "<u2"))
    return _HostWrite(name, memory, found.positions, bytearray(values.tobytes()), None, expected=values)


def join_parts(parts: Iterable[ScatterPart]) -> Iterator[Write]:
    """Joins all parts in the same storage, sorted by position."""
    by_storage: dict[int, list[ScatterPart]] = {}
    for part in parts:
        by_storage.setdefault(storage_of(part.target), []).append(part)
    for several in by_storage.values():
        name, target = several[0].name, several[0].target
        at = np.concatenate([part.at for part in several])
        values = np.concatenate([part.values for part in several])
        if (np.diff(at) <= 0).any():
            order = np.argsort(at)
            at, values = at[order], values[order]
        for first in range(0, len(at), _LARGEST):
            chosen = slice(first, first + _LARGEST)
            yield from _scatter(name, target, at[chosen], values[chosen])


def _scatter(name: str, target: torch.Tensor, at: npt.NDArray[np.int64], values: Bits) -> Iterator[Write]:
    if target.device.type != "cpu":
        units, device = as_torch_integers(np.array(values)), target.device
        yield _DeviceWrite(name, _flat(target), torch.from_numpy(at).to(device), units.to(device))
        return
    while len(at):
        first = int(at[0])
        count = int(np.searchsorted(at, first + (1 << 32)))
        memory = _memory(target)[first : int(at[count - 1]) + 1]
        positions = (at[:count] - first).astype(_U4).tobytes()
        expected = values[:count]
        yield _HostWrite(name, memory, positions, bytearray(expected.tobytes()), None, expected=expected)
        at, values = at[count:], values[count:]


# --- kinds of writes ---------------------------------------------------------------------------------------------


@dataclass
class _HostWrite:
    name: str
    memory: Bits
    positions: bytes | None
    values: bytearray
    layout: Layout | None  # if `memory` is one whole block of the tensor: only then a digest is known
    begin: int = 0
    expected: Bits | None = None

    def swap(self) -> Digest | None:
        patch = Patch(self.positions, self.values)
        if self.layout is None:
            codec.swap_units(self.memory, patch, self.memory.dtype.itemsize, 0)
            return None
        return codec.swap_units(self.memory, patch, self.layout.word, self.layout.word_index(self.begin))

    def check(self) -> None:
        if self.expected is None:
            return
        held = self.memory if self.positions is None else self.memory[np.frombuffer(self.positions, _U4)]
        if not np.array_equal(held, self.expected):
            raise EngineError(
                f"tensor {self.name!r}: read-back differs from the written values", hint="reload the model"
            )


@dataclass
class _WidenedWrite:
    """Writes bfloat16 values to a whole block that the model holds in float32. The digest is over the high halves."""

    write: _HostWrite
    layout: Layout
    begin: int
    is_foreign: bool = False  # low halves were not zero: no version has such values

    @property
    def name(self) -> str:
        return self.write.name

    def swap(self) -> Digest:
        added = self._digest_change()
        self.write.swap()
        return added

    def _digest_change(self) -> Digest:
        """Reads only the words that are written: the rest of `narrow` stays undefined."""
        write, word = self.write, self.layout.word
        narrow: Bits = np.empty(len(write.memory), "<u2")
        if write.positions is None:
            narrow[:] = write.memory >> np.uint32(16)
            self.is_foreign |= bool((write.memory & np.uint32(0xFFFF)).any())
        else:
            per_word = word // 2
            words = np.frombuffer(write.positions, _U4).astype(np.int64) // per_word
            touched = words[:, None] * per_word + np.arange(per_word)
            held = write.memory[touched]
            narrow[touched] = held >> np.uint32(16)
            self.is_foreign |= bool((held & np.uint32(0xFFFF)).any())
        values = (np.frombuffer(write.values, "<u4") >> np.uint32(16)).astype("<u2")
        patch = Patch(write.positions, bytearray(values.tobytes()))
        return codec.swap_units(narrow, patch, word, self.layout.word_index(self.begin))

    def check(self) -> None:
        self.write.check()
        if self.is_foreign:
            raise changed_outside(self.name)


@dataclass
class _DeviceWrite:
    name: str
    memory: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor
    expected: torch.Tensor | None = None

    def swap(self) -> None:
        held = self.memory[self.positions]
        self.memory[self.positions] = self.values  # the last step that can fail; allocates nothing
        self.values, self.expected = held, self.values

    def check(self) -> None:
        if not torch.equal(self.memory[self.positions], self.expected):
            raise EngineError(
                f"tensor {self.name!r}: read-back differs from the written values", hint="reload the model"
            )


def _flat(target: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as integers."""
    flat = torch.empty(0, dtype=torch_integer_dtype(target.element_size()), device=target.device)
    return flat.set_(target.untyped_storage())


def _memory(target: torch.Tensor) -> Bits:
    units: Any = _flat(target).numpy()
    memory: Bits = units.view(f"<u{target.element_size()}")
    return memory
