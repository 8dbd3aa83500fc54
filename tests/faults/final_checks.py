"""What must be true once the faults of a simulation have ended."""

from __future__ import annotations

import asyncio
import random

from faults.simulated_follower import SimFollower
from faults.simulated_parts import publisher
from faults.simulated_store import Objects, flipped, is_data
from faults.simulated_world import World
from faults.store_rules import is_vouched_for, usable_anchors
from faults.tampering import false_hint
from weightwire.chain.record_paths import HEAD
from weightwire.chain.records import Commit, DataFile, Sealed, Shortcut, unseal
from weightwire.publisher.settings import PublisherSettings

_POLL = 31.0  # seconds


class FinalChecks:
    def __init__(self, world: World, followers: list[SimFollower], rng: random.Random) -> None:
        self.world = world
        self.followers = followers
        self.random = rng

    @property
    def _head(self) -> Sealed[Commit] | None:
        head = self.world.head()
        return head if head is not None and head.record.after else None

    async def check_caught_up(self, limit: float) -> None:
        """Running followers reach the newest version and are well, without a restart."""
        head, end = self._head, self.world.loop.time() + limit
        while head is not None:
            late = [one for one in self.followers if not _is_at(one, head)]
            if not late:
                return
            if self.world.loop.time() > end:
                work = late[0].work
                trouble, version = (work.trouble, work.version) if work else ("it does not run", None)
                self.world.violate(f"{late[0].name}: stays at version {version}, not {head.record.version} ({trouble})")
                return
            await asyncio.sleep(_POLL)

    async def check_end(self) -> None:
        commits, head = self.world.commits(), self._head
        if sorted(commits) != list(range(len(commits))):
            self.world.violate("the chain has holes")
        for version, state in self.world.truth.acknowledged.items():
            if version not in commits or commits[version].record.after != state:
                self.world.violate(f"version {version} was acknowledged, and is not there")
        if head is None:
            return
        if self.random.random() < 0.5:
            self._leave_one_path(head)
        if self.random.random() < 0.5:
            self.world.store.objects[HEAD] = false_hint(self.world, self.random), self.world.store.now()
        for follower in [*self.followers, SimFollower(self.world, "late")]:
            await self._check_follower(follower, head)
        await self._check_successor(head)

    async def _check_follower(self, follower: SimFollower, head: Sealed[Commit]) -> None:
        """A restarted follower, or a new one, is at the newest version after one look."""
        follower.stop.clear()
        process = self.world.process(follower.name)
        life = process.start(follower.live(process))
        for _ in range(10):
            await asyncio.sleep(2.0)
            if life.done() or _is_at(follower, head):
                break
        if not _is_at(follower, head):
            trouble = follower.work.trouble if follower.work else ""
            self.world.violate(f"{follower.name}: cannot reach the newest version after a start ({trouble})")
            return
        assert follower.work is not None
        path = await follower.work.checkpoint()
        follower._check_checkpoint(path, "at the end", head.record.after)
        follower.stop.set()
        await life

    async def _check_successor(self, head: Sealed[Commit]) -> None:
        """A new publisher finds the last published state and continues from it."""
        process = self.world.process("successor")
        listen = self.world.listener(process.name)
        work = publisher(self.world.store, process, PublisherSettings(threads=1, signer=self.world.signer()), listen)
        await work.process.start()
        if work.process.copies is None or work.process.state is None:
            self.world.violate("the successor does not find the published weights")
            return
        self.world.check(head.record.after, work.process.copies.published, "the successor")

    def _leave_one_path(self, head: Sealed[Commit]) -> None:
        """Damages all data but one anchor and what follows it: any complete path is enough."""
        anchors, objects = usable_anchors(self.world.store), self.world.store.objects
        if not anchors:
            return
        start = self.random.choice(anchors)
        needed = {file.path for version in range(start + 1, head.record.version + 1) for file in self._files(version)}
        starts = [
            record.files
            for path, data in self.world.store.latest(f"shortcuts/{start}/")
            if is_vouched_for(objects, data)
            and (record := unseal(data, Shortcut, path).record).after == self.world.commits()[start].record.after
        ]
        commit = self.world.commits()[start].record
        starts += [commit.files] if commit.kind == "anchor" else []
        whole = [files for files in starts if all(file.path in objects for file in files)]
        needed |= {file.path for file in self.random.choice(whole)}
        self._damage(objects, needed)

    def _files(self, version: int) -> list[DataFile]:
        return [*self.world.commits()[version].record.files]

    def _damage(self, objects: Objects, needed: set[str]) -> None:
        self.world.trace(f"{self.world.now()} everything but {sorted(needed)} is damaged")
        for path in [path for path in objects if is_data(path) and path not in needed]:
            data, modified = objects[path]
            if self.random.random() < 0.5:
                objects[path] = flipped(data, self.random.randrange(8 * len(data))), modified
            else:
                del objects[path]


def _is_at(follower: SimFollower, head: Sealed[Commit]) -> bool:
    work = follower.work
    return work is not None and work.commit == head and not work.trouble
