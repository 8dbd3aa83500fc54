"""Tensors that are encoded together, in blocks of several members, keep their own weights, counts and digests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import weightwire
from support.crafted_files import with_stacks
from support.patch_checks import Arrays, bytes_of
from weightwire import CheckpointError, CorruptDelta, Delta, diff, digest, patch
from weightwire.delta import EncodedStack, Entry, changes
from weightwire.delta.absolute import make_absolute, write_absolute
from weightwire.delta.file import Packed, block_hash, pack
from weightwire.errors import SchemaChanged, WrongBase

NAMES = [f"layers.{k}.weight" for k in range(5)]
PER = 2


def old_weights() -> Arrays:
    return {name: np.arange(8 * 64, dtype=np.uint16).reshape(8, 64) + np.uint16(k) for k, name in enumerate(NAMES)}


def new_weights() -> Arrays:
    """Member k has k changes, in row k."""
    new = old_weights()
    for k, name in enumerate(NAMES):
        new[name][k, :k] += np.uint16(100 + k)
    return new


def stacked(*, with_digests: bool = False) -> Delta:
    """Blocks of two members each. weightwire itself makes one block of such small tensors."""
    old, new = old_weights(), new_weights()
    entries, parts = list[Entry](), list[bytes]()
    for first in range(0, len(NAMES), PER):
        names = NAMES[first : first + PER]
        made = diff({name: old[name] for name in names}, {name: new[name] for name in names})
        (stack,) = made.stacks
        entries += stack.entries
        parts.append(bytes(made.block(stack, 0)))
    after = digest(new)
    if with_digests:
        entries = [replace(entry, digest=after.tensors[entry.name].digest) for entry in entries]
    stack = EncodedStack(tuple(entries), PER, tuple(map(len, parts)), tuple(map(block_hash, parts)))
    made = pack([Packed(stack, parts)], before=digest(old).hex, after=after.hex)
    return Delta.from_bytes(made.to_bytes())


def test_every_member_counts_its_own_changes() -> None:
    assert [entry.changed for entry in stacked().stacks[0].entries] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("with_digests", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_a_stack_of_several_blocks_is_applied(with_digests: bool, copy: bool) -> None:
    assert bytes_of(patch(old_weights(), stacked(with_digests=with_digests), copy=copy)) == bytes_of(new_weights())


def test_a_stack_of_several_blocks_becomes_absolute() -> None:
    weights = weightwire.weights.read_weights(old_weights())
    absolute = make_absolute(weights, [stacked()], digest(weights))
    write_absolute(weights, absolute)
    assert bytes_of(weights) == bytes_of(new_weights())


@pytest.mark.parametrize("name", NAMES)
def test_one_member_is_read_alone(name: str) -> None:
    old, new = old_weights(), new_weights()
    at, values = changes(old, stacked(), name)
    expected = np.flatnonzero(old[name] != new[name])
    assert at.tolist() == expected.tolist()
    assert values.tolist() == new[name].reshape(-1)[expected].tolist()


def lying(entries: list[Entry], *, with_digests: bool = False) -> bytes:
    delta = stacked(with_digests=with_digests)
    return with_stacks(delta, [replace(delta.stacks[0], entries=tuple(entries))])


def refused(data: bytes, reason: str) -> None:
    weights = old_weights()
    with pytest.raises(CorruptDelta, match=reason):
        patch(weights, data)
    assert bytes_of(weights) == bytes_of(old_weights())


def exchanged(field: str, *, with_digests: bool = False) -> list[Entry]:
    """The claims of the second and the third member, which are in two blocks, are exchanged."""
    entries = list(stacked(with_digests=with_digests).stacks[0].entries)
    one, other = entries[1], entries[2]
    entries[1], entries[2] = (
        replace(one, **{field: getattr(other, field)}),
        replace(other, **{field: getattr(one, field)}),
    )
    return entries


def test_a_member_with_the_count_of_its_neighbor_is_refused() -> None:
    refused(lying(exchanged("changed")), "changes 1 weights, but claims 2")


def test_a_member_with_the_digest_of_its_neighbor_is_refused() -> None:
    refused(lying(exchanged("digest", with_digests=True), with_digests=True), "wrong digest")


def test_two_members_with_each_others_name_are_refused() -> None:
    refused(lying(exchanged("name")), "the result has a wrong state|malformed|marks|changes")


# The last member of a stack is checked like the first


def with_last(value: np.ndarray | None) -> Arrays:
    weights = old_weights()
    del weights[NAMES[-1]]
    return weights if value is None else {**weights, NAMES[-1]: value}


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (None, "missing in the base"),
        (np.zeros((64, 8), np.uint16), r"but U16 \[64, 8\] in the base"),
        (np.zeros((8, 64), np.int16), r"but I16 \[8, 64\] in the base"),
    ],
    ids=["missing", "reshaped", "another dtype"],
)
def test_a_base_whose_last_member_differs_is_refused(last: np.ndarray | None, reason: str, copy: bool) -> None:
    weights = with_last(last)
    with pytest.raises(WrongBase, match=f"tensor '{NAMES[-1]}': .*{reason}"):
        patch(weights, stacked(), copy=copy)
    assert bytes_of(weights) == bytes_of(with_last(last))


def test_a_read_only_last_member_is_refused() -> None:
    weights = old_weights()
    weights[NAMES[-1]].flags.writeable = False
    with pytest.raises(CheckpointError, match=f"tensor '{NAMES[-1]}': is read-only"):
        patch(weights, stacked())
    assert bytes_of(weights) == bytes_of(old_weights())


def test_a_state_without_the_last_member_is_refused() -> None:
    with pytest.raises(WrongBase, match=f"tensor '{NAMES[-1]}': missing in the state"):
        patch(old_weights(), stacked(), before=digest(with_last(None)))


@pytest.mark.parametrize("last", [None, np.zeros((64, 8), np.uint16)], ids=["missing", "reshaped"])
def test_a_fresh_stack_whose_last_member_does_not_fit_is_refused(last: np.ndarray | None) -> None:
    anchor, weights = weightwire.anchor(new_weights()), with_last(last)
    with pytest.raises(CheckpointError, match=f"tensor '{NAMES[-1]}': cannot be added, removed or reshaped"):
        patch(weights, anchor)
    read = weightwire.weights.read_weights(weights)
    with pytest.raises(SchemaChanged, match=f"tensor '{NAMES[-1]}'"):
        make_absolute(read, [anchor], digest(read))
    assert bytes_of(weights) == bytes_of(with_last(last))


@pytest.mark.parametrize("changed", [127, 128, 129])
def test_numbers_of_one_byte_and_of_two_are_read_back(changed: int) -> None:
    old = {name: np.zeros(200, np.uint8) for name in "ab"}
    new = {name: (np.arange(200) < changed).astype(np.uint8) for name in "ab"}
    delta = Delta.from_bytes(diff(old, new).to_bytes())
    assert [entry.changed for entry in delta.entries.values()] == [changed, changed]
    assert bytes_of(patch(old, delta)) == bytes_of(new)
