"""The publisher's two host copies of the weights: what was last published, and what was captured last.

Keeps captures and diffs off each other's toes, so that a diff sees one whole capture and a trainer hardly ever waits.
Knows weights and threads; no bucket, no asyncio, and not what a ticket stands for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from weightwire.codec import Layout
from weightwire.publisher.aligned_memory import CACHE_LINE, aligned_memory
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.system import Stopped, in_order, to_the_end
from weightwire.weights import Dtype, Rows, Schema, Tensor, Weights, check_schema

__all__ = ["HostCopies"]

T = TypeVar("T")
BlockKey = tuple[str, int]
"""A tensor's name, and the index of one of its blocks: captures and diffs cut tensors in the same places."""

_BATCH = 4 << 20  # bytes; a model has hundreds of tensors that are not worth a job of their own


class HostCopies(Generic[T]):
    """`published` are the weights last published; `latest` is what was captured last, for `advance_copy` to read.

    Buffers are allocated, and their pages touched, once. With `single` there is no `latest`: who lets the trainer wait
    diffs the live weights. Both have the schema's order, and a shard's tensors the `rows` that it holds of them.

    A capture comes with a ticket: whatever the caller likes, but not None. It is pending until it is taken, together
    with the weights, or dropped; every ticket whose capture returned is one or the other in the end, once.
    `dropped(ticket, by)` hears of one that a later capture replaced `by` its own or, where that is None, lost: it
    failed after it had begun to overwrite the weights. It is called from a thread of ours, where no interrupt can cut
    it short. The `gate` says when a capture may begin.
    """

    published: dict[str, Tensor]
    latest: dict[str, Tensor]

    def __init__(
        self,
        schema: Schema,
        *,
        rows: Mapping[str, Rows] | None = None,
        single: bool = False,
        threads: int | None = None,
        dropped: Callable[[T, T | None], None] | None = None,
        gate: CaptureGate | None = None,
    ) -> None:
        self._threads = threads
        self._dropped = dropped
        self.published = _allocate(schema, rows or {}, threads)
        self.latest = {} if single else _allocate(schema, rows or {}, threads)
        self._layouts = {name: _layout(tensor) for name, tensor in self.published.items()}
        self._batches = [*_batches(self.latest)]
        self.gate = gate or CaptureGate()
        # Guarded by the gate's condition, as all that captures and diffs share.
        self._pending: T | None = None
        self._reading: set[BlockKey] = set()

    @property
    def busy(self) -> bool:
        """That a diff still reads what was captured, so that a capture would have to wait for it."""
        return bool(self._reading)

    @property
    def waiting(self) -> bool:
        """That something newer than what was taken last is there, or on its way."""
        return self._pending is not None or self.gate.is_capturing

    @property
    def pending(self) -> T | None:
        """The ticket of what was captured last, if it has not been taken."""
        return self._pending

    def check(self, weights: Weights) -> dict[str, Tensor]:
        """These weights, in the order of the schema; an error if it is not theirs."""
        check_schema(_kinds(weights), _kinds(self.published))
        return {name: weights[name] for name in self.published}

    def capture(self, weights: Weights, ticket: T, turn: int = 0) -> None:
        """Copies weights into `latest`, and makes this the pending ticket.

        Waits for nothing but captures by other threads, and blocks that a running diff still reads: it follows the
        diff as one wave follows another; and, if it has a turn, while captures are held. Where it raises, nothing has
        changed, or else nothing is pending; unless an interrupt came too late to stop it.
        """
        if self.published and not self.latest:
            raise RuntimeError("a single copy has no room for a capture: diff the live weights")
        checked = self.check(weights)
        # In a thread of its own, where nothing can come between two steps that belong together.
        to_the_end(lambda stop: self._capture(checked, ticket, turn, stop))

    def take(self) -> T | None:
        """The pending ticket, if there is one: what it stands for is in `latest`, and stays until it is released.

        Waits for a capture in progress to end. What was taken before counts as released.
        """
        with self.gate.changed:
            self._reading.clear()
            self.gate.changed.notify_all()
            with self.gate.between_captures():
                ticket, self._pending = self._pending, None
                if ticket is not None:
                    self._reading.update(block for batch in self._batches for block in batch)
                return ticket

    def release(self, name: str, block: int) -> None:
        """The diff no longer needs this block of `latest`: the `done` of `advance_copy`."""
        with self.gate.changed:
            self._reading.discard((name, block))
            self.gate.changed.notify_all()

    def release_all(self) -> None:
        """The diff has ended, one way or the other."""
        with self.gate.changed:
            self._reading.clear()
            self.gate.changed.notify_all()

    def _capture(self, weights: Weights, ticket: T, turn: int, stop: threading.Event) -> None:
        with self.gate.changed:
            self.gate.enter(turn, stop)
            replaced, self._pending = self._pending, None
        captured: T | None = None
        try:
            self._copy(weights, stop)
            captured = ticket
        finally:
            with self.gate.changed:
                self._pending = captured
                self.gate.leave()
            if replaced is not None and self._dropped:
                self._dropped(replaced, captured)

    def _copy(self, weights: Weights, stop: threading.Event) -> None:
        def work(batch: list[BlockKey]) -> None:
            for block in batch:
                self._wait_for(block, stop)
                name, index = block
                begin, end = self._layouts[name].span(index)
                weights[name].copy_to(begin, end, self.latest[name].bits[begin:end])

        for _ in in_order(work, self._batches, self._threads):
            pass

    def _wait_for(self, block: BlockKey, stop: threading.Event) -> None:
        if stop.is_set():
            raise Stopped
        if block in self._reading:  # which only shrinks during a capture: no need to hold up a diff by asking
            with self.gate.changed:
                self.gate.wait_until(lambda: block not in self._reading, stop)


