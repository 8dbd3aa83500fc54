"""A rebuild replaces all weights of a replica at once, or none."""

from __future__ import annotations

import os

import pytest

from support.replicas import STORY, check, reopened
from support.small_run import SHAPES, Story
from weightwire import State, digest
from weightwire.errors import ReplicaError
from weightwire.replica.replica import Replica
from weightwire.weights.dtypes import DTYPES

pytestmark = pytest.mark.usefixtures("without_fsync")


def test_a_finished_rebuild_is_held_at_once(replica: Replica) -> None:
    check(replica, 0)
    with reopened(replica) as again:
        check(again, 0)
        assert again.journal_bytes == 0


def test_a_rebuild_is_invisible_until_it_is_finished(replica: Replica) -> None:
    before = sorted(os.listdir(replica.directory / "works"))
    with replica.rebuild(STORY.schema) as new:
        assert set(new) == set(SHAPES)
        assert len(new) == len(SHAPES)
        assert not any(new[name].bits.any() for name in new)
        new["embed"].bits[:] = 1
        check(replica, 0)
    check(replica, 0)
    assert sorted(os.listdir(replica.directory / "works")) == before
    with pytest.raises(ZeroDivisionError), replica.rebuild(STORY.schema) as new:
        raise ZeroDivisionError
    assert sorted(os.listdir(replica.directory / "works")) == before


def test_a_rebuild_replaces_a_replica_with_a_journal(replica: Replica) -> None:
    other = Story(run="other", seed=7)
    STORY.advance(replica, 1)
    STORY.advance(replica, 2)
    other.build(replica, 1)
    check(replica, 1, other)
    assert replica.journal_bytes == 0
    with reopened(replica) as again:
        check(again, 1, other)


def test_a_rebuild_with_other_weights_is_refused(replica: Replica) -> None:
    with (
        replica.rebuild(STORY.schema) as new,
        pytest.raises(ReplicaError, match="'embed' does not have the expected digest"),
    ):
        new.finish(STORY.at(1), STORY.states[1])
    check(replica, 0)


def test_a_rebuild_cannot_be_finished_twice(replica: Replica) -> None:
    with replica.rebuild(STORY.schema) as new:
        for name in new:
            new[name].bits[:] = STORY.versions[3][name].bits
        new.finish(STORY.at(3), STORY.states[3])
        check(replica, 3)
        with pytest.raises(ValueError, match="finished once"):
            new.finish(STORY.at(3), STORY.states[3])
    with pytest.raises(ValueError, match="inside its block"):
        new.finish(STORY.at(3), STORY.states[3])
    check(replica, 3)


def test_a_rebuild_has_tensors_only_inside_its_block(replica: Replica) -> None:
    new = replica.rebuild(STORY.schema)
    assert digest(new) == State({})
    with new:
        assert {name: kind[:2] for name, kind in new.kinds.items()} == STORY.schema
        for name in new:
            new[name].bits[:] = STORY.versions[1][name].bits
        new.finish(STORY.at(1), STORY.states[1])
        assert (new.kinds, new.dtypes, digest(new)) == ({}, {}, State({}))
    check(replica, 1)


def test_a_rebuild_allocates_disk_blocks(replica: Replica) -> None:
    """A sparse file would raise SIGBUS on a full disk."""
    with replica.rebuild({"x": (DTYPES["U8"], (10_000_000,))}):
        (staged,) = (replica.directory / "works").glob(".*.partial")
        assert (staged / "model.safetensors").stat().st_blocks * 512 >= 10_000_000
