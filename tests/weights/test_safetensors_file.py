"""The safetensors container: headers are compatible with the stock library, malformed files are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from weightwire.errors import CheckpointError, CorruptDelta, OutputError
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.safetensors_file import Header, Slot, build_header, lay_out, read_header, read_size

F32, U8, F4 = DTYPES["F32"], DTYPES["U8"], DTYPES["F4"]


def file_of(header: Any, data: int = 0) -> bytes:
    """A file with this header (JSON value or raw bytes) and this many bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# Headers


def test_files_of_stock_safetensors_are_read() -> None:
    weights: dict[str, np.ndarray[Any, Any]] = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.zeros((), np.int8),
    }
    file = safetensors.numpy.save(weights, metadata={"format": "pt"})

    header = read_header(file, "model.safetensors")

    assert header.metadata == {"format": "pt"}
    assert [(slot.name, slot.dtype.name, slot.shape) for slot in header.slots] == [
        ("b", "F32", (2, 3)),
        ("a", "I8", ()),
    ]
    slot = header.slots[0]
    data = file[header.size + slot.start : header.size + slot.end]
    assert data == weights["b"].tobytes()


def test_stock_safetensors_reads_our_files(tmp_path: Path) -> None:
    slots = lay_out([("weights ö", F32, (2, 3)), ("empty", F32, (0, 7)), ("scalar", U8, ())])
    data = np.arange(6, dtype=np.float32).tobytes() + b"\x07"
    path = tmp_path / "built.safetensors"
    path.write_bytes(build_header(slots, {"format": "pt", "a": '"quoted"'}) + data)

    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "a": '"quoted"'}
        assert sorted(file.keys()) == ["empty", "scalar", "weights ö"]
        assert file.get_tensor("weights ö").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.get_tensor("empty").shape == (0, 7)
        assert file.get_tensor("scalar") == 7


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_stock_safetensors_knows_all_our_dtypes(dtype: Any) -> None:
    slots = lay_out([("x", dtype, (4, 8))])
    file = build_header(slots, {}) + bytes(slots[-1].end)

    ((name, view),) = safetensors.deserialize(file)

    assert (name, view["dtype"], view["shape"]) == ("x", dtype.name, [4, 8])


