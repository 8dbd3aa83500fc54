"""Runs to sweep, and checks of the result."""

from __future__ import annotations

from dataclasses import dataclass

from support.clocked_bucket import HOUR, Arrays, Clocked, run
from weightwire.chain.reader import read_run
from weightwire.chain.record_paths import commit_path
from weightwire.chain.records import Commit, unseal
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime
from weightwire.upkeep.gc import Sweep, sweep
from weightwire.upkeep.retention import (
    Retention,
)

__all__ = ["SHORT", "Lived", "check_whole", "commit_of", "run_id", "swept", "swept_twice"]

SHORT = Retention(anchors=2, window=HOUR, grace=HOUR)


def swept(bucket: Clocked, retention: Retention = SHORT, *, dry_run: bool = False) -> Sweep:
    return run(sweep(bucket, Runtime(), retention, dry_run=dry_run))


def swept_twice(bucket: Clocked, retention: Retention = SHORT) -> Sweep:
    """Sweeps, waits for the grace period, and sweeps again."""
    swept(bucket, retention)
    bucket.now += retention.grace + 1
    return swept(bucket, retention)


def run_id(bucket: Clocked) -> str:
    return run(read_run(bucket)).run


def commit_of(bucket: Clocked, version: int) -> Commit:
    return unseal(run(bucket.get(commit_path(version))), Commit, "here").record


def check_whole(bucket: Clocked) -> None:
    """Checks that the newest version can be rebuilt from the remaining data."""
    found = run(verify_run(bucket, Runtime(), rebuild=True))
    assert found.problems == ()
    assert found.rebuilt[-1][1] == found.head


@dataclass(frozen=True)
class Lived:
    """A run with a version every hour: 0 is a fence, 1, 4, 7 and 10 have anchors, 10 is the newest."""

    bucket: Clocked
    weights: Arrays
