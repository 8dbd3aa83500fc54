"""The observer of commits notes what was sent and what was answered."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from support.failing_bucket import Trouble, conflicting, failed, in_memory, lost
from support.records import chain_of
from weightwire.chain.record_paths import commit_path
from weightwire.cli.publish.commit_observer import CommitObserver, SentCommit
from weightwire.errors import BucketError


def observe(path: str, data: bytes, trouble: Trouble | None = None) -> list[SentCommit]:
    bucket, seen = in_memory(), list[SentCommit]()
    if trouble:
        bucket.trouble("create", "", trouble)
    with suppress(BucketError):
        asyncio.run(CommitObserver(bucket, seen.append).create(path, data))
    assert bucket.asked == [("create", path)]
    return seen


DELTA = chain_of(5)[4].data  # version 4


def test_observer_notes_a_commit_before_and_after_its_answer() -> None:
    sent = SentCommit(4, "delta")
    assert observe(commit_path(4), DELTA) == [sent, SentCommit(4, "delta", is_answered=True)]


@pytest.mark.parametrize("trouble", [failed, lost, conflicting])
def test_observer_does_not_take_an_error_for_an_answer(trouble: Trouble) -> None:
    assert observe(commit_path(4), DELTA, trouble) == [SentCommit(4, "delta")]


def test_observer_ignores_other_objects() -> None:
    assert observe("epochs/00000001.json", b"not a commit") == []


@pytest.mark.parametrize(
    ("kind", "has_weights"), [("delta", True), ("anchor", True), ("base", False), ("fence", False)]
)
def test_observer_knows_which_commits_publish_weights(kind: str, has_weights: bool) -> None:
    assert SentCommit(1, kind).has_weights == has_weights
