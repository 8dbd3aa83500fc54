"""The delta file: an ordinary safetensors file that is read by range and verified."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors

import weightwire
from support.delta_files import make_delta
from support.patch_checks import U8, U16, Arrays
from support.samples import base
from weightwire import CorruptDelta, Delta, Tensor, WeightwireError
from weightwire.codec.block_layout import BLOCK, Layout
from weightwire.delta import EncodedStack, Entry
from weightwire.delta.spool import Spool


def test_stock_safetensors_opens_and_lists_a_delta(tmp_path: Path) -> None:
    make_delta().write(tmp_path / "d.safetensors")
    with safetensors.safe_open(tmp_path / "d.safetensors", "numpy") as file:
        assert set(file.keys()) == {"index", "blocks"}
        assert file.metadata()["format"] == "weightwire/1"
        assert json.loads(file.metadata()["removed"]) == ["gone"]
        assert file.get_tensor("blocks").tobytes() == make_delta().to_bytes()[len(make_delta().head) :]


def test_the_file_holds_the_same_bytes_as_in_memory(tmp_path: Path) -> None:
    delta = make_delta()
    delta.write(tmp_path / "d")
    assert (tmp_path / "d").read_bytes() == delta.to_bytes()
    assert len(delta.to_bytes()) == delta.nbytes


@pytest.mark.parametrize("size", [1, 7, 100, 8 << 20])
def test_chunks_of_any_size_add_up_to_the_file(tmp_path: Path, size: int) -> None:
    make_delta().write(tmp_path / "d")
    for delta in (make_delta(), Delta.open(tmp_path / "d")):
        chunks = [bytes(chunk) for chunk in delta.chunks(size)]
        assert b"".join(chunks) == make_delta().to_bytes()
        assert {len(chunk) for chunk in chunks[:-1]} <= {size}
        assert 0 < len(chunks[-1]) <= size


def test_any_range_of_the_file_can_be_read() -> None:
    delta = make_delta()
    data, head = delta.to_bytes(), len(delta.head)
    places = (0, 5, head - 1, head, head + 1, delta.nbytes - 1, delta.nbytes)
    for begin in places:
        for end in (place for place in places if place >= begin):
            assert bytes(delta.read(begin, end)) == data[begin:end]


def test_a_file_round_trips(tmp_path: Path) -> None:
    delta = make_delta()
    delta.write(tmp_path / "d")
    for read in (Delta.open(tmp_path / "d"), Delta.from_bytes(delta.to_bytes())):
        assert (read.stacks, read.entries) == (delta.stacks, delta.entries)
        assert (read.kind, read.before, read.after, read.removed) == ("delta", delta.before, delta.after, ("gone",))
        assert (read.head, read.nbytes, read.changed) == (delta.head, delta.nbytes, delta.changed)
        assert read.to_bytes() == delta.to_bytes()


def test_equal_stacks_have_equal_hashes_however_they_hold_their_entries() -> None:
    read = Delta.from_bytes(
        weightwire.diff({"x": np.zeros(9), "y": np.zeros(9)}, {"x": np.ones(9), "y": np.ones(9)}).to_bytes()
    )
    (stack,) = read.stacks
    same = replace(stack, entries=tuple(stack.entries))
    assert len({stack, same}) == 1
    assert {read: "delta"}[replace(read, stacks=(same,))] == "delta"


def test_entries_are_in_the_order_of_their_names_bytes() -> None:
    names = ["b", "ä", "a.b", "a", "\U0001f600", "\uffff"]
    delta = weightwire.anchor({name: np.zeros(1, np.uint8) for name in names})
    assert list(delta.entries) == sorted(names, key=str.encode)


def test_thousands_of_names_take_little_space() -> None:
    """Written out in JSON, they would be larger than many deltas."""
    old = {f"model.layers.{i}.experts.{k}.weight": np.zeros((8, 8), np.uint16) for i in range(60) for k in range(64)}
    new = {name: array + np.uint16(1) for name, array in old.items()}
    delta = weightwire.diff(old, new)
    assert len(delta.entries) == 60 * 64
    assert len(delta.head) < 2000


def test_an_existing_file_is_replaced_atomically(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(weightwire.anchor({}).to_bytes())
    make_delta().write(tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert Delta.open(tmp_path / "d").changed


class Far:
    """Remote bytes, and a log of the requested ranges."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []

    def read(self, begin: int, end: int) -> bytes:
        self.asked.append((begin, end))
        return self.data[begin:end]


