"""A damaged anchor is not fetched again at every look."""

from __future__ import annotations

import asyncio

import pytest

from support.failing_bucket import failed, in_memory
from support.follow_scene import ALWAYS, Play, Scene, eventually
from weightwire.catchup.fetch import Fetcher
from weightwire.errors import CorruptDelta, NotFound
from weightwire.follower.damage_backoff import DamageBackoff
from weightwire.system.runtime import Runtime


def damage_anchor(scene: Scene) -> tuple[str, bytes]:
    path = next(path for path in scene.store.objects if path.startswith("anchors/1/"))
    good = scene.read(path)
    scene.write(path, good[:-1] + bytes([good[-1] ^ 1]))
    return path, good


def test_a_follower_waits_longer_before_each_new_fetch_of_a_damaged_anchor(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.publish()
        damage_anchor(scene)
        scene.start()
        await asyncio.sleep(3600)
        # By polling alone, every 30 s: over a hundred.
        assert 8 <= scene.bucket.count("read_into", "anchors/1/") <= 20
        assert len(scene.warnings) == 1

    play(act)


def test_an_outage_does_not_shorten_the_wait(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.publish()
        damage_anchor(scene)
        scene.start()
        await asyncio.sleep(3600)
        scene.bucket.trouble("get list find read_into", "", failed, ALWAYS)
        await asyncio.sleep(1200)  # in the meantime the next fetch is due
        scene.bucket.calm()
        scene.bucket.asked.clear()
        await asyncio.sleep(560)
        assert scene.bucket.count("read_into", "anchors/1/") == 1

    play(act)


def test_a_repaired_anchor_is_fetched_within_ten_minutes(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.publish()
        path, good = damage_anchor(scene)
        scene.start()
        await asyncio.sleep(3600)
        scene.write(path, good)
        await eventually(lambda: scene.work.version == 1 and not scene.work.trouble, 660)
        assert scene.work._discovery._damage._due == {}  # if it is damaged again, the waits start again

    play(act)


def test_a_new_anchor_is_used_at_once(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.publish()
        damage_anchor(scene)
        scene.start()
        await asyncio.sleep(3600)
        await scene.publish()
        await eventually(lambda: scene.work.version == 2, 60)

    play(act, anchor_every=1)


def test_an_explicit_look_always_tries_again(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.publish()
        path, good = damage_anchor(scene)
        scene.start()
        await asyncio.sleep(3600)
        await scene.stop()
        scene.write(path, good)
        await scene.look()
        scene.check(1)

    play(act)


class Clock(Runtime):
    now = 0.0

    def clock(self) -> float:
        return self.now


class Looks:
    """A follower that looks every second at one damaged file. `tries` are the times when it fetches it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fetcher = Fetcher(in_memory(), self.clock)
        self.backoff = DamageBackoff(self.fetcher, self.clock)
        self.problem: CorruptDelta | NotFound | None = CorruptDelta("damaged")
        self.reachable = True
        self.has_detour = False  # another path leads to the newest version
        self.tries: list[int] = []

    def look(self, seconds: int = 1, *, only_due: bool = True) -> None:
        for _ in range(seconds):
            self.backoff.forget(only_due=only_due)
            if self.reachable and "a" not in self.fetcher.lost:
                self.tries.append(int(self.clock.now))
                if self.problem:
                    self.fetcher.lost["a"] = self.problem
            if self.reachable and (self.has_detour or not self.problem):
                self.backoff.settle()
            self.clock.now += 1


@pytest.fixture
def looks() -> Looks:
    return Looks()


class TestWaits:
    @pytest.mark.parametrize("has_detour", [False, True])
    def test_waits_double_up_to_ten_minutes(self, looks: Looks, has_detour: bool) -> None:
        looks.has_detour = has_detour
        looks.look(2500)
        waits = [after - before for before, after in zip(looks.tries, looks.tries[1:], strict=False)]
        # The first wait begins at the look that finds the damage in `lost`.
        assert waits == [3, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]

    def test_looks_that_do_not_reach_the_file_neither_reset_nor_use_up_the_wait(self, looks: Looks) -> None:
        looks.look(20)
        assert looks.tries == [0, 3, 7, 15]
        looks.reachable = False
        looks.look(80)  # due at 31
        looks.reachable = True
        looks.look(60)
        assert looks.tries[4:] == [100, 132]

    def test_an_explicit_look_tries_at_once_and_keeps_the_wait(self, looks: Looks) -> None:
        looks.look(20)
        looks.look(only_due=False)
        looks.look(20)
        assert looks.tries[4:] == [20, 31]

    def test_a_missing_file_is_tried_at_every_look(self, looks: Looks) -> None:
        looks.problem = NotFound("missing")
        looks.look(5)
        assert looks.tries == [0, 1, 2, 3, 4]

    def test_a_file_that_was_repaired_or_missing_meanwhile_starts_with_a_short_wait(self, looks: Looks) -> None:
        for between in (None, NotFound("missing")):
            looks.problem = CorruptDelta("damaged")
            looks.look(200)
            looks.problem = between
            looks.look(200)
            looks.problem = CorruptDelta("damaged again")
            looks.tries.clear()
            looks.look(10)
            waits = [after - before for before, after in zip(looks.tries, looks.tries[1:], strict=False)]
            assert waits == [3, 4], between
