"""The rules of the chain: what a reader accepts as the next commit. Pure; docs/PROTOCOL.md says the same in words."""

from __future__ import annotations

from weightwire.chain.records import DAMAGED, FENCE, Commit, Record, Sealed
from weightwire.errors import BrokenChain, ForeignRun

__all__ = ["check_first", "check_follows", "check_run", "hop", "missing_commit"]


def check_run(record: Record, run: str, where: str) -> None:
    if record.run != run:
        raise ForeignRun(
            f"{where}: belongs to run {record.run[:12]}, not to run {run[:12]}",
            hint="two runs were mixed under one URL: give each run a prefix of its own",
        )


def check_first(commit: Commit, where: str) -> None:
    """What version 0 must be: the fence of the first publisher."""
    if commit.version or commit.kind != FENCE or commit.parent or commit.after:
        raise BrokenChain(f"{where}: is no beginning of a chain", hint=DAMAGED)


def check_follows(parent: Sealed[Commit], commit: Commit, where: str) -> None:
    """What a reader asks of a commit before it accepts it as the next."""
    before = parent.record
    check_run(commit, before.run, where)
    problems = (
        (commit.version == before.version + 1, f"says it is version {commit.version}"),
        (commit.parent == parent.sha256, "does not follow from the version before it: its parent hash is another"),
        (commit.before == before.after, "starts from another state than the version before it ends in"),
        (commit.epoch >= before.epoch, "comes from a publisher that had been replaced"),
        ((commit.epoch > before.epoch) == (commit.kind == FENCE), "a new publisher must begin with a fence"),
        (not commit.back or before.parent == commit.back[0], "names another commit two versions back"),
    )
    for fine, what in problems:
        if not fine:
            raise BrokenChain(f"{where}: {what}", hint=DAMAGED)


def missing_commit(where: str, consequence: str = "") -> BrokenChain:
    """The error for a commit that is not there, though later ones are."""
    return BrokenChain(
        f"{where}: is missing, though later versions are there{consequence}",
        hint="commits must never be deleted while a run lives: restore it, or start a new run",
    )


def hop(commit: Commit, target: int) -> tuple[int, str]:
    """The furthest commit that one names, without going past a target below it; and its hash."""
    distance = commit.version - target
    if distance < 2:
        return commit.version - 1, commit.parent
    k = distance.bit_length() - 1
    return commit.version - (1 << k), commit.back[k - 1]
