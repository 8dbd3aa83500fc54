"""A follower in a simulation, with its disk and its engine. Every version that it reaches is checked."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from pathlib import Path

import msgspec

from faults.simulated_disk import SimDisk
from faults.simulated_keys import parse, signer_of
from faults.simulated_parts import SIDE_FILES, follower
from faults.simulated_runtime import EPOCH, Ambush, Process, View
from faults.simulated_store import SimBucket
from faults.simulated_world import Arrays, World, copy_of, sha256
from weightwire import patch
from weightwire.chain.record_paths import ALIVE, commit_path
from weightwire.chain.records import Commit, DataFile, Sealed, back_versions, seal
from weightwire.errors import WeightwireError
from weightwire.follower.follow_loop import FollowLoop
from weightwire.follower.trust_settings import TrustSettings
from weightwire.replica import Position
from weightwire.replica.checkpoint_about import CheckpointAbout
from weightwire.replica.replica import Replica
from weightwire.telemetry.events import Event
from weightwire.weights.checkpoint import Checkpoint

# Requests around which a follower may crash, or sleep about as long as its lease.
_MOMENTS = [
    ("get", "commits/"),
    ("get", "deltas/"),
    ("get", "anchors/"),
    ("list", "shortcuts/"),
    ("put", "replicas/"),
    ("thread", "advance"),
    ("thread", "finish"),
    ("thread", "make_current"),
    ("thread", "make_beside"),
    ("thread", "finish_refresh"),
]


def follower_ambush(rng: random.Random) -> Ambush:
    operation, prefix = rng.choice(_MOMENTS)
    return Ambush(operation, prefix, rng.random() < 0.5, rng.choice([0, 1, 3, 8]), rng.choice([None, 50, 58, 61, 300]))


def forged_after(held: Sealed[Commit], files: tuple[DataFile, ...]) -> Sealed[Commit] | None:
    """A commit that follows another by all rules, but that nobody published. None if the files do not fit."""
    record, version = held.record, held.record.version + 1
    fields = {"version": version, "parent": held.sha256, "before": record.after, "write_id": "5" * 32, "keys": ()}
    fields |= {"kind": "delta", "files": files, "keys_from": record.next_keys_from}
    back = (record.parent, *("0" * 64 for _ in back_versions(version)[1:])) if version > 1 else ()
    try:
        return seal(msgspec.structs.replace(record, **fields, back=back))
    except ValueError:
        return None


def slow_reader_ambush(rng: random.Random) -> Ambush:
    """Every heartbeat takes most of a lease: what it holds back stays needed until just before its lease ends."""
    return Ambush("put", "replicas/", True, rng.choice([0, 2]), rng.uniform(32, 58), stays=True)


class SimFollower:
    """`reached` is the newest version that it reported. It must never hold an older one again."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.delay = world.random.choice([0.0, 0.0, 2.0, 60.0])
        self.trust = world.keys.trust() if world.keys else TrustSettings()
        self.leaves = world.random.random() < 0.3  # stops for a while, now and then
        self.stop = asyncio.Event()
        self.reached = -1
        self._floor = -1  # what its memory says it has held: it must not go below that, even if its weights are lost
        self.process: Process | None = None
        self.work: FollowLoop | None = None
        self._checked: Sealed[Commit] | None = None
        self._wrong: dict[tuple[int, int], str] = {}  # by version and size: the last data file, if its bytes were wrong
        self._alive = ""  # what is wrong with the last sign of life that it read
        self._began_with: View | None = None  # what a lying store showed when its process started
        self._shows = False  # `current` was made
        self._handed: tuple[Path, str] | None = None  # the checkpoint that was handed out last, and its state

    @property
    def directory(self) -> Path:
        return self.world.room / self.name

    # --- life ----------------------------------------------------------------------------------------------------

    async def live(self, process: Process) -> bool:
        """Follows until it is stopped. Returns whether it is finished."""
        replica = await self._open(process)
        self.process, self._checked, self._handed = process, None, None
        process.delay = 0.0 if self.world.calm else self.delay
        process.closers.append(replica.close)
        bucket = SimBucket(self.world.store, process)
        bucket.on_request, bucket.on_data, bucket.on_put = self.check_commit, self._note_data, self._check_heartbeat
        bucket.on_get, self._alive = self._note_alive, "has not read a sign of life"
        self._began_with = self.world.views.get(self.name)
        work = self.work = follower(bucket, replica, self._listen, self.trust)
        running = process.start(work.run())
        away = await self._serve(process, work, running)
        await process.step()  # a crashed process ends here
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if process.random.random() < 0.5:
            await work.stop_beating()
        self.work = None
        replica.close()
        if away and not self.stop.is_set():
            await asyncio.sleep(process.random.choice([30.0, 70.0, 300.0]))
        return not away

    async def _open(self, process: Process) -> Replica:
        world, rng = self.world, process.random
        disk = world.disks.get(self.name)
        if disk is None:
            failing = random.Random(rng.getrandbits(64))
            disk = SimDisk(self.directory, failing, lambda: failing.random() < world.faults.disk)
            world.disks[self.name] = disk
        disk.repair()
        if not world.calm:
            disk.is_power = world.power and rng.random() < 0.7
            disk.fuse = rng.choice([rng.randrange(most) for most in (8, 40, 250)]) if world.crashes else None
        model = self.directory / "work/model.safetensors"
        # Without trusted keys, only the weights remember the chain: without both, it must believe the store.
        remembers = self.trust.is_active or self.name not in world.views
        if not world.calm and self.name in world.rotted and remembers and model.exists():
            disk.rot(model)
        process.disk = disk
        self._check_current("after a start")
        try:
            with disk.in_use():
                replica = Replica.open(self.directory, threads=1)
        except BaseException:
            if not disk.is_down:
                raise
            process.kill()
            await process.step()
            raise
        self._check_opened(replica)
        return replica

    async def _serve(self, process: Process, work: FollowLoop, running: asyncio.Task[None]) -> bool:
        """The engine: takes updates now and then, and must hold the same bits. Returns whether it leaves."""
        rng = process.random
        died, stopped = asyncio.create_task(process.died.wait()), asyncio.create_task(self.stop.wait())
        away = rng.uniform(20, 200) if self.leaves and not self.world.calm else None
        lazy = rng.choice([2.0, 2.0, 2.0, 60.0])
        engine: Arrays = {}
        began = self.world.loop.time()
        while not self.stop.is_set() and not process.dead:
            more = asyncio.create_task(work.wait_for_more(100.0))
            await asyncio.wait([died, stopped, running, more], return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
            await asyncio.sleep(rng.expovariate(1 / lazy))
            if running.done():
                running.result()
            if away is not None and self.world.loop.time() - began > away:
                break
            if not process.dead:
                self._push(work)
                engine = await self._take(work, engine, process)
        died.cancel()
        stopped.cancel()
        return away is not None and not self.stop.is_set()

    def _push(self, work: FollowLoop) -> None:
        """Publishers push commits, also late and out of order. Strangers push commits that nobody published."""
        rng = random.Random(f"{self.name} {self.world.now()}")
        commits, held = self.world.commits(), work.commit
        if not self.world.pushes or not commits or held is None or rng.random() < 0.3:
            return
        real = commits.get(held.record.version + 1) or commits[rng.choice([*commits])]
        stranger = forged_after(held, real.record.files) if rng.random() < 0.4 else None
        work.wake((stranger or real).data)

    async def _take(self, work: FollowLoop, engine: Arrays, process: Process) -> Arrays:
        self._check_handed_out()
        try:
            update = await work.take()
            if update is None:
                return engine
            if update.patch is None:
                return await self._load(work, update.version, process)
        except WeightwireError as problem:
            self.world.trace(f"{self.world.now()} {self.name}: {problem.message}")
            return {}
        if engine:
            patch(engine, update.patch, threads=1)
            self.world.check(update.state, engine, f"the engine of {self.name}")
        return engine

    async def _load(self, work: FollowLoop, version: int, process: Process) -> Arrays:
        """Loads all weights: from the replica's memory, or from a checkpoint."""
        if process.random.random() < 0.5:
            engine = copy_of(work.replica.weights)
            is_same = work.commit is not None and work.commit.record.version == version
            return engine if is_same else {}  # the replica has advanced meanwhile: use the next update
        path = await work.checkpoint()
        self._handed = path, CheckpointAbout.read(path).state
        self._check_handed_out()
        return copy_of(Checkpoint(path))

    def lose_replica(self) -> None:
        """The memory of the replica cannot be trusted any more, as after a failed flush."""
        held = self.work.replica._good() if self.work else None
        if held is not None:
            held.lost = "its pages are gone"

    # --- promises ------------------------------------------------------------------------------------------------

    def _listen(self, event: Event) -> None:
        self.world.listener(self.name)(event)
        if event.stage == "apply":
            self._check_version()
        if event.stage == "verify":
            wrong = self._wrong.get((event.version or 0, event.nbytes))
            if wrong is not None:
                self.world.violate(f"{self.name}: verified {wrong}, which has other bytes than its record says")

    def _check_version(self) -> None:
        """At every version: it is a real one with its real bits, and never older than one before."""
        work = self.work
        assert work is not None
        assert work.commit is not None
        self.check_commit()
        self.world.check(work.commit.record.after, work.replica.weights, self.name)
        self._check_refusals(work.commit.record.version)
        if work.commit.record.version < max(self.reached, self._floor):
            before = max(self.reached, self._floor)
            self.world.violate(f"{self.name}: went back from {before} to {work.commit.record.version}")
        self.reached = max(self.reached, work.commit.record.version)

    def _check_refusals(self, version: int) -> None:
        """It reaches nothing while the store shows what it must refuse, or while it knows no recent sign of life."""
        lie = self.world.views.get(self.name)
        if lie is not None and lie is self._began_with and lie.is_refused:
            self.world.violate(f"{self.name}: reached version {version} in a store that it must refuse")
        if self.trust.max_age is not None and self._alive:
            self.world.violate(f"{self.name}: reached version {version}, but {self._alive}")

    def _note_alive(self, path: str, data: bytes) -> None:
        if path != ALIVE or self.world.keys is None or self.trust.max_age is None:
            return
        honest = {key.public.hex for key in self.world.keys.honest}
        record = json.loads(data.partition(b"\n")[0])
        age = EPOCH + self.world.loop.time() - record["time"]
        if signer_of("alive", data) not in honest:
            self._alive = "its sign of life is forged"
        elif record["epoch"] < self._shown_epoch():
            self._alive = "its sign of life is of a publisher that was replaced"
        elif abs(age) > self.trust.max_age + 1.0:
            self._alive = f"its sign of life is {age:.0f} s old"
        else:
            self._alive = ""

    def _shown_epoch(self) -> int:
        """The epoch of the newest commit in what the store shows to it."""
        view = self.world.views.get(self.name) or self.world.store
        found = view.find(max(view.paths("commits/"), default=""))
        return int(parse(found[0])["epoch"]) if found else 0

    def check_commit(self) -> None:
        commit = self.work.commit if self.work else None
        if commit is None or commit is self._checked:
            return
        self._checked = commit
        if not self.world.is_genuine(commit):
            self.world.violate(f"{self.name}: accepted a version {commit.record.version} that nobody published")

    def _check_opened(self, replica: Replica) -> None:
        """A version that was reported survives every crash and power cut. Only a damaged disk may lose it."""
        held = replica.position
        if held is not None:
            assert replica.state is not None
            self.world.check(replica.state.hex, replica.weights, f"{self.name} after a start")
        if (held.version if held else -1) < self.reached and self.name not in self.world.rotted:
            self.world.violate(f"{self.name}: lost version {self.reached} ({replica.trouble})")
        if held is None:
            self.reached, self._floor = -1, self._remembered()
            self.world.rotted.discard(self.name)

    def _remembered(self) -> int:
        memory = self.directory / "seen.json"
        return int(json.loads(memory.read_bytes())["held"]) if self.trust.is_active and memory.exists() else -1

    def _check_current(self, when: str) -> None:
        """`current` is always complete: engines load it at any time, also after a power cut."""
        link = self.directory / "current"
        if link.is_symlink():
            self._check_checkpoint(link, when)
        elif self._shows:
            self.world.violate(f"{self.name}: `current` is gone {when}")

    def _check_handed_out(self) -> None:
        """A checkpoint that was handed out stays until the next one is. Between two steps, `current` is on disk."""
        self._shows = self._shows or (self.directory / "current").is_symlink()
        if self._handed is not None:
            self._check_checkpoint(self._handed[0], "handed out", self._handed[1])

    def _check_checkpoint(self, path: Path, when: str, state: str = "") -> None:
        who = f"the checkpoint of {self.name} {when}"
        try:
            about = CheckpointAbout.read(path)
            self.world.check(state or about.state, Checkpoint(path), who)
            files = {name: (path / name).read_bytes() for name in SIDE_FILES}
        except (OSError, ValueError, WeightwireError) as problem:
            self.world.violate(f"{who}: {problem!r}")
            return
        if files != SIDE_FILES:
            self.world.violate(f"{who}: its side files differ")

    def _note_data(self, path: str, data: bytes) -> None:
        key = int(path.split("/")[1]), len(data)
        if sha256(data).startswith(path.rsplit("-", 1)[-1].removesuffix(".safetensors")):
            self._wrong.pop(key, None)
        else:
            self._wrong[key] = path

    def _is_in_run(self, held: Position) -> bool:
        """Whether an honest store would show that a version belongs to the run. With trusted keys it may be refused."""
        stored = self.world.store.objects.get(commit_path(held.version))
        honest = self.name not in self.world.deceived and not self.trust.is_active
        return honest and stored is not None and sha256(stored[0]) == held.commit

    def _check_heartbeat(self, path: str, data: bytes) -> None:
        """A heartbeat never claims more than the replica holds. Nor does it give up a lease that is still needed."""
        held = self.work.replica.position if self.work else None
        with suppress(KeyError):
            beat = json.loads(data)
            version = beat["version"]
            last = self.world.store.objects.get(path)
            claimed = last is not None and json.loads(last[0])["version"] >= 0
            if version < 0 and claimed and held is not None and beat["lease"] and self._is_in_run(held):
                self.world.violate(f"{path}: claims nothing, but {self.name} needs what follows version {held.version}")
            if version >= 0 and held is not None and version > held.version:
                self.world.violate(f"{path}: claims version {version}, but {self.name} holds {held.version}")
