"""Hostile inputs: each gets its expected error from both kernels, and changes nothing.

`make_files.py` makes `hostile/files/`, for the base below. `hostile/blocks/` holds blocks with their base: one for
every reason to reject that tests/fuzz/golden_mutations.py has reached, and a few unusual blocks that are accepted.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import weightwire
from fuzz.blocks import Block
from fuzz.verdicts import check_result, decode_with
from hostile import make_files
from support.samples import vector_widths, vectors_of
from weightwire import CheckpointError, CorruptDelta, Delta, UnsupportedFormat, WeightwireError, WrongBase
from weightwire.codec import _kernel, numpy_kernel

HOSTILE = Path(__file__).parent
BLOCKS = sorted((HOSTILE / "blocks").glob("*.json"))


def error_of_a_deep_header() -> str:
    """Python 3.11 rejects 4,000 levels of JSON. Python 3.13 reads on and misses a value."""
    try:
        json.loads('{"a":' * 4000)
    except RecursionError:
        return "the header is nested too deeply"
    except ValueError:
        return "the header is not valid JSON"
    raise AssertionError("this JSON does not end")


FILES: dict[str, tuple[type[WeightwireError], str]] = {
    "after-of-zeros": (CorruptDelta, "the result has a wrong state"),
    "anchor-that-leans-on-a-base": (CorruptDelta, "an anchor must not need a base"),
    "before-of-zeros": (WrongBase, "made for weights with state 000000000000"),
    "block-of-another-hash": (CorruptDelta, "tensor 'x': block 0: its hash does not match the index"),
    "block-of-another-kind": (CorruptDelta, "tensor 'x': block 0: "),
    "bomb-8-gigabytes-in-5-kilobytes": (CorruptDelta, "tensor 'x': is too short for what it claims to hold"),
    "bomb-blocks-that-are-not-there": (CorruptDelta, "tensor 'x': its index is too short"),
    "bomb-columns": (CorruptDelta, "its index is damaged or too large"),
    "bomb-members": (CorruptDelta, "its index has too many entries"),
    "bomb-of-blocks": (CorruptDelta, "tensor 'x': has too many blocks"),
    "bomb-of-blocks-in-three-tensors": (CorruptDelta, "its index has too many blocks"),
    "bomb-of-names": (CorruptDelta, "its names are too long"),
    "bomb-stacks": (CorruptDelta, "its index has too many entries"),
    "bomb-coo-of-2-to-the-61": (WrongBase, "tensor 'x': is U8 [2305843009213693952], but U8 [10, 64] in the base"),
    "changed-one-too-few": (CorruptDelta, "tensor 'x': changes 2 weights, but claims 1"),
    "coo-that-is-none": (CorruptDelta, "tensor 'x': its size does not fit its number of changes"),
    "cut-in-the-data": (CorruptDelta, "its tensors take"),
    "cut-in-the-header": (CorruptDelta, "ends inside its header"),
    "digest-of-zeros": (CorruptDelta, "tensor 'x': the result has a wrong digest"),
    "dtype-of-the-same-width": (WrongBase, "tensor 'x': is F8_E4M3 [10, 64], but U8 [10, 64] in the base"),
    "format-2": (UnsupportedFormat, "has format version 2, but this release reads weightwire/1"),
    "header-longer-than-the-file": (CorruptDelta, "ends inside its header"),
    "header-nested-deeply": (CorruptDelta, error_of_a_deep_header()),
    "header-of-an-exabyte": (CorruptDelta, "not a safetensors file"),
    "index-not-compressed": (CorruptDelta, "its index is damaged"),
    "index-of-another-file": (CorruptDelta, "the sizes of its blocks do not match its bytes"),
    "member-twice": (CorruptDelta, "it names a tensor twice"),
    "name-of-more-than-the-one-before": (CorruptDelta, "a name is malformed"),
    "names-exchanged": (WrongBase, "tensor 'y': missing in the base"),
    "new-that-is-not": (CorruptDelta, "tensor 'x': block 0: it needs a base"),
    "one-byte-too-many": (CorruptDelta, "its tensors take"),
    "removed-nested-deeply": (CorruptDelta, "its list of removed tensors"),
    "rows-past-the-end": (CorruptDelta, "tensor 'x': does not have rows 5 to 11"),
    "shape-turned": (WrongBase, "tensor 'x': is U8 [64, 10], but U8 [10, 64] in the base"),
}


def base() -> dict[str, npt.NDArray[np.uint8]]:
    return {"x": np.zeros((10, 64), np.uint8)}


def test_every_file_has_an_expected_error() -> None:
    assert {path.stem for path in (HOSTILE / "files").iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_are_rejected(name: str, implementation: str) -> None:
    path = HOSTILE / "files" / f"{name}.safetensors"
    kind, says = FILES[name]
    for copy in (True, False):
        weights = base()
        with pytest.raises((kind, CheckpointError)) as caught:
            weightwire.patch(weights, Delta.open(path), copy=copy)
        assert not weights["x"].any()
        assert caught.value.message.startswith(f"{path}: ")
        assert caught.value.hint
        # In place there may be another reason to reject it first.
        assert not copy or (type(caught.value) is kind and says in caught.value.message)


def test_the_files_are_those_of_this_format() -> None:
    for name, data in make_files.files().items():
        assert (HOSTILE / "files" / f"{name}.safetensors").read_bytes() == data


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("bomb-")])
def test_bombs_take_little_memory(name: str) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightwireError):
        weightwire.patch(base(), Delta.open(HOSTILE / "files" / f"{name}.safetensors"), copy=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # kB


def test_blocks_are_found() -> None:
    assert len(BLOCKS) >= 50


@pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path.stem)
def test_hostile_blocks_get_the_same_verdict_from_both_kernels(path: Path) -> None:
    """The name of a block is the reason of the kernel."""
    block = Block.from_json(path.read_text())
    expected = decode_with(numpy_kernel, block)
    for width in vector_widths():
        with vectors_of(width):
            found = decode_with(_kernel, block)
        if block.name != "accepted":
            assert found == block.name
            assert isinstance(expected, str)
        else:
            assert found == expected
            assert not isinstance(found, str)
            check_result(block, *found)
