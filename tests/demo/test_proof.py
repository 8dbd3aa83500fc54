"""The proof that all hold the same bits: it must fail where one does not."""

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
    """A thousand weights, of which one may have another last bit."""
    bits = np.arange(1000, dtype=np.uint16)
    if flipped is not None:
        bits[flipped] ^= 1
    directory.mkdir(parents=True)
    safetensors.numpy.save_file({"weight": bits.view(ml_dtypes.bfloat16)}, directory / "model.safetensors")
    return directory


def replica(into: Path, *, ours: bool = False) -> ReplicaProgram:
    """One whose server is none of ours has a follower beside it."""
    return ReplicaProgram("replica-1", NOWHERE, into, Program([]), None if ours else Program([]))


def test_the_same_bits_are_proven(tmp_path: Path) -> None:
    trained = checkpoint(tmp_path / "trained")
    checkpoint(tmp_path / "replica" / "current")
    proof = prove([replica(tmp_path / "replica")], trained)
    assert (proof.state, proof.holders) == (digest(trained).hex, ("trainer", "replica-1"))


def test_one_different_bit_fails_the_proof(tmp_path: Path) -> None:
    trained = checkpoint(tmp_path / "trained")
    checkpoint(tmp_path / "replica" / "current", flipped=999)
    with pytest.raises(EngineError, match="replica-1: its replica holds state"):
        prove([replica(tmp_path / "replica")], trained)


def test_a_server_of_ours_must_tell_what_is_in_its_memory(tmp_path: Path) -> None:
    trained = checkpoint(tmp_path / "trained")
    checkpoint(tmp_path / "replica" / "current")
    with pytest.raises(EngineGone, match="does not tell what it holds"):
        prove([replica(tmp_path / "replica", ours=True)], trained)
