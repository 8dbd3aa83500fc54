"""A loop in a thread: it returns results and errors, and stops without leftovers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from support.followers import until
from weightwire.system.loop_thread import LoopThread


@pytest.fixture
def background() -> Iterator[LoopThread]:
    made = LoopThread("test")
    yield made
    made.stop()


def is_alive() -> bool:
    return any(thread.name == "weightwire-test" for thread in threading.enumerate())


class TestCall:
    def test_call_returns_the_result(self, background: LoopThread) -> None:
        async def where() -> str:
            return threading.current_thread().name

        assert background.call(where()) == "weightwire-test"

    def test_call_raises_the_error(self, background: LoopThread) -> None:
        async def fail() -> None:
            raise KeyError("x")

        with pytest.raises(KeyError):
            background.call(fail())

    def test_call_is_cancelled_after_its_timeout(self, background: LoopThread) -> None:
        """Its task ends, whether it had begun by then or not."""

        async def others() -> set[asyncio.Task[object]]:
            return asyncio.all_tasks() - {asyncio.current_task()}

        with pytest.raises(TimeoutError):
            background.call(asyncio.sleep(1000), 0.01)
        until(lambda: not background.call(others()))

    def test_call_works_after_an_error(self, background: LoopThread) -> None:
        async def divide(by: int) -> int:
            return 6 // by

        with pytest.raises(ZeroDivisionError):
            background.call(divide(0))
        assert background.call(divide(2)) == 3


class TestStart:
    def test_start_does_not_wait(self, background: LoopThread) -> None:
        go = threading.Event()

        async def work() -> int:
            await asyncio.to_thread(go.wait)
            return 5

        future = background.start(work())
        assert not future.done()
        go.set()
        assert future.result(60) == 5

    def test_started_tasks_share_one_loop(self, background: LoopThread) -> None:
        async def rendezvous() -> asyncio.Event:
            return asyncio.Event()

        event = background.call(rendezvous())
        waiting = background.start(event.wait())
        background.call_soon(event.set)
        assert waiting.result(60)


class TestStop:
    def test_stop_ends_the_thread(self) -> None:
        background = LoopThread("test")
        assert is_alive()
        background.stop()
        assert not is_alive()

    def test_stop_cancels_running_coroutines(self) -> None:
        background = LoopThread("test")
        began, ended = threading.Event(), threading.Event()

        async def forever() -> None:
            try:
                began.set()
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.01)  # cleanup takes a moment
                ended.set()

        future = background.start(forever())
        assert began.wait(60)
        background.stop()
        assert ended.is_set()
        assert future.cancelled()

    def test_stop_can_be_repeated(self) -> None:
        background = LoopThread("test")
        background.stop()
        background.stop()

    def test_loop_thread_does_not_keep_the_program_alive(self) -> None:
        background = LoopThread("test")
        try:
            [thread] = [thread for thread in threading.enumerate() if thread.name == "weightwire-test"]
            assert thread.daemon
        finally:
            background.stop()
