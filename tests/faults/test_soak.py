"""A short run of `benchmarks/soak.py`, and its checks: each must notice what it is there for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from faults.actors import Journal, bits_at, weights_at
from faults.promises import Promises, Violation
from faults.resources import ResourceLog, Series
from faults.soak_actors import Comparison
from weightwire import Publisher, Tensor, digest
from weightwire.bucket.registry import open_bucket
from weightwire.weights import schema_of_weights
from weightwire.weights.checkpoint_writer import CheckpointWriter

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
SEED = 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_run_under_random_faults_keeps_all_promises() -> None:
    ran = subprocess.run(
        [sys.executable, SOAK, "--minutes", "1.5", "--followers", "6", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    broken = ran.stdout.partition("BROKEN")[2]
    assert ran.returncode == 0, f"{ran.stdout[:3000]}\n{broken[:60_000]}\n{ran.stderr[-4000:]}"
    assert "served versions with wrong bits" in ran.stdout
    assert " 0 missed" in ran.stdout


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flipped", [0, 1])
def test_engine_that_serves_one_wrong_bit_is_recorded(flipped: int, tmp_path: Path) -> None:
    weights = dict(weights_at(SEED, 7))
    weights["norm"].bits[100] ^= flipped
    Comparison(Journal(tmp_path / "log"), SEED).serve(9, "state", weights)
    (line,) = Journal.read(tmp_path / "log")
    assert (line["version"], line["step"], line["exact"]) == (9, 7, not flipped)


def test_engine_without_a_tensor_is_recorded(tmp_path: Path) -> None:
    weights = {name: one for name, one in weights_at(SEED, 7).items() if name != "norm"}
    Comparison(Journal(tmp_path / "log"), SEED).serve(9, "state", weights)
    assert not Journal.read(tmp_path / "log")[0]["exact"]


@pytest.fixture
def promises(tmp_path: Path) -> Promises:
    """A run with one version, and the journal of its trainer."""
    journal = Journal(tmp_path / "trainer.journal")
    weights = weights_at(SEED, 0)
    state = digest(weights).hex
    journal.add(what="captured", step=0, state=state)
    with Publisher(tmp_path / "run") as publisher:
        version = publisher.publish(weights, step=0).wait()
    journal.add(what="acknowledged", step=0, version=version, state=state)
    return Promises(open_bucket(tmp_path / "run"), Journal.Reader(tmp_path / "trainer.journal"), SEED)


def test_acknowledged_version_is_found(promises: Promises) -> None:
    promises.check_acknowledged()
    promises.check_all_again()
    assert promises.checked == len(promises.acknowledged) == 1


@pytest.mark.parametrize("line", [{"version": 2}, {"state": "0" * 64}, {"step": 1}], ids=["version", "state", "step"])
def test_lost_version_is_a_violation(promises: Promises, line: dict[str, object], tmp_path: Path) -> None:
    promises.check_acknowledged()
    (acknowledged,) = promises.acknowledged
    Journal(tmp_path / "trainer.journal").add(**acknowledged | line)
    with pytest.raises(Violation, match="acknowledged, but is not in the bucket"):
        promises.check_acknowledged()


def test_state_that_the_trainer_never_had_is_a_violation(promises: Promises, tmp_path: Path) -> None:
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(weights_at(SEED, 1), step=1).wait()
    with pytest.raises(Violation, match="never had"):
        promises.check_all_again()


@pytest.mark.parametrize("flipped", [0, 1])
def test_checkpoint_with_one_wrong_bit_is_a_violation(promises: Promises, flipped: int, tmp_path: Path) -> None:
    held: dict[str, Tensor] = dict(weights_at(SEED, 0))
    state = digest(held).hex
    held["norm"].bits[3] ^= flipped
    with CheckpointWriter(tmp_path / "current", schema=schema_of_weights(held)) as writer:
        for name, one in held.items():
            writer[name].bits[:] = one.bits
    (tmp_path / "current" / "weightwire.json").write_text(f'{{"version": 1, "state": "{state}"}}')
    if flipped:
        with pytest.raises(Violation, match="has other bits than the trainer had"):
            promises.check_checkpoint(tmp_path / "current", "follower")
    else:
        promises.check_checkpoint(tmp_path / "current", "follower")


def test_expected_weights_depend_on_the_step() -> None:
    assert bits_at(SEED, 1) == bits_at(SEED, 1) != bits_at(SEED, 2)


# --- growth ----------------------------------------------------------------------------------------------------------


def series(values: list[float]) -> Series:
    return Series([float(second) for second in range(len(values))], values)


def test_leak_grows() -> None:
    growth = series([100.0 + second for second in range(90)]).growth(warm_up=30)
    assert growth is not None
    assert growth.value == 40
    assert growth.seconds == 40


def test_warm_up_and_peaks_are_not_growth() -> None:
    values = [float(min(second, 20)) for second in range(90)]
    values[80] = 1000.0
    growth = series(values).growth(warm_up=30)
    assert growth is not None
    assert growth.value == 0


def test_short_life_is_not_judged() -> None:
    assert series([float(second) for second in range(41)]).growth(warm_up=30) is None
    assert series([float(second) for second in range(42)]).growth(warm_up=30) is not None


def test_worst_growth_is_that_of_one_life() -> None:
    log = ResourceLog()
    log.series["memory"] = {
        ("trainer", 11): series([5.0] * 60),
        ("trainer", 12): series([50.0] * 60),  # larger, but constant
        ("gc", 13): series([second / 10 for second in range(60)]),
    }
    worst = log.worst("memory", 30)
    assert worst is not None
    assert worst[0] == "gc"
    assert log.worst("memory", 30, life=60) is None
    assert log.peak("memory", "trainer") == log.final("memory", "trainer") == 50
