"""Host copies: captures are complete, follow a diff, replace each other, and survive interrupts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from support.captures import (
    BF16,
    F32,
    SCHEMA,
    U8,
    CopyGate,
    eventually,
    filled,
    interrupt_own_work,
    interrupt_waiting_capture,
    marks,
)
from weightwire import State, Tensor, digest
from weightwire.codec.block_layout import BLOCK
from weightwire.errors import SchemaChanged
from weightwire.publisher.copy_advance import advance_copy
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.weight_arena import WeightArena
from weightwire.weights.schema import Schema
from weightwire.weights.tensor import Weights

# Three blocks of `embed`, then `head`, then `norm` and `scale` together.
BATCHES = [0, 1, 2, 3, 4]


def part(weights: WeightArena, batch: int) -> set[int]:
    """The marks in one batch."""
    return {int(mark) for mark in np.unique(weights.units(weights.batches[batch]))}


@contextmanager
def released(copies: HostCopies[int]) -> Iterator[None]:
    """Releases all batches after a test, so that a failed test does not leave a waiting thread."""
    try:
        yield
    finally:
        copies.release_all()


def test_copies_have_the_schema_and_its_order() -> None:
    copies = HostCopies[int](SCHEMA)
    for weights in (copies.published, copies.latest):
        assert [*weights.values()] == [weights[name] for name in weights]
        assert [(name, (t.dtype, t.shape)) for name, t in weights.items()] == list(SCHEMA.items())
        assert marks(weights) == {0}
        assert all(tensor.bits.flags.writeable for tensor in weights.values())


def test_no_two_tensors_share_memory() -> None:
    copies = HostCopies[int](SCHEMA)
    tensors = [*copies.published.values(), *copies.latest.values()]
    for mark, tensor in enumerate(tensors):
        tensor.bits[:] = mark
    for mark, tensor in enumerate(tensors):
        assert (tensor.bits == mark).all()


def test_buffers_are_reused() -> None:
    copies = HostCopies[int](SCHEMA)
    places = [tensor.bits.ctypes.data for tensor in copies.latest.values()]
    for mark in (1, 2):
        copies.capture(filled(mark), mark)
        copies.take()
        copies.release_all()
    assert [tensor.bits.ctypes.data for tensor in copies.latest.values()] == places


def test_an_empty_schema_can_be_captured() -> None:
    copies = HostCopies[int]({})
    copies.capture({}, 1)
    assert copies.take() == 1


def test_a_single_copy_refuses_captures() -> None:
    copies = HostCopies[int](SCHEMA, single=True)
    assert not copies.latest
    assert list(copies.check(filled(1))) == list(SCHEMA)
    with pytest.raises(RuntimeError, match="diff the live weights"):
        copies.capture(filled(1), 1)


def test_a_rank_captures_only_its_rows() -> None:
    copies = HostCopies[int]({"head": (BF16, (64, 100)), "norm": (F32, (5,))}, rows={"head": (16, 32)})
    shard = Tensor(BF16, (64, 100), np.full(1600, 7, np.uint16), (16, 32))
    copies.capture({"head": shard, "norm": filled(7)["norm"]}, 1)
    assert (copies.latest["head"].rows, copies.latest["head"].count) == ((16, 32), 1600)
    assert marks(copies.latest) == {7}
    with pytest.raises(SchemaChanged, match="BF16 \\[64, 100\\], but BF16 \\[64, 100\\] rows 16 to 32 in the run"):
        copies.capture({"head": filled(7)["head"], "norm": filled(7)["norm"]}, 2)


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_a_capture_is_taken_once(threads: int | None) -> None:
    copies = HostCopies[str](SCHEMA, threads=threads)
    assert copies.take() is None
    copies.capture(filled(1), "one")
    assert copies.take() == "one"
    assert marks(copies.latest) == {1}
    assert marks(copies.published) == {0}
    assert copies.take() is None


def test_the_order_of_the_source_does_not_matter() -> None:
    copies = HostCopies[int](SCHEMA)
    copies.capture(dict(reversed(filled(3).items())), 3)
    assert copies.take() == 3
    assert (list(copies.latest), marks(copies.latest)) == (list(SCHEMA), {3})


def test_captures_replace_each_other() -> None:
    dropped: list[tuple[int, int | None]] = []
    copies = HostCopies[int](SCHEMA, dropped=lambda ticket, by: dropped.append((ticket, by)))
    for mark in (1, 2, 3):
        copies.capture(filled(mark), mark)
    assert dropped == [(1, 2), (2, 3)]
    assert copies.take() == 3
    assert marks(copies.latest) == {3}
    copies.release_all()
    copies.capture(filled(4), 4)
    assert dropped == [(1, 2), (2, 3)]  # the third was taken


def without(name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in filled(9).items() if other != name}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (without("norm"), "tensor 'norm' of the run is missing"),
        ({**filled(9), "more": filled(9)["norm"]}, "tensor 'more' is not in the run"),
        ({**filled(9), "head": filled(9)["norm"]}, "tensor 'head': is F32 [5], but BF16 [64, 100] in the run"),
        (
            {**filled(9), "head": Tensor(BF16, (100, 64), filled(9)["head"].bits), "scale": filled(9)["norm"]},
            "tensor 'head': is BF16 [100, 64], but BF16 [64, 100] in the run",
        ),
        ({}, "5 tensors ('embed', 'head', 'none', ...) of the run are missing"),
    ],
)
def test_a_changed_schema_is_refused_before_anything_is_copied(weights: Weights, message: str) -> None:
    dropped: list[int] = []
    copies = HostCopies[int](SCHEMA, dropped=lambda ticket, by: dropped.append(ticket))
    copies.capture(filled(1), 1)
    with pytest.raises(SchemaChanged) as caught:
        copies.capture(weights, 2)
    assert caught.value.message == message
    assert "another URL" in (caught.value.hint or "")
    assert copies.take() == 1
    assert (marks(copies.latest), dropped) == ({1}, [])


def test_a_capture_follows_the_diff_batch_by_batch(pool: ThreadPoolExecutor) -> None:
    copies = HostCopies[int](SCHEMA, threads=1)
    copies.capture(filled(1), 1)
    copies.take()
    capturing = pool.submit(copies.capture, filled(2), 2)
    with released(copies):
        for at, batch in enumerate(BATCHES):
            assert not capturing.done()
            assert all(part(copies.latest, later) == {1} for later in BATCHES[at:])
            copies.release(batch)
            assert eventually(lambda batch=batch: part(copies.latest, batch) == {2})  # type: ignore[misc]
        capturing.result(60)
    assert copies.take() == 2


def test_a_capture_waits_for_a_batch_that_is_still_read(pool: ThreadPoolExecutor) -> None:
    copies = HostCopies[int](SCHEMA, threads=2)
    copies.capture(filled(1), 1)
    copies.take()
    capturing = pool.submit(copies.capture, filled(2), 2)
    with released(copies):
        for batch in BATCHES[1:]:
            copies.release(batch)
        time.sleep(0.1)
        assert not capturing.done()
        assert part(copies.latest, BATCHES[0]) == {1}
        copies.release(BATCHES[0])
        capturing.result(60)
    assert marks(copies.latest) == {2}


def test_a_capture_does_not_wait_for_a_diff_that_ended(pool: ThreadPoolExecutor) -> None:
    copies = HostCopies[int](SCHEMA)
    for end in (copies.release_all, copies.take):
        copies.capture(filled(1), 1)
        assert copies.take() == 1
        capturing = pool.submit(copies.capture, filled(2), 2)
        time.sleep(0.02)
        assert not capturing.done()
        assert end() in (None, 2)  # a second take waits for the capture that it released
        capturing.result(60)
        copies.take()
        copies.release_all()


def test_a_capture_does_not_wait_if_nothing_was_taken() -> None:
    copies = HostCopies[int](SCHEMA)
    assert copies.take() is None
    copies.capture(filled(1), 1)
    copies.capture(filled(2), 2)


def test_a_diff_releases_its_blocks() -> None:
    copies = HostCopies[int](SCHEMA)
    copies.capture(filled(1), 1)
    copies.take()
    before = digest(copies.published)
    made = advance_copy(copies.published, copies.latest, done=copies.release).diff(before)
    assert made.after == digest(filled(1)).hex
    copies.capture(filled(2), 2)  # would otherwise wait forever


def test_take_waits_for_a_capture_in_progress(pool: ThreadPoolExecutor, gate: CopyGate) -> None:
    copies = HostCopies[int](SCHEMA)
    copies.capture(filled(1), 1)
    gate.open.clear()
    capturing = pool.submit(copies.capture, filled(2), 2)
    assert eventually(lambda: gate.copies > len(BATCHES))
    taking = pool.submit(copies.take)
    time.sleep(0.02)
    assert not taking.done()
    gate.open.set()
    assert taking.result(60) == 2
    assert marks(copies.latest) == {2}
    capturing.result(60)


def test_a_waiting_diff_goes_before_the_next_capture(pool: ThreadPoolExecutor, gate: CopyGate) -> None:
    """Otherwise a trainer that publishes without a pause would starve it."""
    copies = HostCopies[int](SCHEMA)
    gate.open.clear()
    pool.submit(copies.capture, filled(1), 1)
    assert eventually(lambda: gate.copies > 0)
    taking = pool.submit(copies.take)
    assert eventually(lambda: copies.gate._takers > 0)
    second = pool.submit(copies.capture, filled(2), 2)
    gate.open.set()
    assert taking.result(60) == 1
    assert marks(copies.latest) == {1}
    copies.release_all()
    second.result(60)
    assert copies.take() == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_a_diff_never_sees_parts_of_two_captures(pool: ThreadPoolExecutor, threads: int) -> None:
    """Three trainers that capture constantly, and a slow reader that releases batch by batch."""
    dropped: list[int] = []
    copies = HostCopies[int](SCHEMA, threads=threads, dropped=lambda ticket, by: dropped.append(ticket))
    finished = threading.Event()

    def hammer(first: int) -> list[int]:
        tickets = range(first, first + 15)
        for mark in tickets:
            copies.capture(filled(mark), mark)
        return list(tickets)

    def follow() -> list[tuple[int, set[int]]]:
        taken: list[tuple[int, set[int]]] = []
        last = False
        while not last:
            last = finished.is_set()  # one more round after that
            ticket = copies.take()
            if ticket is not None:
                taken.append((ticket, set()))
                for batch in BATCHES:
                    taken[-1][1].update(part(copies.latest, batch))
                    copies.release(batch)
        return taken

    following = pool.submit(follow)
    hammering = [pool.submit(hammer, first) for first in (10, 40, 70)]
    given = [ticket for one in hammering for ticket in one.result(60)]
    finished.set()
    taken = following.result(60)
    assert taken
    assert all(seen == {ticket} for ticket, seen in taken)
    assert sorted([ticket for ticket, _ in taken] + dropped) == sorted(given)


def test_every_delta_under_constant_captures_is_one_capture(pool: ThreadPoolExecutor) -> None:
    """With the real diff, every version is one complete capture."""
    schema: Schema = {"a": (BF16, (300, 128)), "b": (F32, (77,)), "c": (U8, (BLOCK + 500,))}
    copies = HostCopies[int](schema)
    finished = threading.Event()

    def hammer() -> None:
        mark = 0
        while not finished.is_set():
            mark = mark % 250 + 1
            copies.capture(filled(mark, schema), mark)

    def publish(ticket: int, state: State) -> State:
        made = advance_copy(copies.published, copies.latest, done=copies.release).diff(state)
        assert made.after == digest(filled(ticket, schema)).hex
        assert marks(copies.published) == {ticket}
        return made.advance(state)

    hammering = pool.submit(hammer)
    state, chain = digest(copies.published), 0
    try:
        while chain < 6:
            ticket = copies.take()
            if ticket is not None:
                state, chain = publish(ticket, state), chain + 1
    finally:
        finished.set()
        copies.release_all()
    hammering.result(60)


def test_a_capture_that_fails_halfway_drops_the_pending_one(gate: CopyGate) -> None:
    dropped: list[tuple[int, int | None]] = []
    copies = HostCopies[int](SCHEMA, threads=1, dropped=lambda ticket, by: dropped.append((ticket, by)))
    copies.capture(filled(1), 1)

    def fail(count: int) -> None:
        if count == len(BATCHES) + 2:
            raise MemoryError

    gate.before = fail
    with pytest.raises(MemoryError):
        copies.capture(filled(2), 2)
    assert marks(copies.latest) == {1, 2}
    assert dropped == [(1, None)]
    assert copies.take() is None
    gate.before = lambda count: None
    copies.capture(filled(3), 3)
    assert (copies.take(), marks(copies.latest)) == (3, {3})
    assert dropped == [(1, None)]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_halfway_drops_the_pending_capture(gate: CopyGate) -> None:
    dropped: list[tuple[int, int | None]] = []
    copies = HostCopies[int](SCHEMA, threads=1, dropped=lambda ticket, by: dropped.append((ticket, by)))
    copies.capture(filled(1), 1)
    gate.before = lambda count: interrupt_own_work() if count == len(BATCHES) + 1 else None
    with pytest.raises(KeyboardInterrupt):
        copies.capture(filled(2), 2)
    assert marks(copies.latest) == {1, 2}
    assert gate.copies == len(BATCHES) + 2  # it stopped at once
    assert dropped == [(1, None)]
    assert copies.take() is None


@pytest.mark.usefixtures("interruptible")
def test_a_late_interrupt_changes_nothing(gate: CopyGate) -> None:
    dropped: list[tuple[int, int | None]] = []
    copies = HostCopies[int](SCHEMA, threads=1, dropped=lambda ticket, by: dropped.append((ticket, by)))
    copies.capture(filled(1), 1)
    gate.before = lambda count: interrupt_own_work() if count == 2 * len(BATCHES) - 1 else None
    with pytest.raises(KeyboardInterrupt):
        copies.capture(filled(2), 2)
    assert dropped == [(1, 2)]
    assert (copies.take(), marks(copies.latest)) == (2, {2})


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_wait_for_a_diff(pool: ThreadPoolExecutor) -> None:
    """Even if the diff never ends. Its weights are unchanged."""
    copies = HostCopies[int](SCHEMA)
    copies.capture(filled(1), 1)
    copies.take()
    pool.submit(interrupt_waiting_capture)
    with pytest.raises(KeyboardInterrupt):
        copies.capture(filled(2), 2)
    assert marks(copies.latest) == {1}
    copies.release_all()
    assert copies.take() is None
    copies.capture(filled(3), 3)
    assert copies.take() == 3


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_wait_for_a_turn(pool: ThreadPoolExecutor, gate: CopyGate) -> None:
    copies = HostCopies[int](SCHEMA)
    gate.open.clear()
    first = pool.submit(copies.capture, filled(1), 1)
    assert eventually(lambda: gate.copies > 0)
    pool.submit(interrupt_waiting_capture)
    with pytest.raises(KeyboardInterrupt):
        copies.capture(filled(2), 2)
    gate.open.set()
    first.result(60)
    assert (copies.take(), marks(copies.latest)) == (1, {1})
