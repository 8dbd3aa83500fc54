"""The real runtime: clocks, threads and tokens."""

from __future__ import annotations

import asyncio
import re
import threading
import time

import pytest

from weightwire.system.runtime import Runtime


class TestTime:
    def test_runtime_time_is_the_system_time(self) -> None:
        before = time.time()
        assert before <= Runtime().time() <= time.time()

    def test_runtime_clock_measures_durations(self) -> None:
        runtime = Runtime()
        began = runtime.clock()
        time.sleep(0.01)
        assert 0.01 <= runtime.clock() - began < 60


class TestWork:
    def test_work_runs_in_a_thread(self) -> None:
        async def where() -> tuple[threading.Thread, threading.Thread]:
            return threading.current_thread(), await Runtime().run_in_thread(threading.current_thread)

        here, there = asyncio.run(where())
        assert here is not there

    def test_work_gets_all_arguments(self) -> None:
        def function(*args: object, **kwargs: object) -> object:
            return args, kwargs

        assert asyncio.run(Runtime().run_in_thread(function, 1, 2, a=3)) == ((1, 2), {"a": 3})

    def test_work_raises_its_error(self) -> None:
        with pytest.raises(ZeroDivisionError):
            asyncio.run(Runtime().run_in_thread(lambda: 1 // 0))

    def test_work_does_not_block_the_loop(self) -> None:
        async def meet() -> bool:
            runtime, met = Runtime(), threading.Event()
            waiting = asyncio.create_task(runtime.run_in_thread(met.wait, 60))
            await runtime.run_in_thread(met.set)
            return await waiting

        assert asyncio.run(meet())


class TestTokens:
    def test_tokens_are_32_hex_digits(self) -> None:
        assert re.fullmatch("[0-9a-f]{32}", Runtime().token())

    def test_tokens_are_unique(self) -> None:
        one, other = Runtime(), Runtime()
        assert len({one.token() for _ in range(500)} | {other.token() for _ in range(500)}) == 1000
