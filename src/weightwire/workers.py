"""Work in threads, results in order. The kernel releases the interpreter, so threads really run side by side."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Progress", "default_threads", "in_order"]

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
                if len(ahead) >= 4 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
