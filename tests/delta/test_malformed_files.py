"""Delta files with one wrong field, or with claims far beyond their size: rejected, with the base unchanged."""

from __future__ import annotations

import base64
import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import weightwire
from support.crafted_files import Header, packed_entry, put_together, taken_apart
from support.delta_files import make_delta, new_weights, old_weights
from support.patch_checks import U8
from weightwire import CorruptDelta, Delta, UnsupportedFormat, WeightwireError, WrongBase
from weightwire.codec.block_layout import BLOCK
from weightwire.delta import Entry
from weightwire.delta.file import Packed, pack
from weightwire.weights.dtypes import DTYPES


def refuse(data: bytes, *kinds: type[WeightwireError], tensor: str | None = None) -> WeightwireError:
    """Checks that a file is rejected in place and for a copy, and that the base is unchanged."""
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
    """A delta that can be applied in place: only the wrong field can make it fail."""
    old = old_weights()
    new = old | {name: array for name, array in new_weights().items() if name in ("a", "ünï")}
    return weightwire.diff(old, new)


def test_the_valid_file_is_applied() -> None:
    for delta in (make_delta(), in_place_delta()):
        assert Delta.from_bytes(put_together(*taken_apart(delta))).entries == delta.entries
    weights = {name: array.copy() for name, array in old_weights().items()}
    weightwire.patch(weights, put_together(*taken_apart(in_place_delta())))
    assert (weights["a"] == new_weights()["a"]).all()


@pytest.mark.parametrize("value", ["weightwire/2", "weightwire/10", "weightwire/0"])
def test_a_newer_format_asks_for_an_upgrade(value: str) -> None:
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
        ("removed", '["\\ud800"]'),  # could not be printed
        ("removed", '"x"'),
        ("removed", "[" * 1_000_000),
        ("index", ""),
        ("index", "~~~~~"),
        ("index", "ü"),
        ("index", "0"),
    ],
)
def test_invalid_metadata_is_refused(key: str, value: str) -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"][key] = value
    refuse(put_together(header, data), CorruptDelta)


@pytest.mark.parametrize("key", ["format", "kind", "before", "after", "index"])
def test_missing_metadata_is_refused(key: str) -> None:
    header, data = taken_apart(in_place_delta())
    del header["__metadata__"][key]
    assert key == "format" or f"'{key}'" in str(refuse(put_together(header, data), CorruptDelta))
    refuse(put_together(header, data), CorruptDelta)


def test_a_wrong_state_before_is_refused() -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"]["before"] = "0" * 64
    assert "made for weights with state 000000000000" in str(refuse(put_together(header, data), WrongBase))


def test_a_wrong_state_after_is_refused() -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"]["after"] = "0" * 64
    assert "the result has a wrong state" in str(refuse(put_together(header, data), CorruptDelta))


def test_a_delta_that_calls_itself_an_anchor_is_refused() -> None:
    """The base is not compared then, but the result is. It lacks the unchanged tensors."""
    header, data = taken_apart(in_place_delta())
    header["__metadata__"]["kind"] = "anchor"
    refuse(put_together(header, data), CorruptDelta)


def test_a_tensor_removed_against_the_state_is_refused() -> None:
    header, data = taken_apart(make_delta())
    header["__metadata__"]["removed"] = '["gone","a"]'
    with pytest.raises(WeightwireError) as caught:
        weightwire.patch(old_weights(), put_together(header, data), copy=True)
    assert isinstance(caught.value, CorruptDelta)


@pytest.mark.parametrize("by_rows", [False, True])
def test_an_anchor_that_needs_a_base_is_refused(by_rows: bool) -> None:
    header, data = taken_apart(in_place_delta())
    entries = in_place_delta().entries.values()
    packed = b"".join(packed_entry(replace(one, rows=(0, one.shape[0]) if by_rows else None)) for one in entries)
    header["__metadata__"] |= {"kind": "anchor", "before": "", "after": "", "index": base64.b85encode(packed).decode()}
    refuse(put_together(header, data), CorruptDelta)


def test_a_tensor_both_changed_and_removed_is_refused() -> None:
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
    """Also takes one byte of the next entry."""
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
def test_a_header_that_does_not_match_the_data_is_refused(lie: Callable[[Header], None]) -> None:
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


def test_the_index_follows_the_format() -> None:
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
def test_an_index_that_does_not_match_the_data_is_refused(lies: dict[str, Any]) -> None:
    refuse(with_entry(**lies), CorruptDelta, WrongBase)


