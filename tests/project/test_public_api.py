"""What `import weightwire` gives a user: the names, the errors that documented calls raise, and their codes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightwire
from weightwire import errors

# Adding a name is a promise to users; removing one breaks them.
NAMES = {
    "Bucket ObjectInfo open_bucket",
    "Publisher Publication Follower Update Event",
    "Delta State Tensor anchor diff digest patch",
}

# Codes end up in scripts and alerts: one that changes breaks them.
CODES = {
    "AlreadyExists": "WW-ALREADY-EXISTS",
    "BrokenChain": "WW-BROKEN-CHAIN",
    "BucketError": "WW-BUCKET",
    "CannotListen": "WW-CANNOT-LISTEN",
    "CheckpointError": "WW-CHECKPOINT",
    "Closed": "WW-CLOSED",
    "CorruptDelta": "WW-CORRUPT-DELTA",
    "DataGone": "WW-DATA-GONE",
    "EngineError": "WW-ENGINE",
    "EngineGone": "WW-ENGINE-GONE",
    "Fenced": "WW-FENCED",
    "ForeignRun": "WW-FOREIGN-RUN",
    "Interrupted": "WW-INTERRUPTED",
    "NoBucket": "WW-NO-BUCKET",
    "NoRun": "WW-NO-RUN",
    "NotFound": "WW-NOT-FOUND",
    "OutputError": "WW-OUTPUT",
    "PermissionDenied": "WW-PERMISSION-DENIED",
    "ProcessFailed": "WW-PROCESS-FAILED",
    "RankFailed": "WW-RANK-FAILED",
    "ReplicaError": "WW-REPLICA",
    "RunError": "WW-RUN",
    "SchemaChanged": "WW-SCHEMA-CHANGED",
    "Truncated": "WW-TRUNCATED",
    "Unavailable": "WW-UNAVAILABLE",
    "UnsafeBucket": "WW-UNSAFE-BUCKET",
    "UnsupportedFormat": "WW-UNSUPPORTED-FORMAT",
    "WeightwireError": "WW-ERROR",
    "WrongBase": "WW-WRONG-BASE",
}

# Errors that no documented call raises, each with the reason why a user never sees it.
INTERNAL: dict[str, str] = {}


def error_classes() -> dict[str, type[errors.WeightwireError]]:
    return {
        name: found
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, errors.WeightwireError)
    }


class TestNames:
    def test_are_what_users_need_and_every_error(self) -> None:
        known = {name for line in NAMES for name in line.split()}
        assert set(weightwire.__all__) - set(error_classes()) == known

    def test_are_all_there(self) -> None:
        assert [name for name in weightwire.__all__ if not hasattr(weightwire, name)] == []

    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("weightwire.weights", "DTYPES"),
            ("weightwire.weights", "Dtype"),
            ("weightwire.delta", "Entry"),
            ("weightwire.delta", "TensorState"),
        ],
    )
    def test_lower_ones_are_a_level_down(self, module: str, name: str) -> None:
        assert not hasattr(weightwire, name)
        assert hasattr(sys.modules[module], name)


class TestErrors:
    def test_every_class_is_exported_or_internal_for_a_reason(self) -> None:
        assert set(errors.__all__) == set(error_classes())
        assert not set(INTERNAL) & set(weightwire.__all__)
        assert all(INTERNAL.values())
        assert set(error_classes()) == set(INTERNAL) | (set(weightwire.__all__) & set(error_classes()))

    def test_every_class_has_its_own_code_that_stays(self) -> None:
        assert {name: found.code for name, found in error_classes().items()} == CODES
        assert all("code" in vars(found) for found in error_classes().values())
        assert len(set(CODES.values())) == len(CODES)

    def test_a_code_is_on_the_error_too(self) -> None:
        assert errors.Fenced("a newer publisher").code == "WW-FENCED"


WEIGHTS = {"a": np.arange(6, dtype=np.float32)}
OTHER = {"a": np.ones(6, np.float32)}


def open_wrong_delta(path: Path) -> None:
    (path / "x").write_bytes(b"not a delta")
    weightwire.Delta.open(path / "x")


def publish(path: Path, weights: Any = WEIGHTS) -> None:
    with weightwire.Publisher(path / "run", blocking=True) as publisher:
        publisher.publish(weights)


def publish_other_weights(path: Path) -> None:
    publish(path)
    publish(path, {"b": WEIGHTS["a"]})


def publish_after_another(path: Path) -> None:
    with weightwire.Publisher(path / "run", blocking=True) as first:
        first.publish(WEIGHTS)
        with weightwire.Publisher(path / "run", blocking=True) as second:
            second.publish(OTHER)
        first.publish(OTHER)


def publish_after_closing(path: Path) -> None:
    publisher = weightwire.Publisher(path / "run")
    publisher.close()
    publisher.publish(WEIGHTS)


def follow(path: Path) -> None:
    with weightwire.Follower(path / "run", into=path / "replica") as follower:
        follower.once()


def follow_a_broken_run(path: Path) -> None:
    publish(path)
    for commit in (path / "run" / "commits").iterdir():
        commit.write_bytes(b"{}")
    follow(path)


def follow_into_a_directory_of_others(path: Path) -> None:
    publish(path)
    (path / "replica").mkdir()
    (path / "replica" / "mine.txt").write_text("not to be overwritten")
    follow(path)


def follow_a_run_without_data(path: Path) -> None:
    publish(path)
    for data in (path / "run").rglob("*.safetensors"):
        data.unlink()
    follow(path)


def create_twice(path: Path) -> None:
    bucket = weightwire.open_bucket(path)
    asyncio.run(bucket.create("a", b""))
    asyncio.run(bucket.create("a", b""))


RAISED: dict[str, Callable[[Path], Any]] = {
    "AlreadyExists": create_twice,
    "BrokenChain": follow_a_broken_run,
    "BucketError": lambda path: weightwire.open_bucket("ftp://host/x"),
    "CheckpointError": lambda path: weightwire.digest(path / "nothing"),
    "Closed": publish_after_closing,
    "CorruptDelta": open_wrong_delta,
    "DataGone": follow_a_run_without_data,
    "Fenced": publish_after_another,
    "NoRun": follow,
    "NotFound": lambda path: asyncio.run(weightwire.open_bucket(path).get("a")),
    "OutputError": lambda path: weightwire.diff(WEIGHTS, OTHER).write(path),
    "ReplicaError": follow_into_a_directory_of_others,
    "SchemaChanged": publish_other_weights,
    "WrongBase": lambda path: weightwire.patch(OTHER, weightwire.diff(WEIGHTS, WEIGHTS | OTHER)),
}


@pytest.mark.parametrize("name", RAISED)
def test_documented_calls_raise_exported_errors(name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.WeightwireError) as caught:
        RAISED[name](tmp_path)
    assert type(caught.value) is getattr(weightwire, name)
    assert caught.value.hint


def test_a_star_import_works() -> None:
    code = "from weightwire import *; print(Publisher.__name__, Fenced.code)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "Publisher WW-FENCED\n"
