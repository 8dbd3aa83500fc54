"""The rules of the chain: what a reader accepts as the next commit. Pure. See docs/PROTOCOL.md."""

from __future__ import annotations

from weightwire.chain.records import DAMAGED, FENCE, Commit, Record, Sealed
from weightwire.errors import BrokenChain, ForeignRun

__all__ = ["check_first", "check_follows", "check_run", "hop", "missing_commit"]


def check_run(record: Record, run: str, where: str) -> None:
    if record.run != run:
        raise ForeignRun(
            f"{where}: belongs to run {record.run[:12]}, not to run {run[:12]}",
            hint="two runs are mixed under one URL: give each run its own prefix",
        )


def check_first(commit: Commit, run_sha256: str, where: str) -> None:
    """Checks version 0: it must be the fence of the first publisher, and name the hash of run.json."""
    if commit.version or commit.kind != FENCE or commit.after or commit.keys_from is not None:
        raise BrokenChain(f"{where}: not the first commit of a chain", hint=DAMAGED)
    if commit.parent != run_sha256:
        raise BrokenChain(f"{where}: does not belong to this run.json: its hash differs", hint=DAMAGED)


def check_follows(parent: Sealed[Commit], commit: Commit, where: str) -> None:
    """Checks that a commit is the next one after its parent."""
    before = parent.record
    check_run(commit, before.run, where)
    problems = (
        (commit.version == before.version + 1, f"claims to be version {commit.version}"),
        (commit.parent == parent.sha256, "does not follow the previous version: its parent hash differs"),
        (commit.before == before.after, "does not start from the state of the previous version"),
        (commit.epoch >= before.epoch, "comes from a publisher that was fenced off"),
        ((commit.epoch > before.epoch) == (commit.kind == FENCE), "a new publisher must begin with a fence"),
        (
            not commit.back or before.parent == commit.back[0],
            "names another hash for the commit two versions before it",
        ),
        (commit.keys_from == before.next_keys_from, "names other keys than those in force"),
    )
    for fine, what in problems:
        if not fine:
            raise BrokenChain(f"{where}: {what}", hint=DAMAGED)


def missing_commit(where: str, consequence: str = "") -> BrokenChain:
    """The error for a missing commit that later ones build on."""
    return BrokenChain(
        f"{where}: missing, although later versions exist{consequence}",
        hint="restore the deleted commit from a backup, or start a new run",
    )


def rolled_back(message: str) -> BrokenChain:
    """The error for a bucket that lacks a version which a replica holds."""
    return BrokenChain(
        message,
        hint="the bucket was rolled back or replaced: if that is intended, follow it into a new directory, "
        "or publish under another URL",
    )


def hop(commit: Commit, target: int) -> tuple[int, str]:
    """The version and hash of the furthest commit that a commit names, without passing the target."""
    distance = commit.version - target
    if distance < 2:
        return commit.version - 1, commit.parent
    k = distance.bit_length() - 1
    return commit.version - (1 << k), commit.back[k - 1]
