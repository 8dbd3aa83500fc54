"""Work in threads, results in order. The kernel releases the interpreter, so threads really run side by side."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Progress", "Stopped", "default_threads", "in_order", "to_the_end"]

Progress = Callable[[int], None]
"""Told how many bytes of weights have been dealt with since it was last told."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def default_threads() -> int:
    """As many as this process may use, up to eight: by then the memory is the limit."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def in_order(work: Callable[[Job], Result], jobs: Iterable[Job], threads: int | None = None) -> Iterator[Result]:
    """`work(job)` for every job, in the order of jobs; a few jobs ahead at the most, so that memory stays bounded."""
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
    """Raised by work that was asked to stop, once it has put everything back."""


def to_the_end(work: Callable[[threading.Event], Result]) -> Result:
    """Runs work that must not be torn apart, in a thread of its own.

    Ctrl-C and whatever else a signal handler raises reach only the main thread. They are held back until the work has
    ended, which is asked to stop by the event that it is given.
    """
    stop, go, done = threading.Event(), threading.Event(), threading.Event()
    certain: list[bool] = []  # that it will be waited for
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
