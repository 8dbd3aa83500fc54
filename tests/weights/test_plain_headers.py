"""Headers as libraries write them are read by a fast path, which must agree with the general one on every header."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from weightwire.errors import CheckpointError
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.safetensors_file import LENGTH_SIZE, _Reader, build_header, lay_out, read_header

READER = _Reader("file", CheckpointError)
ENTRY = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'


def both(raw: bytes) -> tuple[Any, Any]:
    """What the fast and the general path make of a header. The fast one may leave it to the other."""

    def outcome(plain: bool) -> Any:
        try:
            found = READER.read_plain(raw) if plain else READER.parse(raw)
        except CheckpointError as problem:
            return problem.message
        if found is None:
            return None
        metadata = found.pop("__metadata__", {})
        try:
            return [(name, READER.slot(name, entry)) for name, entry in found.items()], READER.metadata(metadata)
        except CheckpointError as problem:
            return problem.message

    return outcome(True), outcome(False)


def header(count: int = 5, metadata: dict[str, str] | None = None) -> bytes:
    slots = lay_out((f"layer.{i}.wé", DTYPES["BF16"], (i, 3)[: i % 3]) for i in range(count))
    return build_header(slots, metadata or {})[LENGTH_SIZE:]


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"a": '{"dtype":"U8"}', "b": "ü"}])
def test_ordinary_header_is_read_fast(count: int, metadata: dict[str, str]) -> None:
    fast, general = both(header(count, metadata))
    assert fast == general
    assert fast is not None


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a":{ENTRY},"a":{ENTRY}}}',
        f'{{"a":{ENTRY},}}',
        f'{{"a":{ENTRY}}}"b":{ENTRY}}}',
        f'{{"a":{ENTRY}"b":{ENTRY}}}',
        f'{{"a":{ENTRY};"b":{ENTRY}}}',
        f'{{"__metadata__":{{}};"b":{ENTRY}}}',
        f'{{"__metadata__":{{}}"b":{ENTRY}}}',
        f'{{"__metadata__":{{"k":"1","k":"2"}},"b":{ENTRY}}}',
        f'{{"__metadata__":{{}},"__metadata__":{{}},"b":{ENTRY}}}',
        f'{{"__metadata__":{{}},"__metadata__":{ENTRY}}}',
        f'{{"__metadata__":{ENTRY}}}',
        f'{{"__metadata__":[],"b":{ENTRY}}}',
        f'{{"\\u0061":{ENTRY},"a":{ENTRY}}}',
        f'{{"a":{ENTRY}',
        f'{{"a":{ENTRY}}} x',
        f'{{"a":{ENTRY}}}\n',
        f' {{"a":{ENTRY}}}',
        f'["a":{ENTRY}}}',
        '{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":[4e0],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}}',
        '{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
        '{"a":{"shape":[4],"dtype":"U8","data_offsets":[0,4]}}',
        '{"a":{"dtype":"U9","shape":[4],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,5]}}',
        '{"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"U8","shape":[' + ",".join(["1"] * 65) + '],"data_offsets":[0,1]}}',
        "{}",
        "{",
        "",
    ],
)
def test_unusual_header_has_the_same_result(text: str) -> None:
    fast, general = both(text.encode())
    assert fast in (None, general)


def test_mutated_headers_have_the_same_result() -> None:
    source, agreed = random.Random(7), 0
    for _ in range(4000):
        raw = bytearray(header(source.randrange(4), source.choice([None, {"format": "pt"}])))
        for _ in range(source.randrange(1, 3)):
            at = source.randrange(len(raw))
            change = source.choice([b"", b'"', b",", b"}", b"{", b"0", b"\\", b" ", b"1", raw[at : at + 20] * 2])
            raw[at : at + source.choice([0, 1, 1, 8])] = change
        fast, general = both(bytes(raw))
        assert fast in (None, general), bytes(raw)
        agreed += fast is not None
    assert agreed > 100


def test_many_tensors_are_read_as_they_were_written() -> None:
    slots = lay_out((f"experts.{i}", DTYPES["F32"], (4, 2)) for i in range(3000))
    head = build_header(slots, {"format": "pt"})
    found = read_header(head, "file", total=len(head) + slots[-1].end)
    assert found.slots == slots
    assert json.loads(head[LENGTH_SIZE:]).keys() - {"__metadata__"} == {slot.name for slot in found.slots}
