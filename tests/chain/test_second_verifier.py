"""A second verifier, written from docs/PROTOCOL.md alone, and `weightwire verify` agree on every chain."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from chain.second_verifier import Verified, verify
from chain.verifier_agreement import KEY, comparisons, make_chain


@pytest.mark.parametrize("seed", range(30))
def test_both_verifiers_accept_a_valid_chain_and_agree_on_a_tampered_one(seed: int, tmp_path: Path) -> None:
    valid, tampered = comparisons(seed, tmp_path)
    assert valid.outcome == "accepted", valid
    assert tampered.outcome != "disagree", tampered


def test_a_verdict_names_the_newest_version(tmp_path: Path) -> None:
    chain = make_chain(random.Random(3), tmp_path / "room")
    for path, data in chain.objects.items():
        (tmp_path / "run" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / path).write_bytes(data)
    found = verify(tmp_path / "run", [KEY.public.hex] if chain.is_signed else [])
    assert isinstance(found, Verified)
    assert found.version == len(chain.keys) - 1


def test_the_second_verifier_stays_short() -> None:
    lines = Path(__file__).with_name("second_verifier.py").read_text().splitlines()
    assert len(lines) <= 150
