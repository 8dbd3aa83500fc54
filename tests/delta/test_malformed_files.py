"""Delta files with one wrong field, or with claims far beyond their size: rejected, with the base unchanged."""

from __future__ import annotations

import resource
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import weightwire
from support.crafted_files import Header, index_of, put_together, taken_apart, with_index, with_stack
from support.delta_files import make_delta, new_weights, old_weights
from support.patch_checks import U8
from weightwire import CorruptDelta, Delta, UnsupportedFormat, WeightwireError, WrongBase
from weightwire.codec.block_layout import BLOCK
from weightwire.delta import EncodedStack, Entry
from weightwire.delta.file import Packed, block_hash, pack
from weightwire.weights.dtypes import DTYPES, Dtype


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
    ],
)
def test_invalid_metadata_is_refused(key: str, value: str) -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"][key] = value
    refuse(put_together(header, data), CorruptDelta)


@pytest.mark.parametrize("key", ["format", "kind", "before", "after"])
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


@pytest.mark.parametrize("removed", ["[]", '["z","y"]', '["y","y"]', '["y",1]', '{"y":1}', ""])
def test_a_list_of_removed_tensors_has_one_form(removed: str) -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"] |= {"removed": removed}
    assert "removed" in str(refuse(put_together(header, data), CorruptDelta))


def test_a_removed_tensor_must_be_there() -> None:
    header, data = taken_apart(make_delta())
    header["__metadata__"] |= {"removed": '["another"]', "before": ""}
    with pytest.raises(WrongBase, match="'another': to be removed, but missing in the base"):
        weightwire.patch(old_weights(), put_together(header, data), copy=True)


def test_a_result_that_nothing_identifies_is_refused() -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"] |= {"before": "", "after": ""}
    assert "neither a state nor digests" in str(refuse(put_together(header, data), CorruptDelta))


def test_an_anchor_that_needs_a_base_is_refused() -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"] |= {"kind": "anchor", "before": "", "after": ""}
    assert "must not need a base" in str(refuse(put_together(header, data), CorruptDelta))


def test_a_tensor_both_changed_and_removed_is_refused() -> None:
    header, data = taken_apart(in_place_delta())
    header["__metadata__"] |= {"removed": '["a"]', "after": ""}
    with pytest.raises(CorruptDelta):
        weightwire.patch(old_weights(), put_together(header, data), copy=True)


def swap_names(header: Header) -> None:
    header["index"], header["blocks"] = header["blocks"], header["index"]


def another_name(header: Header) -> None:
    header["data"] = header.pop("blocks")


def no_blocks(header: Header) -> None:
    end = header.pop("blocks")["data_offsets"][1]
    header["index"] |= {"shape": [end], "data_offsets": [0, end]}


def no_u8(header: Header) -> None:
    size = header["blocks"]["shape"][0]
    header["blocks"] |= {"dtype": "F4", "shape": [2 * size]}


def two_dimensions(header: Header) -> None:
    header["index"]["shape"] = [1, *header["index"]["shape"]]


def move_border(header: Header, by: int) -> None:
    end, last = header["index"]["data_offsets"][1] + by, header["blocks"]["data_offsets"][1]
    header["index"] |= {"shape": [end], "data_offsets": [0, end]}
    header["blocks"] |= {"shape": [last - end], "data_offsets": [end, last]}


def a_longer_index(header: Header) -> None:
    move_border(header, 1)


def a_shorter_index(header: Header) -> None:
    move_border(header, -1)


def a_tensor_too_many(header: Header) -> None:
    end = header["blocks"]["data_offsets"][1]
    header["zzz"] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}


def a_hole(header: Header) -> None:
    begin, end = header["blocks"]["data_offsets"]
    header["blocks"] = {"dtype": "U8", "shape": [end - begin - 1], "data_offsets": [begin + 1, end]}


def an_overlap(header: Header) -> None:
    begin, end = header["blocks"]["data_offsets"]
    header["blocks"] = {"dtype": "U8", "shape": [end - begin + 1], "data_offsets": [begin - 1, end]}


def past_the_end(header: Header) -> None:
    begin, end = header["blocks"]["data_offsets"]
    header["blocks"] = {"dtype": "U8", "shape": [end - begin + 9], "data_offsets": [begin, end + 9]}


@pytest.mark.parametrize(
    "lie",
    [
        swap_names,
        another_name,
        no_blocks,
        no_u8,
        two_dimensions,
        a_longer_index,
        a_shorter_index,
        a_tensor_too_many,
        a_hole,
        an_overlap,
        past_the_end,
    ],
    ids=lambda lie: lie.__name__,
)
def test_a_header_that_does_not_match_the_data_is_refused(lie: Callable[[Header], None]) -> None:
    header, data = taken_apart(in_place_delta())
    lie(header)
    refuse(put_together(header, data), CorruptDelta, WrongBase)


def with_entry(**lies: Any) -> bytes:
    """The file, with another claim about tensor `a`."""
    return with_stack(in_place_delta(), "a", **lies)


def test_an_index_without_lies_gives_the_same_file() -> None:
    assert Delta.from_bytes(with_entry()).stacks == in_place_delta().stacks


SIZE = in_place_delta().stack_of["a"].nbytes


