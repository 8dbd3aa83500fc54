"""Parallel work with results in order. The C kernel releases the GIL, so threads run in parallel."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Progress", "Stopped", "default_threads", "in_order", "to_the_end"]

Progress = Callable[[int], None]
"""Called with the bytes of weights that were processed since the last call."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def default_threads() -> int:
    """One per core that this process may use, up to eight: with more, memory bandwidth is the limit."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def in_order(work: Callable[[Job], Result], jobs: Iterable[Job], threads: int | None = None) -> Iterator[Result]:
    """`work(job)` for every job, in the order of the jobs. Runs only a few jobs ahead, to bound memory."""
    threads = default_threads() if threads is None else threads
    if threads <= 1:
        yield from map(work, jobs)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="weightwire") as pool:
        ahead: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                ahead.append(pool.submit(work, job))
                if len(ahead) >= 2 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


class Stopped(Exception):
    """Raised by work that was asked to stop, after it has undone its changes."""


def to_the_end(work: Callable[[threading.Event], Result]) -> Result:
    """Runs work that must not be interrupted halfway, in a new thread.

    Ctrl-C and other exceptions of signal handlers reach only the main thread. They set the event that the work gets
    and are raised again when the work has ended.
    """
    stop, go, done = threading.Event(), threading.Event(), threading.Event()
    certain: list[bool] = []  # not empty once the caller is sure to wait for the work
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        go.wait()
        try:
            if certain:
                outcome.append(work(stop))
        except BaseException as problem:
            failure.append(problem)
        finally:
            done.set()

    interrupt: BaseException | None = None
    try:
        try:
            threading.Thread(target=run, name="weightwire", daemon=True).start()
            certain.append(True)
        finally:
            go.set()
        # In short waits: a signal may arrive in any thread, but its handler runs only between steps of this one.
        while not done.wait(0.05):
            pass
    except BaseException as problem:
        interrupt = problem
        stop.set()
    while certain and not done.is_set():
        try:
            done.wait(0.05)
        except BaseException as problem:
            interrupt = problem
    if interrupt is not None:
        raise interrupt
    if failure:
        raise failure[0]
    return outcome[0]
