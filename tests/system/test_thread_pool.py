"""Parallel work: ordered results, few jobs ahead, and nothing left running after an error."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from weightwire.system.thread_pool import Stopped, default_threads, in_order, to_the_end


def test_default_is_one_to_eight_threads() -> None:
    assert 1 <= default_threads() <= 8


@pytest.mark.parametrize("threads", [None, 0, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_results_are_in_order(threads: int | None, count: int) -> None:
    assert list(in_order(lambda job: job * job, range(count), threads)) == [job * job for job in range(count)]


def test_slow_first_job_keeps_the_order() -> None:
    second_done = threading.Event()

    def work(job: int) -> int:
        if job == 0:
            assert second_done.wait(60)
        else:
            second_done.set()
        return job

    assert list(in_order(work, range(2), 2)) == [0, 1]


def test_one_thread_runs_jobs_in_the_caller() -> None:
    assert list(in_order(lambda _: threading.current_thread(), range(2), 1)) == [threading.current_thread()] * 2


def test_several_threads_run_in_parallel() -> None:
    together = threading.Barrier(2)

    def work(_: int) -> str:
        together.wait(60)  # passes only if two jobs run at the same time
        return threading.current_thread().name

    names = set(in_order(work, range(2), 2))
    assert len(names) == 2
    assert all(name.startswith("weightwire") for name in names)


@pytest.mark.parametrize("threads", [1, 2])
def test_few_jobs_are_taken_ahead(threads: int) -> None:
    drawn = 0

    def jobs() -> Iterator[int]:
        nonlocal drawn
        for job in range(1000):
            drawn += 1
            yield job

    results = in_order(lambda job: job, jobs(), threads)
    for _ in range(10):
        next(results)
    assert drawn <= 10 + 4 * threads
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("threads", [1, 3])
def test_error_is_raised_at_its_position(threads: int) -> None:
    def work(job: int) -> int:
        if job == 5:
            raise ValueError("five")
        return job

    results = in_order(work, range(100), threads)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(results)


def test_nothing_runs_after_an_error() -> None:
    """Started jobs end before the error is raised, and no other job starts."""
    running, started = 0, 0
    lock = threading.Lock()
    failed = threading.Event()

    def work(job: int) -> None:
        nonlocal running, started
        with lock:
            running += 1
            started += 1
        if job == 0:
            failed.set()
            raise ValueError
        assert failed.wait(60)
        with lock:
            running -= 1

    with pytest.raises(ValueError):  # noqa: PT011
        list(in_order(work, range(1000), 2))
    assert running == 1  # the failed job
    assert started <= 8


def test_error_of_the_job_iterator_is_raised() -> None:
    def jobs() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(in_order(lambda job: job, jobs(), 2))


# Work that must not be interrupted


def test_finished_work_returns_its_result() -> None:
    assert to_the_end(lambda stop: (stop.is_set(), 7)) == (False, 7)


def test_failed_work_raises_its_error() -> None:
    def work(stop: threading.Event) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        to_the_end(work)


def test_work_runs_in_another_thread() -> None:
    """Signal handlers raise only in the main thread."""
    assert to_the_end(lambda _: threading.current_thread()) is not threading.current_thread()


@pytest.mark.parametrize("presses", [1, 3])
def test_interrupt_waits_until_changes_are_undone(presses: int) -> None:
    undone = []

    def work(stop: threading.Event) -> None:
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(60)
        undone.append(True)
        raise Stopped

    with pytest.raises(KeyboardInterrupt):
        to_the_end(work)
    assert undone


def test_interrupt_is_raised_even_if_the_work_ends_first() -> None:
    def work(stop: threading.Event) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait(60)
        return "done"

    with pytest.raises(KeyboardInterrupt):
        to_the_end(work)


def test_interrupt_waits_for_the_end() -> None:
    ended: list[bool] = []

    def work(stop: threading.Event) -> None:
        signal.raise_signal(signal.SIGINT)  # delivered to the waiting main thread
        assert stop.wait(60)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        to_the_end(work)
    assert ended
