"""Fixtures of the publisher tests: a bucket, events, threads, and copies that stop halfway."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.captures import CopyGate
from support.failing_bucket import Troubled, in_memory
from weightwire.bucket import silence
from weightwire.telemetry.events import Event


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls for seconds is not a silent store, which would be one more warning."""
    monkeypatch.setattr(silence, "_SECONDS", 60.0)


@pytest.fixture
def bucket() -> Troubled:
    return in_memory()


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def gate(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyGate]:
    made = CopyGate(monkeypatch)
    yield made
    made.open.set()  # before the pool waits for its threads


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restores Python's default handler of Ctrl-C, which an earlier test may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
