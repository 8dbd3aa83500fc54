"""The safetensors container: a JSON header that places the tensors, followed by their bytes.

Parses headers and builds them. Rejects every file that does not follow the format. Opens no files.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from weightwire.errors import CheckpointError, OutputError, WeightwireError
from weightwire.weights.dtypes import DTYPES, Dtype

__all__ = [
    "INCOMPLETE",
    "LENGTH_SIZE",
    "MAX_DIMS",
    "MAX_INT",
    "METADATA",
    "Header",
    "Slot",
    "build_header",
    "is_unicode",
    "lay_out",
    "read_header",
    "read_size",
]

LENGTH_SIZE = 8  # bytes of the little-endian length in front of the JSON
METADATA = "__metadata__"  # the only key of the JSON that does not name a tensor

# The limit of stock safetensors.
_MAX_JSON = 100_000_000
# NumPy's limit. It also bounds the product of a hostile shape.
MAX_DIMS = 64
MAX_INT = 2**63 - 1
_ALIGNMENT = 8

# The hint of errors that a file has while it is being written.
INCOMPLETE = "the file is damaged or incomplete: download or write it again"
_NOT_SAFETENSORS = "pass a safetensors file: pickle checkpoints (.bin, .pt) must be converted first"


@dataclass(frozen=True)
class Slot:
    """A tensor and its place: bytes `start` to `end` of the data part."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A parsed header. `slots` are in byte order. The data part begins at byte `size`."""

    slots: tuple[Slot, ...]
    metadata: dict[str, str]
    size: int


def read_size(
    buffer: memoryview | bytes,
    where: str,
    *,
    total: int | None = None,
    error: type[WeightwireError] = CheckpointError,
) -> int:
    """The number of bytes before the data part, from the first eight bytes of the file.

    `total` is the size of the file if `buffer` is only its beginning.
    """
    total = len(buffer) if total is None else total
    if min(total, len(buffer)) < LENGTH_SIZE:
        raise error(f"{where}: too short for a header ({total} bytes)", hint=INCOMPLETE)
    length = int.from_bytes(buffer[:LENGTH_SIZE], "little")
    if length > _MAX_JSON:
        raise error(f"{where}: not a safetensors file", hint=_NOT_SAFETENSORS)
    if LENGTH_SIZE + length > total:
        raise error(f"{where}: ends inside its header ({total:,} bytes)", hint=INCOMPLETE)
    return LENGTH_SIZE + length


def read_header(
    buffer: memoryview | bytes,
    where: str,
    *,
    total: int | None = None,
    error: type[WeightwireError] = CheckpointError,
) -> Header:
    """Parses and checks the header. `total` is the size of the file if `buffer` is only its beginning.

    `where` names the file in errors, which are raised as `error`.
    """
    total = len(buffer) if total is None else total
    size = read_size(buffer, where, total=total, error=error)
    if size > len(buffer):
        raise error(f"{where}: header needs {size:,} bytes, got {len(buffer):,}", hint=INCOMPLETE)
    reader = _Reader(where, error)
    entries = reader.read_plain(raw := bytes(buffer[LENGTH_SIZE:size])) or reader.parse(raw)
    metadata = reader.metadata(entries.pop(METADATA, {}))
    slots = sorted(
        (reader.slot(name, entry) for name, entry in entries.items()),
        key=lambda slot: (slot.start, slot.end),
    )
    reader.check_cover(slots, total - size)
    return Header(tuple(slots), metadata, size)


def lay_out(entries: Iterable[tuple[str, Dtype, tuple[int, ...]]]) -> tuple[Slot, ...]:
    """Slots for tensors placed one after another, in this order."""
    slots, end = [], 0
    for name, dtype, shape in entries:
        nbytes = dtype.nbytes(shape)
        if nbytes is None:
            raise OutputError(
                f"tensor {name!r}: {dtype.name} {list(shape)} ends inside a byte", hint="pad it to whole bytes"
            )
        slots.append(Slot(name, dtype, shape, end, end + nbytes))
        end += nbytes
    return tuple(slots)