@pytest.fixture(scope="module")
def three_blocks() -> tuple[Arrays, Arrays, bytes]:
    """A tensor of 12,000 lines in three blocks of 4,000, with a change in each; and two small ones."""
    old = {"x": np.zeros((12_000, 1000), np.uint8), "a": np.zeros(9, np.uint8), "z": np.zeros(8, np.uint8)}
    new = {name: array.copy() for name, array in old.items()}
    for row in (5, 3999, 4000, 11_999):
        new["x"][row, row % 1000] = 1
    new["a"][1] = new["z"][1] = 1
    return old, new, weightwire.diff(old, new).to_bytes()


def test_opening_reads_the_head_only(three_blocks: tuple[Arrays, Arrays, bytes]) -> None:
    far = Far(three_blocks[2])
    delta = Delta.remote(far.read, len(far.data), "far")
    header = 8 + int.from_bytes(far.data[:8], "little")
    assert far.asked == [(0, 8), (0, header), (0, len(delta.head))]


def test_rows_are_read_by_the_blocks_that_hold_them(three_blocks: tuple[Arrays, Arrays, bytes]) -> None:
    old, _, data = three_blocks
    far = Far(data)
    delta = Delta.remote(far.read, len(data), "far")
    blocks = [delta.byte_range("x", (row, row + 1)) for row in (0, 4000, 11_999)]
    assert [begin for begin, _ in blocks[1:]] == [end for _, end in blocks[:-1]]
    assert (blocks[0][0], blocks[-1][1]) == delta.byte_range("x")

    for rows, asked, found in [
        ((4000, 4001), blocks[1:2], [4000 * 1000]),
        ((3999, 4001), blocks[:2], [3999 * 1000 + 999, 4000 * 1000]),
        ((6000, 7000), blocks[1:2], []),
        ((8000, 12_000), blocks[2:], [11_999 * 1000 + 999]),
    ]:
        far.asked.clear()
        positions, values = weightwire.delta.changes(old, delta, "x", rows)
        assert far.asked == asked
        assert positions.tolist() == found
        assert values.tolist() == [1] * len(found)


def test_reading_a_tensor_reads_only_its_bytes(three_blocks: tuple[Arrays, Arrays, bytes]) -> None:
    old, _, data = three_blocks
    far = Far(data)
    delta = Delta.remote(far.read, len(data), "far")
    far.asked.clear()
    positions, _ = weightwire.delta.changes(old, delta, "a")
    assert positions.tolist() == [1]
    assert far.asked == [delta.byte_range("a")]


def test_a_remote_delta_can_be_applied(three_blocks: tuple[Arrays, Arrays, bytes]) -> None:
    old, new, data = three_blocks
    far = Far(data)
    patched = weightwire.patch(old, Delta.remote(far.read, len(data), "far"), copy=True)
    assert all((patched[name] == new[name]).all() for name in new)
    read = sorted(far.asked[3:])
    assert [begin for begin, _ in read[1:]] == [end for _, end in read[:-1]]  # everything once


def test_coo_has_all_rows_in_one_block() -> None:
    old, new = {"x": np.zeros((300, 64), np.uint8)}, {"x": np.zeros((300, 64), np.uint8)}
    new["x"][[3, 200], [5, 6]] = 1
    delta = weightwire.diff(old, new, coo=True)
    assert delta.byte_range("x", (0, 1)) == delta.byte_range("x")
    assert weightwire.delta.changes({}, delta, "x", (100, 300))[0].tolist() == [200 * 64 + 6]


