"""FollowLoop in virtual time: which way is taken, what it costs, how often it looks, and what it says of itself."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from faults.simulated_runtime import Faults, Process, SimBucket, SimLoop, SimRuntime, Store
from support.records import sha
from support.samples import base as bits_for
from support.story import Bits, bits_of
from support.troubled import Act, Trouble, Troubled, denied, failed, slow
from weightwire import Update, digest, patch
from weightwire.chain.records import (
    HEAD,
    RUN,
    Commit,
    Head,
    Heartbeat,
    Run,
    Shortcut,
    commit_path,
    heartbeat_path,
    seal,
    shortcut_path,
    unseal,
)
from weightwire.errors import BrokenChain, DataGone, ReplicaError, Unavailable, WeightwireError
from weightwire.follower import patch_queue, replica_updater
from weightwire.follower.follow_loop import FollowLoop
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.settings import PublisherSettings
from weightwire.replica.replica import Replica
from weightwire.telemetry.events import Event
from weightwire.weights import DTYPES
from weightwire.weights.source import read_weights

Arrays = dict[str, Any]
Result = TypeVar("Result")
ALWAYS = NEVER = 10**9
NAME = "rollout-1"


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def random_bits(seed: int = 1) -> Any:
    return bits_for(DTYPES["F16"], 51200, seed=seed).view(np.float16).reshape(400, 128)


def initial() -> Arrays:
    return {"embed": random_bits(), "norm": np.linspace(0, 1, 5, dtype=np.float32)}


class Scene:
    """A trainer and a follower, in a world where time passes only when everybody waits."""

    def __init__(self, into: Path, seed: int = 7, **settings: Any) -> None:
        self.into = into
        self._seed = seed
        self.store = Store()
        self.bucket = Troubled(self._bucket())
        self.weights = initial()
        self.bits: dict[int, Bits] = {}
        self.heard: list[Event] = []
        self.every = 997  # of how many weights one changes in a step
        self._settings = settings
        self._publishing: PublishLoop | None = None
        self.steps = 0
        self._running: asyncio.Task[None] | None = None
        self.open()

    def _bucket(self) -> SimBucket:
        return SimBucket(self.store, _process())

    # The trainer

    async def publish(self, versions: int = 1, pause: float = 0.0) -> int:
        """Some versions, and so many seconds after each; returns the last."""
        if self._publishing is None:
            given = {"threads": 1, "blocking": True, "anchor_every": NEVER} | self._settings
            runtime, settings = SimRuntime(_process(self._seed)), PublisherSettings(**given)
            self._publishing = PublishLoop(PublishContext(self._bucket(), runtime, settings, lambda event: None))
            await self._publishing.start()
        for _ in range(versions):
            self.train()
            publication = Publication(step=self.steps)
            await self._publishing.publish_now(publication, read_weights(self.weights))
            assert publication.version is not None
            self.bits[publication.version] = bits_of(self.weights)
            await self._publishing.context.background.wait()  # anchors
            await asyncio.sleep(pause)
        return publication.version or 0

    def train(self) -> None:
        self.steps += 1
        self.weights["embed"].reshape(-1).view(np.uint16)[self.steps % self.every :: self.every] += 1
        self.weights["norm"][self.steps % 5] += 1

    # The store, behind everybody's back

    def read(self, path: str) -> bytes:
        return self.store.objects[path][0]

    def write(self, path: str, data: bytes) -> None:
        self.store.objects[path] = data, 0.0

    def remove(self, prefix: str) -> None:
        for path in [path for path in self.store.objects if path.startswith(prefix)]:
            del self.store.objects[path]

    def commit(self, version: int) -> Commit:
        return unseal(self.read(commit_path(version)), Commit, "").record

    @property
    def run_id(self) -> str:
        return unseal(self.read(RUN), Run, "").record.run

    @property
    def beat(self) -> Heartbeat:
        return unseal(self.read(heartbeat_path(NAME)), Heartbeat, "").record

    # The follower

    def open(self, **given: Any) -> None:
        self.replica = Replica.open(self.into, threads=1)
        self.work = FollowLoop(
            self.bucket, SimRuntime(_process()), self.replica, NAME, self.heard.append, threads=1, **given
        )

    def start(self) -> None:
        self._running = asyncio.create_task(self.work.run())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def look(self) -> list[str]:
        """What that asks of the bucket: "anchors/1" and the like."""
        self.bucket.asked.clear()
        await self.work.look()
        return self.fetched()

    def fetched(self) -> list[str]:
        paths = [path for verb, path in self.bucket.asked if verb == "read_into"]
        return [path.rsplit("/", 1)[0] for path in paths]

    def check(self, version: int) -> None:
        """That the follower holds a version, bit for bit."""
        assert self.work.version == version
        assert bits_of(self.replica.weights) == self.bits[version]

    async def take(self) -> Update:
        update = await self.work.take()
        assert update is not None
        return update

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.heard if event.stage == "warning"]


def _process(seed: int = 7) -> Process:
    """One to which nothing happens."""
    return Process("test", random.Random(seed), Faults())


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    def play(act: Callable[[Scene], Awaitable[None]], **settings: Any) -> None:
        async def whole() -> None:
            scene = Scene(tmp_path / "replica", **settings)
            try:
                await act(scene)
            finally:
                await scene.stop()
                scene.replica.close()

        with asyncio.Runner(loop_factory=SimLoop) as runner:
            runner.run(whole())

    return play


Play = Callable[..., None]


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(reached: Callable[[], object], seconds: float = 3600.0) -> None:
    end = now() + seconds
    while not reached():
        assert now() < end, "it never happened"
        await asyncio.sleep(0.05)


class TestRequests:
    def test_nothing_new_is_one(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            for _ in range(3):
                assert await scene.look() == []
                assert scene.bucket.asked == [("get", commit_path(4))]

        play(act)

    def test_a_new_version_is_few(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            await scene.publish()
            assert await scene.look() == ["deltas/4"]
            assert scene.bucket.asked.count(("get", commit_path(4))) == 1
            assert len(scene.bucket.asked) <= 4
            scene.check(4)

        play(act)

    def test_some_versions_are_read_one_after_the_other(self, play: Play) -> None:
        """Without asking which anchors there are."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(60)
            assert await scene.look() == [f"deltas/{version}" for version in range(2, 62)]
            assert scene.bucket.count("list") == scene.bucket.count("find") == scene.bucket.count("get", HEAD) == 0
            assert scene.bucket.count("get", "commits/") <= 60 + 6
            scene.check(61)

        play(act)

    def test_many_versions_are_planned(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(66)
            assert await scene.look() == [f"deltas/{version}" for version in range(2, 68)]
            assert scene.bucket.count("list", "shortcuts/") == 1
            scene.check(67)

        play(act)

    def test_an_anchor_where_that_is_cheaper(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.publish(90)
            assert await scene.look() == ["anchors/81", *(f"deltas/{version}" for version in range(82, 92))]
            scene.check(91)

        play(act, anchor_every=20)

    def test_deltas_where_they_are_cheaper(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(70)
            assert await scene.look() == [f"deltas/{version}" for version in range(2, 72)]

        play(act, anchor_every=20)

    def test_a_delta_as_large_as_an_anchor_is_planned(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            for seed in range(2, 6):
                scene.weights["embed"][:] = random_bits(seed)
                await scene.publish()
            assert await scene.look() == ["anchors/5"]
            scene.check(5)

        play(act, anchor_every=4)

    def test_from_nothing(self, play: Play) -> None:
        """The history is proven by few requests, however long it is."""

        async def act(scene: Scene) -> None:
            await scene.publish(200)
            assert await scene.look() == ["anchors/181", *(f"deltas/{version}" for version in range(182, 201))]
            scene.check(200)
            assert scene.bucket.count("get", "commits/") < 60

        play(act, anchor_every=20)

    def test_from_nothing_without_a_hint(self, play: Play) -> None:
        """HEAD.json is overwritten, lost, wrong or a lie: the newest version is found all the same."""

        async def act(scene: Scene) -> None:
            await scene.publish(20)
            run = scene.run_id
            hints = [None, b"hello", seal(Head(run=run, version=3)).data, seal(Head(run=run, version=900)).data]
            for k, hint in enumerate(hints):
                scene.remove(HEAD)
                if hint is not None:
                    scene.write(HEAD, hint)
                scene.replica.close()
                scene.into = scene.into.with_name(f"replica-{k}")
                scene.open()
                await scene.look()
                scene.check(20)

        play(act)

    def test_after_a_restart_nothing_is_fetched_again(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(4)
            await scene.look()
            scene.replica.close()
            scene.open()
            assert await scene.look() == []
            assert scene.bucket.asked == [("get", RUN), ("get", commit_path(4)), ("get", commit_path(5))]
            scene.check(4)

        play(act)

    def test_versions_are_fetched_ahead(self, play: Play) -> None:
        """The next while one is applied, and not one after the other."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(8)
            together, most = 0, 0

            async def slowly(do: Act) -> Any:
                nonlocal together, most
                together += 1
                most = max(most, together)
                await asyncio.sleep(10)
                together -= 1
                return await do()

            scene.bucket.trouble("read_into", "", slowly, ALWAYS)
            began = now()
            await scene.look()
            assert most == 4
            assert now() - began < 40
            scene.check(9)

        play(act)


class TestAnchors:
    def test_that_lie_are_not_taken(self, play: Play) -> None:
        """Anyone who may write may have made them."""

        async def act(scene: Scene) -> None:
            await scene.publish(8)
            [path] = [path for path in scene.store.objects if path.startswith("shortcuts/5/")]
            good = unseal(scene.read(path), Shortcut, "").record
            scene.remove("shortcuts/")
            lie = Shortcut(run=good.run, version=5, kind="anchor", after=sha("lie"), files=good.files)
            scene.write(shortcut_path(seal(lie)), seal(lie).data)
            scene.write("shortcuts/6/anchor-0123456789abcdef.json", b"hello")
            scene.write("shortcuts/7/anchor-0123456789abcdef.json", seal(good).data)
            assert (await scene.look())[0] == "anchors/1"
            scene.check(8)

        play(act, anchor_every=4)

    def test_whose_data_is_gone_are_passed_over(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(10)
            scene.remove("anchors/9/")
            assert await scene.look() == ["anchors/9", "anchors/5", *(f"deltas/{v}" for v in range(6, 11))]
            scene.check(10)

        play(act, anchor_every=4)

    def test_lead_past_what_retention_has_deleted(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(9)
            for version in range(1, 9):
                for folder in ("deltas", "anchors", "shortcuts"):
                    scene.remove(f"{folder}/{version}/")
            assert (await scene.look())[-2:] == ["anchors/9", "deltas/10"]
            scene.check(10)
            assert (await scene.take()).patch is None

        play(act, anchor_every=4)

    def test_that_rot_are_passed_over(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.publish(90)
            [path] = [path for path in scene.store.objects if path.startswith("anchors/81/")]
            scene.write(path, bytes(len(scene.read(path))))
            fetched = await scene.look()
            assert fetched[:2] == ["anchors/81", "anchors/61"]
            scene.check(91)
            assert scene.replica.trouble is None

        play(act, anchor_every=20)

    def test_of_a_history_that_is_not_ours(self, play: Play) -> None:
        """Commits that follow from what is held, and later ones, with an anchor, that do not follow from those."""

        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish(3)
            await scene.look()
            other = Scene(scene.into.with_name("other"), seed=8, anchor_every=20)
            other.replica.close()
            other.store.objects.update(scene.store.objects)
            other.every = 50
            await other.publish(90)
            await scene.publish(66)
            for path, one in other.store.objects.items():
                if not path.startswith("commits/") or path > commit_path(68):
                    scene.store.objects[path] = one
            with pytest.raises(BrokenChain, match="is not the commit that later ones were built on"):
                await scene.look()
            scene.check(3)

        play(act)


class TestARebuild:
    def test_that_is_interrupted_leaves_what_was_held(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.publish(90)
            for requests in range(1, 12, 3):
                scene.bucket.calm()
                count = 0

                async def break_off(do: Act, requests: int = requests) -> Any:
                    nonlocal count
                    count += 1
                    return await (failed(do) if count == requests else do())

                scene.bucket.trouble("read_into", "", break_off, ALWAYS)
                with pytest.raises(Unavailable):
                    await scene.look()
                scene.check(1)
                assert len(list((scene.into / "works").iterdir())) == 1
            scene.bucket.calm()
            await scene.look()
            scene.check(91)

        play(act, anchor_every=20)

    def test_that_is_cancelled_leaves_what_was_held(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.publish(90)
            for seconds in (0.3, 0.6, 0.9, 1.2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(scene.work.look(), seconds)
                scene.check(1)
            await scene.look()
            scene.check(91)

        play(act, anchor_every=20)

    def test_of_a_replica_that_was_lost(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is in memory cannot be relied on any more: all weights come anew."""

        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            await scene.take()
            await scene.publish()
            lose(scene, monkeypatch)
            with pytest.raises(ReplicaError, match="half-way"):
                await scene.look()
            assert scene.replica.position is None
            await scene.look()
            scene.check(4)
            update = await scene.take()
            assert (update.version, update.patch) == (4, None)
            await scene.publish()
            await scene.look()
            scene.check(5)

        play(act)

    def test_is_told_of(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            scene.replica.close()
            with (scene.into / "work" / "model.safetensors").open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"?")
            scene.open()
            scene.heard.clear()
            assert await scene.look() == ["anchors/1", "deltas/2", "deltas/3"]
            [warning] = scene.warnings
            assert "damaged" in warning
            scene.check(3)

        play(act)


def lose(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version is written half-way."""

    def fail(*_: object, **__: object) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(os, "fsync", lambda fd: None)
        raise MemoryError("half of it")

    monkeypatch.setattr("weightwire.replica.workdir.write_absolute", fail)


class TestALostReplica:
    """Until it is rebuilt, there is nothing to take and nothing to load."""

    def test_gives_nothing(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            await scene.publish(2)
            await scene.look()
            await scene.publish()
            lose(scene, monkeypatch)
            with pytest.raises(ReplicaError):
                await scene.look()
            assert await scene.work.take() is None

        play(act)

    def test_lets_engines_wait(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """And does not keep a core busy."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            await scene.publish()
            lose(scene, monkeypatch)
            with pytest.raises(ReplicaError):
                await scene.look()
            scene.bucket.trouble("get find list", "", failed, ALWAYS)
            with pytest.raises(Unavailable):
                await scene.look()
            assert await scene.work.take() is None
            began = now()
            await scene.work.wait_for_more(1.0)
            await scene.work.wait_for_more(1.0)
            assert now() >= began + 1.0  # the sum that the loop makes: a difference may be a bit less

        play(act)

    def test_never_goes_back(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """Though the bucket was rolled back in the meantime."""

        async def act(scene: Scene) -> None:
            await scene.publish(4)
            await scene.look()
            await scene.publish()
            lose(scene, monkeypatch)
            with pytest.raises(ReplicaError):
                await scene.look()
            for version in (3, 4, 5):
                scene.remove(commit_path(version))
            with pytest.raises(WeightwireError):
                await scene.look()

        play(act)


class TestAnInterrupt:
    def test_while_a_version_is_applied_costs_nothing(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """As Ctrl-C in once(), after which it is called again."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(2)
            looking = asyncio.create_task(scene.work.look())

            async def run_in_thread(
                self: SimRuntime, function: Callable[..., Result], *args: Any, **kwargs: Any
            ) -> Result:
                """A thread is waited for; whoever was cancelled meanwhile does not hear what became of it."""
                result = function(*args, **kwargs)
                if function == scene.replica.advance:
                    looking.cancel()
                    await asyncio.sleep(0)
                return result

            with monkeypatch.context() as patched:
                patched.setattr(SimRuntime, "run_in_thread", run_in_thread)
                with pytest.raises(asyncio.CancelledError):
                    await looking
            await scene.look()
            scene.check(3)

        play(act)


class Looks:
    """When the bucket was asked for the next commit."""

    def __init__(self, scene: Scene, what: Trouble | None = None) -> None:
        self.times: list[float] = []

        async def note(do: Act) -> Any:
            if not self.times or now() - self.times[-1] > 0.14:  # else it makes sure of the commit that it has
                self.times.append(now())
            return await (what(do) if what else do())

        scene.bucket.trouble("get", "commits/", note, ALWAYS)

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


class TestPolling:
    """The seconds between two looks are from three quarters to five quarters of what they should be."""

    def test_is_quick_where_nothing_is_known_yet(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await until(lambda: scene.work.version == 1)
            looks = Looks(scene)
            await asyncio.sleep(5)
            assert len(looks.gaps()) > 15
            assert min(looks.gaps()) >= 0.15
            assert max(looks.gaps()) <= 0.25 + 0.3  # and the request

        play(act)

    def test_is_a_fifth_of_the_time_between_versions(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.start()
            publishing = asyncio.create_task(scene.publish(12, pause=20))
            await until(lambda: scene.work.version == 5)
            looks = Looks(scene)
            await until(lambda: scene.work.version == 9)
            apart = [gap for gap in looks.gaps() if gap > 1]  # others are of the same look
            assert len(apart) >= 12
            assert 3 - 0.1 <= min(apart) <= max(apart) <= 5 + 1.5
            await publishing

        play(act)

    def test_gets_rarer_where_nothing_comes(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await until(lambda: scene.work.version == 3)
            looks = Looks(scene)
            await asyncio.sleep(100)
            assert 1 < max(looks.gaps()) < 4
            await asyncio.sleep(3000)
            recent = looks.gaps()[-40:]
            assert 30 * 0.75 <= min(recent) <= max(recent) <= 30 * 1.25 + 0.3
            assert max(recent) - min(recent) > 5  # no two followers in step

        play(act)

    def test_is_quick_again_when_versions_come(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await asyncio.sleep(3000)
            publishing = asyncio.create_task(scene.publish(30, pause=5))
            await until(lambda: scene.work.version == 20)
            looks = Looks(scene)
            await until(lambda: scene.work.version == 25)
            apart = [gap for gap in looks.gaps() if gap > 0.5]
            assert max(apart) < 3
            await publishing

        play(act)

    def test_is_gentle_where_requests_are_rationed(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.bucket.poll_interval = 2.0
            await scene.publish()
            scene.start()
            await until(lambda: scene.work.version == 1)
            looks = Looks(scene)
            await asyncio.sleep(20)
            assert len(looks.gaps()) > 5
            assert min(looks.gaps()) >= 1.5

        play(act)

    def test_gets_rarer_where_it_fails(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await until(lambda: scene.work.version == 1)
            looks = Looks(scene, failed)
            await asyncio.sleep(600)
            gaps = looks.gaps()
            assert gaps[0] < 1
            assert gaps[2] > 2 * gaps[0]
            assert 30 * 0.75 <= min(gaps[-5:]) <= max(gaps[-5:]) <= 30 * 1.25 + 0.3
            assert len(scene.warnings) == 1
            scene.bucket.calm()
            await scene.publish()
            await until(lambda: scene.work.version == 2 and not scene.work.trouble, 40)

        play(act)

    def test_is_cut_short_by_a_wake(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await asyncio.sleep(3000)
            await scene.publish()
            assert scene.work.version == 3
            scene.work.wake()
            await until(lambda: scene.work.version == 4, 2)
            looks = Looks(scene)
            await asyncio.sleep(60)
            assert len(looks.times) <= 5

        play(act)

    def test_a_wake_while_it_looks_is_not_lost(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await asyncio.sleep(3000)

            async def late(do: Act) -> Any:
                """Someone publishes, and says so, when it is too late for this look to see it."""
                try:
                    return await do()
                finally:
                    await scene.publish()
                    scene.work.wake()

            scene.bucket.trouble("get", commit_path(4), late)
            scene.work.wake()
            await until(lambda: scene.work.version == 4, 3)

        play(act)


class TestPatches:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patch_queue, "_FEW", 0)  # all of it is few here

    def test_of_several_versions_become_one(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            first = await scene.take()
            engine = {name: array.copy() for name, array in scene.weights.items()}
            assert digest(engine).hex == first.state
            await scene.publish(30)
            await scene.look()
            update = await scene.take()
            assert update.patch is not None
            assert (update.patch.before, update.patch.after) == (first.state, update.state)
            patch(engine, update.patch)
            assert digest(engine).hex == update.state
            assert bits_of(engine) == scene.bits[31]

        play(act)

    def test_that_nobody_takes_are_bounded(self, play: Play) -> None:
        """The same weights change again and again: that is one patch, however many versions it spans."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            engine = {name: array.copy() for name, array in scene.weights.items()}
            scene.every = 16
            most = sum(array.nbytes for array in engine.values()) // 4
            for _ in range(4):
                scene.steps = 0
                await scene.publish()
                await scene.look()
                assert 0 < scene.work._patches.nbytes <= most
            update = await scene.take()
            assert update.patch is not None
            patch(engine, update.patch)
            assert bits_of(engine) == scene.bits[5]

        play(act)

    def test_that_grow_too_large_are_none(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            scene.every = 8
            await scene.publish(6)
            await scene.look()
            assert (await scene.take()).patch is None
            engine = read_copy(await scene.work.checkpoint())
            scene.every = 997
            await scene.publish()
            await scene.look()
            update = await scene.take()
            assert update.patch is not None
            patch(engine, update.patch)
            assert bits_of(engine) == scene.bits[8]

        play(act)

    def test_are_whole_though_buffers_are_used_again(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            engine = {name: array.copy() for name, array in scene.weights.items()}
            for version in range(2, 12):
                scene.every = 997 if version % 2 else 20
                await scene.publish()
                await scene.look()
                update = await scene.take()
                assert update.patch is not None
                patch(engine, update.patch)
                assert bits_of(engine) == scene.bits[version]

        play(act)


def read_copy(path: Path) -> Arrays:
    return {
        name: (tensor.dtype.name, tensor.shape, bytearray(tensor.bits.tobytes()))
        for name, tensor in read_weights(path).items()
    }


class TestCurrent:
    def test_of_a_small_replica_is_always_the_newest(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            for version in (1, 2, 3):
                await scene.publish()
                await scene.look()
                assert bits_of(scene.into / "current") == scene.bits[version]

        play(act)

    def test_of_a_large_one_is_made_now_and_then(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """When so much has changed since that a crash would cost more than to write it."""
        monkeypatch.setattr(replica_updater, "_SMALL", 0)

        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.work.checkpoint()
            made, most = [1], sum(array.nbytes for array in scene.weights.values()) // 4
            for _ in range(18):
                await scene.publish()
                await scene.look()
                assert scene.replica.journal_bytes <= most
                made.append(int((scene.into / "current").resolve().name.split("-")[0]))
            assert 2 <= len({*made}) <= 6
            assert bits_of(scene.into / "current") == scene.bits[made[-1]]

        play(act)


class TestEvents:
    @pytest.mark.parametrize("way", ["rebuilt", "patched"])
    def test_a_version_is_told_of_before_it_can_be_taken(self, play: Play, way: str) -> None:
        """So that whoever takes it knows how many bytes it took."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            if way == "patched":
                await scene.look()
                await scene.take()
                await scene.publish()
            looking = asyncio.create_task(scene.work.look())
            while (update := await scene.work.take()) is None:
                await asyncio.sleep(0.001)
            assert ("apply", update.version) in [(event.stage, event.version) for event in scene.heard]
            await looking

        play(act)


class TestHeartbeats:
    def test_come_after_each_version(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.start()
            for version in range(1, 5):
                await scene.publish()
                await until(lambda version=version: scene.work.version == version)  # type: ignore[misc]
                await asyncio.sleep(0.5)
                assert (scene.beat.version, scene.beat.head) == (version, version)

        play(act)

    def test_come_while_nothing_does(self, play: Play) -> None:
        """Several within a lease, so that one may be lost."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await until(lambda: scene.work.version == 1)
            await asyncio.sleep(1)
            scene.bucket.asked.clear()
            await asyncio.sleep(scene.beat.lease * 10)
            assert 35 <= scene.bucket.count("put", "replicas/") <= 41

        play(act)

    def test_say_what_is_wrong(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            good = scene.store.objects.pop(commit_path(3))
            scene.start()
            await until(lambda: scene.work.version == 2)
            scene.write(commit_path(3), b"hello")
            await until(lambda: scene.work.trouble)
            await asyncio.sleep(20)
            assert (scene.beat.version, scene.beat.trouble) == (2, scene.work.trouble)
            scene.store.objects[commit_path(3)] = good
            await until(lambda: scene.work.version == 3)
            await asyncio.sleep(20)
            assert (scene.beat.version, scene.beat.trouble) == (3, "")

        play(act)

    def test_say_at_once_that_trouble_is_over(self, play: Play) -> None:
        """Before the next one would be due."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await until(lambda: scene.work.version == 1)
            scene.write(commit_path(2), b"hello")
            await until(lambda: scene.work.trouble)
            await asyncio.sleep(1)
            assert scene.beat.trouble == scene.work.trouble
            scene.remove(commit_path(2))
            scene.work.wake()
            await until(lambda: not scene.work.trouble)
            await asyncio.sleep(1)
            assert scene.beat.trouble == ""

        play(act)

    def test_come_at_once_after_a_restart_without_news(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            scene.replica.close()
            scene.open()
            scene.start()
            await asyncio.sleep(3)
            assert scene.beat.version == 1

        play(act)

    def test_end_with_one_that_ends_the_lease(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(2)
            scene.start()
            await until(lambda: scene.work.version == 2)
            await asyncio.sleep(1)
            assert not scene.beat.stopped
            await scene.stop()
            await scene.work.stop_beating()
            assert scene.beat.stopped
            assert (scene.beat.version, scene.beat.lease, scene.beat.trouble) == (2, 0.0, "")
            assert [one.version for one in scene.beat.recent] == [1, 2]

        play(act)

    def test_end_without_trouble(self, play: Play) -> None:
        """Whoever has stopped is not in trouble any more."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await until(lambda: scene.work.version == 1)
            scene.write(commit_path(2), b"hello")
            await until(lambda: scene.work.trouble)
            await scene.stop()
            await scene.work.stop_beating()
            assert (scene.beat.stopped, scene.beat.trouble) == (True, "")

        play(act)

    def test_never_follow_the_last_one(self, play: Play) -> None:
        """One that is still being written lands before it."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            scene.bucket.trouble("put", "replicas/", slow(5), 1)
            beating = asyncio.create_task(scene.work.beat())
            await asyncio.sleep(1)
            await scene.work.stop_beating()
            await beating
            assert scene.beat.stopped

        play(act)

    def test_of_one_that_never_said_anything_have_no_last_one(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.work.stop_beating()
            assert heartbeat_path(NAME) not in scene.store.objects

        play(act)

    def test_of_one_that_cannot_begin_go_on_telling_of_the_versions_before(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            await scene.work.beat()
            told = scene.beat.recent
            assert told
            scene.replica.close()
            scene.remove(commit_path(3))
            scene.open()
            scene.start()
            await until(lambda: scene.work.trouble)
            await asyncio.sleep(1)
            assert (scene.beat.version, scene.beat.recent) == (-1, told)

        play(act)

    def test_that_are_denied_are_tried_again(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.bucket.trouble("put", "replicas/", denied, ALWAYS)
            await scene.publish()
            scene.start()
            await until(lambda: scene.work.version == 1)
            await asyncio.sleep(300)
            assert scene.warnings == ["this key may not write, so nobody sees how far this follower is"]
            await scene.publish()
            await until(lambda: scene.work.version == 2)
            assert heartbeat_path(NAME) not in scene.store.objects
            scene.bucket.calm()
            await asyncio.sleep(20)
            assert scene.beat.version == 2
            scene.bucket.trouble("put", "replicas/", denied, ALWAYS)
            await asyncio.sleep(20)
            assert len(scene.warnings) == 2  # it was allowed in between

        play(act)

    def test_that_get_lost_are_no_trouble(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.bucket.trouble("put", "replicas/", failed, 3)
            await scene.publish()
            scene.start()
            await asyncio.sleep(60)
            assert scene.beat.version == 1
            assert scene.warnings == []

        play(act)

    def test_of_one_that_cannot_begin(self, play: Play) -> None:
        """A replica ahead of the bucket keeps serving, and whoever looks sees why it does not move."""

        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            scene.replica.close()
            scene.remove(commit_path(3))
            scene.open()
            scene.start()
            await until(lambda: scene.work.trouble)
            await asyncio.sleep(60)
            assert "rolled back" in scene.warnings[0]
            assert scene.beat.trouble == scene.work.trouble

        play(act)


class TestABucketThatChanges:
    """Under a follower that has seen nothing new for a while, and so must look whether all is as it was."""

    def test_was_rolled_back(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(4)
            scene.start()
            await until(lambda: scene.work.version == 4)
            gone = {version: scene.store.objects.pop(commit_path(version)) for version in (3, 4)}
            await until(lambda: scene.work.trouble, 60)
            assert "has no version 4, which this replica holds; it stays as it is" in scene.work.trouble
            await asyncio.sleep(300)
            assert len(scene.warnings) == 1
            assert bits_of(scene.replica.weights) == scene.bits[4]
            for version, commit in gone.items():
                scene.store.objects[commit_path(version)] = commit
            await scene.publish()
            await until(lambda: scene.work.version == 5 and not scene.work.trouble, 60)
            scene.check(5)

        play(act)

    @pytest.mark.parametrize("versions", [2, 4, 8])
    def test_holds_another_run(self, play: Play, versions: int) -> None:
        """With fewer versions than the old one, as many, or more."""

        async def act(scene: Scene) -> None:
            await scene.publish(4)
            scene.start()
            await until(lambda: scene.work.version == 4)
            await scene.take()
            old = scene.run_id
            other = Scene(scene.into.with_name("other"), seed=8)
            other.replica.close()
            other.weights["norm"][:] = 17
            await other.publish(versions)
            scene.store.objects.clear()
            scene.store.objects.update(other.store.objects)
            await until(lambda: bits_of(scene.replica.weights) == other.bits[versions], 120)
            await until(lambda: scene.work.version == versions and not scene.work.trouble, 60)
            named = f"this replica is of run {old[:12]}; rebuilding it for {other.run_id[:12]}"
            assert scene.warnings.count(named) == 1
            update = await scene.take()
            assert (update.version, update.patch) == (versions, None)

        play(act)


class TestDataThatIsGone:
    def test_is_looked_for_again(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(2)
            objects = dict(scene.store.objects)
            scene.remove("deltas/2/")
            for _ in range(2):
                with pytest.raises(DataGone, match="no anchor leads"):
                    await scene.look()
                scene.check(1)
            scene.store.objects = objects
            await scene.look()
            scene.check(3)

        play(act)

    def test_and_what_rotted_is_as_good_as_gone(self, play: Play) -> None:
        """Where an anchor leads past it."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(6)
            [path] = [path for path in scene.store.objects if path.startswith("deltas/3/")]
            scene.write(path, bytes(len(scene.read(path))))
            await scene.look()
            scene.check(7)

        play(act, anchor_every=4)
