"""The delta file: an ordinary safetensors file, read by range, and believed in nothing that it cannot prove."""

from __future__ import annotations

import base64
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors

import weightwire
from support.crafted import Header, packed_entry, put_together, taken_apart
from support.samples import base, change
from weightwire import CorruptDelta, Delta, Tensor, UnsupportedFormat, WeightwireError, WrongBase
from weightwire.codec.block_layout import BLOCK, Layout
from weightwire.delta import Entry
from weightwire.delta.file import Packed, pack
from weightwire.weights.dtypes import DTYPES

Arrays = dict[str, npt.NDArray[Any]]
BF16, U8, U16 = (DTYPES[name] for name in ("BF16", "U8", "U16"))


def old_weights() -> Arrays:
    return {
        "a": base(U16, 6400).reshape(100, 64),
        "gone": np.zeros(3, np.uint8),
        "ünï": base(U16, 12, seed=3).reshape(3, 4),
    }


def new_weights() -> Arrays:
    old = old_weights()
    return {
        "a": change(old["a"].reshape(-1), U16, "few").reshape(100, 64),
        "fresh": np.arange(5, dtype=np.float32),
        "ünï": old["ünï"] + np.uint16(1),
    }


def make() -> Delta:
    return weightwire.diff(old_weights(), new_weights())


# An ordinary file


def test_stock_safetensors_opens_and_lists_it(tmp_path: Path) -> None:
    make().write(tmp_path / "d.safetensors")
    with safetensors.safe_open(tmp_path / "d.safetensors", "numpy") as file:
        assert set(file.keys()) == {"a", "fresh", "ünï"}
        assert file.metadata()["format"] == "weightwire/1"
        assert json.loads(file.metadata()["removed"]) == ["gone"]
        for name, entry in make().entries.items():
            array = file.get_tensor(name)
            assert array.dtype == np.uint8
            assert array.tobytes() == bytes(make().fetch(*entry.span(range(len(entry.blocks)))))


def test_the_file_is_the_bytes(tmp_path: Path) -> None:
    delta = make()
    delta.write(tmp_path / "d")
    assert (tmp_path / "d").read_bytes() == delta.to_bytes()
    assert len(delta.to_bytes()) == delta.nbytes


@pytest.mark.parametrize("size", [1, 7, 100, 8 << 20])
def test_chunks_are_the_bytes(tmp_path: Path, size: int) -> None:
    make().write(tmp_path / "d")
    for delta in (make(), Delta.open(tmp_path / "d")):
        chunks = [bytes(chunk) for chunk in delta.chunks(size)]
        assert b"".join(chunks) == make().to_bytes()
        assert {len(chunk) for chunk in chunks[:-1]} <= {size}
        assert 0 < len(chunks[-1]) <= size


def test_reading_anywhere_in_the_file() -> None:
    delta = make()
    data, head = delta.to_bytes(), len(delta.head)
    places = (0, 5, head - 1, head, head + 1, delta.nbytes - 1, delta.nbytes)
    for begin in places:
        for end in (place for place in places if place >= begin):
            assert bytes(delta.read(begin, end)) == data[begin:end]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    delta = make()
    delta.write(tmp_path / "d")
    for read in (Delta.open(tmp_path / "d"), Delta.from_bytes(delta.to_bytes())):
        assert read.entries == delta.entries
        assert (read.kind, read.before, read.after, read.removed) == ("delta", delta.before, delta.after, ("gone",))
        assert (read.head, read.nbytes, read.changed) == (delta.head, delta.nbytes, delta.changed)
        assert read.to_bytes() == delta.to_bytes()


def test_the_data_begins_at_a_multiple_of_eight() -> None:
    assert len(make().head) % 8 == 0


def test_entries_are_in_the_order_of_their_names_bytes() -> None:
    names = ["b", "ä", "a.b", "a", "\U0001f600", "\uffff"]
    delta = weightwire.anchor({name: np.zeros(1, np.uint8) for name in names})
    assert list(delta.entries) == sorted(names, key=str.encode)


def test_metadata_is_small() -> None:
    """Six hundred tensors with hex digests in JSON would cost more than many a delta."""
    old = {f"model.layers.{i}.weight": np.zeros((8, 64), np.uint16) for i in range(600)}
    new = {name: array + np.uint16(1) for name, array in old.items()}
    metadata = json.loads(weightwire.diff(old, new).head[8:])["__metadata__"]
    assert len(metadata["index"]) <= 600 * 30


