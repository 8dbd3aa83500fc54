"""The publisher's two host copies of the weights: the published ones and the latest capture.

Synchronizes captures and diffs, so that a diff sees one complete capture and the trainer hardly ever waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from weightwire.delta import kinds_in
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.publisher.weight_arena import Batch, WeightArena
from weightwire.system import Stopped, in_order, to_the_end
from weightwire.weights import Rows, Schema, Tensor, Weights, check_schema

__all__ = ["HostCopies"]

T = TypeVar("T")


class HostCopies(Generic[T]):
    """`published` holds the last published weights, `latest` the last captured ones, which `advance_copy` reads.

    Buffers are allocated and their pages touched once. Without `latest` (`single`), a blocking publisher diffs
    the live weights. Tensors are in the schema's order; those of a shard have only its `rows`.

    Each capture has a ticket: any value but None. Once the capture has returned, its ticket is pending until it is
    taken together with the weights, or dropped. Each ticket is either taken or dropped, never both.
    `dropped(ticket, by)` is called if a later capture replaced it, with that capture's ticket as `by`, or None if the
    later capture failed halfway. It is called in a background thread that no interrupt reaches. The `gate` decides
    when a capture may begin.
    """

    published: WeightArena
    latest: WeightArena

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
        self.published = WeightArena(schema, rows, threads)
        self.latest = WeightArena({} if single else schema, rows, threads)
        self._kinds = kinds_in(self.published)
        self.gate = gate or CaptureGate()
        # Guarded by the gate's condition, like everything that captures and diffs share.
        self._pending: T | None = None
        self._reading: set[int] = set()  # batches

    @property
    def busy(self) -> bool:
        """Whether a diff still reads the capture, so that a new capture would wait."""
        return bool(self._reading)

    @property
    def waiting(self) -> bool:
        """Whether a capture is pending or in progress."""
        return self._pending is not None or self.gate.is_capturing

    @property
    def pending(self) -> T | None:
        """The ticket of the latest capture, if it has not been taken."""
        return self._pending

    def check(self, weights: Weights) -> dict[str, Tensor]:
        """The weights in the order of the schema. Raises SchemaChanged if they do not fit it."""
        check_schema(kinds_in(weights), self._kinds)
        return {name: weights[name] for name in self._kinds}

    def capture(self, weights: Weights, ticket: T, turn: int = 0) -> None:
        """Copies weights into `latest` and makes this the pending ticket.

        Waits only for captures by other threads, for batches that a running diff still reads, and, if it has a turn,
        while captures are held. If it raises, either nothing has changed or nothing is pending, unless an interrupt
        came too late to stop it.
        """
        if self.published and not self.latest:
            raise RuntimeError("a single copy cannot take a capture: diff the live weights")
        checked = self.check(weights)
        # In a separate thread, where no interrupt can separate steps that belong together.
        to_the_end(lambda stop: self._capture(checked, ticket, turn, stop))

    def take(self) -> T | None:
        """Takes the pending ticket, if any. Its weights stay in `latest` until they are released.

        Waits for a capture in progress to end. Releases the weights that were taken before.
        """
        with self.gate.changed:
            self._reading.clear()
            self.gate.changed.notify_all()
            with self.gate.between_captures():
                ticket, self._pending = self._pending, None
                if ticket is not None:
                    self._reading.update(range(len(self.latest.batches)))
                return ticket

    def release(self, batch: int) -> None:
        """Frees a batch of `latest` that the diff no longer needs. Used as `done` of `advance_copy`."""
        with self.gate.changed:
            self._reading.discard(batch)
            self.gate.changed.notify_all()

    def release_all(self) -> None:
        """Frees all batches: the diff has ended, successfully or not."""
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
        def work(batch: Batch) -> None:
            self._wait_for(batch.index, stop)
            batch.read(weights, self.latest.units(batch))

        for _ in in_order(work, self.latest.batches, self._threads):
            pass

    def _wait_for(self, batch: int, stop: threading.Event) -> None:
        if stop.is_set():
            raise Stopped
        if batch in self._reading:  # the set only shrinks during a capture, so no lock is needed here
            with self.gate.changed:
                self.gate.wait_until(lambda: batch not in self._reading, stop)
