"""Captures of several ranks are held and released by turn."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from support.captures import SCHEMA, CopyGate, eventually, filled, interrupt_waiting_capture, marks
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.publisher.host_copies import HostCopies
from weightwire.system import Stopped


def test_captures_are_held_and_released_by_turn(pool: ThreadPoolExecutor) -> None:
    """This is how several ranks agree on one capture."""
    copies = HostCopies[str](SCHEMA)
    copies.capture(filled(1), "one", 1)
    assert copies.gate.hold() == 1

    def go_on() -> None:
        for turn in (2, 3):
            copies.capture(filled(turn), str(turn), turn)

    later = pool.submit(go_on)
    time.sleep(0.1)
    assert copies.pending == "one"
    assert not copies.gate.reached(2)

    copies.gate.let(2)
    assert eventually(lambda: copies.gate.reached(2))
    assert not later.done()
    assert copies.take() == "2"
    assert marks(copies.latest) == {2}
    copies.release_all()

    copies.gate.let(None)
    later.result(60)
    assert copies.take() == "3"


def test_holding_waits_for_a_capture_in_progress(pool: ThreadPoolExecutor, gate: CopyGate) -> None:
    copies = HostCopies[str](SCHEMA)
    gate.open.clear()
    capturing = pool.submit(copies.capture, filled(1), "one", 1)
    assert eventually(lambda: gate.copies > 0)
    held = pool.submit(copies.gate.hold)
    time.sleep(0.05)
    assert not held.done()
    assert not copies.gate.reached(1)
    gate.open.set()
    assert held.result(60) == 1
    assert copies.gate.reached(1)
    capturing.result(60)


def test_a_skipped_turn_counts_as_reached() -> None:
    copies = HostCopies[str](SCHEMA)
    copies.capture(filled(1), "one", 1)
    copies.gate.skip(2)
    assert copies.gate.hold() == 2
    assert copies.gate.reached(2)
    assert copies.take() == "one"


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_wait_for_the_gate(pool: ThreadPoolExecutor) -> None:
    copies = HostCopies[str](SCHEMA)
    copies.gate.hold()
    pool.submit(interrupt_waiting_capture)
    with pytest.raises(KeyboardInterrupt):
        copies.capture(filled(1), "one", 1)
    copies.gate.let(None)
    assert copies.take() is None


def test_no_capture_begins_while_a_diff_waits_for_the_one_in_progress(pool: ThreadPoolExecutor) -> None:
    gate, never = CaptureGate(), threading.Event()
    never.set()  # a capture that would wait gives up at once

    def take() -> None:
        with gate.changed, gate.between_captures():
            pass

    with gate.changed:
        gate.enter(0, never)
    taking = pool.submit(take)
    assert eventually(lambda: gate._takers > 0)
    with gate.changed:
        gate.leave()
        with suppress(Stopped):
            gate.enter(0, never)
        began = gate.is_capturing
        gate.leave()
    assert not began
    taking.result(60)
    with gate.changed:
        gate.enter(0, never)
