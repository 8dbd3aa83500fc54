"""The cache of the last published weights beside the checkpoints. It never causes an error."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from support.commands import Training, bits_of, state_of, tree, versions_in, weightwire
from support.damage import HARMS
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.cli.publish import publish_cache
from weightwire.delta.state import digest
from weightwire.errors import WeightwireError
from weightwire.weights.checkpoint import Checkpoint

RUN, OTHER = "a" * 32, "b" * 32


def keep(training: Training, name: str, version: int, run: str = RUN) -> str:
    """Stores a checkpoint and returns its state."""
    path = training.save(name)
    state = state_of(path)
    assert publish_cache.store(training.parent, run, state, version, Checkpoint(path))
    return state


def kept(training: Training) -> list[str]:
    return sorted(path.parent.name for path in (training.parent / ".weightwire").glob("*/*/published.json"))


def test_cache_works_after_the_checkpoint_is_deleted(training: Training) -> None:
    state = keep(training, "checkpoint-1", 1)
    bits = bits_of(training.parent / "checkpoint-1")
    shutil.rmtree(training.parent / "checkpoint-1")

    found = publish_cache.load(training.parent, RUN, state)

    assert found is not None
    assert {name: tensor.bits.tobytes() for name, tensor in found.items()} == bits
    assert digest(found).hex == state


def test_hard_links_take_no_space(training: Training) -> None:
    state = keep(training, "checkpoint-1", 1)

    files = sorted((training.parent / ".weightwire" / RUN / state).glob("*.safetensors"))
    originals = sorted((training.parent / "checkpoint-1").glob("*.safetensors"))
    assert [file.stat().st_ino for file in files] == [file.stat().st_ino for file in originals]


def test_files_are_copied_if_links_are_not_supported(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> NoReturn:
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    state = keep(training, "checkpoint-1", 1)
    shutil.rmtree(training.parent / "checkpoint-1")

    found = publish_cache.load(training.parent, RUN, state)

    assert found is not None
    assert digest(found).hex == state


def test_single_file_behind_a_symbolic_link_is_cached(training: Training) -> None:
    path = training.save("checkpoint-1") / "model-00001-of-00002.safetensors"
    link = training.parent / "weights"
    link.symlink_to(path)

    assert publish_cache.store(training.parent, RUN, state_of(path), 1, Checkpoint(link))
    path.unlink()

    found = publish_cache.load(training.parent, RUN, digest(Checkpoint(training.save("x") / path.name)).hex)
    assert found is None  # another state
    assert len(kept(training)) == 1
    assert publish_cache.load(training.parent, RUN, kept(training)[0]) is not None


def test_previous_state_is_removed(training: Training) -> None:
    first = keep(training, "checkpoint-1", 1)
    second = keep(training, "checkpoint-2", 2)

    assert kept(training) == [second]
    assert publish_cache.load(training.parent, RUN, first) is None


def test_each_run_has_its_own_cache_until_it_expires(training: Training) -> None:
    first = keep(training, "checkpoint-1", 1)
    keep(training, "checkpoint-2", 1, run=OTHER)
    assert publish_cache.load(training.parent, RUN, first) is not None
    assert publish_cache.load(training.parent, OTHER, first) is None

    long_ago = time.time() - 30 * 86400
    os.utime(training.parent / ".weightwire" / RUN, (long_ago, long_ago))
    keep(training, "checkpoint-3", 2, run=OTHER)

    assert publish_cache.load(training.parent, RUN, first) is None


def test_storing_the_same_state_replaces_it(training: Training) -> None:
    """The trainer may have written through the link."""
    state = keep(training, "checkpoint-1", 1)
    file = next((training.parent / ".weightwire" / RUN / state).glob("0.safetensors"))
    file.unlink()
    file.write_bytes(b"damaged")
    assert publish_cache.load(training.parent, RUN, state) is None

    assert publish_cache.store(training.parent, RUN, state, 2, Checkpoint(training.parent / "checkpoint-1"))

    assert publish_cache.load(training.parent, RUN, state) is not None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"run": 1}', b'{"run": "x", "state": "y"}'])
def test_damaged_cache_is_ignored(training: Training, damage: bytes) -> None:
    state = keep(training, "checkpoint-1", 1)
    (training.parent / ".weightwire" / RUN / state / "published.json").write_bytes(damage)

    assert publish_cache.load(training.parent, RUN, state) is None


def test_crash_halfway_leaves_no_usable_entry(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    first = keep(training, "checkpoint-1", 1)
    path = training.save("checkpoint-2")

    def rename(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        patched.setattr(publish_cache, "_tidy", lambda *_: None)  # as if the process were killed
        with pytest.raises(KeyboardInterrupt):
            publish_cache.store(training.parent, RUN, state_of(path), 2, Checkpoint(path))

    assert publish_cache.load(training.parent, RUN, state_of(path)) is None
    assert publish_cache.load(training.parent, RUN, first) is not None
    keep(training, "checkpoint-3", 3)
    assert [path.name for path in (training.parent / ".weightwire" / RUN).iterdir()] == kept(training)


def test_unwritable_directory_is_ignored(training: Training) -> None:
    path = training.save("checkpoint-1")
    (training.parent / ".weightwire").write_text("in the way")

    assert not publish_cache.store(training.parent, RUN, state_of(path), 1, Checkpoint(path))
    assert publish_cache.load(training.parent, RUN, state_of(path)) is None


def test_cache_is_not_part_of_a_checkpoint(tmp_path: Path) -> None:
    training = Training(tmp_path)
    keep(training, "out", 1)
    before = Checkpoint(tmp_path / "out").side_files
    shutil.move(tmp_path / ".weightwire", tmp_path / "out" / ".weightwire")

    assert Checkpoint(tmp_path / "out").side_files == before


def test_git_ignores_the_cache(training: Training) -> None:
    keep(training, "checkpoint-1", 1)
    keep(training, "checkpoint-2", 2)

    assert tree(training.parent / ".weightwire")[".gitignore"] == b"*\n"


def test_errors_of_cached_weights_are_caught(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    state = keep(training, "checkpoint-1", 1)

    def fail(*_: object) -> NoReturn:
        raise WeightwireError("damaged")

    monkeypatch.setattr(publish_cache, "Checkpoint", fail)

    assert publish_cache.load(training.parent, RUN, state) is None


@pytest.mark.parametrize("harm", HARMS)
def test_anchor_repairs_a_damaged_run_without_the_cache(
    training: Training, tmp_path: Path, harm: Callable[[Bucket, str], None]
) -> None:
    url = tmp_path / "bucket"
    for number in (1, 2):
        assert weightwire("publish", training.save(f"checkpoint-{number}"), url).code == 0
    harm(open_bucket(url), "deltas/")
    shutil.rmtree(training.parent / ".weightwire")

    path = training.save("checkpoint-3")
    ran = weightwire("publish", path, url)

    assert ran.code == 0, ran.err
    assert "warning: " in ran.err
    assert "the next version will be an anchor with all weights" in ran.err
    assert [commit["kind"] for commit in versions_in(url)] == ["fence", "anchor", "fence", "delta", "fence", "anchor"]
    assert weightwire("restore", url, "-o", tmp_path / "r").code == 0
    assert bits_of(tmp_path / "r") == bits_of(path)