def test_pieces_are_read_as_if_they_were_one() -> None:
    data = make_delta().to_bytes()
    delta, size = make_delta(), len(make_delta().head)
    for begin, end in [(0, 5), (3, 40), (0, len(data) - size), (7, 7), (len(data) - size, len(data) - size)]:
        assert bytes(delta.fetch(begin, end)) == data[size + begin : size + end]


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1])
def test_a_truncated_file_is_rejected(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(make_delta().to_bytes()[:keep])
    with pytest.raises(CorruptDelta) as caught:
        Delta.open(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(WeightwireError, match=r"no such file or directory|is a directory") as caught:
            Delta.open(path)
        assert str(path) in caught.value.message


def test_a_checkpoint_is_not_a_delta(tmp_path: Path) -> None:
    import safetensors.numpy

    safetensors.numpy.save_file({"x": np.zeros(3)}, tmp_path / "c.safetensors")
    with pytest.raises(CorruptDelta, match="not a weightwire delta") as caught:
        Delta.open(tmp_path / "c.safetensors")
    assert caught.value.hint == "pass a file written by `weightwire diff`"


def test_a_file_of_rows_names_no_state() -> None:
    bits = base(U16, 640)
    shard = {"x": Tensor(U16, (100, 64), bits, (10, 20))}
    moved = {"x": Tensor(U16, (100, 64), bits + np.uint16(1), (10, 20))}
    delta = Delta.from_bytes(weightwire.diff(shard, moved).to_bytes())
    assert (delta.before, delta.after) == ("", "")
    assert delta.entries["x"].rows == (10, 20)
    assert delta.entries["x"].layout == Layout.of(U16, (100, 64), (10, 20))


def test_a_stack_knows_the_bytes_of_its_blocks() -> None:
    entry = Entry("x", U8, (3 * BLOCK,), None, False, False, 3)
    stack = EncodedStack((entry,), 1, (5, 0, 7), (bytes(16), b"", bytes(16)), start=100)
    assert stack.nbytes == 12
    assert [stack.span(range(i, i + 1)) for i in range(3)] == [(100, 105), (105, 105), (105, 112)]
    assert stack.span(range(3)) == (100, 112)


# Stacks


def small_tensors(count: int) -> Arrays:
    return {f"layer.{i}": base(U16, 600, seed=i).reshape(20, 30) for i in range(count)}


def test_tensors_of_one_shape_are_encoded_together() -> None:
    old = {**small_tensors(50), "other": np.zeros((30, 20), np.uint16)}
    new = {name: array + np.uint16(1) for name, array in old.items()}
    delta = Delta.from_bytes(weightwire.diff(old, new).to_bytes())
    assert [len(stack.entries) for stack in delta.stacks] == [50, 1]
    assert [len(stack.blocks) for stack in delta.stacks] == [1, 1]
    patched = weightwire.patch(old, delta, copy=True)
    assert all((patched[name] == new[name]).all() for name in new)


def test_members_of_a_stack_count_their_own_changes() -> None:
    old = small_tensors(5)
    new = {name: array.copy() for name, array in old.items()}
    new["layer.1"][0, :3] ^= 1
    new["layer.4"][19, 29] ^= 1
    delta = Delta.from_bytes(weightwire.diff(old, new).to_bytes())
    assert [entry.changed for entry in delta.entries.values()] == [0, 3, 0, 0, 1]


def test_blocks_of_a_stack_that_did_not_change_are_left_out() -> None:
    """Six tensors of which two fit into a block."""
    old = {f"t{i}": np.zeros((2048, 1000), np.uint8) for i in range(6)}
    new = {name: array.copy() for name, array in old.items()}
    new["t5"][1, 2] = 7
    delta = Delta.from_bytes(weightwire.diff(old, new).to_bytes())
    assert list(delta.entries) == ["t4", "t5"]
    patched = weightwire.patch(old, delta, copy=True)
    assert all((patched[name] == new[name]).all() for name in new)


def test_changes_of_a_member_are_read_from_its_block() -> None:
    old = {f"t{i}": np.zeros((2048, 1000), np.uint8) for i in range(6)}
    new = {name: array.copy() for name, array in old.items()}
    new["t2"][0, 5] = new["t3"][1, 6] = new["t3"][2047, 999] = 1
    new["t0"][0, 0] = 1
    far = Far(weightwire.diff(old, new).to_bytes())
    delta = Delta.remote(far.read, len(far.data), "far")
    far.asked.clear()
    assert weightwire.delta.changes(old, delta, "t3")[0].tolist() == [1006, 2_047_999]
    assert far.asked == [delta.byte_range("t3")] == [delta.byte_range("t2")]
    assert weightwire.delta.changes(old, delta, "t3", (2, 2048))[0].tolist() == [2_047_999]


def test_a_damaged_block_is_found_by_its_hash(three_blocks: tuple[Arrays, Arrays, bytes]) -> None:
    """Also by a reader of some rows, who cannot compare states. Other blocks stay readable."""
    old, _, data = three_blocks
    begin, end = Delta.from_bytes(data).byte_range("x", (4000, 4001))
    for at in range(begin, end):
        lie = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        delta = Delta.from_bytes(lie)
        with pytest.raises(CorruptDelta, match="tensor 'x': block 1: its hash does not match the index"):
            weightwire.delta.changes(old, delta, "x", (4000, 4001))
        assert len(weightwire.delta.changes(old, delta, "x", (0, 10))[0]) == 1


def test_threads_can_spool_at_the_same_time() -> None:
    blocks = [bytes([index]) * (1000 + index) for index in range(200)]
    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(8) as pool:
        spool = Spool(file)
        kept = list(pool.map(spool.keep, blocks))
        assert [one.read(0, len(one)) for one in kept] == blocks
