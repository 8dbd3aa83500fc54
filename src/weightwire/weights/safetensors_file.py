"""The safetensors container: a JSON header that says which bytes are which tensor, then the bytes.

Knows the layout of such a file and refuses every file that departs from it. Opens no file, holds no weights,
and does not know what a delta is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from weightwire.errors import CheckpointError, OutputError, WeightwireError
from weightwire.weights.dtypes import DTYPES, Dtype

__all__ = [
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
METADATA = "__metadata__"  # the one key of the JSON that is no tensor

# What stock safetensors accepts, so that nobody can make us parse more than it would.
_MAX_JSON = 100_000_000
# NumPy's limit. It also keeps the product of a hostile shape from growing without end.
MAX_DIMS = 64
MAX_INT = 2**63 - 1
_ALIGNMENT = 8

_AGAIN = "the file is damaged or incomplete: copy, download or write it again"
_NOT_SAFETENSORS = "is this a safetensors file? Pickle checkpoints (.bin, .pt) must be converted first"


@dataclass(frozen=True)
class Slot:
    """One tensor's place: bytes `start` to `end` of the data part."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A parsed header. `slots` are in the order of their bytes; the data part begins at byte `size`."""

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
    """How many bytes precede the data part; the first eight bytes of the file are enough to tell.

    `total` is the size of the whole file where `buffer` is only its beginning.
    """
    total = len(buffer) if total is None else total
    if min(total, len(buffer)) < LENGTH_SIZE:
        raise error(f"{where}: ends before its header begins ({total} bytes)", hint=_AGAIN)
    length = int.from_bytes(buffer[:LENGTH_SIZE], "little")
    if length > _MAX_JSON:
        raise error(f"{where}: claims a header of {length:,} bytes, over the limit", hint=_NOT_SAFETENSORS)
    if LENGTH_SIZE + length > total:
        raise error(f"{where}: ends inside its header ({total:,} bytes)", hint=_AGAIN)
    return LENGTH_SIZE + length


def read_header(
    buffer: memoryview | bytes,
    where: str,
    *,
    total: int | None = None,
    error: type[WeightwireError] = CheckpointError,
) -> Header:
    """Parse and check the header of a file, or of a file of `total` bytes of which `buffer` is the beginning.

    `where` names the file in errors, which are raised as `error`.
    """
    total = len(buffer) if total is None else total
    size = read_size(buffer, where, total=total, error=error)
    if size > len(buffer):
        raise error(f"{where}: header of {size:,} bytes, {len(buffer):,} at hand", hint=_AGAIN)
    reader = _Reader(where, error)
    entries = reader.parse(bytes(buffer[LENGTH_SIZE:size]))
    metadata = reader.metadata(entries.pop(METADATA, {}))
    slots = sorted(
        (reader.slot(name, entry) for name, entry in entries.items()),
        key=lambda slot: (slot.start, slot.end),
    )
    reader.check_cover(slots, total - size)
    return Header(tuple(slots), metadata, size)


def lay_out(entries: Iterable[tuple[str, Dtype, tuple[int, ...]]]) -> tuple[Slot, ...]:
    """Slots for tensors placed one after the other, in the order given."""
    slots, end = [], 0
    for name, dtype, shape in entries:
        nbytes = dtype.nbytes(shape)
        if nbytes is None:
            raise OutputError(f"tensor {name!r}: {dtype.name} {list(shape)} ends inside a byte")
        slots.append(Slot(name, dtype, shape, end, end + nbytes))
        end += nbytes
    return tuple(slots)


def build_header(slots: Sequence[Slot], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data part: the same for the same slots and metadata, on every machine."""
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
        raise OutputError(
            f"a header of {len(text):,} bytes for {len(slots):,} tensors is more than safetensors allows",
            hint="split the weights over several files",
        )
    return len(text).to_bytes(LENGTH_SIZE, "little") + text


@dataclass(frozen=True)
class _Reader:
    """Checks the parts of one header, and says in every error which file it is."""

    where: str
    error: type[WeightwireError]

    def fail(self, what: str, *, tensor: str | None = None, hint: str = _AGAIN) -> NoReturn:
        place = self.where if tensor is None else f"{self.where}: tensor {tensor!r:.200}"
        raise self.error(f"{place}: {what}", hint=hint)

    def parse(self, raw: bytes) -> dict[str, Any]:
        # An object only, as in stock safetensors: no byte order mark, no leading space.
        if not raw.startswith(b"{"):
            self.fail("the header is no JSON object", hint=_NOT_SAFETENSORS)
        try:
            entries = json.loads(raw.decode(), object_pairs_hook=self.unique)
        except RecursionError:
            self.fail("the header is nested too deeply")
        except ValueError as problem:
            self.fail(f"the header is not valid JSON ({problem})")
        if not isinstance(entries, dict):
            self.fail("the header is no JSON object", hint=_NOT_SAFETENSORS)
        return entries

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            self.fail(f"the header has {twice!r:.200} twice")
        return entries

    def metadata(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            self.fail(f"{METADATA} does not map text to text")
        if not all(is_unicode(text) for pair in value.items() for text in pair):
            self.fail(f"{METADATA} is not valid Unicode")
        return value

    def slot(self, name: str, entry: Any) -> Slot:
        if not is_unicode(name):
            self.fail("the name is not valid Unicode", tensor=name)
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            self.fail("its entry is not exactly dtype, shape and data_offsets", tensor=name)
        dtype = self.dtype(name, entry["dtype"])
        shape = self.sizes(name, "shape", entry["shape"])
        offsets = self.sizes(name, "data_offsets", entry["data_offsets"])
        if len(offsets) != 2:
            self.fail(f"has {len(offsets)} data_offsets, not 2", tensor=name)
        start, end = offsets
        if end - start != dtype.nbytes(shape):
            self.fail(f"{dtype.name} {list(shape)} does not take bytes {start} to {end}", tensor=name)
        return Slot(name, dtype, shape, start, end)

    def dtype(self, name: str, value: Any) -> Dtype:
        dtype = DTYPES.get(value) if isinstance(value, str) else None
        if dtype is None:
            self.fail(f"unknown dtype {value!r:.80}", tensor=name, hint=f"known are {', '.join(DTYPES)}")
        return dtype

    def sizes(self, name: str, what: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > MAX_DIMS:
            self.fail(f"{what} is no list of at most {MAX_DIMS} numbers", tensor=name)
        for number in value:
            # `type` and not isinstance: JSON's true and false are ints in Python.
            if type(number) is not int or not 0 <= number <= MAX_INT:
                self.fail(f"{what} has {number!r:.80}, which is no size", tensor=name)
        return tuple(value)

    def check_cover(self, slots: Sequence[Slot], data: int) -> None:
        """Every byte of the data part belongs to exactly one tensor."""
        position = 0
        for slot in slots:
            if slot.start != position:
                what = "overlaps the tensor before it" if slot.start < position else "leaves a hole before it"
                self.fail(what, tensor=slot.name)
            position = slot.end
        if position != data:
            self.fail(f"its tensors take {position:,} bytes, but it holds {data:,}")


def is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON and Python can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
