"""Handmade runs: valid records without data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from weightwire.bucket.bucket import Bucket
from weightwire.chain.record_paths import RUN, commit_path, data_path
from weightwire.chain.records import Commit, DataFile, Run, Sealed, Shortcut, back_versions, seal

__all__ = [
    "RUN_ID",
    "Warnings",
    "a_run",
    "chain_of",
    "file_of",
    "grow",
    "sha",
    "shortcut_to",
    "state",
    "store",
    "token",
]


def sha(text: str) -> str:
    """A made-up hash."""
    return hashlib.sha256(text.encode()).hexdigest()


def token(text: str) -> str:
    """A made-up run id or write_id."""
    return sha(text)[:32]


RUN_ID = token("run")


def state(version: int) -> str:
    """The state digest of a version."""
    return sha(f"state {version}")


def a_run(**fields: Any) -> Run:
    given: dict[str, Any] = {"run": RUN_ID, "time": 1.5, "mode": "strict", "tensors": {"w": ("BF16", (4, 8))}}
    return Run(**given | fields)


def file_of(kind: str, version: int, size: int = 100, epoch: int = 1, rank: int = 0) -> DataFile:
    sha256 = sha(f"{kind} {version}")
    return DataFile(data_path(kind, version, epoch, rank, sha256), size, sha256, rank)


def grow(commits: list[Sealed[Commit]], kind: str = "delta", size: int = 100, **fields: Any) -> Sealed[Commit]:
    """Adds the next commit, with this kind and size."""
    version = len(commits)
    last = commits[-1].record if commits else None
    before = last.after if last else ""
    epoch = fields.get("epoch", (last.epoch if last else 0) + (kind == "fence"))
    given: dict[str, Any] = {
        "run": RUN_ID,
        "version": version,
        "epoch": epoch,
        "write_id": token(f"write {version}"),
        "kind": kind,
        "parent": commits[-1].sha256 if commits else seal(a_run()).sha256,
        "back": tuple(commits[one].sha256 for one in back_versions(version)),
        "before": before,
        "after": before if kind == "fence" else state(version),
        "files": (file_of(kind, version, size, epoch),) if kind in ("anchor", "delta") else (),
    }
    commits.append(seal(Commit(**given | fields)))
    return commits[-1]


def chain_of(count: int, first: str = "anchor") -> list[Sealed[Commit]]:
    """A chain of this length: a fence, an anchor or base, and deltas."""
    commits: list[Sealed[Commit]] = []
    for version in range(count):
        grow(commits, ("fence", first)[version] if version < 2 else "delta", 1000 if version == 1 else 100)
    return commits


def shortcut_to(commit: Sealed[Commit], size: int = 1000, **fields: Any) -> Shortcut:
    record = commit.record
    files = (file_of("anchor", record.version, size),)
    given: dict[str, Any] = {
        "run": record.run,
        "version": record.version,
        "kind": "anchor",
        "after": record.after,
        "files": files,
    }
    return Shortcut(**given | fields)


async def store(bucket: Bucket, commits: Sequence[Sealed[Commit]], objects: Iterable[tuple[str, bytes]] = ()) -> None:
    """Writes a run and other objects into a bucket."""
    await bucket.create(RUN, seal(a_run()).data)
    for commit in commits:
        await bucket.create(commit_path(commit.record.version), commit.data)
    for path, data in objects:
        await bucket.put(path, data)


class Warnings(list[str]):
    """The warnings of a writer."""

    def __call__(self, message: str) -> None:
        self.append(message)
