"""Work in threads: results in order, a few jobs ahead, and nothing left running after a failure."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from weightwire.system.thread_pool import Stopped, default_threads, in_order, to_the_end


def test_there_is_at_least_one_thread() -> None:
    assert 1 <= default_threads() <= 8


@pytest.mark.parametrize("threads", [None, 0, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_results_are_in_the_order_of_jobs(threads: int | None, count: int) -> None:
    assert list(in_order(lambda job: job * job, range(count), threads)) == [job * job for job in range(count)]


def test_a_slow_first_job_does_not_let_others_pass() -> None:
    second_done = threading.Event()

    def work(job: int) -> int:
        if job == 0:
            assert second_done.wait(10)
        else:
            second_done.set()
        return job

    assert list(in_order(work, range(2), 2)) == [0, 1]


def test_one_thread_is_the_caller() -> None:
    assert list(in_order(lambda _: threading.current_thread(), range(2), 1)) == [threading.current_thread()] * 2


def test_several_threads_are_others() -> None:
    together = threading.Barrier(2)

    def work(_: int) -> str:
        together.wait(10)  # which two jobs can reach only side by side
        return threading.current_thread().name

    names = set(in_order(work, range(2), 2))
    assert len(names) == 2
    assert all(name.startswith("weightwire") for name in names)


@pytest.mark.parametrize("threads", [1, 2])
def test_jobs_are_drawn_only_a_little_ahead(threads: int) -> None:
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
def test_a_failure_comes_out_where_it_belongs(threads: int) -> None:
    def work(job: int) -> int:
        if job == 5:
            raise ValueError("five")
        return job

    results = in_order(work, range(100), threads)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(results)


def test_nothing_runs_on_after_a_failure() -> None:
    """What was begun is finished before the failure comes out, what was not is never begun."""
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
        assert failed.wait(10)
        with lock:
            running -= 1

    with pytest.raises(ValueError):  # noqa: PT011
        list(in_order(work, range(1000), 2))
    assert running == 1  # the one that failed
    assert started <= 8


def test_a_job_that_cannot_be_drawn() -> None:
    def jobs() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(in_order(lambda job: job, jobs(), 2))


# Work that must not be torn apart


def test_the_result_comes_back() -> None:
    assert to_the_end(lambda stop: (stop.is_set(), 7)) == (False, 7)


def test_the_failure_comes_back() -> None:
    def work(stop: threading.Event) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        to_the_end(work)


def test_it_is_done_elsewhere() -> None:
    """Where no signal handler can raise anything."""
    assert to_the_end(lambda _: threading.current_thread()) is not threading.current_thread()


@pytest.mark.parametrize("presses", [1, 3])
def test_an_interrupt_waits_until_everything_is_put_back(presses: int) -> None:
    put_back = []

    def work(stop: threading.Event) -> None:
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
        put_back.append(True)
        raise Stopped

    with pytest.raises(KeyboardInterrupt):
        to_the_end(work)
    assert put_back


def test_an_interrupt_comes_out_even_if_the_work_was_done_first() -> None:
    def work(stop: threading.Event) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait(10)
        return "done"

    with pytest.raises(KeyboardInterrupt):
        to_the_end(work)


def test_an_interrupt_waits_for_the_end() -> None:
    ended: list[bool] = []

    def work(stop: threading.Event) -> None:
        signal.raise_signal(signal.SIGINT)  # delivered to the main thread, which waits
        assert stop.wait(10)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        to_the_end(work)
    assert ended


def test_what_work_raises_is_raised() -> None:
    def work(stop: threading.Event) -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        to_the_end(work)
    assert to_the_end(lambda stop: 7) == 7
