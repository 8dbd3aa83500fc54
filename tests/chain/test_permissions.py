"""The table of permissions: complete, and with the limits that the roles promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weightwire.chain.permissions import AccessRole, Verb, access_of
from weightwire.chain.record_paths import HEAD, RUN, Folder

PROTOCOL = Path(__file__).parents[2] / "docs/PROTOCOL.md"
WRITES = {Verb.CREATE, Verb.PUT, Verb.UPLOAD}
FORBIDDEN_TO_DELETE = {RUN, HEAD, Folder.COMMITS, Folder.EPOCHS, Folder.FILES, Folder.GC}


def paths(role: AccessRole, verbs: set[Verb], *names: str) -> set[str]:
    return {one.path for one in access_of(role, names) if verbs & {*one.verbs}}


def test_table_has_every_object_of_the_protocol_and_how_it_is_written() -> None:
    section = PROTOCOL.read_text().partition("## Objects")[2].partition("## Records")[0]
    rows = re.findall(r"^\| `([^`<.]+/|[A-Za-z]+\.(?:json|sig))[^`]*` \| ([a-z, ]+) \|", section, re.MULTILINE)
    listed = {one.path.replace("*.json", "") for role in AccessRole for one in access_of(role, ["*"])}
    assert {path for path, _ in rows} == listed >= {RUN, HEAD, *Folder}
    for path, how in rows:
        written = {verb for role in AccessRole for one in access_of(role, ["*"]) for verb in one.verbs
                   if one.path.replace("*.json", "") == path} & WRITES  # fmt: skip
        assert written, path
        assert (written == {Verb.CREATE}) == (how == "create"), path


@pytest.mark.parametrize("role", AccessRole)
def test_only_gc_deletes_and_never_records_of_the_chain(role: AccessRole) -> None:
    deleted = paths(role, {Verb.DELETE})
    assert bool(deleted) == (role is AccessRole.GC)
    assert not deleted & FORBIDDEN_TO_DELETE


def test_follower_writes_nothing_but_its_own_heartbeat() -> None:
    assert paths(AccessRole.FOLLOWER, WRITES) == set()
    assert paths(AccessRole.FOLLOWER, WRITES, "gpu-0") == {"replicas/gpu-0.json"}
    assert not any(path.startswith("replicas/") for path in paths(AccessRole.FOLLOWER, {*Verb}))


def test_reader_writes_nothing() -> None:
    assert paths(AccessRole.READER, WRITES | {Verb.DELETE}) == set()


def test_names_are_only_for_followers() -> None:
    for role in AccessRole:
        if role is not AccessRole.FOLLOWER:
            assert access_of(role, ["gpu-0"]) == access_of(role)
