"""The examples in docs/FORMAT.md and docs/PROTOCOL.md are what the code writes and reads."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

import weightwire
from weightwire.chain import Commit, Run, seal, unseal
from weightwire.chain.rules import check_first, check_follows

DOCS = Path(__file__).parent.parent.parent / "docs"


def examples(document: str) -> list[bytes]:
    """The JSON examples of a page, without the line breaks that only the page has."""
    text = (DOCS / document).read_text(encoding="utf-8")
    return [block.replace("\n", "").encode() for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]


def example_file() -> bytes:
    """The delta that docs/FORMAT.md shows, put together from its parts."""
    text = (DOCS / "FORMAT.md").read_text(encoding="utf-8")
    (header,) = examples("FORMAT.md")
    (size,) = re.findall(r"begins with `((?:[0-9a-f]{2} ){7}[0-9a-f]{2})`", text)
    index, blocks = re.findall(r"^```\n((?:[0-9a-f]{2} ?)+)\n```", text, re.MULTILINE)
    header = header.ljust(int.from_bytes(bytes.fromhex(size), "little"))
    return bytes.fromhex(size) + header + bytes.fromhex(index) + bytes.fromhex(blocks)


def test_format_example_is_the_delta_of_its_weights() -> None:
    values = (np.arange(32, dtype="<f4") / 8).view("<u4") >> 16
    weight = values.astype("<u2").reshape(4, 8)
    changed = weight.copy()
    changed[1, 4] += 1
    changed[3, 0] -= 1
    bias = np.zeros(4, "<f4")
    before = {"bias": bias, "weight": ("BF16", (4, 8), weight)}
    after = {"bias": bias, "weight": ("BF16", (4, 8), changed)}

    assert weightwire.diff(before, after).to_bytes() == example_file()


def test_protocol_examples_are_a_valid_chain() -> None:
    run_json, *commits = examples("PROTOCOL.md")
    run = unseal(run_json, Run, "run.json")
    assert seal(run.record).data == run_json

    first, *later = [unseal(data, Commit, "commit") for data in commits]
    check_first(first.record, run.sha256, "commit 0")
    parent = first
    for commit in later:
        check_follows(parent, commit.record, "commit")
        assert seal(commit.record).data == commit.data
        parent = commit
    assert [commit.record.run for commit in (first, *later)] == [run.record.run] * 3


def test_protocol_example_names_the_file_of_the_format_example() -> None:
    commit = unseal(examples("PROTOCOL.md")[-1], Commit, "commit 2").record
    assert [file.sha256 for file in commit.files] == [hashlib.sha256(example_file()).hexdigest()]
