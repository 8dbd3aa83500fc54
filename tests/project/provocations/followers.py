"""Errors of followers and of the replica directories that they keep."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from project.provocations.case import OTHER, WEIGHTS, Case, Provocation, follow, publish
from support.small_run import FILES, Story
from weightwire import Follower, ReplicaError
from weightwire.replica.replica import Replica
from weightwire.system import durable_files

STORY = Story(last=2)


def follower(work: Callable[[Follower], Any]) -> Provocation:
    def provoke(case: Case) -> None:
        publish(case)
        with Follower(case.run, into=case.here / "replica", threads=1) as one:
            work(one)

    return provoke


def closed_follower(one: Follower) -> None:
    one.close()
    one.once()


def replica(work: Callable[[Case, Replica], Any]) -> Provocation:
    """Work on a replica at version 0 of a small run."""

    def provoke(case: Case) -> None:
        one = Replica.open(case.here / "replica", threads=1)
        try:
            STORY.build(one)
            work(case, one)
        finally:
            with suppress(ReplicaError):
                one.close()

    return provoke


def directory_with_other_files(case: Case) -> None:
    publish(case)
    case.file("replica/notes.txt", "mine")
    follow(case)


def lock_of_another_program(case: Case) -> None:
    publish(case)
    case.file("replica/lock", "the lock of another program")
    case.file("replica/data", "its data")
    follow(case)


def two_followers(case: Case) -> None:
    publish(case)
    with Follower(case.run, into=case.here / "replica", threads=1):
        follow(case)


def full_disk(case: Case, one: Replica) -> None:
    _fail(case, errno.ENOSPC)
    one.make_current()


def failing_disk(case: Case, one: Replica) -> None:
    _fail(case, errno.EIO)
    one.make_current()


def _fail(case: Case, number: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    for name in ("copy_file_range", "replace", "mkdir", "symlink"):
        case.patch.setattr(os, name, fail)


def nearly_full_disk(case: Case, one: Replica) -> None:
    one.make_current()
    one._shares_blocks = True
    case.patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 10))
    STORY.advance(one, 1)


def failed_sync(case: Case, one: Replica) -> None:
    STORY.advance(one, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    case.patch.setattr(durable_files, "flush", fail)
    one.sync()


def replica_changed_by_another_program(case: Case, one: Replica) -> None:
    memory = one._work.memory  # type: ignore[union-attr]
    memory[len(memory) - 1] ^= 1
    one.verify()


def wrong_rebuild(case: Case, one: Replica) -> None:
    with one.rebuild(STORY.schema, FILES) as new:
        for name in new:
            new[name].bits[:] = 0
        new.finish(STORY.at(1), STORY.states[1])


def closed_replica(case: Case, one: Replica) -> None:
    one.close()
    one.sync()


def rebuild_of_a_closed_replica(case: Case, one: Replica) -> None:
    one.close()
    one.rebuild(STORY.schema)


def damaged_replica(case: Case) -> None:
    publish(case, WEIGHTS, OTHER)
    follow(case)
    for path in (case.here / "replica").glob("work*/*/state.json"):
        path.write_text("{}")
    one = Replica.open(case.here / "replica", threads=1)
    try:
        one.sync()
    finally:
        one.close()


def linked_replica(name: str) -> Provocation:
    """A part of a replica leads to a directory of somebody else."""

    def provoke(case: Case) -> None:
        publish(case)
        follow(case)
        link = case.here / "replica" / name
        durable_files.remove(link)
        link.symlink_to(case.run)
        with Replica.open(case.here / "replica", threads=1) as one:
            one.sync()

    return provoke


def side_file_outside_the_replica(case: Case, one: Replica) -> None:
    one.rebuild(STORY.schema, {"../config.json": b""})


PROVOCATIONS: list[Provocation] = [
    lambda case: Follower(case.run, into=case.here / "replica", name="a/b"),
    follower(lambda one: one.checkpoint()),
    follower(closed_follower),
    two_followers,
    directory_with_other_files,
    lock_of_another_program,
    damaged_replica,
    linked_replica("lock"),
    linked_replica("works"),
    linked_replica("work"),
    linked_replica("work/journal"),
    replica(full_disk),
    replica(failing_disk),
    replica(nearly_full_disk),
    replica(failed_sync),
    replica(replica_changed_by_another_program),
    replica(wrong_rebuild),
    replica(side_file_outside_the_replica),
    replica(closed_replica),
    replica(rebuild_of_a_closed_replica),
    replica(lambda case, one: Story(last=2, run="other").advance(one, 1)),
    replica(lambda case, one: (STORY.advance(one, 1), STORY.advance(one, 1))),
    replica(lambda case, one: Replica.open(case.here / "empty", threads=1).sync()),
]