def build_header(slots: Sequence[Slot], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data part. They depend only on the slots and the metadata."""
    entries: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    for slot in slots:
        entries[slot.name] = {
            "dtype": slot.dtype.name,
            "shape": slot.shape,
            "data_offsets": (slot.start, slot.end),
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_SIZE + len(text)) % _ALIGNMENT)
    if len(text) > _MAX_JSON:
        tensors = f"{len(slots):,} tensor{'' if len(slots) == 1 else 's'}"
        raise OutputError(
            f"header of {len(text):,} bytes for {tensors} is over the limit of safetensors",
            hint="split the weights over several files",
        )
    return len(text).to_bytes(LENGTH_SIZE, "little") + text


_BEGIN = f'{{"{METADATA}":'
_NUMBER = r"(?:0|[1-9][0-9]{0,17})"  # below MAX_INT
_PLAIN = re.compile(
    rf'"((?!{METADATA}")[^"\\\x00-\x1f]*)":\{{"dtype":"(\w+)",'
    rf'"shape":\[((?:{_NUMBER},){{0,{MAX_DIMS - 1}}}{_NUMBER}|)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}(?=[,}}])',
    re.ASCII,
)
"""An entry of a header without escapes or spaces."""


class _PlainEntry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@lru_cache(4096)  # thousands of tensors have a few shapes
def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


@dataclass(frozen=True)
class _Reader:
    """Checks the parts of one header. Every error names the file."""

    where: str
    error: type[WeightwireError]

    def fail(self, what: str, *, tensor: str | None = None, hint: str = INCOMPLETE) -> NoReturn:
        place = self.where if tensor is None else f"{self.where}: tensor {tensor!r:.200}"
        raise self.error(f"{place}: {what}", hint=hint)

    def parse(self, raw: bytes) -> dict[str, Any]:
        # As in stock safetensors: no byte order mark, no leading space.
        if not raw.startswith(b"{"):
            self.fail("the header is not a JSON object", hint=_NOT_SAFETENSORS)
        try:
            entries: dict[str, Any] = json.loads(raw.decode(), object_pairs_hook=self.unique)
        except RecursionError:
            self.fail("the header is nested too deeply")
        except ValueError as problem:
            self.fail(f"the header is not valid JSON ({problem})")
        return entries

    def read_plain(self, raw: bytes) -> dict[str, Any] | None:
        """What `parse` returns for a header as libraries write it, but fast: there may be 100,000 tensors.

        None for any other header, valid or not. Its entries are `_PlainEntry`s.
        """
        entries: dict[str, Any] = {}
        try:
            text = raw.decode()
            at, count = 1, 0
            if text.startswith(_BEGIN):
                decoder = json.JSONDecoder(object_pairs_hook=self.unique)
                entries[METADATA], at = decoder.raw_decode(text, len(_BEGIN))
                at, count = at + 1, 1
        except (ValueError, RecursionError):
            return None
        for found in _PLAIN.finditer(text, at):
            if found.start() != at or (count and text[at - 1] != ","):
                return None
            name, dtype, shape, start, end = found.groups()
            entries[name] = _PlainEntry(dtype, _numbers(shape), int(start), int(end))
            at, count = found.end() + 1, count + 1
        # `at` is behind a comma, or behind the last brace.
        return entries if text.startswith("{") and text[at - 1 :].rstrip(" ") == "}" and len(entries) == count else None

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            self.fail(f"the header names {twice!r:.200} twice")
        return entries

    def metadata(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            self.fail(f"{METADATA} does not map text to text")
        if not all(is_unicode(text) for pair in value.items() for text in pair):
            self.fail(f"{METADATA} is not valid Unicode")
        return value

    def slot(self, name: str, entry: Any) -> Slot:
        if type(entry) is _PlainEntry:
            dtype = DTYPES.get(entry.dtype) or self.dtype(name, entry.dtype)
            return self.checked(name, dtype, entry.shape, entry.start, entry.end)
        if not is_unicode(name):
            self.fail("the name is not valid Unicode", tensor=name)
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            self.fail("its entry must have exactly dtype, shape and data_offsets", tensor=name)
        dtype = self.dtype(name, entry["dtype"])
        shape = self.sizes(name, "shape", entry["shape"])
        offsets = self.sizes(name, "data_offsets", entry["data_offsets"])
        if len(offsets) != 2:
            self.fail(f"has {len(offsets)} data_offsets, not 2", tensor=name)
        return self.checked(name, dtype, shape, *offsets)

    def checked(self, name: str, dtype: Dtype, shape: tuple[int, ...], start: int, end: int) -> Slot:
        if end - start != dtype.nbytes(shape):
            self.fail(f"{dtype.name} {list(shape)} does not fit bytes {start} to {end}", tensor=name)
        return Slot(name, dtype, shape, start, end)

    def dtype(self, name: str, value: Any) -> Dtype:
        dtype = DTYPES.get(value) if isinstance(value, str) else None
        if dtype is None:
            self.fail(f"unknown dtype {value!r:.80}", tensor=name, hint=f"use one of {', '.join(DTYPES)}")
        return dtype

    def sizes(self, name: str, what: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > MAX_DIMS:
            self.fail(f"{what} is not a list of at most {MAX_DIMS} numbers", tensor=name)
        for number in value:
            # Not isinstance: true and false are ints in Python.
            if type(number) is not int or not 0 <= number <= MAX_INT:
                self.fail(f"{what} contains {number!r:.80}, which is not a size", tensor=name)
        return tuple(value)

    def check_cover(self, slots: Sequence[Slot], data: int) -> None:
        """Every byte of the data part belongs to exactly one tensor."""
        position = 0
        for slot in slots:
            if slot.start != position:
                what = "overlaps the tensor before it" if slot.start < position else "leaves unused bytes before it"
                self.fail(what, tensor=slot.name)
            position = slot.end
        if position != data:
            self.fail(f"its tensors take {position:,} bytes, but it has {data:,} bytes of data")


def is_unicode(text: str) -> bool:
    """False for a lone surrogate, which JSON and Python can express and UTF-8 cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
