"""The replica after kills, power cuts and a full disk: it always holds exactly one version."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors

from support.disk import Disk, at_every_step, copied
from support.small_run import FILES, Story, bits_of
from weightwire import diff
from weightwire.errors import WeightwireError
from weightwire.replica.current_refresh import CurrentRefresh
from weightwire.replica.replica import Replica

STORY = Story(last=10)
OTHER = Story(run="other", seed=7)
STORIES = {story.run: story for story in (STORY, OTHER)}

Action = Callable[[Replica], object]


@dataclass(frozen=True)
class Act:
    """An operation on a replica. `held` is the version after it, `shown` the version of `current`."""

    do: Action
    held: tuple[str, int]
    shown: tuple[str, int] | None


def acts() -> list[Act]:
    """Everything a follower does, in order, from version 1 on and without a `current` at first."""

    def to(version: int) -> Action:
        return lambda replica: STORY.advance(replica, version)

    refreshes: list[CurrentRefresh | None] = []

    def begin(replica: Replica) -> None:
        refreshes.append(replica.begin_refresh())

    def make(replica: Replica) -> None:
        assert refreshes[-1]
        refreshes[-1].make_beside()

    def finish(replica: Replica) -> None:
        assert refreshes[-1]
        replica.finish_refresh(refreshes[-1])

    return [
        Act(to(2), ("run", 2), None),
        Act(to(3), ("run", 3), None),
        Act(Replica.checkpoint, ("run", 3), ("run", 3)),
        Act(to(4), ("run", 4), ("run", 3)),
        Act(Replica.sync, ("run", 4), ("run", 3)),
        Act(to(5), ("run", 5), ("run", 3)),
        Act(Replica.checkpoint, ("run", 5), ("run", 5)),
        Act(to(6), ("run", 6), ("run", 5)),
        Act(begin, ("run", 6), ("run", 5)),
        Act(to(7), ("run", 7), ("run", 5)),
        Act(make, ("run", 7), ("run", 5)),
        Act(to(8), ("run", 8), ("run", 5)),
        Act(finish, ("run", 8), ("run", 6)),
        Act(lambda replica: OTHER.build(replica, 2), ("other", 2), ("run", 6)),
        Act(lambda replica: OTHER.advance(replica, 3), ("other", 3), ("run", 6)),
        Act(Replica.checkpoint, ("other", 3), ("other", 3)),
    ]


@dataclass
class Progress:
    """The versions that are certain, and those that are possible."""

    held: list[tuple[str, int] | None] = field(default_factory=lambda: [("run", 1)])
    shown: list[tuple[str, int] | None] = field(default_factory=lambda: [None])

    def run(self, replica: Replica) -> None:
        for act in acts():
            self.held, self.shown = [self.held[-1], act.held], [self.shown[-1], act.shown]
            act.do(replica)
            self.held, self.shown = self.held[-1:], self.shown[-1:]


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory if possible, because the tests make hundreds of copies."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture
def begun(place: Path) -> Path:
    """A replica at version 1, synced at version 0."""
    with Replica.open(place / "replica", threads=1) as replica:
        STORY.build(replica)
        STORY.advance(replica, 1)
    return place / "replica"


def check(directory: Path, progress: Progress, *, go_on: bool = False) -> None:
    """Checks that a replica holds and shows one of the possible versions, and still works."""
    with Replica.open(directory, threads=1) as replica:
        assert replica.trouble is None
        assert replica.position
        run, version = replica.position.run, replica.position.version
        assert (run, version) in progress.held
        assert replica.position == STORIES[run].at(version)
        assert bits_of(replica.weights) == STORIES[run].bits[version]
        assert shown(directory) in progress.shown
        if go_on:
            STORIES[run].advance(replica, version + 1)
            replica.checkpoint()
            assert shown(directory) == (run, version + 1)


def check_copy(directory: Path, progress: Progress, *, go_on: bool = False) -> None:
    """The same, called inside the tested code, which must not catch the failure as its own error."""
    try:
        check(directory, progress, go_on=go_on)
    except Exception as problem:
        raise AssertionError(str(problem)) from problem
    shutil.rmtree(directory)


def shown(directory: Path, stories: Mapping[str, Story] = STORIES) -> tuple[str, int] | None:
    """The version of `current`, checked with the safetensors library."""
    current = directory / "current"
    if not current.is_symlink():
        return None
    about = json.loads((current / "weightwire.json").read_bytes())
    run, version = about["run"], about["version"]
    data = (current / "model.safetensors").read_bytes()
    assert {name: tensor["data"] for name, tensor in safetensors.deserialize(data)} == stories[run].bits[version]
    assert {name: (current / name).read_bytes() for name in FILES} == FILES
    return run, version


# A crash at every step


def test_a_replica_survives_a_crash_at_any_step(begun: Path, place: Path) -> None:
    progress, steps = Progress(), 0

    def look(name: str) -> None:
        nonlocal steps
        steps += 1
        copied(begun, place / "copy")
        check_copy(place / "copy", progress, go_on=steps % 7 == 0)

    with Replica.open(begun, threads=1) as replica, at_every_step(look):
        progress.run(replica)
    assert steps > 150
    assert progress == Progress([("other", 3)], [("other", 3)])


def test_a_replica_survives_a_crash_during_recovery(begun: Path, place: Path) -> None:
    with Replica.open(begun, threads=1) as replica:
        replica.checkpoint()
        STORY.advance(replica, 2)
        STORY.advance(replica, 3)
    for leftover in ("works/0badc0de", "checkpoints/7-0badc0de"):  # leftovers of an earlier crash
        (begun / leftover / "files").mkdir(parents=True)
    (begun / "work.partial").symlink_to("works/0badc0de")
    progress, steps = Progress([("run", 3)], [("run", 1)]), 0

    def look(name: str) -> None:
        nonlocal steps
        steps += 1
        copied(begun, place / "copy")
        check_copy(place / "copy", progress)
        disk.cut(place / "copy", seed=steps)
        check_copy(place / "copy", progress)

    with Disk(begun) as disk, at_every_step(look, disk.after), Replica.open(begun, threads=1):
        pass
    assert steps > 10
    assert sorted(os.listdir(begun / "works")) == [os.path.basename(os.readlink(begun / "work"))]


# The power is cut


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what is synced is looked up in /proc")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_a_replica_survives_a_power_cut_at_any_step(begun: Path, place: Path, seed: int) -> None:
    progress, steps = Progress(), 0

    def look(name: str) -> None:
        nonlocal steps
        steps += 1
        for i in range(3):
            disk.cut(place / "copy", seed=seed * 100_000 + 3 * steps + i)
            check_copy(place / "copy", progress, go_on=steps % 11 == 0)

    with Replica.open(begun, threads=1) as replica, Disk(begun) as disk, at_every_step(look, disk.after):
        progress.run(replica)
    assert steps > 150


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what is synced is looked up in /proc")
@pytest.mark.parametrize("seed", range(3))
def test_a_new_replica_survives_a_power_cut_at_any_step(place: Path, seed: int) -> None:
    """Also before anything is synced: the directory must still be recognized as a replica."""
    directory, steps = place / "replica", 0
    directory.mkdir()

    def look(name: str) -> None:
        nonlocal steps
        steps += 1
        for i in range(5):
            disk.cut(place / "copy", seed=seed * 100_000 + 5 * steps + i)
            with Replica.open(place / "copy", threads=1) as replica:
                assert replica.trouble is None
                assert replica.position in (None, STORY.at(0))
            shutil.rmtree(place / "copy")

    with Disk(directory) as disk, at_every_step(look, disk.after), Replica.open(directory, threads=1) as replica:
        STORY.build(replica)
    assert steps > 20


def test_any_mixture_of_pages_is_repaired(begun: Path, place: Path) -> None:
    """After writes in place, any mixture of old and new pages may be on disk."""
    rng = random.Random(5)
    with Replica.open(begun, threads=1) as replica:
        seen = [(begun / "work" / "model.safetensors").read_bytes()]
        for version in (2, 3, 4, 5, 6):
            STORY.advance(replica, version)
            seen.append((begun / "work" / "model.safetensors").read_bytes())
    for _ in range(20):
        pages = [rng.choice(seen)[at : at + 4096] for at in range(0, len(seen[0]), 4096)]
        (begun / "work" / "model.safetensors").write_bytes(b"".join(pages))
        check(begun, Progress([("run", 6)]))


# Killed


def test_a_replica_survives_kills_at_random_moments(place: Path) -> None:
    story = Story(last=300)
    story.prepare()
    rng, directory, reached = random.Random(3), place / "replica", 0
    for _ in range(12):
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            _follow(story, directory, tell)
        os.close(tell)
        for _ in range(rng.choice([0, 3, 6, 9])):  # versions
            os.read(told, 1)
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        with Replica.open(directory, threads=1) as replica:
            assert replica.trouble is None
            version = replica.position.version if replica.position else 0
            assert version >= reached
            reached = version
            if replica.position:
                assert bits_of(replica.weights) == story.bits[version]
                assert (shown(directory, {"run": story}) or ("run", 0))[1] <= version
    assert reached > 24


def _follow(story: Story, directory: Path, tell: int) -> NoReturn:
    """Runs a follower in a subprocess until it is killed. Writes a byte after each version."""
    code = 1
    try:
        with Replica.open(directory, threads=2) as replica:
            while replica.position is None or replica.position.version < story.last:
                version = replica.position.version if replica.position else -1
                if version < 0 or version % 13 == 12:
                    story.build(replica, version + 1)
                else:
                    story.advance(replica, version + 1)
                os.write(tell, b".")
                if version % 7 == 3:
                    replica.sync()
                if version % 11 == 5:
                    replica.checkpoint()
        while True:
            time.sleep(1)
    finally:
        os._exit(code)


# The disk is full


class Full:
    """A disk without space from the k-th step on."""

    def __init__(self, k: int) -> None:
        self.left = k

    def __call__(self, name: str) -> None:
        if name in ("rmdir", "unlink", "apply", "swap"):
            return
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failure(replica: Replica, act: Act, k: int) -> WeightwireError | None:
    try:
        with at_every_step(Full(k)):
            act.do(replica)
    except WeightwireError as problem:
        return problem
    return None


def without_refreshes() -> list[Act]:
    """All but those that belong to one refresh, and the whole refresh as one."""
    several = acts()
    return [*several[:8], Act(refreshed, ("run", 7), ("run", 6)), *several[13:]]


def refreshed(replica: Replica) -> None:
    """Advances while `current` is renewed."""
    refresh = replica.begin_refresh()
    assert refresh
    is_made = False
    try:
        STORY.advance(replica, 7)
        refresh.make_beside()
        is_made = True
    finally:
        replica.finish_refresh(refresh, is_made=is_made)


@pytest.mark.parametrize("number", range(len(without_refreshes())))
def test_a_replica_survives_a_full_disk_at_any_step(begun: Path, place: Path, number: int) -> None:
    """The error names the cause, nothing is lost, and work continues once there is space."""
    act = without_refreshes()[number]
    with Replica.open(begun, threads=1) as replica:
        for earlier in without_refreshes()[:number]:
            earlier.do(replica)
    for k in range(1000):
        copied(begun, place / "copy")
        replica = Replica.open(place / "copy", threads=1)
        held, before = replica.position, shown(place / "copy")
        problem = failure(replica, act, k)
        if problem is None:
            break
        assert problem.hint
        assert "No space left" in problem.message
        if replica.trouble:  # only if the memory or disk contents are uncertain
            replica.close()
            replica = Replica.open(place / "copy", threads=1)
        assert replica.position
        replica.verify()
        assert (replica.position.run, replica.position.version) in ((held and (held.run, held.version)), act.held)
        assert shown(place / "copy") in (before, act.shown)
        if replica.position == held:
            act.do(replica)
        replica.close()
        check(place / "copy", Progress([act.held], [act.shown, before]), go_on=True)
        shutil.rmtree(place / "copy")
    replica.close()
    assert k > 0
    check(place / "copy", Progress([act.held], [act.shown]))


def test_a_journal_record_whose_sync_failed_is_not_built_on(begun: Path) -> None:
    """The record exists, but its directory was not synced. No later record may build on it."""

    def fail(name: str) -> None:
        if name == "fsync" and (begun / "work" / "journal" / STORY.at(2).record).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Replica.open(begun, threads=1) as replica:
        with pytest.raises(WeightwireError, match="Input/output error"), at_every_step(fail):
            STORY.advance(replica, 2)
        shortcut = diff(STORY.versions[1], STORY.versions[4])
        replica.advance([shortcut], STORY.at(4), STORY.states[4].hex)
    check(begun, Progress([("run", 4)]))


def test_a_file_size_limit_is_reported(begun: Path) -> None:
    """The limit is a real one, set by the operating system."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = _run_out_of_space(begun)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(begun, Progress([("run", 2)], [("run", 2)]))


def _run_out_of_space(directory: Path) -> int:
    """Runs in a subprocess, because the limit is permanent. Returns the number of the failed expectation, or 0."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with Replica.open(directory, threads=1) as replica:
        calls: list[Callable[[], Any]] = [
            lambda: STORY.advance(replica, 2),
            replica.checkpoint,
            lambda: STORY.build(replica, 3),
        ]
        for number, call in enumerate(calls, 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
            try:
                call()
                return number
            except WeightwireError as problem:
                if not problem.hint:
                    return 10 + number
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            replica.verify()
            if number < 3:
                call()
    return 0


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests compute the disk contents, so fsync is not needed."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
