"""A store that does not answer is reported once, and again when it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, cast

import pytest

from faults.simulated_runtime import SimLoop
from support.failing_bucket import Act, Troubled, failed, in_memory, slow
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.silence import MonitoredBucket
from weightwire.errors import NotFound, Unavailable
from weightwire.system.runtime import Runtime
from weightwire.telemetry.events import Event

URL = "memory://store/run"


Request = Callable[[MonitoredBucket], Awaitable[object]]


class LoopClock(Runtime):
    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return 1000 + self.clock()


class Scene:
    """A monitored bucket and the events that it emits."""

    def __init__(self) -> None:
        self.store = Troubled(cast(Bucket, _Instant()))
        self.events: list[Event] = []
        self.notes = ""
        self.bucket = MonitoredBucket(self.store, LoopClock(), self.events.append, lambda: self.notes)

    @property
    def lines(self) -> list[tuple[str, str]]:
        return [(event.stage, event.message) for event in self.events]


class _Instant:
    """A bucket that answers at once, without threads: virtual time knows none."""

    url, strict, poll_interval = URL, True, 0.2

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def answer(*args: object) -> None:
            pass

        return answer


def played(scene: Callable[[Scene], Coroutine[Any, Any, None]]) -> Scene:
    """Plays a scene in virtual time. Afterwards neither tasks nor timers are left."""
    made = Scene()
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(scene(made))
        loop: Any = runner.get_loop()
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]
    return made


def test_a_silent_store_is_mentioned_once_and_when_it_answers() -> None:
    async def scene(scene: Scene) -> None:
        scene.store.trouble("get find", "", slow(60), times=5)
        scene.notes = "2 versions behind"
        await asyncio.gather(scene.bucket.get("a"), scene.bucket.get("b"), scene.bucket.find("c"))

    assert played(scene).lines == [
        ("warning", f"{URL} has not answered for 5 s (2 versions behind); still waiting"),
        ("recovered", f"{URL} answers again after 60 s (2 versions behind)"),
    ]


def test_a_store_that_answers_in_time_is_not_mentioned() -> None:
    async def scene(scene: Scene) -> None:
        scene.store.trouble("get", "", slow(4.9), times=9)
        for _ in range(9):
            await scene.bucket.get("a")

    assert played(scene).lines == []


def test_each_silence_is_mentioned() -> None:
    async def scene(scene: Scene) -> None:
        for _ in range(2):
            scene.store.trouble("get", "", slow(7))
            await scene.bucket.get("a")

    assert [stage for stage, _ in played(scene).lines] == ["warning", "recovered"] * 2


def test_a_request_that_times_out_is_not_an_answer() -> None:
    async def hang(act: Act) -> None:
        await asyncio.sleep(20)
        await failed(act)

    async def scene(scene: Scene) -> None:
        scene.store.trouble("get", "", hang, times=3)
        for _ in range(3):
            with pytest.raises(Unavailable):
                await scene.bucket.get("a")
        await scene.bucket.get("a")

    assert played(scene).lines == [
        ("warning", f"{URL} has not answered for 5 s; still waiting"),
        ("recovered", f"{URL} answers again after 60 s"),
    ]


def test_an_error_from_the_store_is_an_answer() -> None:
    async def missing(act: Act) -> None:
        await asyncio.sleep(9)
        raise NotFound("a: is not there")

    async def scene(scene: Scene) -> None:
        scene.store.trouble("get", "", missing)
        with pytest.raises(NotFound):
            await scene.bucket.get("a")

    assert [stage for stage, _ in played(scene).lines] == ["warning", "recovered"]


def test_other_answers_do_not_end_the_silence_of_a_request() -> None:
    async def scene(scene: Scene) -> None:
        scene.store.trouble("get", "", slow(30))
        hanging = asyncio.create_task(scene.bucket.get("a"))
        for _ in range(10):
            await asyncio.sleep(1)
            await scene.bucket.find("b")
        assert [stage for stage, _ in scene.lines] == ["warning"]
        await hanging

    assert played(scene).lines[1:] == [("recovered", f"{URL} answers again after 30 s")]


@pytest.mark.parametrize(("seconds", "stages"), [(1.0, []), (10.0, ["warning", "recovered"])])
def test_a_cancelled_request_leaves_neither_a_timer_nor_a_silence(seconds: float, stages: list[str]) -> None:
    async def scene(scene: Scene) -> None:
        scene.store.trouble("get", "", slow(1000))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scene.bucket.get("a"), seconds)
        assert [stage for stage, _ in scene.lines] == stages[:1]
        await scene.bucket.get("a")

    assert [stage for stage, _ in played(scene).lines] == stages


def test_a_large_read_gets_more_time() -> None:
    async def scene(scene: Scene) -> None:
        scene.store.trouble("read_into", "", slow(20), times=2)
        await scene.bucket.read_into("a", memoryview(bytearray(64 << 20)))
        assert scene.lines == []
        await scene.bucket.read_into("a", memoryview(bytearray(4 << 20)))

    assert played(scene).lines[0] == ("warning", f"{URL} has not answered for 6 s; still waiting")


MB = 1 << 20


@pytest.mark.parametrize(
    ("request_of", "seconds"),
    [
        (lambda bucket: bucket.get("a"), 5),
        (lambda bucket: bucket.list("a"), 5),
        (lambda bucket: bucket.find("a"), 5),
        (lambda bucket: bucket.delete("a"), 5),
        (lambda bucket: bucket.read_into("a", memoryview(bytearray(8 * MB))), 7),
        (lambda bucket: bucket.create("a", bytes(8 * MB)), 7),
        (lambda bucket: bucket.put("a", bytes(8 * MB)), 7),
        (lambda bucket: bucket.put("a", iter([b""]), 8 * MB), 7),
        (lambda bucket: bucket.put("a", iter([b""]), 64 * MB), 21),
        (lambda bucket: bucket.put("a", iter([b""]), 1000 * MB), 21),  # no more is on its way at a time
        (lambda bucket: bucket.put("a", iter([b""])), 21),  # of unknown size
    ],
)
def test_every_request_is_watched_for_a_time_that_fits_its_size(request_of: Request, seconds: int) -> None:
    async def scene(scene: Scene) -> None:
        scene.store.trouble("create put get read_into list find delete", "", slow(100))
        await request_of(scene.bucket)

    assert played(scene).lines == [
        ("warning", f"{URL} has not answered for {seconds} s; still waiting"),
        ("recovered", f"{URL} answers again after 100 s"),
    ]


def test_events_have_the_time_of_day() -> None:
    async def scene(scene: Scene) -> None:
        scene.store.trouble("get", "", slow(60))
        await scene.bucket.get("a")

    assert [event.at for event in played(scene).events] == [1005.0, 1060.0]


@pytest.mark.parametrize(("pause", "stages"), [(4.0, []), (7.0, ["warning", "recovered"])])
def test_an_upload_that_moves_is_not_silent(pause: float, stages: list[str]) -> None:
    """The backend takes a small piece after each pause: every piece is a sign of life."""

    async def scene(scene: Scene) -> None:
        async def put(path: str, data: Iterator[bytes], size: int) -> None:
            for _ in data:
                await asyncio.sleep(pause)

        scene.store.put = put  # type: ignore[method-assign, assignment]
        await scene.bucket.put("a", iter([b"12"] * 3), 6)

    assert [stage for stage, _ in played(scene).lines] == stages


@pytest.mark.parametrize(("pause", "stages"), [(4.9, []), (5.1, ["warning", "recovered"])])
def test_the_time_starts_again_with_each_sign_of_life(pause: float, stages: list[str]) -> None:
    async def scene(scene: Scene) -> None:
        async def put(path: str, data: Iterator[bytes], size: int) -> None:
            await asyncio.sleep(1)
            next(data)
            await asyncio.sleep(pause)

        scene.store.put = put  # type: ignore[method-assign, assignment]
        await scene.bucket.put("a", iter([b"12"]), 2)

    assert [stage for stage, _ in played(scene).lines] == stages


def test_time_that_the_caller_computes_is_not_silence() -> None:
    async def scene(scene: Scene) -> None:
        clock: Any = asyncio.get_running_loop()

        def computed() -> Iterator[bytes]:
            for _ in range(3):
                clock.now += 60
                for timer in list(clock._scheduled):  # in a real put this code runs in a thread beside the loop
                    timer._run()
                    timer.cancel()
                yield b"12"

        async def put(path: str, data: Iterator[bytes], size: int) -> None:
            for _ in data:
                await asyncio.sleep(0.1)

        scene.store.put = put  # type: ignore[method-assign, assignment]
        await scene.bucket.put("a", computed(), 6)

    assert played(scene).lines == []


def test_all_requests_reach_the_store() -> None:
    async def whole(bucket: MonitoredBucket) -> None:
        await bucket.create("a", b"first")
        await bucket.put("b", iter([b"se", b"cond"]), 6)
        await bucket.put("c", b"third")
        buffer = bytearray(4)
        await bucket.read_into("b", memoryview(buffer), 2)
        assert bytes(buffer) == b"cond"
        assert await bucket.get("c") == b"third"
        await bucket.delete("a")
        assert await bucket.find("a") is None
        assert [one.path for one in await bucket.list("")] == ["b", "c"]
        await bucket.close()

    inner = in_memory()
    monitored = MonitoredBucket(inner, Runtime(), lambda event: None)
    assert (monitored.url, monitored.strict, monitored.poll_interval) == (inner.url, inner.strict, inner.poll_interval)
    asyncio.run(whole(monitored))


def test_close_reaches_the_store() -> None:
    closed: list[str] = []

    async def scene(scene: Scene) -> None:
        async def close() -> None:
            closed.append(scene.store.url)

        scene.store.close = close  # type: ignore[method-assign]
        await scene.bucket.close()

    played(scene)
    assert closed == [URL]