CHANGED = in_place_delta().entries["a"].changed


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
        {"hashes": (bytes(16),)},
        {"names": ["a", "b"], "per": 1},
        {"names": ["a", "ünï"], "per": 1},
        {"names": ["a", "a"], "per": 2},
        {"names": ["a", "b"], "per": 0},
        {"names": ["a", "b"], "per": 2, "coo": True},
        {"names": ["a", "b"], "per": 2, "rows": (0, 50)},
        {"names": ["a", "b"], "per": 3},
        {"names": ["a", "b"], "per": 656},
        {"names": ["a", "__metadata__"], "per": 2},
        {"shape": (0, 2**62, 2**62)},
        {"names": ["a", "b"], "per": 2**64 - 1},
        {"names": ["a", "b"], "per": 1, "shape": (BLOCK + 1,)},
        {"names": ["a", "b"], "per": 1, "shape": (0, 64)},
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
    ],
    ids=str,
)
def test_the_error_names_the_tensor(lies: dict[str, Any]) -> None:
    refuse(with_entry(**lies), CorruptDelta, WrongBase, tensor="a")


def test_an_unknown_dtype_is_refused() -> None:
    data = with_entry(dtype=Dtype("X", 31, 16))
    assert "unknown dtype" in str(refuse(data, CorruptDelta, tensor="a"))


@pytest.mark.parametrize("digest", ["a", "b"])
def test_a_wrong_digest_of_a_tensor_is_refused(digest: str) -> None:
    delta = weightwire.diff(old_weights(), {**old_weights(), "a": new_weights()["a"]}, coo=True)
    assert delta.entries["a"].digest
    a, b = delta.entries["a"].digest
    data = with_stack(delta, "a", digest=(a ^ 1, b) if digest == "a" else (a, b ^ 1 << 63))
    assert "wrong digest" in str(refuse(data, CorruptDelta, tensor="a"))


@pytest.mark.parametrize("cut", [1, 5, 16, 17, 40])
def test_a_truncated_or_extended_index_is_rejected(cut: int) -> None:
    index = index_of(in_place_delta())
    for lie in (index[:-cut], index + bytes(cut)):
        refuse(with_index(in_place_delta(), lie), CorruptDelta)


def columns(lie: bytes) -> bytes:
    """An index with these columns."""
    packed = zlib.compress(lie)
    assert len(packed) < 1 << 14
    return bytes([0, len(packed) & 0x7F | 0x80, len(packed) >> 7]) + packed


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"\0",
        b"\2" + index_of(in_place_delta())[1:],
        b"\0\5ABCDE",
        columns(b""),
        columns(b"\1"),
        columns(b"\1\1\1\1a\x0b\0\0\0"),  # a name that begins with a part of no name
        columns(b"\1\1\0\1\xff\x0b\0\0\0"),  # not UTF-8
        columns(bytes(9)),
        columns(b"\xff" * 9 + b"\1"),  # 2^64 - 1 stacks
        columns(b"\1" + b"\xff" * 9 + b"\1"),  # 2^64 - 1 members
    ],
    ids=[
        "empty",
        "short",
        "option",
        "not deflate",
        "no columns",
        "cut",
        "name",
        "Unicode",
        "long",
        "stacks",
        "members",
    ],
)
def test_a_malformed_index_is_refused(index: bytes) -> None:
    refuse(with_index(in_place_delta(), index), CorruptDelta)


def test_an_index_that_expands_without_end_is_refused() -> None:
    packed = zlib.compress(bytes(1 << 29))
    size = bytes([len(packed) & 0x7F | 0x80, len(packed) >> 7 & 0x7F | 0x80, len(packed) >> 14])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuse(with_index(in_place_delta(), b"\0" + size + packed), CorruptDelta)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 600_000  # kB


@pytest.mark.parametrize("at", range(0, SIZE, 3))
def test_a_flipped_bit_in_the_data_is_found(at: int) -> None:
    data = bytearray(in_place_delta().to_bytes())
    data[len(in_place_delta().head) + at] ^= 1 << at % 8
    refuse(bytes(data), CorruptDelta, tensor="a")


def hollow(entry: Entry, parts: list[bytes]) -> bytes:
    """A file with one entry, whose claims are not checked."""
    stack = EncodedStack((replace(entry, digest=(0, 0)),), 1, tuple(map(len, parts)), tuple(map(block_hash, parts)))
    return pack([Packed(stack, parts)]).to_bytes()


def bomb(dtype: str, shape: tuple[int, ...], blocks: tuple[int, ...]) -> bytes:
    """A file that claims a tensor far larger than itself."""
    entry = Entry("x", DTYPES[dtype], shape, None, False, True, 0)
    return hollow(entry, [b"\3\0\0\0\1\0\0".ljust(size, b"\0")[:size] for size in blocks])


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
    delta = Delta.from_bytes(hollow(Entry("x", U8, (2**61,), None, True, False, 1), [coo]), "bomb")
    with pytest.raises(WrongBase):
        weightwire.patch({}, delta, copy=True)
    assert weightwire.delta.changes({}, delta, "x")[0].tolist() == [5]


def test_a_new_tensor_with_an_empty_block_is_refused() -> None:
    """A new tensor has no old block to keep. The other block is long enough for both."""
    entry = Entry("x", U8, (BLOCK + 8,), None, False, True, BLOCK + 8)
    delta = Delta.from_bytes(hollow(entry, [bytes(9000), b""]), "hollow")
    with pytest.raises(CorruptDelta, match="hollow: tensor 'x': block 1: is empty"):
        weightwire.patch({}, delta, copy=True)


def test_a_shape_with_more_blocks_than_the_file_has_is_refused() -> None:
    """The number of blocks follows from the shape, and must be checked against the file."""
    data = with_entry(shape=(2**60,), blocks=(0,))
    assert "a" in str(refuse(data, CorruptDelta))
