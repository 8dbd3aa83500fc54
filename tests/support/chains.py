"""A chain of commits in memory, without data, for tests of readers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from support.failing_bucket import Act, Troubled, denied, in_memory
from support.records import a_run, grow, store, token
from weightwire.chain.reader import ChainReader
from weightwire.chain.record_paths import HEAD, commit_path
from weightwire.chain.records import Commit, HeadHint, Sealed, Shortcut, seal, shortcut_path
from weightwire.errors import NotFound, PermissionDenied

__all__ = ["ChainBucket", "Commits", "forged", "versions"]

Commits = list[Sealed[Commit]]


class ChainBucket(Troubled):
    """A run in memory, with a reader."""

    def __init__(self, commits: Sequence[Sealed[Commit]], **objects: bytes) -> None:
        super().__init__(in_memory().inner)
        self.chain = ChainReader(self, a_run())
        asyncio.run(store(self.inner, commits, ((path.replace("__", "/"), data) for path, data in objects.items())))

    def put_now(self, path: str, data: bytes) -> None:
        asyncio.run(self.inner.put(path, data))

    def add(self, shortcut: Shortcut) -> None:
        self.put_now(shortcut_path(seal(shortcut)), seal(shortcut).data)

    def hint(self, version: int, anchor: str = "", run: str = a_run().run) -> None:
        self.put_now(HEAD, seal(HeadHint(run=run, version=version, anchor=anchor)).data)

    def deny_missing(self) -> None:
        """From now on this key has no list permission."""
        self.trouble("list", "", denied, times=1e9)
        self.trouble("get find", "", deny_as_s3, times=1e9)

    def rewrite(self, commit: Sealed[Commit]) -> None:
        """Replaces a commit."""
        self.put_now(commit_path(commit.record.version), commit.data)


def forged(commits: Commits, version: int) -> Sealed[Commit]:
    """A valid commit that is not the parent of later ones."""
    return grow(commits[:version], commits[version].record.kind, write_id=token("forger"))


def versions(commits: Sequence[Sealed[Commit]]) -> list[int]:
    return [commit.record.version for commit in commits]


async def deny_as_s3(act: Act) -> Any:
    """Without list permission, S3 answers the same for missing and for forbidden objects."""
    try:
        found = await act()
    except NotFound as problem:
        raise PermissionDenied("Access Denied") from problem
    if found is None:
        raise PermissionDenied("Access Denied")
    return found