def test_an_entry_may_list_all_rows() -> None:
    """Valid: it means the same."""
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
def test_the_error_names_the_tensor(lies: dict[str, Any]) -> None:
    refuse(with_entry(**lies), CorruptDelta, WrongBase, tensor="a")


def test_an_unknown_dtype_is_refused() -> None:
    index = base64.b85encode(bytes([31]) + packed_entry(in_place_delta().entries["a"])[1:]).decode()
    header, data = taken_apart(in_place_delta())
    header["__metadata__"]["index"] = index
    assert "unknown dtype" in str(refuse(put_together(header, data), CorruptDelta, tensor="a"))


@pytest.mark.parametrize("cut", [1, 5, 16, 17, 40])
def test_a_truncated_or_extended_index_is_rejected(cut: int) -> None:
    index = b"".join(map(packed_entry, in_place_delta().entries.values()))
    header, data = taken_apart(in_place_delta())
    for lie in (index[:-cut], index + bytes(cut)):
        header["__metadata__"]["index"] = base64.b85encode(lie).decode()
        refuse(put_together(header, data), CorruptDelta)


@pytest.mark.parametrize("at", range(0, SIZE, 3))
def test_a_flipped_bit_in_the_data_is_found(at: int) -> None:
    data = bytearray(in_place_delta().to_bytes())
    data[len(in_place_delta().head) + at] ^= 1 << at % 8
    refuse(bytes(data), CorruptDelta, tensor="a")


def bomb(dtype: str, shape: tuple[int, ...], blocks: tuple[int, ...], **what: Any) -> bytes:
    """A file that claims a tensor far larger than itself."""
    entry = Entry("x", DTYPES[dtype], shape, None, what.pop("coo", False), what.pop("fresh", True), 0, blocks, (0, 0))
    return pack(
        [Packed(replace(entry, **what), [b"\3\0\0\0\1\0\0".ljust(size, b"\0")[:size] for size in blocks])]
    ).to_bytes()


@pytest.mark.parametrize(
    ("dtype", "shape", "blocks"),
    [
        ("U8", (2**28,), (7,) * 64),
        ("F64", (2**37,), (1,) * 32_768),  # a terabyte in 32 kB
        ("F64", (2**39,), (7,) * 131_072),
        ("U8", (2**41, 1), (1,) * 524_288),
        ("BF16", (2**20, 2**20), (2,) * 262_144),
    ],
    ids=["a quarter of a gigabyte", "a terabyte", "four terabytes", "two terabytes", "lines"],
)
def test_a_new_tensor_that_claims_terabytes_is_refused_without_taking_memory(
    dtype: str, shape: tuple[int, ...], blocks: tuple[int, ...]
) -> None:
    """Refused before memory or disk is taken for it."""
    data = bomb(dtype, shape, blocks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptDelta) as caught:
        weightwire.patch({}, Delta.from_bytes(data, "bomb"), copy=True)
    assert "'x'" in caught.value.message
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 200_000  # kB


def test_a_sparse_tensor_that_claims_exabytes_costs_nothing() -> None:
    """Positions and values need no base, and a shape costs nothing to claim."""
    coo = b"\x08" + bytes(7) + (5).to_bytes(8, "little") + b"\1"
    entry = Entry("x", U8, (2**61,), None, True, False, 1, (len(coo),), (0, 0))
    delta = Delta.from_bytes(pack([Packed(entry, [coo])]).to_bytes(), "bomb")
    with pytest.raises(WrongBase):
        weightwire.patch({}, delta, copy=True)
    assert weightwire.delta.changes({}, delta, "x")[0].tolist() == [5]


def test_a_new_tensor_with_an_empty_block_is_refused() -> None:
    """A new tensor has no old block to keep. The other block is long enough for both."""
    entry = Entry("x", U8, (BLOCK + 8,), None, False, True, BLOCK + 8, (9000, 0), (0, 0))
    delta = Delta.from_bytes(pack([Packed(entry, [bytes(9000)])]).to_bytes(), "hollow")
    with pytest.raises(CorruptDelta, match="hollow: tensor 'x': block 1: is empty"):
        weightwire.patch({}, delta, copy=True)


def test_a_shape_with_more_blocks_than_the_file_has_is_refused() -> None:
    """The number of blocks follows from the shape, and must be checked against the file."""
    data = with_entry(shape=(2**60,), blocks=(0,))
    assert "a" in str(refuse(data, CorruptDelta))
