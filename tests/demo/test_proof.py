"""The proof of equal bits fails if one bit differs."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from support.stores import NOWHERE
from weightwire.delta.state import digest
from weightwire.demo.programs import ReplicaProgram
from weightwire.demo.proof import prove
from weightwire.engines.registry import Program
from weightwire.errors import EngineError, EngineGone


def checkpoint(directory: Path, *, flipped: int | None = None) -> Path:
    """A checkpoint of 1,000 weights. The last bit of one can be flipped."""
    bits = np.arange(1000, dtype=np.uint16)
    if flipped is not None:
        bits[flipped] ^= 1
    directory.mkdir(parents=True)
    safetensors.numpy.save_file({"weight": bits.view(ml_dtypes.bfloat16)}, directory / "model.safetensors")
    return directory


def replica(into: Path, *, ours: bool = False) -> ReplicaProgram:
    """A replica of our own server, or of another server with a follower."""
    return ReplicaProgram("replica-1", NOWHERE, into, Program([]), None if ours else Program([]))


def test_equal_bits_are_proven(tmp_path: Path) -> None:
    trained = checkpoint(tmp_path / "trained")
    checkpoint(tmp_path / "replica" / "current")
    proof = prove([replica(tmp_path / "replica")], trained)
    assert (proof.state, proof.holders) == (digest(trained).hex, ("trainer", "replica-1"))


def test_one_different_bit_fails_the_proof(tmp_path: Path) -> None:
    trained = checkpoint(tmp_path / "trained")
    checkpoint(tmp_path / "replica" / "current", flipped=999)
    with pytest.raises(EngineError, match="replica-1: the replica holds state"):
        prove([replica(tmp_path / "replica")], trained)


def test_our_own_server_must_report_its_digest(tmp_path: Path) -> None:
    trained = checkpoint(tmp_path / "trained")
    checkpoint(tmp_path / "replica" / "current")
    with pytest.raises(EngineGone, match="cannot read the digest of its weights"):
        prove([replica(tmp_path / "replica", ours=True)], trained)
