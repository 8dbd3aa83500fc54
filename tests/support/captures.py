"""Marked weights, and copies that stop halfway."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from weightwire import Tensor
from weightwire.codec.block_layout import BLOCK, Layout
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.publisher.weight_arena import Batch
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.schema import Schema
from weightwire.weights.tensor import Bits, Weights

BF16, F32, U8 = (DTYPES[name] for name in ("BF16", "F32", "U8"))

SCHEMA: Schema = {
    "embed": (U8, (3 * BLOCK,)),
    "norm": (F32, (5,)),
    "none": (BF16, (4, 0)),
    "head": (BF16, (64, 100)),
    "scale": (F32, ()),
}


def filled(mark: int, schema: Schema = SCHEMA) -> dict[str, Tensor]:
    """Weights in which every unit is the mark."""
    return {
        name: Tensor(dtype, shape, np.full(Layout.of(dtype, shape).count, mark, f"<u{dtype.unit}"))
        for name, (dtype, shape) in schema.items()
    }


def marks(weights: Weights) -> set[int]:
    return {int(mark) for tensor in weights.values() for mark in np.unique(tensor.bits)}


def eventually(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not what() and time.monotonic() < end:
        time.sleep(0.001)
    return what()


class CopyGate:
    """Replaces `Batch.read`. Copies wait until the gate is open, or run a callback first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.copies = 0
        self.before: Callable[[int], None] = lambda count: None
        read = Batch.read

        def copy(batch: Batch, weights: Weights, out: Bits) -> None:
            self.before(self.copies)
            self.copies += 1
            assert self.open.wait(60)
            read(batch, weights, out)

        monkeypatch.setattr(Batch, "read", copy)


def interrupt_own_work() -> None:
    """Interrupts the main thread, which waits for the work that calls this. Returns once the work is asked to stop."""
    signal.raise_signal(signal.SIGINT)
    assert next(found["stop"] for found in _locals(sys._getframe()) if "stop" in found).wait(60)


def interrupt_waiting_capture() -> None:
    """Interrupts the main thread once its capture waits."""
    assert eventually(lambda: any(_is_waiting(frame) for frame in sys._current_frames().values()))
    signal.raise_signal(signal.SIGINT)


def _is_waiting(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not CaptureGate.wait_until.__code__:
        frame = frame.f_back
    return frame is not None


def _locals(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """The local variables of a function and of its callers."""
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
