"""Makes `tests/hostile/files/`, each with one thing wrong.

    python tests/hostile/make_files.py

Run it again only if the format changes. `test_hostile.py` names the error of each file.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

import numpy as np

from support.crafted_files import PlainIndex, index_of, put_together, taken_apart, with_block, with_index, with_stack
from weightwire import Delta, diff
from weightwire.codec import uvarint
from weightwire.delta import EncodedStack, Entry
from weightwire.delta.decoder import BlockJob
from weightwire.delta.file import ANCHOR, Packed, block_hash, pack
from weightwire.weights.dtypes import DTYPES

FOLDER = Path(__file__).parent / "files"
U8 = DTYPES["U8"]


def small(*names: str, coo: bool = False) -> Delta:
    """Two weights of each tensor change."""
    old = {name: np.zeros((10, 64), np.uint8) for name in names}
    new = {name: array.copy() for name, array in old.items()}
    for number, array in enumerate(new.values(), 1):
        array[3, 5], array[7, 60] = number, number + 1
    return diff(old, new, coo=coo)


def with_metadata(**fields: str) -> bytes:
    header, data = taken_apart(small("x"))
    header["__metadata__"] |= fields
    return put_together(header, data)


def with_columns(columns: bytes) -> bytes:
    packed = zlib.compress(columns, 9)
    return with_index(small("x"), b"\0" + uvarint(len(packed)) + packed)


def columns_of(names: bytes, members: int, *, shape: bytes = b"\2\x0a\x40", dtype: bytes = b"\1") -> bytes:
    """The columns of one stack, up to its shape. `names` are the three columns of names."""
    per = b"\1" if members > 1 else b""
    return b"\1" + uvarint(members) + names + dtype + per + shape


def hollow(kind: str, entry: Entry, parts: list[bytes]) -> bytes:
    stack = EncodedStack((replace(entry, digest=(0, 0)),), 1, tuple(map(len, parts)), tuple(map(block_hash, parts)))
    return pack([Packed(stack, parts)], kind=kind).to_bytes()


def of_another_kind() -> bytes:
    delta = small("x")
    job = BlockJob(delta.stacks[0], 0)
    return with_block(delta, job, b"\3" + bytes(delta.block(job.stack, 0))[1:])


def two_names_exchanged() -> bytes:
    """The base has only one of them."""
    return with_stack(small("x"), "x", names=["y"])


def two_members() -> bytes:
    return with_stack(small("x"), "x", names=["x", "x"], per=2)


def with_borders(name: str) -> bytes:
    data = small("x").to_bytes()
    return {
        "cut-in-the-data": data[:-1],
        "cut-in-the-header": data[:100],
        "header-longer-than-the-file": len(data).to_bytes(8, "little") + data[8:],
        "header-of-an-exabyte": (1 << 60).to_bytes(8, "little") + data[8:],
        "one-byte-too-many": data + b"\0",
    }[name]


def deep_header() -> bytes:
    text = b'{"a":' * 4000
    return len(text).to_bytes(8, "little") + text


def long_names() -> bytes:
    """100 names of 700 kB, each the one before and another last byte."""
    size, count = 700_000, 100
    shared = b"\0" + uvarint(size - 1) * (count - 1)
    rest = uvarint(size) + b"\1" * (count - 1)
    return with_columns(columns_of(shared + rest + b"a" * size + bytes(range(1, count)), count))


def blocks_of_three_tensors() -> bytes:
    """Each has as many as one file may have."""
    names = bytes(3) + b"\1\1\1" + b"xyz"
    shapes = b"\1\1\1" + uvarint(1 << 44) * 3
    return with_columns(b"\3" + b"\1\1\1" + names + b"\1\1\1" + shapes + bytes(3 << 22) + bytes(3))


def wrong_hash() -> bytes:
    delta = small("x")
    job = BlockJob(delta.stacks[0], 0)
    data = bytearray(delta.block(job.stack, 0))
    data[-1] ^= 1
    return with_block(delta, job, bytes(data), is_hashed=False)


def lying(**lies: Any) -> bytes:
    return with_stack(small("x"), "x", **lies)


def files() -> dict[str, bytes]:
    digits, coo = "0" * 64, b"\x08" + bytes(7) + (5).to_bytes(8, "little") + b"\1"
    plain = PlainIndex.of(small("x"))
    one = b"\0\1x"  # the columns of a name
    return {
        "after-of-zeros": with_metadata(after=digits),
        "anchor-that-leans-on-a-base": with_metadata(kind="anchor", before="", after=""),
        "before-of-zeros": with_metadata(before=digits),
        "block-of-another-hash": wrong_hash(),
        "block-of-another-kind": of_another_kind(),
        "bomb-8-gigabytes-in-5-kilobytes": hollow(
            ANCHOR, Entry("x", DTYPES["U64"], (1 << 30,), None, False, True, 0), [b"\3"] * 256
        ),
        "bomb-blocks-that-are-not-there": lying(shape=(1 << 40,), blocks=(19,)),
        "bomb-coo-of-2-to-the-61": hollow("delta", Entry("x", U8, (1 << 61,), None, True, False, 1), [coo]),
        "bomb-columns": with_columns(bytes(1 << 26) + b"\1"),
        "bomb-members": with_columns(b"\1" + uvarint(1 << 25) + bytes((1 << 25) + 9)),
        "bomb-of-blocks-in-three-tensors": blocks_of_three_tensors(),
        "bomb-of-blocks": with_columns(columns_of(one, 1, shape=b"\1" + uvarint(1 << 47)) + bytes((1 << 25) + 9)),
        "bomb-of-names": long_names(),
        "bomb-stacks": with_columns(uvarint(1 << 25) + b"\1" * (1 << 25)),
        "changed-one-too-few": lying(changed=1),
        "coo-that-is-none": lying(coo=True),
        "digest-of-zeros": with_stack(small("x", coo=True), "x", digest=(0, 0)),
        "dtype-of-the-same-width": lying(dtype=DTYPES["F8_E4M3"]),
        "format-2": with_metadata(format="weightwire/2"),
        "header-nested-deeply": deep_header(),
        "index-not-compressed": with_index(small("x"), plain.options + uvarint(len(plain.columns)) + plain.columns),
        "index-of-another-file": with_index(small("x"), index_of(small("x", "y"))),
        "member-twice": two_members(),
        "name-of-more-than-the-one-before": with_index(
            small("x"), replace(plain, columns=plain.columns[:2] + b"\1" + plain.columns[3:]).pack()
        ),
        "names-exchanged": two_names_exchanged(),
        "new-that-is-not": lying(fresh=True),
        "removed-nested-deeply": with_metadata(removed="[" * 20_000),
        "rows-past-the-end": lying(rows=(5, 11)),
        "shape-turned": lying(shape=(64, 10)),
        **{
            name: with_borders(name)
            for name in (
                "cut-in-the-data",
                "cut-in-the-header",
                "header-longer-than-the-file",
                "header-of-an-exabyte",
                "one-byte-too-many",
            )
        },
    }


def main() -> None:
    for name, data in files().items():
        (FOLDER / f"{name}.safetensors").write_bytes(data)
        print(f"{name}: {len(data):,} bytes")


if __name__ == "__main__":
    main()