def _allocate(schema: Schema, rows: Mapping[str, Rows], threads: int | None) -> dict[str, Tensor]:
    """Tensors of zeros, one behind the other in one piece of memory, which large pages fit best."""
    places: dict[str, int] = {}
    size = 0
    for name, (dtype, shape) in schema.items():
        places[name] = size
        nbytes = Layout.of(dtype, shape, rows.get(name)).count * dtype.unit
        size += -(-nbytes // CACHE_LINE) * CACHE_LINE  # no two tensors share one
    memory = aligned_memory(size)
    _touch(memory, threads)
    return {name: _place(memory, places[name], dtype, shape, rows.get(name)) for name, (dtype, shape) in schema.items()}


def _touch(memory: npt.NDArray[np.uint8], threads: int | None) -> None:
    """The system gives a page only to who writes to it, which takes longer than a copy: not while a trainer waits."""
    for _ in in_order(lambda at: memory[at : at + _BATCH].fill(0), range(0, len(memory), _BATCH), threads):
        pass


def _place(memory: npt.NDArray[np.uint8], at: int, dtype: Dtype, shape: tuple[int, ...], rows: Rows | None) -> Tensor:
    count = Layout.of(dtype, shape, rows).count
    return Tensor(dtype, shape, np.frombuffer(memory, f"<u{dtype.unit}", count, at), rows)


def _batches(weights: Weights) -> Iterator[list[BlockKey]]:
    """All blocks, in order; together as many as make a copy worth a job."""
    batch: list[BlockKey] = []
    nbytes = 0
    for name, tensor in weights.items():
        layout = _layout(tensor)
        for index in range(layout.blocks):
            begin, end = layout.span(index)
            batch.append((name, index))
            nbytes += (end - begin) * tensor.dtype.unit
            if nbytes >= _BATCH:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _layout(tensor: Tensor) -> Layout:
    return Layout.of(tensor.dtype, tensor.shape, tensor.rows)


def _kinds(weights: Weights) -> dict[str, tuple[Dtype, tuple[int, ...], Rows | None]]:
    return {name: (tensor.dtype, tensor.shape, tensor.rows) for name, tensor in weights.items()}
