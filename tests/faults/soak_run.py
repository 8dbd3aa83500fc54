"""A run under random faults for a stated time: a trainer, gc and followers with engines, and a real SeaweedFS.

Every version that an engine serves must have the trainer's bits. No acknowledged version may be lost. When the faults
end, everyone catches up. `benchmarks/soak.py` is the command, and judges the resources.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from faults import soak_actors
from faults.actors import Actor, Journal, Line, Rest
from faults.chaos import Chaos, Member
from faults.promises import Promises, Violation, bucket_of, read_about
from faults.proxy import Proxy
from faults.resources import ResourceLog, disk_use, read_usage
from faults.small_disks import SmallDisk, mount_tmpfs
from support.stores import SeaweedFS
from weightwire.bucket.bucket import Bucket, ObjectInfo
from weightwire.errors import BucketError
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime

__all__ = ["Plan", "Soak", "Tally"]

DISK_MEGABYTES = 24
"""Size of a disk that is filled: a replica of these weights needs 5 to 12 MB."""
PATIENCE = 240.0
"""Seconds until everyone works at the start, and has caught up at the end: many times the usual."""
SPARED_AFTER = 0.6
"""Share of the time after which trainer and gc are no longer killed, so that their memory can be judged."""
SHARED_MEMORY = Path("/dev/shm")
DATA = ("deltas/", "anchors/", "shortcuts/")


@dataclass(frozen=True)
class Plan:
    """What to run."""

    seed: int
    seconds: float
    followers: int = 8
    pace: float = 0.5  # seconds between versions, on average
    small_disks: int = 2
    own_shared_memory: bool = False


@dataclass
class Tally:
    """What happened. `wrong` and `lost` must stay 0."""

    served: Counter[str] = field(default_factory=Counter)
    """Versions compared bit by bit, by engine."""
    wrong: int = 0
    restarts_on_full_disk: int = 0
    swept: int = 0
    caught_up_after: float = 0.0


class Soak:
    """`with soak.playing():`, then `run` and `finish`. One thread calls everything."""

    def __init__(self, server: SeaweedFS, room: Path, plan: Plan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.say = say
        self.tally = Tally()
        self.resources = ResourceLog()
        self.room = room
        self._server = server
        self._url = server.url(f"soak-{plan.seed}")
        bucket = bucket_of(server, self._url)
        self.promises = Promises(bucket, Journal.Reader(room / "trainer.journal"), plan.seed)
        self.members: list[Member] = []
        self.chaos = Chaos(server, self.members, plan.seed, self._check_killed)
        self._logs: dict[str, Journal.Reader] = {}
        self._unchecked: list[tuple[str, Line]] = []

    # --- the cast ------------------------------------------------------------------------------------------------

    @contextmanager
    def playing(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._enlist(stack)
            stack.callback(self._kill_all)
            for one in self.members:
                one.actor.start()
            yield

    def _kill_all(self) -> None:
        for one in self.members:
            one.actor.kill()

    def _enlist(self, stack: ExitStack) -> None:
        seed, pace = str(self.plan.seed), str(self.plan.pace)
        trainer = ["train", self._url, str(self.room), "--seed", seed, "--pace", pace]
        self._add(stack, Actor(self.room, "trainer", trainer, {}))
        program = Path(soak_actors.__file__)
        gc = ["gc", self._url, str(self.room), "--name", "gc"]
        self._add(stack, Actor(self.room, "gc", gc, {}, program))
        for number in range(self.plan.followers):
            # The first of each engine is spared. The last ones have small disks.
            engine = "torch" if number % 4 == 1 else "patches"
            name = f"follower-{number}"
            disk = self._disk(stack, name) if number >= self.plan.followers - self.plan.small_disks else None
            replica = disk.replica if disk else self.room / "replicas" / name
            arguments = [engine, self._url, str(self.room), "--name", name, "--into", str(replica), "--seed", seed]
            self._add(stack, Actor(self.room, name, arguments, {}, program), replica, disk, is_spared=number < 2)

    def _add(
        self,
        stack: ExitStack,
        actor: Actor,
        replica: Path | None = None,
        disk: SmallDisk | None = None,
        is_spared: bool = False,
    ) -> None:
        """Gives the process its own proxy, temporary directory and log."""
        proxy = stack.enter_context(Proxy(self._server.endpoint, remembers=False))
        temporary = self.room / "tmp" / actor.name
        temporary.mkdir(parents=True)
        endpoint = {"AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ENDPOINT_URL_S3": proxy.endpoint}
        actor.env = self._server.env | endpoint | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        self.members.append(Member(actor, proxy, replica, disk, is_spared))
        self._logs[actor.name] = Journal.Reader(self.room / f"{actor.name}.log")

    def _disk(self, stack: ExitStack, name: str) -> SmallDisk | None:
        disk = SmallDisk(self.room / "disks" / name)
        problem = mount_tmpfs(disk.path, DISK_MEGABYTES)
        if problem:
            self.say(f"without a full disk of {name}: {problem}")
            return None
        stack.callback(disk.unmount)
        return disk

    @property
    def followers(self) -> Sequence[Member]:
        return [one for one in self.members if one.replica is not None]

    # --- the faults ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Plays until the time is over, from when everyone works. Prints a line every minute."""
        self._wait_for(lambda: all(one.has_worked for one in self.members), "everyone to work")
        began = time.monotonic()
        until, minute, next_look, next_check = began + self.plan.seconds, 1, began, began
        while (now := time.monotonic()) < until:
            self.chaos.step()
            if now >= next_look:
                next_look = now + 1.0
                self._look()
                self._sample_processes()
            if now >= next_check and self.chaos.is_server_up:
                next_check = now + 10.0
                self._check()
            if now >= began + SPARED_AFTER * self.plan.seconds:
                self._spare()
            if now >= began + 60 * minute:
                self.say(f"{minute} min: {self.describe()}")
                minute += 1
            time.sleep(0.05)
        self.chaos.end()

    def _spare(self) -> None:
        for one in self.members:
            one.is_spared = one.is_spared or one.kind in ("trainer", "gc")

    def describe(self) -> str:
        killed = sum(count for what, count in self.chaos.happened.items() if what.startswith("killed"))
        memory = {one.name: self.resources.final("memory", one.name) / 1e6 for one in self.members}
        data = self.resources.final("data objects"), self.resources.final("data bytes") / 1e6
        return (
            f"version {max(self.promises.commits, default=-1)}, {len(self.promises.acknowledged)} acknowledged, "
            f"{sum(self.tally.served.values())} compared, {self.tally.wrong} wrong, {killed} kills of "
            f"{sum(self.chaos.happened.values())} faults; memory {max(memory.values()):.0f} MB at most, "
            f"bucket {data[0]:.0f} objects, {data[1]:.1f} MB"
        )

    # --- checks --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Reads the logs, and checks that no process has ended by itself."""
        before = len(self.promises.acknowledged)
        self.promises.learn()
        for one in self.members:
            if one.kind == "trainer" and len(self.promises.acknowledged) > before:
                one.has_worked = True
            for line in self._logs[one.name].read():
                one.has_worked = one.has_worked or line["what"] in ("serves", "swept")
                if line["what"] == "serves":
                    engine = one.actor.arguments[0]
                    self.tally.served[engine] += 1
                    self._unchecked.append((one.name, line))
                elif line["what"] == "wrong":
                    self._report_wrong(one.name, line)
                elif line["what"] == "swept":
                    self.tally.swept += line["objects"]
            if not one.actor.alive and "down" not in one.ails:
                self._revive(one)

    def _revive(self, one: Member) -> None:
        """Starts a follower again that a full disk has ended, like a supervisor. Others must not end by themselves."""
        said = one.actor.said.read_text()[-20_000:]  # a traceback follows what is looked for
        is_full = "full" in one.ails or time.monotonic() - one.was_full < 20.0
        if not (is_full and one.actor.process is not None and one.actor.process.returncode == 1 and "ended: " in said):
            status = one.actor.process and one.actor.process.returncode
            raise Violation(f"{one.name} ended by itself with status {status}:\n{said}")
        self.tally.restarts_on_full_disk += 1
        one.has_worked = False
        one.actor.start()

    def _check(self) -> None:
        """Checks everything that was acknowledged or served since the last time."""
        waiting, self._unchecked = self._unchecked, []
        try:
            self.promises.check_acknowledged()
            self._sample_places()
        except BucketError as problem:
            self._unchecked = waiting + self._unchecked
            self.say(f"checks put off: {problem.message}")
            return
        for name, line in waiting:
            commit = self.promises.commits.get(line["version"])
            if commit is None:
                raise Violation(f"{name} serves version {line['version']}, which is not in the bucket")
            if (
                not line["exact"]
                or line["state"] != commit.after
                or self.promises.steps.get(commit.after) != line["step"]
            ):
                self._report_wrong(name, line)

    def _report_wrong(self, name: str, line: Line) -> None:
        self.tally.wrong += 1
        raise Violation(f"{name} serves other bits than the trainer had: {line}")

    def _check_killed(self, one: Member) -> None:
        """Checks `current` of a dead follower before anything repairs it."""
        if one.replica is not None and (one.replica / "current").exists():
            self.promises.check_checkpoint(one.replica / "current", f"{one.name}, just killed")

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """After the last fault: everyone catches up, all acknowledged versions are there, and all end cleanly."""
        began = time.monotonic()
        asked = Rest(self.room).begin("end")
        self._wait_for(lambda: self._has_rested(asked), "the trainer to publish everything")
        self.promises.check_rested()
        for one in self.followers:
            self._check_caught_up(one)
        self.tally.caught_up_after = time.monotonic() - began
        self._look()
        self._check()
        self.promises.check_all_again()
        self._verify()
        self._leave()
        self._sample_places()

    def _leave(self) -> None:
        """Stops all processes at the same time. Each must end cleanly."""
        with ThreadPoolExecutor(len(self.members)) as pool:
            statuses = list(pool.map(lambda one: one.actor.leave(), self.members))
        for one, status in zip(self.members, statuses, strict=True):
            if status:
                raise Violation(f"{one.name} ended with status {status}:\n{one.actor.said.read_text()[-3000:]}")

    def _has_rested(self, asked: str) -> bool:
        self.promises.learn()
        return any(line["asked"] == asked for line in self.promises.rests)

    def _check_caught_up(self, one: Member) -> None:
        assert one.replica is not None
        newest, current = self.promises.newest, one.replica / "current"
        self._wait_for(
            lambda: (read_about(current) or {}).get("version") == newest.version,
            f"{one.name} to reach version {newest.version}",
        )
        self.promises.check_checkpoint(current, one.name, newest.after)
        self._wait_for(lambda: self._serves(one, newest.version), f"the engine of {one.name}")

    def _serves(self, one: Member, version: int) -> bool:
        lines = [line for line in Journal.read(self.room / f"{one.name}.log") if line["what"] == "serves"]
        return bool(lines) and lines[-1]["version"] == version

    def _verify(self) -> None:
        found = asyncio.run(verify_run(self.promises.bucket, Runtime(), rebuild=True, threads=1))
        if not found.fine or found.head != self.promises.newest.version or found.rebuilt[-1][1] != found.head:
            raise Violation(f"verify found {found}")

    def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not done():
            self._look()
            if time.monotonic() > until:
                raise Violation(f"waited {PATIENCE:.0f} s for {what}\n{self._ask_everyone()}")
            time.sleep(0.1)

    def _ask_everyone(self) -> str:
        """What each process has said last, and where its threads are now."""
        for one in self.members:
            one.actor.dump_threads()
        time.sleep(1.0)
        return "\n".join(f"{one.name}: {one.actor.said.read_text()[-6000:]}" for one in self.members)

    # --- resources -----------------------------------------------------------------------------------------------

    def _sample_processes(self) -> None:
        """Samples processes from when they work: until then they import and load."""
        for one in self.members:
            if one.actor.process is not None and one.has_worked and "stopped" not in one.ails:
                self.resources.add_process(one.name, one.actor.process.pid)
        usage = read_usage(os.getpid())
        self.resources.add("memory of the proxies", "soak", usage.rss if usage else 0)

    def _sample_places(self) -> None:
        log = self.resources
        for one in self.followers:
            assert one.replica is not None
            files, size = disk_use(one.replica)
            log.add("replica files", one.name, files)
            log.add("replica bytes", one.name, size)
        for one in self.members:
            log.add("temporary files", one.name, disk_use(self.room / "tmp" / one.name)[0])
        if self.plan.own_shared_memory:
            log.add("shared memory files", "all", disk_use(SHARED_MEMORY)[0])
        objects = asyncio.run(_list(self.promises.bucket))
        data = [one for one in objects if one.path.startswith(DATA)]
        log.add("data objects", "bucket", len(data))
        log.add("data bytes", "bucket", sum(one.size for one in data))
        # By the clock of the store.
        log.add("data age", "bucket", time.time() - min((one.modified for one in data), default=time.time()))
        log.add("record objects", "bucket", len(objects) - len(data))


async def _list(bucket: Bucket) -> Sequence[ObjectInfo]:
    return await bucket.list("")
