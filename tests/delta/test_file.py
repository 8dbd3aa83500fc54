"""The delta file: an ordinary safetensors file that is read by range and verified."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors

import weightwire
from support.delta_files import make_delta, new_weights
from support.patch_checks import U8, U16, Arrays
from support.samples import base
from weightwire import CorruptDelta, Delta, Tensor, WeightwireError
from weightwire.codec.block_layout import BLOCK, Layout
from weightwire.delta import Entry


def test_stock_safetensors_opens_and_lists_a_delta(tmp_path: Path) -> None:
    make_delta().write(tmp_path / "d.safetensors")
    with safetensors.safe_open(tmp_path / "d.safetensors", "numpy") as file:
        assert set(file.keys()) == {"a", "fresh", "ünï"}
        assert file.metadata()["format"] == "weightwire/1"
        assert json.loads(file.metadata()["removed"]) == ["gone"]
        for name, entry in make_delta().entries.items():
            array = file.get_tensor(name)
            assert array.dtype == np.uint8
            assert array.tobytes() == bytes(make_delta().fetch(*entry.span(range(len(entry.blocks)))))


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
        assert read.entries == delta.entries
        assert (read.kind, read.before, read.after, read.removed) == ("delta", delta.before, delta.after, ("gone",))
        assert (read.head, read.nbytes, read.changed) == (delta.head, delta.nbytes, delta.changed)
        assert read.to_bytes() == delta.to_bytes()


def test_the_data_begins_at_a_multiple_of_eight() -> None:
    assert len(make_delta().head) % 8 == 0


def test_entries_are_in_the_order_of_their_names_bytes() -> None:
    names = ["b", "ä", "a.b", "a", "\U0001f600", "\uffff"]
    delta = weightwire.anchor({name: np.zeros(1, np.uint8) for name in names})
    assert list(delta.entries) == sorted(names, key=str.encode)


def test_metadata_stays_small() -> None:
    """Six hundred tensors with hex digests in JSON would be larger than many deltas."""
    old = {f"model.layers.{i}.weight": np.zeros((8, 64), np.uint16) for i in range(600)}
    new = {name: array + np.uint16(1) for name, array in old.items()}
    metadata = json.loads(weightwire.diff(old, new).head[8:])["__metadata__"]
    assert len(metadata["index"]) <= 600 * 30


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
    old = {"x": np.zeros((12_000, 1000), np.uint8), "a": np.zeros(9, np.uint8), "z": np.zeros(9, np.uint8)}
    new = {name: array.copy() for name, array in old.items()}
    for row in (5, 3999, 4000, 11_999):
        new["x"][row, row % 1000] = 1
    new["a"][1] = new["z"][1] = 1
    return old, new, weightwire.diff(old, new).to_bytes()


def test_opening_reads_the_header_only(three_blocks: tuple[Arrays, Arrays, bytes]) -> None:
    far = Far(three_blocks[2])
    delta = Delta.remote(far.read, len(far.data), "far")
    assert far.asked == [(0, 8), (0, len(delta.head))]


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
    read = sorted(far.asked[2:])
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


def test_an_entry_names_the_state_of_its_tensor() -> None:
    entry = make_delta().entries["a"]
    assert entry.state == weightwire.digest(new_weights()).tensors["a"]


def test_an_entry_knows_the_bytes_of_its_blocks() -> None:
    entry = Entry("x", U8, (3 * BLOCK,), None, False, False, 3, (5, 0, 7), (0, 0), start=100)
    assert entry.nbytes == 12
    assert [entry.span(range(i, i + 1)) for i in range(3)] == [(100, 105), (105, 105), (105, 112)]
    assert entry.span(range(3)) == (100, 112)
