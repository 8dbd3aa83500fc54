"""advance_copy updates a copy completely or not at all, gives the same delta as a diff, and can be undone."""

from __future__ import annotations

import tempfile
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.captures import eventually, interrupt_own_work
from support.samples import base, change
from weightwire import CheckpointError, CorruptDelta, Tensor, codec, diff, digest, patch
from weightwire.codec.block_codec import EncodedBlock
from weightwire.codec.block_layout import BLOCK, Layout
from weightwire.publisher.copy_advance import advance_copy
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.weight_arena import WeightArena
from weightwire.weights.dtypes import DTYPES, Dtype
from weightwire.weights.tensor import Weights

BF16, F32, F64, U8, I64 = (DTYPES[name] for name in ("BF16", "F32", "F64", "U8", "I64"))


def tensor(dtype: Dtype, shape: tuple[int, ...], seed: int = 1, rows: tuple[int, int] | None = None) -> Tensor:
    return Tensor(dtype, shape, base(dtype, Layout.of(dtype, shape, rows).count, seed=seed), rows)


def changed(one: Tensor, how: str) -> Tensor:
    return replace(one, bits=change(one.bits, one.dtype, how, line=128))


def weights() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Units of every width: changed in a few places, in rows, almost everywhere, or not at all."""
    old = {
        "embed": tensor(BF16, (300, 128)),
        "head": tensor(BF16, (64, 128), 2),
        "norm": tensor(F32, (128,), 3),
        "none": tensor(F32, (3, 0)),
        "scale": tensor(F64, (), 4),
        "packed": tensor(U8, (7, 33), 5),
        "steps": tensor(I64, (1000,), 6),
    }
    how = {"embed": "rows", "norm": "most", "scale": "all", "packed": "few", "steps": "half"}
    return old, {name: changed(one, how[name]) if name in how else one for name, one in old.items()}


@pytest.fixture(scope="module")
def large() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Several blocks: with a few changes, with none, and with many."""
    bits = np.tile(base(BF16, 1 << 16), 160)
    old = {"large": Tensor(BF16, (len(bits) // 1024, 1024), bits)} | {f"t{i}": tensor(F32, (500,), i) for i in range(9)}
    new = bits.copy()
    new[: BLOCK // 2 : 101] += 1
    new[-BLOCK // 2 :] -= 1
    return old, {name: changed(one, "few") if name != "large" else replace(one, bits=new) for name, one in old.items()}


def copied(source: Weights) -> WeightArena:
    rows = {name: one.rows for name, one in source.items() if one.rows}
    arena = WeightArena({name: (one.dtype, one.shape) for name, one in source.items()}, rows)
    arena.copy_from(source)
    return arena


def bytes_of(source: Weights) -> dict[str, bytes]:
    return {name: one.bits.tobytes() for name, one in source.items()}


# Advance and undo


def test_the_copy_becomes_the_latest(implementation: str) -> None:
    old, new = weights()
    copy, latest = copied(old), copied(new)
    rolled = advance_copy(copy, latest)
    assert bytes_of(copy) == bytes_of(latest) == bytes_of(new)
    assert rolled.changed == sum(int((old[name].bits != new[name].bits).sum()) for name in old)


def test_the_delta_is_that_of_a_diff(implementation: str) -> None:
    old, new = weights()
    copy = copied(old)
    rolled = advance_copy(copy, new)
    made = rolled.diff(digest(old))
    assert made.to_bytes() == diff(old, new).to_bytes()
    assert made.changed == rolled.changed
    assert rolled.diff(before=digest(old)).to_bytes() == made.to_bytes()  # repeatable
    assert bytes_of(copy) == bytes_of(new)
    assert bytes_of(patch(old, made, copy=True)) == bytes_of(new)


def test_undo_restores_the_copy(implementation: str) -> None:
    old, new = weights()
    copy = copied(old)
    rolled = advance_copy(copy, new)
    rolled.diff(digest(old))
    for _ in range(2):
        rolled.undo()
        assert bytes_of(copy) == bytes_of(old)
    with pytest.raises(ValueError, match=r"undo\(\) was called"):
        rolled.diff(digest(old))
    assert advance_copy(copy, new).diff(digest(old)).to_bytes() == diff(old, new).to_bytes()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_does_not_matter(large: tuple[Weights, Weights], threads: int) -> None:
    old, new = large
    copy = copied(old)
    rolled = advance_copy(copy, new, threads=threads)
    made = rolled.diff(digest(old))
    assert made.to_bytes() == diff(old, new).to_bytes()
    assert made.changed == rolled.changed
    rolled.undo()
    assert bytes_of(copy) == bytes_of(old)


def test_several_advances_follow_each_other() -> None:
    old, new = weights()
    copy, state = copied(old), digest(old)
    for last, latest in ((old, new), (new, old), (old, old), (old, new)):
        made = advance_copy(copy, latest).diff(state)
        assert made.to_bytes() == diff(last, latest, before=state).to_bytes()
        state = made.advance(state)
    assert state == digest(new)


def test_equal_weights_give_an_empty_delta() -> None:
    old, _ = weights()
    rolled = advance_copy(copied(old), old)
    assert rolled.changed == 0
    assert rolled.diff(digest(old)).to_bytes() == diff(old, old).to_bytes()
    rolled.undo()


def test_empty_weights_give_an_empty_delta() -> None:
    assert advance_copy(copied({}), {}).diff(digest({})).to_bytes() == diff({}, {}).to_bytes()


def test_the_order_of_the_mappings_does_not_matter() -> None:
    old, new = weights()
    made = advance_copy(copied(dict(reversed(old.items()))), new).diff(digest(old))
    assert made.to_bytes() == diff(old, new).to_bytes()


def test_a_rank_advances_only_its_rows() -> None:
    old = {"x": tensor(BF16, (100, 64), rows=(30, 70)), "y": tensor(F32, (5,))}
    new = {name: changed(one, "half") for name, one in old.items()}
    rolled = advance_copy(copied(old), new)
    made = rolled.diff(digest(old))
    assert (made.entries["x"].rows, made.before, made.after) == ((30, 70), "", "")
    assert made.to_bytes() == diff(old, new).to_bytes()


def test_unaligned_weights_give_the_same_delta() -> None:
    old, new = weights()
    shifted = {
        name: replace(one, bits=np.frombuffer(bytearray(b"?") + one.bits.tobytes(), one.bits.dtype, offset=1))
        for name, one in new.items()
    }
    rolled = advance_copy(copied(old), shifted)
    assert rolled.diff(digest(old)).to_bytes() == diff(old, new).to_bytes()


def test_a_spool_gives_the_same_delta(large: tuple[Weights, Weights]) -> None:
    old, new = large
    with tempfile.TemporaryFile() as spool:
        assert advance_copy(copied(old), new).diff(digest(old), spool=spool).to_bytes() == diff(old, new).to_bytes()


def test_a_wrong_state_is_refused() -> None:
    old, new = weights()
    rolled = advance_copy(copied(old), new)
    with pytest.raises(CheckpointError, match="does not match the old weights"):
        rolled.diff(digest({name: one for name, one in old.items() if name != "head"}))


# Released batches


def test_every_batch_is_done_once_and_in_order(large: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    old, new = large
    heard: list[int] = []
    copy = copied(old)
    advance_copy(copy, new, threads=1, done=heard.append)
    assert heard == [batch.index for batch in copy.batches] == [*range(len(heard))]
    heard.clear()
    advance_copy(copied(old), new, threads=3, done=heard.append)
    assert sorted(heard) == [*range(len(copy.batches))]


@pytest.mark.parametrize("threads", [1, 3])
def test_released_batches_may_be_overwritten(large: tuple[Weights, Weights], threads: int) -> None:
    old, new = large
    copy, latest = copied(old), copied(new)

    def overwrite(batch: int) -> None:
        latest.units(latest.batches[batch])[:] = 0xDEAD

    rolled = advance_copy(copy, latest, threads=threads, done=overwrite)
    assert all((one.bits == 0xDEAD).all() for one in latest.values())
    assert rolled.diff(digest(old)).to_bytes() == diff(old, new).to_bytes()
    rolled.undo()
    assert bytes_of(copy) == bytes_of(old)


def test_weights_that_change_during_the_advance_give_a_delta_to_what_was_read(
    large: tuple[Weights, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blocking publisher reads live weights. What the encoder reads twice must not change in between."""
    old, new = large
    copy, live = copied(old), {name: replace(one, bits=one.bits.copy()) for name, one in new.items()}
    real = codec.encode

    def encode(*args: Any) -> EncodedBlock:
        for one in live.values():
            one.bits[::7] ^= 1
        return real(*args)

    monkeypatch.setattr(codec, "encode", encode)
    made = advance_copy(copy, live, threads=2).diff(digest(old))
    assert bytes_of(patch(old, made, copy=True)) == bytes_of(copy)


def test_a_capture_follows_an_advance(large: tuple[Weights, Weights]) -> None:
    old, new = large
    copies = HostCopies[int]({name: (one.dtype, one.shape) for name, one in old.items()})
    advance_copy(copies.published, old)
    copies.capture(new, 1)
    copies.take()
    rolled = advance_copy(copies.published, copies.latest, done=copies.release)
    assert not copies.busy
    copies.capture(old, 2)  # would otherwise wait forever
    assert rolled.diff(digest(old)).to_bytes() == diff(old, new).to_bytes()


# All or nothing


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_halfway_changes_nothing(large: tuple[Weights, Weights], threads: int) -> None:
    old, new = large
    copy, before = copied(old), {*threading.enumerate()}

    def fail(batch: int) -> None:
        if batch == 2:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        advance_copy(copy, new, threads=threads, done=fail)
    assert bytes_of(copy) == bytes_of(old)
    assert eventually(lambda: {one for one in threading.enumerate() if one.name.startswith("weightwire")} <= before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_an_interrupt_changes_everything_or_nothing(monkeypatch: pytest.MonkeyPatch, threads: int, at: int) -> None:
    old, new = weights()
    copy, calls, real = copied(old), iter(range(99)), codec.encode

    def interrupted(*args: Any) -> Any:
        result = real(*args)
        if next(calls) == at:
            interrupt_own_work()
        return result

    monkeypatch.setattr(codec, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        advance_copy(copy, new, threads=threads)
    assert bytes_of(copy) == bytes_of(old)


def test_an_interrupt_at_the_last_moment_undoes_the_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = weights()
    copy = copied(old)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weightwire.publisher.copy_advance.CopyAdvance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        advance_copy(copy, new)
    assert bytes_of(copy) == bytes_of(old)


# Proof


def other_bytes(block: EncodedBlock) -> EncodedBlock:
    return replace(block, data=block.data[:-1] + bytes([block.data[-1] ^ 0xFF]))


def another_digest(block: EncodedBlock) -> EncodedBlock:
    return replace(block, digests=block.digests ^ np.uint64(1))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "harm",
    [other_bytes, another_digest, lambda block: replace(block, data=block.data[:-1])],
    ids=["other bytes", "another digest", "cut short"],
)
def test_a_delta_that_does_not_decode_is_refused(
    monkeypatch: pytest.MonkeyPatch, harm: Callable[[EncodedBlock], EncodedBlock], threads: int
) -> None:
    old, new = weights()
    copy, real = copied(old), codec.encode

    def encode(base: Any, units: Any, layout: Layout, index: int) -> EncodedBlock:
        block = real(base, units, layout, index)
        return harm(block) if layout.dtype == BF16 and block.data else block

    monkeypatch.setattr(codec, "encode", encode)
    with pytest.raises(CorruptDelta, match="tensor 'embed': block 0 was encoded wrongly") as caught:
        advance_copy(copy, new, threads=threads)
    assert caught.value.hint
    assert bytes_of(copy) == bytes_of(old)
    monkeypatch.undo()
    assert advance_copy(copy, new).diff(digest(old)).to_bytes() == diff(old, new).to_bytes()


@pytest.mark.parametrize("how", ["another change", "a missing change", "no change"])
def test_a_wrong_change_with_correct_digests_is_refused(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A valid delta to other weights."""
    old, new = weights()
    copy, real = copied(old), codec.encode

    def encode(base: Any, units: Any, layout: Layout, index: int) -> EncodedBlock:
        other = units.copy()
        if how == "another change":
            other[0] ^= 1
        elif how == "a missing change" and (base != units).any():
            first = int((base != units).argmax())
            other[first] = base[first]
        elif how == "no change":
            other = base
        return real(base, other, layout, index)

    monkeypatch.setattr(codec, "encode", encode)
    with pytest.raises(CorruptDelta, match="was encoded wrongly: it decodes to other weights"):
        advance_copy(copy, new)
    assert bytes_of(copy) == bytes_of(old)


def test_the_refused_tensor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although many small tensors are compared at once."""
    old = {f"t{i}": tensor(F32, (40,), i) for i in range(9)}
    new = {name: changed(one, "all" if name == "t3" else "few") for name, one in old.items()}
    real = codec.encode

    def encode(base: Any, units: Any, layout: Layout, index: int) -> EncodedBlock:
        other = units.copy()
        other[3 * 40 : 4 * 40] = base[3 * 40 : 4 * 40]
        return real(base, other, layout, index)

    monkeypatch.setattr(codec, "encode", encode)
    with pytest.raises(CorruptDelta, match="tensor 't3': block 0"):
        advance_copy(copied(old), new)


# Cost


def test_memory_is_bounded() -> None:
    """Only the delta and the old values of changed units, and one batch per thread for live weights."""
    old = {"x": Tensor(U8, (8 * BLOCK,), np.zeros(8 * BLOCK, np.uint8))}
    new = copied(old)
    new["x"].bits[::5000] = 1
    copy, state = copied(old), digest(old)
    tracemalloc.start()
    try:
        rolled = advance_copy(copy, new, threads=1)
        kept, peak = tracemalloc.get_traced_memory()
        assert kept < 200_000
        assert peak < 400_000
        rolled.diff(state)
        assert tracemalloc.get_traced_memory()[1] < 500_000
        rolled.undo()
        advance_copy(copy, dict(new), threads=1)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * BLOCK
    finally:
        tracemalloc.stop()