def test_a_header_round_trips_with_the_same_bytes() -> None:
    slots = lay_out([("z", U8, (3,)), ("a", F32, (2,))])

    head = build_header(slots, {"b": "2", "a": "1"})

    assert head == (
        b"\x90\x00\x00\x00\x00\x00\x00\x00"
        b'{"__metadata__":{"a":"1","b":"2"},'
        b'"z":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    ).ljust(152)
    assert head == build_header(slots, {"a": "1", "b": "2"})
    assert read_header(head + bytes(11), "x") == Header(slots, {"a": "1", "b": "2"}, len(head))


def test_the_data_part_is_aligned() -> None:
    assert {len(build_header(lay_out([("n" * length, U8, ())]), {})) % 8 for length in range(16)} == {0}


def test_a_header_is_read_from_the_beginning_of_a_file() -> None:
    file = file_of({"x": entry()}, 4)
    size = read_size(file[:8], "remote", total=len(file))

    assert read_header(file[:size], "remote", total=len(file)) == read_header(file, "local")


def test_slots_are_in_the_order_of_their_bytes_and_empty_tensors_take_none() -> None:
    header = {"late": entry(offsets=(4, 8)), "none": entry(shape=(3, 0), offsets=(4, 4)), "first": entry()}

    slots = read_header(file_of(header, 8), "x").slots

    assert [slot.name for slot in slots] == ["first", "none", "late"]


def test_a_file_may_hold_nothing() -> None:
    assert read_header(file_of({}), "x") == Header((), {}, 10)


def test_a_packed_tensor_has_to_end_with_a_byte() -> None:
    assert lay_out([("x", F4, (2, 3))]) == (Slot("x", F4, (2, 3), 0, 3),)
    with pytest.raises(OutputError, match=r"'x'.*ends inside a byte"):
        lay_out([("x", F4, (3,))])


# Malformed files

NESTED = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short for a header"),
    "seven bytes": (bytes(7), "too short for a header"),
    "length past the file": (b"\x09" + bytes(15), "ends inside its header"),
    "length of 4 GB": (b"\xff\xff\xff\xff" + bytes(12), "not a safetensors file"),
    "length of 2^64 - 1": (b"\xff" * 8 + b"{}", "not a safetensors file"),
    "a zip file": (b"PK\x03\x04" + b"pickled checkpoint", "not a safetensors file"),
    "no JSON": (file_of(b"{not json}"), "not valid JSON"),
    "no UTF-8": (file_of(b'{"\xff":1}'), "not valid JSON"),
    "UTF-16": (file_of("{}".encode("utf-16")), "not a JSON object"),
    "leading space": (file_of(b" {}"), "not a JSON object"),
    "no header at all": (file_of(b""), "not a JSON object"),
    "a list": (file_of([]), "not a JSON object"),
    "something after the object": (file_of(b"{}{}"), "not valid JSON"),
    "nested": (file_of(NESTED), "nested too deeply"),
    "an integer of 5000 digits": (file_of(b'{"x":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "tensor twice": (file_of(b'{"x":1,"x":1}'), "names 'x' twice"),
    "key twice in an entry": (file_of(b'{"x":{"dtype":"U8","dtype":"I8"}}'), "names 'dtype' twice"),
    "metadata a list": (file_of({"__metadata__": []}), "does not map text to text"),
    "metadata with a number": (file_of({"__metadata__": {"a": 1}}), "does not map text to text"),
    "metadata with half a surrogate": (file_of(rb'{"__metadata__":{"a":"\ud800"}}'), "not valid Unicode"),
    "name with half a surrogate": (file_of(rb'{"\ud800":{}}'), "not valid Unicode"),
    "entry no object": (file_of({"x": 1}), "tensor 'x'.*must have exactly"),
    "entry lacks a field": (file_of({"x": {"dtype": "U8", "shape": []}}), "tensor 'x'.*must have exactly"),
    "entry with one more": (file_of({"x": entry() | {"stride": 1}}, 4), "tensor 'x'.*must have exactly"),
    "unknown dtype": (file_of({"x": entry("F128")}, 4), "tensor 'x'.*unknown dtype 'F128'"),
    "dtype a list": (file_of({"x": entry(["U8"])}, 4), "tensor 'x'.*unknown dtype"),
    "shape a number": (file_of({"x": entry(shape=4)}, 4), "tensor 'x'.*shape is not a list"),
    "shape of 65 dimensions": (file_of({"x": entry(shape=[1] * 65)}, 4), "tensor 'x'.*shape is not a list"),
    "negative dimension": (file_of({"x": entry(shape=[-4])}, 4), "tensor 'x'.*shape contains -4"),
    "two negative dimensions": (file_of({"x": entry(shape=[-2, -2])}, 4), "tensor 'x'.*shape contains -2"),
    "dimension true": (file_of({"x": entry(shape=[True, 4])}, 4), "tensor 'x'.*shape contains True"),
    "dimension 4.0": (file_of({"x": entry(shape=[4.0])}, 4), "tensor 'x'.*shape contains 4.0"),
    "dimension infinite": (file_of(b'{"x":{"dtype":"U8","shape":[1e999],"data_offsets":[0,0]}}'), "contains inf"),
    "dimension 2^63": (file_of({"x": entry(shape=[2**63, 0], offsets=(0, 0))}), "tensor 'x'.*shape contains"),
    "size that wraps at 2^64": (file_of({"x": entry("U64", [2**61], (0, 0))}), "tensor 'x'.*does not fit"),
    "negative offset": (file_of({"x": entry(offsets=(-4, 0))}, 4), "tensor 'x'.*data_offsets contains -4"),
    "offsets backwards": (file_of({"x": entry(offsets=(4, 0))}, 4), "tensor 'x'.*does not fit"),
    "one offset": (file_of({"x": entry(offsets=[4])}, 4), "tensor 'x'.*1 data_offsets"),
    "three offsets": (file_of({"x": entry(offsets=[0, 4, 4])}, 4), "tensor 'x'.*3 data_offsets"),
    "too few bytes": (file_of({"x": entry("F32", [4], (0, 4))}, 4), "tensor 'x'.*does not fit bytes 0 to 4"),
    "half a byte": (file_of({"x": entry("F4", [7], (0, 3))}, 3), "tensor 'x'.*does not fit"),
    "hole at the start": (file_of({"x": entry(offsets=(1, 5))}, 5), "tensor 'x'.*leaves unused bytes"),
    "hole": (file_of({"x": entry(), "y": entry(offsets=(5, 9))}, 9), "tensor 'y'.*leaves unused bytes"),
    "overlap": (file_of({"x": entry(), "y": entry(offsets=(3, 7))}, 7), "tensor 'y'.*overlaps"),
    "two tensors in one place": (file_of({"x": entry(), "y": entry()}, 4), "tensor 'y'.*overlaps"),
    "data too short": (file_of({"x": entry()}, 3), "take 4 bytes, but it has 3 bytes of data"),
    "data too long": (file_of({"x": entry()}, 5), "take 4 bytes, but it has 5 bytes of data"),
    "a terabyte in a small file": (
        file_of({"x": entry("U8", [2**40], (0, 2**40))}),
        "take 1,099,511,627,776 bytes, but it has 0 bytes of data",
    ),
}


@pytest.mark.parametrize(("file", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_malformed_files_are_rejected(file: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file, "some.safetensors")

    assert caught.value.message.startswith("some.safetensors: ")
    assert caught.value.hint


def test_the_caller_chooses_the_error_class() -> None:
    with pytest.raises(CorruptDelta, match=r"some\.delta"):
        read_header(b"", "some.delta", error=CorruptDelta)


def test_every_truncation_and_every_flipped_bit_is_an_error_or_a_header() -> None:
    file = file_of({"x": entry(), "y": entry("F32", [2, 1], (4, 12))}, 12)
    for length in range(len(file)):
        with pytest.raises(CheckpointError):
            read_header(file[:length], "x")
    for bit in range(8 * (len(file) - 12)):
        flipped = bytearray(file)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            header = read_header(bytes(flipped), "x")
        except CheckpointError:
            continue
        assert sum(slot.end - slot.start for slot in header.slots) == 12


def test_a_partial_header_is_rejected() -> None:
    file = file_of({"x": entry()}, 4)
    with pytest.raises(CheckpointError, match="got 30"):
        read_header(file[:30], "remote", total=len(file))


def test_a_header_too_large_for_safetensors_is_not_built() -> None:
    with pytest.raises(OutputError, match="over the limit of safetensors"):
        build_header((), {"x": "y" * 100_000_000})
