"""A store that lies: a well-made forgery would be accepted, and each broken rule alone is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import pytest

from faults.forgery import FORGERIES, Chain, Forger
from faults.lies import Lie
from faults.simulated_follower import SimFollower
from faults.simulated_keeper import SimKeeper
from faults.simulated_keys import SimKeys
from faults.simulated_runtime import Faults, SimLoop
from faults.simulated_trainer import SimTrainer
from faults.simulated_world import World
from faults.trust_lies import TrustLies
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import commit_path
from weightwire.chain.records import Commit, seal
from weightwire.follower.trust_settings import TrustSettings


class Stage:
    """A follower at the newest version of two publishers, without faults. In a signed run, the key changed between."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.follower = SimFollower(world, "follower")
        if world.keys:
            self.follower.trust = TrustSettings(world.keys.first)

    async def begin(self) -> None:
        for number in range(2):
            if number and self.world.keys:
                keeper = SimKeeper(self.world)
                keeper.revokes = True
                await keeper.live(self.world.process(keeper.name))
            trainer = SimTrainer(self.world, f"trainer-{number}", 3)
            await trainer.live(self.world.process(trainer.name))
        process = self.world.process("follower")
        self.life = process.start(self.follower.live(process))
        await asyncio.sleep(30.0)
        assert self.version == self.chain[-1].record.version

    async def end(self) -> None:
        self.follower.stop.set()
        await self.life

    @property
    def chain(self) -> Chain:
        return [*self.world.commits().values()]

    @property
    def version(self) -> int | None:
        return self.follower.work.version if self.follower.work else None

    @property
    def trouble(self) -> str:
        return self.follower.work.trouble if self.follower.work else "it does not run"

    async def show(self, forger: Forger, commit: Commit, key: PrivateKey | None = None) -> None:
        """Shows a forged next version for a while."""
        path = commit_path(self.chain[-1].record.version + 1)
        lie = Lie(self.world.store, {**forger.objects, path: (seal(commit, key).data, self.world.store.now())})
        await self.tell(lie)

    async def tell(self, lie: Lie) -> None:
        self.world.views["follower"] = lie
        assert self.follower.work
        self.follower.work.wake()
        await asyncio.sleep(60.0)


class Perform(Protocol):
    def __call__(self, act: Callable[[Stage], Awaitable[None]], *, signed: bool = False) -> None: ...


@pytest.fixture
def perform(tmp_path: Path) -> Perform:
    def run(act: Callable[[Stage], Awaitable[None]], *, signed: bool = False) -> None:
        loop = SimLoop()

        async def play() -> None:
            world = World(random.Random(1), loop, tmp_path, lambda line: None, Faults(), False, False, 256, calm=True)
            world.keys = SimKeys(random.Random(3), has_ages=False) if signed else None
            stage = Stage(world)
            await stage.begin()
            try:
                await act(stage)
            finally:
                await stage.end()

        try:
            loop.run_until_complete(play())
        finally:
            loop.close()

    return run


@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_a_well_made_forgery_is_accepted_and_counts_as_a_violation(perform: Perform, kind: str) -> None:
    """Otherwise the forgeries below could be refused for another reason than the rule that they break."""

    async def act(stage: Stage) -> None:
        forger = Forger(stage.world, random.Random(2))
        made = forger.following(stage.chain, kind)
        await stage.show(forger, made)
        assert stage.version == made.version
        assert stage.world.violations[0] == f"follower: accepted a version {made.version} that nobody published"

    perform(act)


async def check_refused(stage: Stage, held: int | None) -> None:
    """The follower keeps its version and reports the lie, and is well once that has ended."""
    assert stage.version == held
    assert stage.trouble
    del stage.world.views["follower"]
    await asyncio.sleep(60.0)
    assert not stage.trouble
    assert not stage.world.violations


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_that_breaks_one_rule_is_refused_and_reported(perform: Perform, name: str) -> None:
    async def act(stage: Stage) -> None:
        forger = Forger(stage.world, random.Random(2))
        made, held = FORGERIES[name](forger, stage.chain), stage.version
        assert made is not None
        await stage.show(forger, made)
        await check_refused(stage, held)

    perform(act)


# --- signed runs -----------------------------------------------------------------------------------------------------


def test_a_version_signed_with_the_key_in_force_is_accepted(perform: Perform) -> None:
    """Otherwise the strangers below could be refused for another reason than their keys."""

    async def act(stage: Stage) -> None:
        assert stage.world.keys
        forger = Forger(stage.world, random.Random(2))
        made = forger.following(stage.chain)
        await stage.show(forger, made, stage.world.keys.honest[1])
        assert stage.version == made.version

    perform(act, signed=True)


@pytest.mark.parametrize("name", TrustLies.STRANGERS)
def test_a_version_of_a_stranger_is_refused_and_reported(perform: Perform, name: str) -> None:
    async def act(stage: Stage) -> None:
        held = stage.version
        assert held is not None
        lie = TrustLies(stage.world, random.Random(2)).stranger(name, stage.chain, held)
        assert lie is not None
        await stage.tell(lie)
        await check_refused(stage, held)

    perform(act, signed=True)