def test_an_existing_file_is_replaced_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(weightwire.anchor({}).to_bytes())
    make().write(tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert Delta.open(tmp_path / "d").changed


# By range


class Far:
    """Bytes that are far away, and a record of what was asked of them."""

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


def test_a_whole_tensor_is_read_and_no_other(three_blocks: tuple[Arrays, Arrays, bytes]) -> None:
    old, _, data = three_blocks
    far = Far(data)
    delta = Delta.remote(far.read, len(data), "far")
    far.asked.clear()
    positions, _ = weightwire.delta.changes(old, delta, "a")
    assert positions.tolist() == [1]
    assert far.asked == [delta.byte_range("a")]


def test_a_delta_that_is_far_away_can_be_applied(three_blocks: tuple[Arrays, Arrays, bytes]) -> None:
    old, new, data = three_blocks
    far = Far(data)
    patched = weightwire.patch(old, Delta.remote(far.read, len(data), "far"), copy=True)
    assert all((patched[name] == new[name]).all() for name in new)
    read = sorted(far.asked[2:])
    assert [begin for begin, _ in read[1:]] == [end for _, end in read[:-1]]  # everything once


def test_rows_of_coo_are_in_its_one_block() -> None:
    old, new = {"x": np.zeros((300, 64), np.uint8)}, {"x": np.zeros((300, 64), np.uint8)}
    new["x"][[3, 200], [5, 6]] = 1
    delta = weightwire.diff(old, new, coo=True)
    assert delta.byte_range("x", (0, 1)) == delta.byte_range("x")
    assert weightwire.delta.changes({}, delta, "x", (100, 300))[0].tolist() == [200 * 64 + 6]


def test_pieces_are_read_as_if_they_were_one() -> None:
    data = make().to_bytes()
    delta, size = make(), len(make().head)
    for begin, end in [(0, 5), (3, 40), (0, len(data) - size), (7, 7), (len(data) - size, len(data) - size)]:
        assert bytes(delta.fetch(begin, end)) == data[size + begin : size + end]


# Files that are none


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1])
def test_a_file_cut_short(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(make().to_bytes()[:keep])
    with pytest.raises(CorruptDelta) as caught:
        Delta.open(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(WeightwireError, match=r"cannot be read|is a directory") as caught:
            Delta.open(path)
        assert str(path) in caught.value.message


def test_a_checkpoint_is_no_delta(tmp_path: Path) -> None:
    import safetensors.numpy

    safetensors.numpy.save_file({"x": np.zeros(3)}, tmp_path / "c.safetensors")
    with pytest.raises(CorruptDelta, match="is no weightwire delta") as caught:
        Delta.open(tmp_path / "c.safetensors")
    assert caught.value.hint == "pass a file that `weightwire diff` wrote"


# Headers that lie: one field at a time


def refuse(data: bytes, *kinds: type[WeightwireError], tensor: str | None = None) -> WeightwireError:
    """That neither a copy nor a patch in place survives a file, and the base survives both."""
    weights = {name: array.copy() for name, array in old_weights().items()}
    caught = []
    for copy in (True, False):
        with pytest.raises(kinds) as raised:
            weightwire.patch(weights, Delta.from_bytes(data, "there/lie.safetensors"), copy=copy)
        caught.append(raised.value)
        assert all((weights[name] == array).all() for name, array in old_weights().items())
    error = caught[0]
    assert error.message.startswith("there/lie.safetensors: ")
    assert error.hint
    assert tensor is None or f"tensor {tensor!r}" in error.message
    return error


def in_place_delta() -> Delta:
    """A delta that could be applied in place, so that nothing but the lie stands in its way."""
    old = old_weights()
    new = old | {name: array for name, array in new_weights().items() if name in ("a", "ünï")}
    return weightwire.diff(old, new)


def test_without_a_lie_it_is_applied() -> None:
    for delta in (make(), in_place_delta()):
        assert Delta.from_bytes(put_together(*taken_apart(delta))).entries == delta.entries
    weights = {name: array.copy() for name, array in old_weights().items()}
    weightwire.patch(weights, put_together(*taken_apart(in_place_delta())))
    assert (weights["a"] == new_weights()["a"]).all()


@pytest.mark.parametrize("value", ["weightwire/2", "weightwire/10", "weightwire/0"])
def test_a_newer_format(value: str) -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"]["format"] = value
    assert refuse(put_together(header, data), UnsupportedFormat).hint == "upgrade weightwire"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "weightwire"),
        ("format", "weightwire/1.5"),
        ("format", "weightwire/-1"),
        ("format", "pt"),
        ("format", ""),
        ("kind", "shortcut"),
        ("kind", ""),
        ("before", "0" * 63),
        ("before", "G" * 64),
        ("after", "0" * 65),
        ("after", "A" * 64),
        ("removed", ""),
        ("removed", "{}"),
        ("removed", "[1]"),
        ("removed", '"x"'),
        ("removed", "[" * 1_000_000),
        ("index", ""),
        ("index", "~~~~~"),
        ("index", "ü"),
        ("index", "0"),
    ],
)
def test_metadata_that_is_none(key: str, value: str) -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"][key] = value
    refuse(put_together(header, data), CorruptDelta)


