"""A delta is applied completely or not at all, and can be undone."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightwire
from support.patch_checks import F32, Arrays, bytes_of, three_tensors
from support.samples import base
from weightwire import (
    CorruptDelta,
    Delta,
    WrongBase,
    anchor,
    codec,
    diff,
    digest,
    patch,
)
from weightwire.codec.block_layout import BLOCK
from weightwire.delta.patcher import apply_in_place


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_patch_that_fails_half_way_changes_nothing(threads: int, name: str) -> None:
    old, new = three_tensors()
    delta = diff(old, new)
    data = bytearray(delta.to_bytes())
    begin, end = delta.byte_range(name)
    data[(begin + end) // 2] ^= 0x10
    before = bytes_of(old)
    with pytest.raises(CorruptDelta, match=f"delta: tensor '{name}'"):
        patch(old, bytes(data), threads=threads)
    assert bytes_of(old) == before
    patch(old, delta)
    assert bytes_of(old) == bytes_of(new)


def test_every_block_is_restored() -> None:
    """The last of several blocks fails."""
    old = {"x": np.zeros(3 * BLOCK, np.uint8)}
    new = {"x": old["x"].copy()}
    new["x"][:: BLOCK // 4] = 1
    delta = diff(old, new)
    data = bytearray(delta.to_bytes())
    data[-3] ^= 1
    for threads in (1, 2):
        with pytest.raises(CorruptDelta):
            patch(old, bytes(data), threads=threads)
        assert not old["x"].any()


def test_a_dense_block_is_restored() -> None:
    old = {"a": base(F32, 5000), "b": base(F32, 5000)}
    new = {"a": old["a"] + np.uint32(1000) + (old["a"] & np.uint32(0xFF)), "b": old["b"] ^ np.uint32(1)}
    delta = diff(old, new)
    data = bytearray(delta.to_bytes())
    data[delta.byte_range("b")[1] - 1] ^= 0x80
    before = bytes_of(old)
    with pytest.raises(CorruptDelta):
        patch(old, bytes(data))
    assert bytes_of(old) == before


def test_a_reader_that_fails_half_way_changes_nothing() -> None:
    old, new = three_tensors()
    data = diff(old, new).to_bytes()
    asked = 0

    def read(begin: int, end: int) -> bytes:
        nonlocal asked
        asked += 1
        if asked > 4:
            raise ConnectionError("gone")
        return data[begin:end]

    before = bytes_of(old)
    with pytest.raises(ConnectionError):
        patch(old, Delta.remote(read, len(data), "far"))
    assert bytes_of(old) == before


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_while_blocks_are_read_changes_nothing(threads: int) -> None:
    """Ctrl-C while blocks are fetched."""
    old, new = three_tensors()
    delta = diff(old, new)
    data, last = delta.to_bytes(), delta.byte_range("c")

    def read(begin: int, end: int) -> bytes:
        if (begin, end) == last:
            os.kill(os.getpid(), signal.SIGINT)
        return data[begin:end]

    before = bytes_of(old)
    with pytest.raises(KeyboardInterrupt):
        patch(old, Delta.remote(read, len(data), "far"), threads=threads)
    assert bytes_of(old) == before
    patch(old, delta)
    assert bytes_of(old) == bytes_of(new)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block", [0, 3, 5])
def test_an_interrupt_while_blocks_are_written_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, threads: int, block: int
) -> None:
    old: Arrays = {f"t{i}": np.arange(6400, dtype=np.uint16).reshape(100 * 2**i, -1) for i in range(3)}
    old |= {f"u{i}": np.arange(6400, dtype=np.uint32).reshape(100 * 2**i, -1) for i in range(3)}
    new = {name: array + array.dtype.type(1) for name, array in old.items()}
    delta = diff(old, new)
    base = {name: array.copy() for name, array in old.items()}
    calls = iter(range(6))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if next(calls) == block:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.3)  # time for the main thread to receive it
        return result

    real = codec.apply
    monkeypatch.setattr(codec, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch(base, delta, threads=threads)
    assert all((base[name] == old[name]).all() for name in old)


def test_weights_that_change_during_a_diff_do_not_crash() -> None:
    """The delta may be wrong, and its digests show that. The process must not crash."""
    old = np.zeros((512, 512), np.uint16)
    new = old.copy()
    stop = threading.Event()

    def write() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            new[:, ::7] = value
            old[::5] = value % 3

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(60):
            diff({"x": ("BF16", old.shape, old)}, {"x": ("BF16", new.shape, new)})
    finally:
        stop.set()
        thread.join()


def test_a_file_truncated_after_opening_is_rejected(tmp_path: Path) -> None:
    old = {"x": np.arange(100_000, dtype=np.uint16)}
    weightwire.anchor(old).write(tmp_path / "a")
    delta = weightwire.Delta.open(tmp_path / "a")
    os.truncate(tmp_path / "a", 4096)
    with pytest.raises(CorruptDelta, match="truncated while it was read"):
        patch({}, delta, copy=True)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("coo", [False, True])
def test_an_applied_delta_can_be_undone(threads: int, coo: bool) -> None:
    old, new = three_tensors()
    old["dense"], new["dense"] = base(F32, 640), base(F32, 640, seed=9)
    before, state = bytes_of(old), digest(old)
    applied = apply_in_place(old, diff(old, new, coo=coo), state, threads)
    assert applied.state == digest(new)
    assert bytes_of(old) == bytes_of(new)
    applied.undo()
    assert bytes_of(old) == before
    applied.undo()
    assert bytes_of(old) == before


def test_an_applied_anchor_can_be_undone() -> None:
    old, new = three_tensors()
    before = bytes_of(old)
    applied = apply_in_place(old, anchor(new))
    assert applied.state == digest(new)
    assert bytes_of(old) == bytes_of(new)
    applied.undo()
    assert bytes_of(old) == before


def test_a_patch_without_old_values_cannot_be_undone() -> None:
    old, new = three_tensors()
    applied = apply_in_place(old, diff(old, new), keep=False)
    assert applied.state == digest(new)
    assert bytes_of(old) == bytes_of(new)
    with pytest.raises(ValueError, match="were not kept"):
        applied.undo()


def test_a_wrong_state_is_refused_before_anything_is_written() -> None:
    old, new = three_tensors()
    before = bytes_of(old)
    for keep in (True, False):
        with pytest.raises(WrongBase):
            apply_in_place(old, diff(old, new), digest(new), keep=keep)
    assert bytes_of(old) == before


def test_a_damaged_delta_applied_in_place_is_undone() -> None:
    old, new = three_tensors()
    before, data = bytes_of(old), bytearray(diff(old, new).to_bytes())
    data[-5] ^= 4
    with pytest.raises(CorruptDelta):
        apply_in_place(old, bytes(data))
    assert bytes_of(old) == before


def test_torch_sees_that_undoing_changed_its_tensors() -> None:
    torch = pytest.importorskip("torch")
    weights = {"w": torch.ones(4, 4)}
    applied = apply_in_place(weights, diff(weights, {"w": torch.zeros(4, 4)}))
    seen = weights["w"]._version
    applied.undo()
    assert weights["w"]._version > seen
    assert (weights["w"] == 1).all()
