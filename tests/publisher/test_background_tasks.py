"""Background tasks run to their end, even if the caller is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from weightwire.publisher.background_tasks import BackgroundTasks


def test_work_is_finished_even_if_the_caller_is_cancelled() -> None:
    async def scene() -> list[str]:
        done: list[str] = []
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            begun.set()
            await go_on.wait()
            done.append("work")

        tasks = BackgroundTasks()
        waiting = asyncio.create_task(tasks.finish(work(), "start"))
        await begun.wait()
        waiting.cancel()
        await asyncio.sleep(0)
        assert tasks.is_running("start")
        assert not waiting.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not tasks.is_running("start")
        return done

    assert asyncio.run(scene()) == ["work"]


def test_results_and_errors_reach_the_caller() -> None:
    async def scene() -> None:
        tasks = BackgroundTasks()
        assert await tasks.finish(asyncio.sleep(0, "done"), "start") == "done"
        with pytest.raises(TimeoutError):
            await tasks.finish(asyncio.wait_for(asyncio.sleep(60), 0.01), "start")

    asyncio.run(scene())


def test_a_task_that_has_just_ended_is_not_running() -> None:
    """Its callback, which removes it, may come later. Whoever looks in between must be able to start it again."""

    async def scene() -> None:
        async def work() -> None:
            pass

        tasks, seen = BackgroundTasks(), []
        task = tasks.start(work(), "hint")
        asyncio.get_running_loop().call_soon(lambda: seen.append((task.done(), tasks.is_running("hint"))))
        await task
        assert seen == [(True, False)]

    asyncio.run(scene())
