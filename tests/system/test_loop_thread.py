"""A loop in a thread: results and errors come back, and nothing is left when it stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from weightwire.system.loop_thread import LoopThread


@pytest.fixture
def background() -> Iterator[LoopThread]:
    made = LoopThread("test-background")
    yield made
    made.stop()


def is_alive() -> bool:
    return any(thread.name == "test-background" for thread in threading.enumerate())


class TestCall:
    def test_returns_what_the_coroutine_returns(self, background: LoopThread) -> None:
        async def where() -> str:
            return threading.current_thread().name

        assert background.call(where()) == "test-background"

    def test_raises_what_the_coroutine_raises(self, background: LoopThread) -> None:
        async def fail() -> None:
            raise KeyError("x")

        with pytest.raises(KeyError):
            background.call(fail())

    def test_is_cancelled_when_the_time_is_up(self, background: LoopThread) -> None:
        ended = threading.Event()

        async def forever() -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                ended.set()

        with pytest.raises(TimeoutError):
            background.call(forever(), 0.01)
        assert ended.wait(10)

    def test_goes_on_after_an_error(self, background: LoopThread) -> None:
        async def divide(by: int) -> int:
            return 6 // by

        with pytest.raises(ZeroDivisionError):
            background.call(divide(0))
        assert background.call(divide(2)) == 3


class TestStart:
    def test_does_not_wait(self, background: LoopThread) -> None:
        go = threading.Event()

        async def work() -> int:
            await asyncio.to_thread(go.wait)
            return 5

        future = background.start(work())
        assert not future.done()
        go.set()
        assert future.result(10) == 5

    def test_tasks_meet_in_one_loop(self, background: LoopThread) -> None:
        async def rendezvous() -> asyncio.Event:
            return asyncio.Event()

        event = background.call(rendezvous())
        waiting = background.start(event.wait())
        background.tell(event.set)
        assert waiting.result(10)


class TestStop:
    def test_ends_the_thread(self) -> None:
        background = LoopThread("test-background")
        assert is_alive()
        background.stop()
        assert not is_alive()

    def test_ends_whatever_still_runs(self) -> None:
        background = LoopThread("test-background")
        began, ended = threading.Event(), threading.Event()

        async def forever() -> None:
            try:
                began.set()
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.01)  # it may take its time to clean up
                ended.set()

        future = background.start(forever())
        assert began.wait(10)
        background.stop()
        assert ended.is_set()
        assert future.cancelled()

    def test_twice_is_fine(self) -> None:
        background = LoopThread("test-background")
        background.stop()
        background.stop()

    def test_the_program_may_end_without_it(self) -> None:
        background = LoopThread("test-background")
        try:
            [thread] = [thread for thread in threading.enumerate() if thread.name == "test-background"]
            assert thread.daemon
        finally:
            background.stop()