@pytest.mark.parametrize("key", ["format", "kind", "before", "after", "index"])
def test_metadata_that_is_missing(key: str) -> None:
    header, data = taken_apart(in_place_delta())
    del header["__metadata__"][key]
    assert key == "format" or f"'{key}'" in str(refuse(put_together(header, data), CorruptDelta))
    refuse(put_together(header, data), CorruptDelta)


def test_another_base() -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"]["before"] = "0" * 64
    assert "was made for weights with state 000000000000" in str(refuse(put_together(header, data), WrongBase))


def test_another_result() -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"]["after"] = "0" * 64
    assert "the result has another state" in str(refuse(put_together(header, data), CorruptDelta))


def test_a_delta_that_calls_itself_an_anchor() -> None:
    """The base is then not compared, but the result is: it lacks the tensors that did not change."""
    header, data = taken_apart(in_place_delta())
    header["__metadata__"]["kind"] = "anchor"
    refuse(put_together(header, data), CorruptDelta)


def test_a_tensor_that_is_secretly_removed() -> None:
    header, data = taken_apart(make())
    header["__metadata__"]["removed"] = '["gone","a"]'
    with pytest.raises(WeightwireError) as caught:
        weightwire.patch(old_weights(), put_together(header, data), copy=True)
    assert isinstance(caught.value, CorruptDelta)


@pytest.mark.parametrize("by_rows", [False, True])
def test_an_anchor_that_leans_on_a_base(by_rows: bool) -> None:
    header, data = taken_apart(in_place_delta())
    entries = in_place_delta().entries.values()
    packed = b"".join(packed_entry(replace(one, rows=(0, one.shape[0]) if by_rows else None)) for one in entries)
    header["__metadata__"] |= {"kind": "anchor", "before": "", "after": "", "index": base64.b85encode(packed).decode()}
    refuse(put_together(header, data), CorruptDelta)


def test_a_tensor_that_is_both_changed_and_removed() -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"] |= {"removed": '["a"]', "after": ""}
    with pytest.raises(CorruptDelta):
        weightwire.patch(old_weights(), put_together(header, data), copy=True)


def swap_names(header: Header) -> None:
    header["a"], header["b"] = header["ünï"], header.pop("a")


def no_u8(header: Header) -> None:
    size = header["a"]["shape"][0]
    header["a"] |= {"dtype": "F4", "shape": [2 * size]}


def two_dimensions(header: Header) -> None:
    header["a"]["shape"] = [1, *header["a"]["shape"]]


def a_longer_entry(header: Header) -> None:
    """One byte of the next entry, too."""
    begin, end = header["a"]["data_offsets"]
    header["a"] = {"dtype": "U8", "shape": [end + 1 - begin], "data_offsets": [begin, end + 1]}
    begin, end = header["ünï"]["data_offsets"]
    header["ünï"] = {"dtype": "U8", "shape": [end - begin - 1], "data_offsets": [begin + 1, end]}


def an_entry_too_many(header: Header) -> None:
    end = header["ünï"]["data_offsets"][1]
    header["zzz"] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}


def a_hole(header: Header) -> None:
    begin, end = header["ünï"]["data_offsets"]
    header["ünï"] = {"dtype": "U8", "shape": [end - begin - 1], "data_offsets": [begin + 1, end]}


def an_overlap(header: Header) -> None:
    begin, end = header["ünï"]["data_offsets"]
    header["ünï"] = {"dtype": "U8", "shape": [end - begin + 1], "data_offsets": [begin - 1, end]}


def past_the_end(header: Header) -> None:
    begin, end = header["ünï"]["data_offsets"]
    header["ünï"] = {"dtype": "U8", "shape": [end - begin + 9], "data_offsets": [begin, end + 9]}


