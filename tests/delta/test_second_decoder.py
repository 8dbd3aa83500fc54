"""A second decoder, written from docs/FORMAT.md alone, and weightwire agree on golden and random files."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta.decoder_agreement import compare, comparisons
from golden.make import CASES, HERE


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("rows", "blocks", "stacks")])
def test_both_decoders_agree_on_golden_files(name: str) -> None:
    """Left out: `rows`, whose base is a part of a tensor, and `blocks` and `stacks`, which take too long."""
    old, _, _ = CASES[name]()
    found = compare((HERE / f"{name}.safetensors").read_bytes(), old)
    assert found.outcome == "accepted", found


@pytest.mark.parametrize("seed", range(0, 200, 10))
def test_both_decoders_accept_valid_files_and_agree_on_damaged_ones(seed: int) -> None:
    for one in range(seed, seed + 10):
        valid, damaged = comparisons(one)
        assert valid.outcome == "accepted", (one, valid)
        assert damaged.outcome != "disagree", (one, damaged)


def test_the_second_decoder_stays_short() -> None:
    files = [Path(__file__).with_name(name) for name in ("second_decoder.py", "second_block_decoder.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 720
