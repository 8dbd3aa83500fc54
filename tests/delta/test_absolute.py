"""Patches of absolute values: the same result as the deltas they are made from, even if applied twice."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from support.cases import case
from support.samples import CHANGES, base, below, change, words
from weightwire import CorruptDelta, Delta, State, Tensor, WrongBase, anchor, diff, digest, patch
from weightwire.codec.block_layout import BLOCK
from weightwire.delta.absolute import DecodedBlocks, make_absolute, merge_absolute, write_absolute
from weightwire.delta.decoder import changes
from weightwire.delta.encoded_stack import Entry
from weightwire.delta.state import add_digests
from weightwire.errors import SchemaChanged
from weightwire.weights.dtypes import DTYPES, Dtype
from weightwire.weights.source import read_weights
from weightwire.weights.tensor import Weights

BF16, F32, U16 = (DTYPES[name] for name in ("BF16", "F32", "U16"))

Array = npt.NDArray[Any]


def bits_of(weights: Weights) -> dict[str, bytes]:
    return {name: tensor.bits.tobytes() for name, tensor in weights.items()}


def copied(weights: Weights) -> dict[str, Tensor]:
    return {name: Tensor(t.dtype, t.shape, t.bits.copy(), t.rows) for name, t in weights.items()}


def check(old: Weights, new: Weights, deltas: list[Delta], threads: int = 1) -> Delta:
    """Checks that deltas become a patch from `old` to `new`, and that nothing is written meanwhile."""
    before, state = bits_of(old), digest(old)
    for tensor in old.values():
        tensor.bits.flags.writeable = False
    decoded: DecodedBlocks = []
    made = make_absolute(old, deltas, state, digest(new).hex, threads=threads, decoded=decoded)
    made = Delta.from_bytes(made.to_bytes())
    assert bits_of(old) == before
    assert (made.before, made.after) == (state.hex, digest(new).hex)
    assert made.advance(state) == digest(new)
    assert all(entry.coo or entry.fresh for entry in made.entries.values())

    quick = copied(old)
    changes_of_digests = write_absolute(quick, made, threads=threads, decoded=decoded)
    assert bits_of(quick) == bits_of(new)

    held = copied(old)
    added = write_absolute(held, made, threads=threads)
    assert added == changes_of_digests
    assert bits_of(held) == bits_of(new)
    assert {name: add_digests(state.tensors[name].digest, change) for name, change in added.items()} == {
        name: made.entries[name].digest for name in added
    }
    assert set(write_absolute(held, made, threads=threads).values()) <= {(0, 0)}  # twice is harmless
    assert bits_of(held) == bits_of(new)
    assert bits_of(read_weights(patch(copied(old), made))) == bits_of(new)
    return made


def pair(dtype: Dtype, how: str, rows: int = 6) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    shape = (rows, 96 * 8 * dtype.unit // dtype.bits)
    old = base(dtype, rows * 96)
    new = change(old, dtype, how, line=96)
    return {"x": Tensor(dtype, shape, old)}, {"x": Tensor(dtype, shape, new)}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_absolute_patch_holds_every_change_of_every_dtype(dtype: Dtype) -> None:
    for how, coo in product(CHANGES, (False, True)):
        with case(how, coo):
            old, new = pair(dtype, how)
            made = check(old, new, [diff(old, new, coo=coo)])
            assert made.nbytes < 2 * new["x"].nbytes + 1000


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_absolute_patch_of_many_blocks_gives_the_new_weights(threads: int) -> None:
    bits = np.tile(base(BF16, 1 << 16), 160)
    moved = bits.copy()
    moved[::1009] += 1
    moved[BLOCK - 3 : BLOCK + 3] += 1
    old = read_weights({"x": bits.reshape(-1, 1024), "y": bits[:100].copy(), "z": bits[:1000].copy()})
    new = read_weights({"x": moved.reshape(-1, 1024), "y": moved[:100].copy(), "z": bits[:1000].copy()})
    made = check(old, new, [diff(old, new)], threads)
    assert set(made.entries) == {"x", "y"}
    where, what = changes({}, made, "x")
    assert where.tolist() == np.flatnonzero(bits != moved).tolist()
    assert what.tolist() == moved[bits != moved].tolist()


def test_absolute_patch_is_made_without_the_kernel(without_kernel: None) -> None:
    for how in ("few", "all"):
        old, new = pair(BF16, how)
        check(old, new, [diff(old, new)])


def test_a_version_without_files_changes_nothing() -> None:
    old, _ = pair(BF16, "few")
    assert not check(old, old, []).entries
    assert not check(old, old, [diff(old, old)]).entries


def test_empty_tensors_and_scalars_are_patched() -> None:
    old = read_weights({"none": np.zeros((3, 0), np.uint8), "one": np.array(3.0)})
    new = read_weights({"none": np.zeros((3, 0), np.uint8), "one": np.array(4.0)})
    check(old, new, [diff(old, new)])
    check(old, new, [anchor(new)])


def test_a_tensor_with_many_changes_is_stored_whole() -> None:
    old, new = pair(BF16, "half", 100)
    made = check(old, new, [diff(old, new)])
    assert made.entries["x"].fresh
    assert made.nbytes < new["x"].nbytes
    old, new = pair(BF16, "down", 100)
    made = check(old, new, [diff(old, new)])
    assert made.entries["x"].coo


def test_a_dense_block_becomes_positions_and_values() -> None:
    bits = np.tile(base(BF16, 1 << 16), 160)
    moved = bits.copy()
    moved[BLOCK // 4 : BLOCK] = words(3, BLOCK)[: BLOCK - BLOCK // 4].astype(np.uint16)
    old, new = read_weights({"x": bits}), read_weights({"x": moved})
    assert check(old, new, [diff(old, new)]).entries["x"].coo


def test_an_anchor_becomes_a_patch_with_whole_tensors() -> None:
    old, new = pair(BF16, "few")
    made = check(old, new, [anchor(new)])
    assert made.entries["x"].fresh


# Several ranks


def rank(tensor: Tensor, first: int, last: int) -> dict[str, Tensor]:
    row = tensor.count // tensor.shape[0]
    return {"x": Tensor(tensor.dtype, tensor.shape, tensor.bits[first * row : last * row], (first, last))}


RANKS = [(0, 30), (30, 31), (31, 100)]


def by_rank(old: Weights, new: Weights, **how: Any) -> list[Delta]:
    return [diff(rank(old["x"], *rows), rank(new["x"], *rows), **how) for rows in RANKS]


@pytest.mark.parametrize("how", ["few", "half", "rows", "all"])
@pytest.mark.parametrize("coo", [False, True])
def test_every_rank_has_its_rows(how: str, coo: bool) -> None:
    old, new = pair(BF16, how, 100)
    deltas = by_rank(old, new, coo=coo)
    check(old, new, deltas)
    check(old, new, deltas[::-1])
    check(old, new, [delta for delta in deltas if delta.entries])


def test_anchors_of_all_ranks_become_one_patch() -> None:
    old, new = pair(BF16, "few", 100)
    check(old, new, [anchor(rank(new["x"], *rows)) for rows in RANKS])


def test_an_anchor_of_some_rows_patches_only_these_rows() -> None:
    old, new = pair(BF16, "half", 100)
    new["x"].bits[: 30 * 96] = old["x"].bits[: 30 * 96]
    new["x"].bits[31 * 96 :] = old["x"].bits[31 * 96 :]
    assert check(old, new, [anchor(rank(new["x"], 30, 31))]).entries["x"].coo


def test_a_missing_rank_is_rejected() -> None:
    old, new = pair(BF16, "half", 100)
    with pytest.raises(CorruptDelta, match="the result has state"):
        make_absolute(old, by_rank(old, new)[1:], digest(old), digest(new).hex)


def test_overlapping_ranks_are_rejected() -> None:
    old, new = pair(BF16, "half", 100)
    for deltas in (by_rank(old, new) + by_rank(old, new)[:1], [*by_rank(old, new), diff(old, new)]):
        with pytest.raises(CorruptDelta, match="changes the same rows"):
            make_absolute(old, deltas, digest(old))


# Errors


def test_every_flipped_bit_is_harmless_or_rejected() -> None:
    """Every single bit of a delta: the right result, or an error."""
    old = {"a": Tensor(BF16, (8, 96), base(BF16, 768)), "b": Tensor(F32, (64,), base(F32, 64))}
    new = {name: Tensor(t.dtype, t.shape, change(t.bits, t.dtype, "down")) for name, t in old.items()}
    delta = diff(old, new)
    data, state, after, before = delta.to_bytes(), digest(old), digest(new).hex, bits_of(old)
    for at in range(len(delta.head), len(data)):
        harmed = bytearray(data)
        harmed[at] ^= 1 << at % 8
        try:
            made = make_absolute(old, [Delta.from_bytes(bytes(harmed))], state, after, threads=1)
        except CorruptDelta:
            continue
        assert made.after == after
    assert bits_of(old) == before


def test_another_base_is_rejected() -> None:
    old, new = pair(BF16, "few")
    with pytest.raises(WrongBase, match="made for weights with state"):
        make_absolute(new, [diff(old, new)], digest(new))
    with pytest.raises(WrongBase, match="missing in the base"):
        make_absolute({}, [diff(old, new)], State({}))


def test_a_wrong_result_state_is_rejected() -> None:
    old, new = pair(BF16, "few")
    with pytest.raises(CorruptDelta, match="the result has state") as caught:
        make_absolute(old, [diff(old, new)], digest(old), "0" * 64)
    assert caught.value.hint


def test_added_or_reshaped_tensors_are_rejected() -> None:
    old, new = pair(BF16, "few")
    more = {**new, "y": Tensor(U16, (3,), np.zeros(3, np.uint16))}
    for before, after in ((old, more), (more, old), (old, {"x": more["y"]})):
        with pytest.raises(SchemaChanged, match="which a run does not allow"):
            make_absolute(before, [diff(before, after)], digest(before))


def test_only_absolute_values_are_written() -> None:
    old, new = pair(BF16, "few", 100)
    before = bits_of(old)
    for delta in (diff(old, new), by_rank(old, new, coo=True)[0]):
        with pytest.raises(CorruptDelta, match="does not hold absolute values"):
            write_absolute(old, delta)
    with pytest.raises(SchemaChanged):
        write_absolute(old, anchor({"x": np.zeros(3)}))
    assert bits_of(old) == before


# Merging


def chain(hows: list[str], rows: int = 50) -> tuple[list[dict[str, Tensor]], list[Delta]]:
    """Versions, and the patches between them. `y` changes in the first step only."""
    old, _ = pair(BF16, "few", rows)
    versions = [{**old, "y": Tensor(U16, (9,), np.arange(9, dtype=np.uint16))}]
    patches = []
    for i, how in enumerate(hows):
        last = versions[-1]
        new = {"x": Tensor(BF16, last["x"].shape, change(last["x"].bits, BF16, how, seed=i))} if how else last
        versions.append({**last, **new})
        if i == 0:
            versions[-1]["y"] = Tensor(U16, (9,), np.arange(1, 10, dtype=np.uint16))
        patches.append(make_absolute(last, [diff(last, versions[-1])], digest(last)))
    return versions, patches


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("hows", "fresh"),
    [
        (["few", "few", "few"], False),
        (["few", "", "signs"], False),
        (["few", "all", "few"], True),
        (["signs", "signs", "mostly-up", "mostly-up"], True),  # each of them few, but not all together
    ],
)
def test_merged_patches_give_the_same_result(hows: list[str], fresh: bool, threads: int) -> None:
    versions, patches = chain(hows)
    merged = merge_absolute(versions[-1], patches, digest(versions[-1]), threads=threads)
    assert merged.entries["x"].fresh == fresh
    held = copied(versions[0])
    patch(held, merged)
    assert bits_of(held) == bits_of(versions[-1])
    union = {at for one in patches if "x" in one.entries for at in changes({}, one, "x")[0].tolist()}
    if not fresh:
        assert changes({}, merged, "x")[0].tolist() == sorted(union)


def test_a_weight_that_changes_back_stays_in_the_patch() -> None:
    """The position stays in the patch: the reader may be at any version between."""
    old, new = pair(BF16, "one")
    patches = [make_absolute(a, [diff(a, b)], digest(a)) for a, b in ((old, new), (new, old))]
    merged = merge_absolute(old, patches, digest(old))
    assert merged.before == merged.after
    assert merged.changed == 1
    held = copied(new)
    write_absolute(held, merged)
    assert bits_of(held) == bits_of(old)


def test_patches_with_gaps_cannot_be_merged() -> None:
    versions, patches = chain(["few", "few", "few"])
    with pytest.raises(WrongBase, match="does not follow"):
        merge_absolute(versions[-1], [patches[0], patches[2]], digest(versions[-1]))
    with pytest.raises(WrongBase, match="but the weights have"):
        merge_absolute(versions[-1], patches[:2], digest(versions[-1]))


def test_a_single_patch_is_returned_unchanged() -> None:
    versions, patches = chain(["few"])
    assert merge_absolute(versions[-1], patches, digest(versions[-1])) is patches[0]
    assert not merge_absolute(versions[-1], [], digest(versions[-1])).entries


# More than 2^32 elements


@pytest.mark.slow
def test_positions_beyond_32_bits_are_patched() -> None:
    """With zeros that take no memory: pages without writes share one page."""
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    if overcommit.exists() and overcommit.read_text().strip() == "2":
        pytest.skip("TENSORS BEYOND 2^32 ELEMENTS ARE NOT TESTED: this machine promises no memory")
    rows = (1 << 20) + 1
    at = [0, (1 << 32) - 1, 1 << 32, 4096 * rows - 1]
    old, new = (np.zeros((rows, 4096), np.uint8) for _ in range(2))
    new.reshape(-1)[at] = 7
    held, moved = (read_weights({"x": array.view(ml_dtypes.float8_e4m3fn)}) for array in (old, new))
    made = make_absolute(held, [diff(held, moved)], digest(held))
    assert made.nbytes < 1000
    assert changes({}, made, "x")[0].tolist() == at
    write_absolute(held, made)
    assert old.reshape(-1)[at].tolist() == [7] * 4
    merged = merge_absolute(held, [made, make_absolute(held, [], digest(held))], digest(held))
    assert changes({}, merged, "x")[0].tolist() == at


def test_an_entry_of_several_blocks_is_cut_at_its_own_block_ends() -> None:
    """Blocks of some rows differ from the blocks of the whole tensor."""
    count = 3 * BLOCK // 96 + 5
    old = {"x": Tensor(U16, (count, 96), (below(1, count * 96, 1000)).astype(np.uint16))}
    bits = old["x"].bits.copy()
    bits[:: BLOCK // 3] += 1
    bits[BLOCK - 2 : BLOCK + 2] += 1
    new = {"x": Tensor(U16, (count, 96), bits)}
    ranks = [(0, 7), (7, count - 1), (count - 1, count)]
    deltas = [diff(rank(old["x"], *rows), rank(new["x"], *rows)) for rows in ranks]
    made = check(old, new, deltas, threads=2)
    entry: Entry = made.entries["x"]
    assert entry.rows is None
    assert entry.changed == np.count_nonzero(bits != old["x"].bits)