@pytest.mark.parametrize(
    "lie",
    [swap_names, no_u8, two_dimensions, a_longer_entry, an_entry_too_many, a_hole, an_overlap, past_the_end],
    ids=lambda lie: lie.__name__,
)
def test_entries_that_lie(lie: Callable[[Header], None]) -> None:
    header, data = taken_apart(in_place_delta())
    lie(header)
    refuse(put_together(header, data), CorruptDelta, WrongBase)


def with_entry(**lies: Any) -> bytes:
    """The file, with another index entry for tensor `a`."""
    return pack_unchecked(in_place_delta(), a=lambda entry: replace(entry, **lies))


def pack_unchecked(delta: Delta, **lies: Callable[[Entry], Entry]) -> bytes:
    header, data = taken_apart(delta)
    told = [lies[name](entry) if name in lies else entry for name, entry in delta.entries.items()]
    header["__metadata__"]["index"] = base64.b85encode(b"".join(map(packed_entry, told))).decode()
    return put_together(header, data)


def test_the_index_is_as_the_format_has_it() -> None:
    assert with_entry() == put_together(*taken_apart(in_place_delta()))


SIZE = in_place_delta().entries["a"].nbytes
CHANGED = in_place_delta().entries["a"].changed
DIGEST = in_place_delta().entries["a"].digest


@pytest.mark.parametrize(
    "lies",
    [
        {"dtype": DTYPES["I16"]},
        {"dtype": DTYPES["BF16"]},
        {"dtype": DTYPES["U32"]},
        {"dtype": DTYPES["F4"]},
        {"shape": (64, 100)},
        {"shape": (6400,)},
        {"shape": (100, 64, 1)},
        {"shape": (100, 63)},
        {"shape": ()},
        {"shape": (0,), "blocks": ()},
        {"shape": (2**40, 64)},
        {"shape": (2**62,)},
        {"shape": (2**63, 2**63)},
        {"shape": (1,) * 65},
        {"shape": (0, 2**64 - 1)},
        {"rows": (0, 50)},
        {"rows": (50, 50)},
        {"rows": (50, 40)},
        {"rows": (0, 101)},
        {"rows": (2**63, 2**64 - 1)},
        {"shape": (), "rows": (0, 1)},
        {"coo": True},
        {"fresh": True},
        {"coo": True, "fresh": True},
        {"changed": 0},
        {"changed": CHANGED - 1},
        {"changed": CHANGED + 1},
        {"changed": 6401},
        {"changed": 2**64 - 1},
        {"blocks": ()},
        {"blocks": (SIZE - 1,)},
        {"blocks": (SIZE + 1,)},
        {"blocks": (0,)},
        {"blocks": (0, SIZE)},
        {"blocks": (SIZE, 0)},
        {"blocks": (2**64 - 1,)},
        {"digest": (DIGEST[0] ^ 1, DIGEST[1])},
        {"digest": (DIGEST[0], DIGEST[1] ^ 1 << 63)},
        {"digest": (0, 0)},
    ],
    ids=str,
)
def test_an_index_that_lies(lies: dict[str, Any]) -> None:
    refuse(with_entry(**lies), CorruptDelta, WrongBase)


def test_all_rows_are_rows_too() -> None:
    """No lie: it says the same in more words."""
    weights = {name: array.copy() for name, array in old_weights().items()}
    weightwire.patch(weights, with_entry(rows=(0, 100)))
    assert (weights["a"] == new_weights()["a"]).all()


@pytest.mark.parametrize(
    "lies",
    [
        {"dtype": DTYPES["I16"]},
        {"shape": (64, 100)},
        {"rows": (0, 101)},
        {"changed": CHANGED + 1},
        {"changed": 6401},
        {"blocks": (SIZE - 1,)},
        {"blocks": (2**64 - 1,)},
        {"digest": (0, 0)},
        {"shape": (2**60,)},
    ],
    ids=str,
)
def test_the_tensor_is_named(lies: dict[str, Any]) -> None:
    refuse(with_entry(**lies), CorruptDelta, WrongBase, tensor="a")


def test_an_unknown_dtype() -> None:
    index = base64.b85encode(bytes([31]) + packed_entry(in_place_delta().entries["a"])[1:]).decode()
    header, data = taken_apart(in_place_delta())
    header["__metadata__"]["index"] = index
    assert "unknown dtype" in str(refuse(put_together(header, data), CorruptDelta, tensor="a"))


