"""The public API: names, errors of documented calls, and error codes."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightwire
from weightwire import errors
from weightwire.chain import PrivateKey

# Adding a name is a promise to users; removing one breaks them.
NAMES = {
    "Bucket ObjectInfo open_bucket",
    "Publisher Publication Follower Update Event",
    "Delta State Tensor anchor diff digest patch",
}

# Scripts and alerts use codes: changing one breaks them.
CODES = {
    "AlreadyExists": "WW-ALREADY-EXISTS",
    "BadKey": "WW-KEY",
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
    "MissingDependency": "WW-MISSING-DEPENDENCY",
    "NoBucket": "WW-NO-BUCKET",
    "NoRun": "WW-NO-RUN",
    "NotFound": "WW-NOT-FOUND",
    "NotPublished": "WW-NOT-PUBLISHED",
    "OutOfMemory": "WW-OUT-OF-MEMORY",
    "OutputError": "WW-OUTPUT",
    "PermissionDenied": "WW-PERMISSION-DENIED",
    "ProcessFailed": "WW-PROCESS-FAILED",
    "RankFailed": "WW-RANK-FAILED",
    "ReplicaError": "WW-REPLICA",
    "RunError": "WW-RUN",
    "SchemaChanged": "WW-SCHEMA-CHANGED",
    "Stale": "WW-STALE",
    "TooLarge": "WW-TOO-LARGE",
    "Truncated": "WW-TRUNCATED",
    "Unavailable": "WW-UNAVAILABLE",
    "UnsafeBucket": "WW-UNSAFE-BUCKET",
    "UnsupportedFormat": "WW-UNSUPPORTED-FORMAT",
    "Untrusted": "WW-UNTRUSTED",
    "WeightwireError": "WW-ERROR",
    "WrongBase": "WW-WRONG-BASE",
}

# Errors that no documented call raises, each with the reason.
INTERNAL: dict[str, str] = {}


def error_classes() -> dict[str, type[errors.WeightwireError]]:
    return {
        name: found
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, errors.WeightwireError)
    }


class TestNames:
    def test_public_names_are_the_documented_names_and_all_errors(self) -> None:
        known = {name for line in NAMES for name in line.split()}
        assert set(weightwire.__all__) - set(error_classes()) == known

    def test_all_public_names_exist(self) -> None:
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
    def test_internal_names_are_in_their_rooms(self, module: str, name: str) -> None:
        assert not hasattr(weightwire, name)
        assert hasattr(importlib.import_module(module), name)

    def test_public_names_are_completed_in_a_shell(self) -> None:
        assert dir(weightwire) == sorted(weightwire.__all__)

    def test_modules_are_attributes_without_an_import(self) -> None:
        code = "import weightwire; print(weightwire.weights.DTYPES is not None, hasattr(weightwire, '__main__'))"
        assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True False\n"


class TestErrors:
    def test_every_class_is_exported_or_internal(self) -> None:
        assert set(errors.__all__) == set(error_classes())
        assert not set(INTERNAL) & set(weightwire.__all__)
        assert all(INTERNAL.values())
        assert set(error_classes()) == set(INTERNAL) | (set(weightwire.__all__) & set(error_classes()))

    def test_every_class_has_a_stable_code(self) -> None:
        assert {name: found.code for name, found in error_classes().items()} == CODES
        assert all("code" in vars(found) for found in error_classes().values())
        assert len(set(CODES.values())) == len(CODES)

    def test_an_error_has_the_code_of_its_class(self) -> None:
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


def follow_into_a_directory_with_other_files(path: Path) -> None:
    publish(path)
    (path / "replica").mkdir()
    (path / "replica" / "mine.txt").write_text("not to be overwritten")
    follow(path)


def follow_a_run_without_data(path: Path) -> None:
    publish(path)
    for data in (path / "run").rglob("*.safetensors"):
        data.unlink()
    follow(path)


def follow_signed(path: Path, **settings: Any) -> None:
    """Follows a signed run whose publisher shows no sign of life."""
    key = PrivateKey.generate()
    with weightwire.Publisher(path / "run", blocking=True, key=key) as publisher:
        publisher.publish(WEIGHTS)
    (path / "run" / "alive.json").unlink(missing_ok=True)
    with weightwire.Follower(path / "run", into=path / "replica", **{"trust": str(key.public)} | settings) as follower:
        follower.once()


def create_twice(path: Path) -> None:
    bucket = weightwire.open_bucket(path)
    asyncio.run(bucket.create("a", b""))
    asyncio.run(bucket.create("a", b""))


RAISED: dict[str, Callable[[Path], Any]] = {
    "AlreadyExists": create_twice,
    "BadKey": lambda path: weightwire.Publisher(path / "run", key=path / "missing"),
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
    "ReplicaError": follow_into_a_directory_with_other_files,
    "SchemaChanged": publish_other_weights,
    "Stale": lambda path: follow_signed(path, max_age=60),
    "Untrusted": lambda path: follow_signed(path, trust="ab" * 32),
    "WrongBase": lambda path: weightwire.patch(OTHER, weightwire.diff(WEIGHTS, WEIGHTS | OTHER)),
}


@pytest.mark.parametrize("name", RAISED)
def test_documented_calls_raise_exported_errors(name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.WeightwireError) as caught:
        RAISED[name](tmp_path)
    assert type(caught.value) is getattr(weightwire, name)
    assert caught.value.hint


def test_star_import_works() -> None:
    code = "from weightwire import *; print(Publisher.__name__, Fenced.code)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "Publisher WW-FENCED\n"
