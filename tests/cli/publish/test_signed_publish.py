"""`weightwire publish` to signed runs: also a command that has nothing to publish judges the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import Ran, Training, tree, weightwire
from weightwire.chain.keys import PrivateKey, read_private_key
from weightwire.chain.records import Commit, seal, unseal


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys of the trainer and of another one."""
    for name in ("trainer", "other"):
        PrivateKey.generate().write(tmp_path / name)
    return tmp_path


@pytest.fixture
def again(training: Training, bucket: Path, keys: Path) -> Callable[..., Ran]:
    """Publishes the newest version again, of a run that `trainer` has signed."""
    path = training.save("checkpoint-100")
    assert weightwire("publish", path, bucket, "--key", keys / "trainer").code == 0
    return lambda *options: weightwire("publish", path, bucket, *options)


def test_same_weights_are_not_published_again(again: Callable[..., Ran], bucket: Path, keys: Path) -> None:
    before = tree(bucket)
    ran = again("--key", keys / "trainer")
    assert ran.code == 0
    assert "already version 1" in ran.err
    assert tree(bucket) == before


@pytest.mark.parametrize(
    ("key", "says"), [(None, "this publisher has no key"), ("other", "WW-UNTRUSTED"), ("none", "WW-KEY")]
)
def test_wrong_key_is_an_error(key: str | None, says: str, again: Callable[..., Ran], bucket: Path, keys: Path) -> None:
    before = tree(bucket)
    ran = again(*(["--key", keys / key] if key else []))
    assert ran.code == 1
    assert says in ran.err
    assert tree(bucket) == before


def test_version_of_a_stranger_is_not_taken_for_a_publication(
    again: Callable[..., Ran], bucket: Path, keys: Path
) -> None:
    newest = max((bucket / "commits").iterdir())
    commit = unseal(newest.read_bytes(), Commit, "").record
    newest.write_bytes(seal(commit, read_private_key(keys / "other")).data)
    ran = again("--key", keys / "trainer")
    assert ran.code == 1
    assert "already version" not in ran.err


def test_unsigned_run_is_an_error_with_a_key(training: Training, bucket: Path, keys: Path) -> None:
    path = training.save("checkpoint-100")
    assert weightwire("publish", path, bucket).code == 0
    ran = weightwire("publish", path, bucket, "--key", keys / "trainer")
    assert ran.code == 1
    assert "this run is not signed" in ran.err


def test_rolled_back_run_is_an_error(training: Training, bucket: Path, keys: Path) -> None:
    first = training.save("checkpoint-100")
    for path in (first, training.save("checkpoint-200")):
        assert weightwire("publish", path, bucket, "--key", keys / "trainer").code == 0
    for newest in sorted((bucket / "commits").iterdir())[2:]:
        newest.unlink()
    ran = weightwire("publish", first, bucket, "--key", keys / "trainer")
    assert ran.code == 1
    assert "which its publisher committed" in ran.err