@pytest.mark.parametrize("cut", [1, 5, 16, 17, 40])
def test_an_index_cut_short_or_too_long(cut: int) -> None:
    index = b"".join(map(packed_entry, in_place_delta().entries.values()))
    header, data = taken_apart(in_place_delta())
    for lie in (index[:-cut], index + bytes(cut)):
        header["__metadata__"]["index"] = base64.b85encode(lie).decode()
        refuse(put_together(header, data), CorruptDelta)


@pytest.mark.parametrize("at", range(0, SIZE, 3))
def test_a_flipped_bit_in_the_data(at: int) -> None:
    data = bytearray(in_place_delta().to_bytes())
    data[len(in_place_delta().head) + at] ^= 1 << at % 8
    refuse(bytes(data), CorruptDelta, tensor="a")


# Bombs


def bomb(dtype: str, shape: tuple[int, ...], blocks: tuple[int, ...], **what: Any) -> bytes:
    """A file that claims a tensor far larger than itself."""
    entry = Entry("x", DTYPES[dtype], shape, None, what.pop("coo", False), what.pop("fresh", True), 0, blocks, (0, 0))
    return pack(
        [Packed(replace(entry, **what), [b"\3\0\0\0\1\0\0".ljust(size, b"\0")[:size] for size in blocks])]
    ).to_bytes()


@pytest.mark.parametrize(
    "data",
    [
        bomb("U8", (2**28,), (7,) * 64),
        bomb("F64", (2**37,), (1,) * 32_768),  # a terabyte in 32 kB
        bomb("F64", (2**39,), (7,) * 131_072),
        bomb("U8", (2**41, 1), (1,) * 524_288),
        bomb("BF16", (2**20, 2**20), (2,) * 262_144),
    ],
    ids=["a quarter of a gigabyte", "a terabyte", "four terabytes", "two terabytes", "lines"],
)
def test_a_new_tensor_that_claims_the_world(data: bytes) -> None:
    """Refused before memory or disk is taken for it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptDelta) as caught:
        weightwire.patch({}, Delta.from_bytes(data, "bomb"), copy=True)
    assert "'x'" in caught.value.message
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 200_000  # kB


def test_a_sparse_tensor_that_claims_the_world() -> None:
    """Positions and values need no base, and a shape costs nothing to claim."""
    coo = b"\x08" + bytes(7) + (5).to_bytes(8, "little") + b"\1"
    entry = Entry("x", U8, (2**61,), None, True, False, 1, (len(coo),), (0, 0))
    delta = Delta.from_bytes(pack([Packed(entry, [coo])]).to_bytes(), "bomb")
    with pytest.raises(WrongBase):
        weightwire.patch({}, delta, copy=True)
    assert weightwire.delta.changes({}, delta, "x")[0].tolist() == [5]


def test_a_new_tensor_with_an_empty_block() -> None:
    """Nothing is "as before" where there was nothing before; its other block is long enough for both."""
    entry = Entry("x", U8, (BLOCK + 8,), None, False, True, BLOCK + 8, (9000, 0), (0, 0))
    delta = Delta.from_bytes(pack([Packed(entry, [bytes(9000)])]).to_bytes(), "hollow")
    with pytest.raises(CorruptDelta, match="hollow: tensor 'x': block 1: it is empty"):
        weightwire.patch({}, delta, copy=True)


def test_many_blocks_that_are_not_there() -> None:
    """The number of blocks follows from the shape: it must not be believed before they have been seen."""
    data = with_entry(shape=(2**60,), blocks=(0,))
    assert "a" in str(refuse(data, CorruptDelta))


# A part of the weights


def test_a_file_of_rows_names_no_state() -> None:
    bits = base(U16, 640)
    shard = {"x": Tensor(U16, (100, 64), bits, (10, 20))}
    moved = {"x": Tensor(U16, (100, 64), bits + np.uint16(1), (10, 20))}
    delta = Delta.from_bytes(weightwire.diff(shard, moved).to_bytes())
    assert (delta.before, delta.after) == ("", "")
    assert delta.entries["x"].rows == (10, 20)
    assert delta.entries["x"].layout == Layout.of(U16, (100, 64), (10, 20))


def test_the_state_of_an_entry() -> None:
    entry = make().entries["a"]
    assert entry.state == weightwire.digest(new_weights()).tensors["a"]


def test_spans_of_blocks() -> None:
    entry = Entry("x", U8, (3 * BLOCK,), None, False, False, 3, (5, 0, 7), (0, 0), start=100)
    assert entry.nbytes == 12
    assert [entry.span(range(i, i + 1)) for i in range(3)] == [(100, 105), (105, 105), (105, 112)]
    assert entry.span(range(3)) == (100, 112)
