"""Stores that lie to one follower for a while: rolled back, spliced, forged, damaged.

Whatever such a store shows, a follower never accepts a version that nobody published, and never goes back. Once the
store is honest again, it catches up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from faults.forgery import FORGERIES, Chain, Forger, first_anchor
from faults.lies import Lie, LieMaker, number_of
from faults.simulated_follower import SimFollower
from faults.simulated_store import flipped, is_data
from faults.simulated_world import World, sha256
from faults.trust_lies import TrustLies
from weightwire.chain.record_paths import HEAD, RUN, commit_path, side_path
from weightwire.chain.records import HeadHint, Run, SideFile, seal, unseal


class Tamperer:
    """Picks followers, and lies to them.

    `join` starts a new follower, and `hire` a new trainer, which see the lie from their beginning.
    """

    def __init__(
        self,
        world: World,
        followers: list[SimFollower],
        join: Callable[[str], SimFollower],
        hire: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        self.world = world
        self.random = random.Random(world.random.getrandbits(64))
        self.followers = followers
        self.join = join
        self.hire = hire
        self.name = ""  # of the latest lie
        self.trust_lies = TrustLies(world, self.random)

    async def work(self, lies: int) -> None:
        for number in range(lies):
            await asyncio.sleep(self.random.expovariate(1 / 20))
            if self.world.keys and self.random.random() < 0.2:
                await self._lie_to_trainer(f"trainer-hired-{number}")
            elif self.random.random() < 0.4 and self._known(self._chain()):
                follower = self.join(f"newcomer-{number}")
                trust = self.trust_lies.to_newcomers(follower) if self._tests_trust(follower) else None
                await self._lie_to(follower, trust or self._lies_to_newcomers())
            else:
                holders = [one for one in self.followers if one.work is not None and one.work.version is not None]
                follower = self.random.choice(holders or self.followers)
                await self._lie_to(follower, self._lies_to_holders(follower))

    def _tests_trust(self, follower: SimFollower) -> bool:
        return follower.trust.is_active and self.random.random() < 0.8

    def _lies_to_holders(self, follower: SimFollower) -> list[LieMaker]:
        if self._tests_trust(follower):
            return [*self.random.choice([[self._fork], []]), *self.trust_lies.to_holders(follower)]
        several: list[list[LieMaker]] = [[self._roll_back], [self._change_run], [self._damage] * 2]
        several += [[self._fork] * 5, [self._fork] * 5, self._forgeries(), self._forgeries()]
        return self.random.choice(several)

    def _lies_to_newcomers(self) -> list[LieMaker]:
        several: list[LieMaker] = [
            self._anchor_first,
            self._other_beginning,
            self._other_beginning,
            self._other_run_json,
        ]
        self.random.shuffle(several)
        # These do not keep it from the newest version, so they come last.
        last = [self._forge_shortcut, self._forge_shortcut, self._damage, self._damage_side_files, self._lie_about_head]
        several.append(self.random.choice(last))
        return self.random.choice([self._forgeries(), several, several])

    def _forgeries(self) -> list[LieMaker]:
        names = [*FORGERIES]
        self.random.shuffle(names)
        return [partial(self._forge, name) for name in names]

    def _chain(self) -> Chain:
        commits = self.world.commits()
        return [commits[version] for version in sorted(commits)]

    def _known(self, chain: Chain, least: int = 0) -> list[int]:
        """The versions of a chain with weights, from `least` on."""
        return [one.record.version for one in chain[least:] if one.record.after in self.world.truth.states]

    async def _lie_to(self, follower: SimFollower, makers: list[LieMaker]) -> None:
        """Shows one lie after the other to a follower. It looks at each, because anyone may wake it."""
        for number, maker in enumerate(makers):
            held = follower.work.version if follower.work else None
            chain = self._chain()
            lie = maker(chain, -1 if held is None else held) if chain and (held or 0) < len(chain) else None
            if lie is None:
                continue
            self.name = lie.name or self.name
            self.world.trace(f"{self.world.now()} {follower.name}: is lied to ({self.name})")
            self.world.views[follower.name] = lie
            self.world.deceived.add(follower.name)
            if lie.needs_rot:
                self.world.rotted.add(follower.name)
            if follower.process and held is not None and (lie.needs_restart or self.random.random() < 0.1):
                follower.process.kill()
            elif follower.work:
                if lie.needs_loss:
                    follower.lose_replica()
                follower.work.wake()
            await asyncio.sleep(45.0 if lie.needs_restart else lie.lasts or self.random.choice([2.0, 6.0]))
            if lie.alerts and (number == len(makers) - 1 or self.random.random() < (0.5 if lie.lasts else 0.05)):
                await self._watch(follower, lie)
        self.world.views.pop(follower.name, None)

    async def _lie_to_trainer(self, name: str) -> None:
        """A new trainer finds a stranger's version, at its start or in the place of its fence."""
        chain = self._chain()
        lie = self.trust_lies.to_trainer(chain) if self._known(chain) else None
        if lie is not None:
            self.world.trace(f"{self.world.now()} {name}: is lied to ({lie.name})")
            self.world.deceived.add(name)
            self.world.views[name] = lie
            life = asyncio.create_task(self.hire(name))
            await asyncio.sleep(20.0)
            self.world.views.pop(name, None)
            await life

    async def lie_at_start(self, name: str) -> None:
        """The first trainer finds a stranger's run.json, whose hash it must not sign."""
        self.world.deceived.add(name)
        self.world.views[name] = self.trust_lies.to_first_trainer()
        await asyncio.sleep(20.0)
        self.world.views.pop(name, None)
        await self.hire("trainer-after")  # the first one may have refused for good

    async def _watch(self, follower: SimFollower, lie: Lie) -> None:
        """A follower that runs all the time and holds a version must notice the lie."""
        process, work = follower.process, follower.work
        if process is None or work is None or process.asleep_until > self.world.loop.time() or not lie.is_due():
            return
        process.interrupted = False
        await asyncio.sleep(150.0 + 4 * process.delay)
        if process.interrupted or follower.process is not process or follower.work is not work or process.dead:
            return
        if lie.alerts and work.version is not None and not work.trouble:
            self.world.violate(f"{follower.name}: has not noticed that the store lies ({self.name})")

    # --- lies to a follower that holds a version -----------------------------------------------------------------

    def _roll_back(self, chain: Chain, held: int) -> Lie | None:
        """The whole bucket is as it was before, when the version that is held did not exist."""
        self.name = "rolled back"
        if held < 0:
            return None
        older = [one for one in self.world.store.snapshots if commit_path(held) not in one and RUN in one]
        if not older:
            return None
        lie = Lie(self.random.choice(older), alerts=True)
        if self.random.random() < 0.3:
            lie.flaps, lie.honest, lie.alerts = self.random, self.world.store, False
        return lie

    def _fork(self, chain: Chain, held: int) -> Lie | None:
        """Another lineage of the same run, from below the version that is held, spliced onto the real one."""
        self.name = "forked"
        known = [version for version in self._known(chain) if version < held]
        if not known:
            return None
        fork = self.random.choice([known[-1], known[-1], self.random.choice(known)])
        # A publisher that was shown an old copy would sign such a lineage.
        key = self.world.keys.at(chain[: fork + 1])[-1] if self.world.keys else None
        forger = Forger(self.world, self.random, key=key)
        count = held - fork + self.random.randint(1, 7)
        made = forger.lineage(chain[: fork + 1], count)
        genuine = self.random.choice([fork, held, held + 1, held + 1, self.random.randint(fork, len(chain))])
        if self.random.random() < 0.4:
            lie = self._spliced(forger, made, self.random.randint(0, fork))
            # A follower with trusted keys knows the chain even if its disk has lost the weights.
            lie.needs_loss = self.random.random() < 0.5
            lie.needs_restart = lie.needs_rot = not lie.needs_loss
            return lie
        return self._spliced(forger, made, genuine, alerts=genuine < held)

    def _spliced(self, forger: Forger, made: Chain, genuine: int, *, alerts: bool = False) -> Lie:
        """Shows the real commits up to `genuine`, and those of another lineage after it."""
        lie = Lie(dict(self.world.store.objects), alerts=alerts)
        ours = {path for path in forger.objects if path.startswith("commits/") and number_of(path) <= genuine}
        lie.shown = {path: one for path, one in forger.objects.items() if path not in ours}
        lie.hide("commits/", above=max(genuine, made[-1].record.version))
        lie.hide("shortcuts/")
        lie.shown[HEAD] = None
        return lie

    def _forge(self, name: str, chain: Chain, held: int) -> Lie | None:
        """The next version breaks one rule."""
        self.name = name
        known = self._known(chain, max(held, 0))
        if not known:
            return None
        after = self.random.choice([known[0], known[-1], self.random.choice(known)])
        forger = Forger(self.world, self.random)
        forged = FORGERIES[name](forger, chain[: after + 1])
        if forged is None:
            return None
        lie = Lie(dict(self.world.store.objects), {**forger.objects}, alerts=True)
        lie.hide("commits/", above=after)
        lie.shown[commit_path(after + 1)] = forger.sealed(forged).data, self.world.store.now()
        if self.random.random() < 0.5:
            lie.shown[HEAD] = None
        return lie

    def _damage(self, chain: Chain, held: int) -> Lie | None:
        """Some data files, or all, are junk of the right size, have a wrong bit, are cut off or missing."""
        self.name = "damaged"
        lie = Lie(self.world.store)
        share = self.random.choice([0.3, 1.0])
        for path, (data, modified) in self.world.store.objects.items():
            if (is_data(path) or path.startswith("files/")) and self.random.random() < share:
                lie.shown[path] = _damaged(data, modified, self.random)
        return lie

    def _damage_side_files(self, chain: Chain, held: int) -> Lie | None:
        self.name = "damaged side files"
        files = {path: self.world.store.objects[path] for path in self.world.store.paths("files/")}
        return Lie(
            self.world.store, {path: (self.random.randbytes(len(data)), at) for path, (data, at) in files.items()}
        )

    def _change_run(self, chain: Chain, held: int) -> Lie | None:
        """run.json names other tensors than the replica has."""
        self.name = "other tensors"
        if held < 0:
            return None
        data, modified = self.world.store.objects[RUN]
        run = unseal(data, Run, RUN).record
        tensors = {**run.tensors, "norm": ("F32", (6,))}
        changed = seal(msgspec.structs.replace(run, tensors=tensors)).data
        return Lie(self.world.store, {RUN: (changed, modified)}, alerts=True, needs_restart=True)

    # --- lies to a new follower ----------------------------------------------------------------------------------

    def _other_beginning(self, chain: Chain, held: int) -> Lie | None:
        """A lineage of the same run that does not begin with the real version 0."""
        self.name = "another beginning"
        forger = Forger(self.world, self.random)
        write_id = f"{self.random.getrandbits(128):032x}"
        first = forger.sealed(msgspec.structs.replace(chain[0].record, write_id=write_id))
        state = self.random.choice([one.record.after for one in chain if one.record.after in self.world.truth.states])
        begun = first_anchor(forger, first.record, forger.next_state(state))
        made = forger.lineage([first, forger.sealed(msgspec.structs.replace(begun, parent=first.sha256))], 12)
        forger.commit(made[1])
        return self._spliced(forger, made, self.random.choice([0, 0, self.random.randint(0, 5)]))

    def _anchor_first(self, chain: Chain, held: int) -> Lie | None:
        """Version 0 is an anchor, and the only version."""
        self.name = "an anchor as version 0"
        forger = Forger(self.world, self.random)
        state = chain[self.random.choice(self._known(chain))].record.after
        forged = forger.sealed(first_anchor(forger, chain[0].record, state, 0))
        lie = Lie(self.world.store, {**forger.objects})
        lie.hide("commits/", "shortcuts/")
        lie.shown[commit_path(0)] = forged.data, self.world.store.now()
        return lie

    def _other_run_json(self, chain: Chain, held: int) -> Lie | None:
        """run.json names other side files, or differs in any other way: version 0 does not name its hash."""
        data, modified = self.world.store.objects[RUN]
        run = unseal(data, Run, RUN).record
        junk = self.random.randbytes(8)
        path = side_path(run.files[0].name, sha256(junk))
        file = SideFile(run.files[0].name, path, len(junk), sha256(junk))
        other_files = msgspec.structs.replace(run, files=(file, *run.files[1:]))
        changed = seal(self.random.choice([other_files, msgspec.structs.replace(run, time=run.time + 1)])).data
        lie = Lie(self.world.store, name="another run.json", is_refused=True)
        lie.shown.update({RUN: (changed, modified), path: (junk, modified)})
        return lie

    def _forge_shortcut(self, chain: Chain, held: int) -> Lie | None:
        """An anchor beside the newest version that has other weights, and says so or not."""
        self.name = "forged shortcut"
        known = self._known(chain)
        forger = Forger(self.world, self.random)
        commit = chain[known[-1]].record
        other = self.random.choice([chain[version].record.after for version in known])
        if other == commit.after:
            other = forger.next_state(other)
        forger.shortcut(commit, **self.random.choice([{"after": other}, {"data": other}]))
        lie = Lie(self.world.store, {**forger.objects})
        lie.hide("commits/", above=commit.version)
        lie.hide("shortcuts/", above=commit.version - 1)
        return lie

    def _lie_about_head(self, chain: Chain, held: int) -> Lie | None:
        self.name = "HEAD.json lies"
        return Lie(self.world.store, {HEAD: (false_hint(self.world, self.random), self.world.store.now())})


def false_hint(world: World, rng: random.Random) -> bytes:
    """A HEAD.json that nobody may trust."""
    run = unseal(world.store.objects[RUN][0], Run, RUN).record.run
    version = rng.choice([0, 3, 10**6])
    anchor = rng.choice(["", "shortcuts/1/anchor-0123456789abcdef.json", "../junk"])
    return rng.choice([b"junk", seal(HeadHint(run=run, version=version, anchor=anchor)).data])


def _damaged(data: bytes, modified: float, rng: random.Random) -> tuple[bytes, float] | None:
    how = rng.randrange(4)
    if how == 0 or not data:
        return None
    if how == 1:
        return data[: rng.randrange(len(data))], modified
    return (rng.randbytes(len(data)) if how == 2 else flipped(data, rng.randrange(8 * len(data)))), modified
