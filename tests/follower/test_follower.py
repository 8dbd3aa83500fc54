"""The follower as an engine's side sees it: it holds the trainer's bits or says why not, and nothing in between."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from support.records import sha, token
from support.samples import base as bits_for
from support.story import Bits, bits_of
from support.troubled import Act, Trouble, Troubled, denied, failed, in_memory, slow
from weightwire import Follower, Publisher, Update, diff, digest, patch
from weightwire.bucket.port import Bucket
from weightwire.chain.records import (
    HEAD,
    RUN,
    Commit,
    Heartbeat,
    PassedVersion,
    commit_path,
    data_path,
    heartbeat_path,
    seal,
    unseal,
)
from weightwire.errors import (
    BrokenChain,
    BucketError,
    CorruptDelta,
    DataGone,
    ForeignRun,
    NoBucket,
    NoRun,
    NotFound,
    PermissionDenied,
    ReplicaError,
    Unavailable,
    UnsupportedFormat,
    WeightwireError,
    WrongBase,
)
from weightwire.follower import heartbeat, replica_updater
from weightwire.follower.follow_loop import FollowLoop
from weightwire.follower.wakeups import WakeupServer
from weightwire.telemetry.events import Event
from weightwire.weights import DTYPES

Arrays = dict[str, Any]
ALWAYS = 10**9
NEVER = 10**9


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# --- the trainer -------------------------------------------------------------------------------------------------


def initial() -> Arrays:
    return {
        "embed": bits_for(DTYPES["F16"], 51200).view(np.float16).reshape(400, 128),
        "norm": np.linspace(0, 1, 5, dtype=np.float32),
    }


def train(weights: Arrays, step: int, every: int = 997) -> None:
    """Changes some weights in place, as an optimizer does."""
    weights["embed"].reshape(-1).view(np.uint16)[step % every :: every] += 1
    weights["norm"][step % 5] += 1


def ignore(event: Event) -> None:
    pass


class Trainer:
    """A publisher, and the bits of all that it has published."""

    def __init__(self, bucket: Any, every: int = 997, **settings: Any) -> None:
        self.bucket = bucket
        self.weights = initial()
        self._every = every
        self.bits: dict[int, Bits] = {}
        self._settings: dict[str, Any] = {"anchor_every": NEVER, "blocking": True, "threads": 1, **settings}
        self._publisher: Publisher | None = None
        self._steps = 0

    @property
    def publisher(self) -> Publisher:
        if self._publisher is None:
            self._publisher = Publisher(self.bucket, on_event=ignore, **self._settings)
        return self._publisher

    def publish(self, versions: int = 1) -> int:
        """Some steps, and a version of each; returns the last."""
        for _ in range(versions):
            self._steps += 1
            train(self.weights, self._steps, self._every)
            version = self.publisher.publish(self.weights, step=self._steps, metrics={"reward": 0.5}).wait()
            self.bits[version] = bits_of(self.weights)
        return version

    def close(self) -> None:
        """Anchors that were on their way are there when this returns."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def restart(self) -> int:
        """Another publisher takes over; returns the version of its fence."""
        self.close()
        version = self.publisher.version
        assert version is not None
        self.bits[version] = self.bits[version - 1]
        return version


@pytest.fixture
def bucket() -> Troubled:
    bucket = in_memory()
    bucket.poll_interval = 0.005
    return bucket


@pytest.fixture
def trainer(bucket: Troubled) -> Iterator[Trainer]:
    trainer = Trainer(bucket.inner)
    yield trainer
    trainer.close()


# --- the bucket, behind everybody's back -------------------------------------------------------------------------


def paths(bucket: Troubled, prefix: str = "") -> list[str]:
    return [one.path for one in asyncio.run(bucket.inner.list(prefix))]


def read(bucket: Troubled, path: str) -> bytes:
    return asyncio.run(bucket.inner.get(path))


def write(bucket: Troubled, path: str, data: bytes) -> None:
    asyncio.run(bucket.inner.put(path, data))


def remove(bucket: Troubled, prefix: str) -> None:
    for path in paths(bucket):
        if path.startswith(prefix):
            asyncio.run(bucket.inner.delete(path))


def commit_in(bucket: Troubled, version: int) -> Commit:
    return unseal(read(bucket, commit_path(version)), Commit, "").record


def beat_in(bucket: Troubled, name: str) -> Heartbeat:
    return unseal(read(bucket, heartbeat_path(name)), Heartbeat, "").record


def copy_of(bucket: Troubled) -> dict[str, bytes]:
    return asyncio.run(_read_all(bucket.inner))


async def _read_all(bucket: Bucket) -> dict[str, bytes]:
    return {one.path: await bucket.get(one.path) for one in await bucket.list("")}


def put_back(bucket: Troubled, objects: dict[str, bytes]) -> None:
    """As if nothing had happened; what is as it was is not touched."""

    async def put() -> None:
        now = await _read_all(bucket.inner)
        for path in now.keys() - objects.keys():
            await bucket.inner.delete(path)
        for path, data in objects.items():
            if now.get(path) != data:
                await bucket.inner.put(path, data)

    bucket.calm()
    asyncio.run(put())


# --- the follower ------------------------------------------------------------------------------------------------


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "replica"


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def follower(bucket: Troubled, into: Path, heard: list[Event]) -> Iterator[Follower]:
    with Follower(bucket, into=into, name="rollout-1", threads=1, on_event=heard.append) as follower:
        yield follower


def warnings(heard: list[Event]) -> list[str]:
    return [event.message for event in heard if event.stage == "warning"]


def until(reached: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def current(into: Path) -> int:
    """The version of `current`, which must be whole."""
    about = json.loads((into / "current" / "weightwire.json").read_bytes())
    loaded = safetensors.numpy.load_file(into / "current" / "model.safetensors")
    assert digest(loaded).hex == about["state"]
    return int(about["version"])


def check(follower: Follower, bits: Mapping[int, Bits], version: int) -> None:
    """That a follower holds a version, bit for bit, and has it ready for whoever loads it."""
    assert follower.version == version
    assert bits_of(follower.replica.weights) == bits[version]
    assert current(follower.replica.directory) == version
    assert bits_of(follower.replica.directory / "current") == bits[version]


def settled(follower: Follower, version: int) -> bool:
    """Whether it has reached a version by now. Woken, it need not wait as long as it would after many failures."""
    follower.wake()
    if follower.version != version or follower.trouble:
        return False
    return (follower.replica.directory / "current").resolve().name.startswith(f"{version}-")


class Engine:
    """Takes updates as an inference server does."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.weights: Arrays = {}

    def take(self, update: Update) -> None:
        if update.patch is None:
            self.load()
        else:
            patch(self.weights, update.patch)
        assert digest(self.weights).hex == update.state

    def load(self) -> None:
        self.weights = safetensors.numpy.load_file(self._follower.checkpoint() / "model.safetensors")


def taken(follower: Follower) -> Update:
    update = follower.take()
    assert update is not None
    return update


class TestOnce:
    def test_from_nothing(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish(4)
        assert (follower.version, follower.head) == (None, -1)
        assert follower.once() == 4
        assert (follower.head, follower.trouble) == (4, "")
        check(follower, trainer.bits, 4)

    def test_again_and_again(self, trainer: Trainer, follower: Follower) -> None:
        for versions in (1, 1, 3, 1):
            version = trainer.publish(versions)
            assert follower.once() == version
            check(follower, trainer.bits, version)

    def test_without_news(self, trainer: Trainer, follower: Follower, heard: list[Event]) -> None:
        trainer.publish(2)
        assert follower.once() == 2
        heard.clear()
        assert follower.once() == 2
        assert not heard

    @pytest.mark.parametrize("versions", [30, 70])
    def test_after_a_pause(self, trainer: Trainer, follower: Follower, versions: int) -> None:
        """Few enough to be read one after the other, and more than that."""
        trainer.publish()
        follower.once()
        version = trainer.publish(versions)
        assert follower.once() == version
        check(follower, trainer.bits, version)

    def test_after_a_long_pause_by_an_anchor(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, every=50, anchor_every=40)
        trainer.publish()
        follower.once()
        trainer.publish(90)
        trainer.close()
        bucket.asked.clear()
        assert follower.once() == 91
        check(follower, trainer.bits, 91)
        assert bucket.count("read_into", "anchors/81/") == 1
        assert bucket.count("read_into", "deltas/") == 10

    def test_in_the_middle_of_a_run(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=5)
        trainer.publish(14)
        trainer.close()
        assert follower.once() == 14
        check(follower, trainer.bits, 14)
        read = [path.split("/")[:2] for verb, path in bucket.asked if verb == "read_into"]
        assert read == [["anchors", "11"], ["deltas", "12"], ["deltas", "13"], ["deltas", "14"]]

    def test_versions_that_change_nothing(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish(2)
        follower.once()
        trainer.publisher.publish(trainer.weights)
        trainer.bits[3] = trainer.bits[2]
        assert follower.once() == 3
        check(follower, trainer.bits, 3)

    def test_versions_that_change_everything(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        for step in range(3):
            trainer.weights["embed"][:] = (
                bits_for(DTYPES["F16"], 51200, seed=step + 5).view(np.float16).reshape(400, 128)
            )
            version = trainer.publish()
            assert follower.once() == version
            check(follower, trainer.bits, version)

    def test_tells_what_it_does(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, heard: list[Event]
    ) -> None:
        """What comes next is fetched while the version before it is applied, so not all has an order."""
        trainer.publish()
        follower.once()
        trainer.publish(2)
        follower.once()
        told = [(event.stage, event.version) for event in heard]
        assert [one for one in told if one[0] in ("discover", "apply")] == [
            ("discover", 1),
            ("apply", 1),
            ("discover", 3),
            ("apply", 2),
            ("apply", 3),
        ]
        for version in (1, 2, 3):
            stages = [stage for stage, told_of in told if told_of == version and stage != "discover"]
            assert stages == ["fetch", "verify", "apply"]
        sizes = {event.nbytes for event in heard if event.version == 2}
        assert sizes == {commit_in(bucket, 2).nbytes}
        assert all(event.at > 1.7e9 for event in heard)

    def test_where_nothing_is(self, follower: Follower, into: Path) -> None:
        with pytest.raises(NoRun, match="nothing has been published there yet") as caught:
            follower.once()
        assert caught.value.hint
        assert not (into / "current").exists()

    def test_before_the_first_version(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        """A publisher has begun the run, and then died."""
        bucket.trouble("put", "anchors/", denied)
        trainer.bucket = bucket
        with pytest.raises(PermissionDenied):
            trainer.publish()
        with pytest.raises(NoRun, match="no weights have been published there yet") as caught:
            follower.once()
        assert caught.value.hint == "wait for the publisher"


class TestRestart:
    def test_goes_on_where_it_was(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        for life in range(3):
            version = trainer.publish(2)
            bucket.asked.clear()
            with Follower(bucket, into=into) as follower:
                assert follower.once() == version
                check(follower, trainer.bits, version)
            assert bucket.count("read_into", "anchors/") == (0 if life else 1)

    def test_without_news_holds_what_it_held(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish(2)
        for _ in range(2):
            with Follower(bucket, into=into) as follower:
                assert follower.once() == 2
                check(follower, trainer.bits, 2)

    def test_of_the_publisher(self, trainer: Trainer, follower: Follower) -> None:
        for _ in range(3):
            trainer.publish(2)
            follower.once()
            version = trainer.restart()
            assert follower.once() == version
            check(follower, trainer.bits, version)

    def test_has_the_same_name(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        for _ in range(2):
            with Follower(bucket, into=into) as follower:
                follower.once()
        assert len(paths(bucket, "replicas/")) == 1

    @pytest.mark.parametrize("content", [b"", b"../../elsewhere\n", b"\xff", b"two words"])
    def test_with_a_name_that_was_lost(self, bucket: Troubled, trainer: Trainer, into: Path, content: bytes) -> None:
        """As a power cut may leave it."""
        trainer.publish()
        with Follower(bucket, into=into) as follower:
            follower.once()
        (into / "name").write_bytes(content)
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 1
        assert len(paths(bucket, "replicas/")) == 2

    def test_of_a_replica_that_rotted(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish(2)
        with Follower(bucket, into=into) as follower:
            follower.once()
        with (into / "work" / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
        with Follower(bucket, into=into) as follower:
            assert "damaged" in str(follower.replica.trouble)
            assert current(into) == 2
            assert follower.once() == 2
            check(follower, trainer.bits, 2)


class TestSeveral:
    def test_follow_one_run(self, bucket: Troubled, trainer: Trainer, tmp_path: Path) -> None:
        trainer.publish()
        with Follower(bucket, into=tmp_path / "a", name="a") as a, Follower(bucket, into=tmp_path / "b", name="b") as b:
            assert a.once() == 1
            trainer.publish(2)
            assert b.once() == 3
            check(a, trainer.bits, 1)
            check(b, trainer.bits, 3)
            assert a.once() == 3
            check(a, trainer.bits, 3)
        assert {name: beat_in(bucket, name).version for name in "ab"} == {"a": 3, "b": 3}

    def test_cannot_share_a_replica(self, bucket: Troubled, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish()
        follower.once()
        with pytest.raises(ReplicaError, match="in use by another follower") as caught:
            Follower(bucket, into=into)
        assert caught.value.hint == "stop that one, or name another directory"
        trainer.publish()
        assert follower.once() == 2
        check(follower, trainer.bits, 2)


class TestPlaces:
    def test_a_directory(self, tmp_path: Path, into: Path) -> None:
        trainer = Trainer(tmp_path / "run")
        trainer.publish(3)
        trainer.close()
        with Follower(tmp_path / "run", into=into) as follower:
            assert follower.once() == 3
            check(follower, trainer.bits, 3)

    def test_a_url(self, into: Path) -> None:
        url = f"memory://test-{uuid4().hex}/run"
        trainer = Trainer(url)
        trainer.publish(3)
        trainer.close()
        with Follower(url, into=str(into)) as follower:
            assert follower.once() == 3
            check(follower, trainer.bits, 3)

    def test_that_are_none(self, into: Path) -> None:
        with pytest.raises(WeightwireError) as caught:
            Follower("ftp://somewhere", into=into)
        assert caught.value.hint
        assert not into.exists()

    def test_a_directory_with_other_things(self, bucket: Troubled, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(ReplicaError, match="holds other files already") as caught:
            Follower(bucket, into=tmp_path)
        assert caught.value.hint
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


class TestName:
    def test_is_what_others_see(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        with Follower(bucket, into=into, name="rollout-7.a_b") as follower:
            follower.once()
        assert paths(bucket, "replicas/") == ["replicas/rollout-7.a_b.json"]

    @pytest.mark.parametrize("name", ["", "../x", "a/b", "two words", ".hidden", "x" * 101])
    def test_that_is_none(self, bucket: Troubled, into: Path, name: str) -> None:
        with pytest.raises(ReplicaError, match="no name for a replica") as caught:
            Follower(bucket, into=into, name=name)
        assert caught.value.hint
        assert not into.exists()


class TestBase:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        """What the run starts from."""
        folder = tmp_path / "base"
        folder.mkdir()
        safetensors.numpy.save_file(initial(), folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        return folder

    @pytest.mark.parametrize("given", ["arrays", "path"])
    def test_is_given(self, bucket: Troubled, checkpoint: Path, into: Path, given: str) -> None:
        trainer = Trainer(bucket.inner, base=initial(), source="hf://org/model")
        trainer.publish(3)
        trainer.close()
        with Follower(bucket, into=into, base=initial() if given == "arrays" else checkpoint) as follower:
            assert follower.once() == 4
            check(follower, trainer.bits, 4)
        assert not paths(bucket, "anchors/")

    def test_is_found_where_the_run_says(self, bucket: Troubled, checkpoint: Path, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=checkpoint)
        trainer.publish()
        trainer.close()
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 2
            check(follower, trainer.bits, 2)
        assert (into / "current" / "config.json").read_text() == "{}"
        assert digest(safetensors.numpy.load_file(checkpoint / "model.safetensors")) == digest(initial())

    def test_of_a_run_without_versions(self, bucket: Troubled, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=initial())
        assert trainer.publisher.version == 1
        trainer.close()
        with Follower(bucket, into=into, base=initial()) as follower:
            assert follower.once() == 1
            assert bits_of(into / "current") == bits_of(initial())

    def test_is_another(self, bucket: Troubled, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=initial(), source="hf://org/model")
        trainer.publish()
        trainer.close()
        other = initial()
        train(other, 3)
        for wrong in (other, {"embed": initial()["embed"]}):
            with Follower(bucket, into=into, base=wrong) as follower:
                with pytest.raises(WrongBase, match="not the weights that the run started from") as caught:
                    follower.once()
                assert caught.value.hint == "get them from hf://org/model"
                assert follower.version is None
        assert not (into / "current").exists()

    def test_is_missing(self, bucket: Troubled, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=initial(), source="hf://org/model")
        trainer.publish()
        trainer.close()
        with Follower(bucket, into=into) as follower:
            with pytest.raises(WrongBase, match=r"base checkpoint \(hf://org/model\) that is not here") as caught:
                follower.once()
            assert caught.value.hint == "download it and say where it is: --base DIR"
        with Follower(bucket, into=into, base=initial()) as follower:
            assert follower.once() == 2

    def test_is_not_needed_where_there_is_an_anchor(self, bucket: Troubled, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=initial(), anchor_every=2)
        trainer.publish(3)
        trainer.close()
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 4
            check(follower, trainer.bits, 4)

    def test_is_not_needed_twice(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=initial())
        trainer.publish()
        with Follower(bucket, into=into, base=initial()) as follower:
            follower.once()
        trainer.publish()
        trainer.close()
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 3
            check(follower, trainer.bits, 3)

    def test_with_tied_weights(self, bucket: Troubled, into: Path) -> None:
        """The trainer's own model, and the engine's: the same tensor under two names."""
        tied = initial()
        tied["lm_head"] = tied["embed"]
        with Publisher(bucket.inner, base=tied, threads=1) as publisher:
            assert publisher.version == 1
        with Follower(bucket, into=into, base=tied) as follower:
            assert follower.once() == 1

    def test_that_cannot_be_read(self, bucket: Troubled, into: Path, tmp_path: Path) -> None:
        with pytest.raises(WeightwireError, match="nowhere"):
            Follower(bucket, into=into, base=tmp_path / "nowhere")
        assert not into.exists()


class TestWatch:
    def test_begins_with_all_weights_and_goes_on_with_patches(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish(2)
        engine, seen = Engine(follower), []
        for update in follower.watch(timeout=20):
            engine.take(update)
            seen.append((update.version, update.patch is None))
            assert bits_of(engine.weights) == trainer.bits[update.version]
            if update.version == 5:
                break
            trainer.publish()
        assert seen == [(2, True), (3, False), (4, False), (5, False)]

    def test_says_what_the_trainer_said(self, trainer: Trainer, follower: Follower) -> None:
        began = time.time()
        trainer.publish(2)
        update = next(follower.watch(timeout=20))
        assert (update.version, update.step, update.metrics) == (2, 2, {"reward": 0.5})
        assert update.state == digest(trainer.weights).hex
        assert began <= update.time <= time.time()

    def test_has_one_patch_for_several_versions(self, trainer: Trainer, follower: Follower) -> None:
        engine = Engine(follower)
        trainer.publish()
        updates = follower.watch(timeout=20)
        engine.take(next(updates))
        version = trainer.publish(20)
        until(lambda: follower.version == version)
        update = next(updates)
        assert update.version == version
        assert update.patch is not None
        engine.take(update)
        assert bits_of(engine.weights) == trainer.bits[version]

    def test_ends_when_nothing_comes(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        assert [update.version for update in follower.watch(timeout=0.3)] == [1]
        began = time.monotonic()
        assert not list(follower.watch(timeout=0.1))
        assert 0.1 <= time.monotonic() - began < 2

    def test_goes_on_where_the_last_one_ended(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        assert next(follower.watch(timeout=20)).patch is None
        trainer.publish()
        update = next(follower.watch(timeout=20))
        assert update.version == 2
        assert update.patch is not None

    def test_waits_for_a_run_to_begin(self, trainer: Trainer, follower: Follower, heard: list[Event]) -> None:
        follower.start()
        until(lambda: follower.trouble)
        assert "nothing has been published there yet" in follower.trouble
        trainer.publish()
        assert next(follower.watch(timeout=20)).version == 1
        until(lambda: not follower.trouble)
        assert len(warnings(heard)) == 1

    def test_of_a_closed_follower_ends(self, trainer: Trainer, bucket: Troubled, into: Path) -> None:
        trainer.publish()
        for started in (False, True):
            with Follower(bucket, into=into, on_event=ignore) as follower:
                if started:
                    assert next(follower.watch(timeout=20)).version == 1
            assert not list(follower.watch())

    def test_ends_when_another_thread_closes(self, trainer: Trainer, bucket: Troubled, into: Path) -> None:
        trainer.publish()
        follower = Follower(bucket, into=into, on_event=ignore)
        seen: list[int] = []
        ended: list[BaseException | None] = []

        def watch() -> None:
            try:
                seen.extend(update.version for update in follower.watch())
                ended.append(None)
            except BaseException as problem:
                ended.append(problem)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        until(lambda: follower.version == 1)
        time.sleep(0.05)
        follower.close()
        thread.join(10)
        assert ended == [None]

    def test_does_not_hide_a_fault_of_ours(
        self, trainer: Trainer, follower: Follower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.publish()
        updates = follower.watch(timeout=20)
        next(updates)

        async def look(self: FollowLoop) -> NoReturn:
            raise ZeroDivisionError("ours")

        monkeypatch.setattr(FollowLoop, "look", look)
        follower.wake()
        with pytest.raises(ZeroDivisionError, match="ours"):
            next(updates)

    def test_survives_a_listener_that_fails(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        """As the publisher does."""

        def fail(event: Event) -> NoReturn:
            raise ValueError("theirs")

        trainer.publish()
        with Follower(bucket, into=into, on_event=fail) as follower:
            assert next(follower.watch(timeout=20)).version == 1


class TestTake:
    def test_nothing(self, trainer: Trainer, follower: Follower) -> None:
        assert follower.take() is None
        trainer.publish()
        assert follower.take() is None
        follower.once()
        assert follower.take() is not None
        assert follower.take() is None
        follower.once()
        assert follower.take() is None

    def test_one_patch_for_each_version(self, trainer: Trainer, follower: Follower) -> None:
        engine = Engine(follower)
        for version in range(1, 6):
            trainer.publish()
            follower.once()
            update = taken(follower)
            assert (update.patch is None) == (version == 1)
            engine.take(update)
            assert bits_of(engine.weights) == trainer.bits[version]

    def test_one_patch_for_all_since(self, trainer: Trainer, follower: Follower) -> None:
        engine = Engine(follower)
        trainer.publish()
        follower.once()
        engine.take(taken(follower))
        for versions in (1, 2, 5):
            trainer.publish(versions)
            follower.once()
        update = taken(follower)
        assert update.version == 9
        assert update.patch is not None
        assert update.patch.before == digest(engine.weights).hex
        engine.take(update)
        assert bits_of(engine.weights) == trainer.bits[9]

    def test_a_fence_is_nothing_but_a_number(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        engine = Engine(follower)
        engine.take(taken(follower))
        trainer.restart()
        follower.once()
        update = taken(follower)
        assert update.version == 2
        assert update.patch is not None
        assert not update.patch.entries
        engine.take(update)
        assert bits_of(engine.weights) == trainer.bits[1]

    def test_after_a_rebuild_all_weights(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, every=50, anchor_every=40)
        trainer.publish()
        follower.once()
        engine = Engine(follower)
        engine.take(taken(follower))
        trainer.publish(90)
        trainer.close()
        follower.once()
        assert bucket.count("read_into", "anchors/81/") == 1
        update = taken(follower)
        assert (update.version, update.patch) == (91, None)
        engine.take(update)
        assert bits_of(engine.weights) == trainer.bits[91]

    def test_after_a_restart_all_weights(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        """Nobody knows what the engine holds."""
        trainer.publish(2)
        for _ in range(2):
            with Follower(bucket, into=into) as follower:
                follower.once()
                update = taken(follower)
                assert (update.version, update.patch) == (2, None)


class TestCheckpoint:
    def test_is_what_is_held(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish(2)
        follower.once()
        path = follower.checkpoint()
        assert path == (into / "current").resolve()
        assert bits_of(path) == trainer.bits[2]
        assert follower.checkpoint() == path

    def test_of_nothing(self, follower: Follower) -> None:
        with pytest.raises(WeightwireError, match="holds nothing yet") as caught:
            follower.checkpoint()
        assert caught.value.hint

    def test_is_where_the_next_patch_starts(self, trainer: Trainer, follower: Follower) -> None:
        """Though the follower has gone on since it said that all weights must be loaded."""
        engine = Engine(follower)
        trainer.publish()
        follower.once()
        assert taken(follower).patch is None
        trainer.publish(2)
        follower.once()
        engine.load()
        assert bits_of(engine.weights) == trainer.bits[3]
        assert follower.take() is None
        trainer.publish()
        follower.once()
        engine.take(taken(follower))
        assert bits_of(engine.weights) == trainer.bits[4]

    def test_for_others_takes_nothing_from_the_engine(self, trainer: Trainer, follower: Follower) -> None:
        engine = Engine(follower)
        trainer.publish()
        follower.once()
        engine.take(taken(follower))
        for _ in range(3):
            trainer.publish()
            follower.once()
            follower.checkpoint()
        engine.take(taken(follower))
        assert bits_of(engine.weights) == trainer.bits[4]

    def test_is_never_changed(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        """Whoever has it open keeps the version that it was."""
        trainer.publish()
        follower.once()
        with (into / "current" / "model.safetensors").open("rb") as file:
            before = file.read()
            trainer.publish(3)
            follower.once()
            file.seek(0)
            assert file.read() == before
        assert current(into) == 4

    def test_stays_until_it_has_been_loaded(self, trainer: Trainer, follower: Follower) -> None:
        """However fast versions come."""
        trainer.publish()
        follower.once()
        taken(follower)
        path = follower.checkpoint()
        trainer.publish()
        follower.once()
        assert bits_of(path) == trainer.bits[1]

    def test_is_there_after_close(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        with Follower(bucket, into=into, on_event=ignore) as follower:
            follower.once()
            path = follower.checkpoint()
            trainer.publish()
            follower.once()
        assert bits_of(path) == trainer.bits[1]
        assert current(into) == 2

    def test_can_be_borrowed_by_several(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        with follower.borrow_checkpoint() as first:
            trainer.publish()
            follower.once()
            with follower.borrow_checkpoint() as second:
                trainer.publish()
                follower.once()
                follower.checkpoint()
                assert bits_of(second) == trainer.bits[2]
            assert not second.exists()
            assert bits_of(first) == trainer.bits[1]
        assert not first.exists()

    def test_that_is_borrowed_is_where_the_next_patch_starts(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        assert taken(follower).patch is None
        trainer.publish()
        follower.once()
        with follower.borrow_checkpoint() as path:
            assert bits_of(path) == trainer.bits[2]
        assert follower.take() is None

    def test_of_nothing_cannot_be_borrowed(self, follower: Follower) -> None:
        with pytest.raises(WeightwireError, match="holds nothing yet"), follower.borrow_checkpoint():
            pass

    def test_of_a_replica_whose_bucket_is_away(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish(2)
        with Follower(bucket, into=into) as follower:
            follower.once()
        bucket.trouble("get", "", failed, ALWAYS)
        with Follower(bucket, into=into) as follower:
            with pytest.raises(Unavailable):
                follower.once()
            assert bits_of(follower.checkpoint()) == trainer.bits[2]


class TestClose:
    def test_leaves_the_version_held(
        self, bucket: Troubled, trainer: Trainer, into: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a large replica, for which `current` is not made each time."""
        monkeypatch.setattr(replica_updater, "_SMALL", 0)
        trainer.publish()
        with Follower(bucket, into=into) as follower:
            follower.once()
            follower.checkpoint()
            trainer.publish(2)
            follower.once()
            assert (follower.version, current(into)) == (3, 1)
        assert current(into) == 3
        assert bits_of(into / "current") == trainer.bits[3]

    def test_ends_the_lease(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        for start in (Follower.once, Follower.start):
            with Follower(bucket, into=into, name="rollout-1", on_event=ignore) as follower:
                start(follower)
                until(lambda: beat_in(bucket, "rollout-1").lease > 0)
            assert beat_in(bucket, "rollout-1").stopped

    @pytest.mark.parametrize("what", [failed, denied, slow(600)])
    def test_without_a_last_heartbeat(
        self,
        bucket: Troubled,
        trainer: Trainer,
        follower: Follower,
        monkeypatch: pytest.MonkeyPatch,
        what: Trouble,
    ) -> None:
        """It takes a bounded time, and is no error; the lease runs out."""
        monkeypatch.setattr("weightwire.follower.follower._LAST_WORDS", 0.05)
        trainer.publish()
        follower.once()
        bucket.trouble("put", "replicas/", what, ALWAYS)
        follower.close()
        assert beat_in(bucket, "rollout-1").lease > 0

    def test_twice(self, follower: Follower) -> None:
        follower.close()
        follower.close()

    def test_lets_go_of_the_replica(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        first = Follower(bucket, into=into)
        first.start()
        until(lambda: first.version == 1)
        first.close()
        with Follower(bucket, into=into) as second:
            assert second.once() == 1

    def test_leaves_no_thread(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        with Follower(bucket, into=into) as follower:
            next(follower.watch(timeout=20))
            assert "weightwire-follower" in {thread.name for thread in threading.enumerate()}
        assert "weightwire-follower" not in {thread.name for thread in threading.enumerate()}

    def test_while_it_follows(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        """At any moment: what is left is whole."""
        trainer.publish(30)
        for pause in (0.0, 0.005, 0.01, 0.02):
            with Follower(bucket, into=into, threads=1, on_event=ignore) as follower:
                follower.start()
                time.sleep(pause)
            if (into / "current").exists():
                assert bits_of(into / "current") == trainer.bits[current(into)]
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 30
            check(follower, trainer.bits, 30)


class TestStart:
    def test_follows_in_the_background(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.start()
        follower.start()
        for version in range(2, 5):
            trainer.publish()
            until(lambda version=version: follower.version == version)  # type: ignore[misc]
        until(lambda: settled(follower, 4))
        check(follower, trainer.bits, 4)
        assert follower.head == 4

    def test_and_once(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        """Whoever cannot wait for the background."""
        trainer.publish()
        bucket.trouble("read_into", "", slow(0.05), ALWAYS)
        follower.start()
        for _ in range(3):
            version = trainer.publish(2)
            follower.wake()
            assert follower.once() == version
        assert follower.trouble == ""


class TestWake:
    @pytest.fixture(autouse=True)
    def _slowly(self, bucket: Troubled) -> None:
        bucket.poll_interval = 30.0

    def test_looks_at_once(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.start()
        until(lambda: follower.version == 1)
        trainer.publish()
        time.sleep(0.05)
        assert follower.version == 1
        follower.wake()
        until(lambda: follower.version == 2, 10)

    def test_by_the_publisher(self, bucket: Troubled, follower: Follower) -> None:
        with WakeupServer("0", wake=follower.wake, status=dict, metrics=bytes) as door:
            trainer = Trainer(bucket.inner, notify=[f"http://{door.address}/"])
            trainer.publish()
            follower.start()
            until(lambda: follower.version == 1)
            for version in (2, 3):
                trainer.publish()
                until(lambda version=version: follower.version == version, 10)  # type: ignore[misc]
            trainer.close()


# --- what can be wrong -------------------------------------------------------------------------------------------

HELD, BAD = 3, 4  # the version that is held, and the one with which something is wrong


@dataclass(frozen=True)
class Harm:
    """Something that happens to version 4, and what a follower says of it."""

    name: str
    do: Callable[[Troubled], None]
    error: type[WeightwireError]
    says: str

    def __str__(self) -> str:
        return self.name


def rewritten(**fields: Any) -> Callable[[Troubled], None]:
    """A commit with other fields."""

    def do(bucket: Troubled) -> None:
        commit = msgspec.structs.replace(commit_in(bucket, BAD), **fields)
        write(bucket, commit_path(BAD), seal(commit).data)

    return do


def replaced(change: Callable[[bytes], bytes]) -> Callable[[Troubled], None]:
    """A commit of other bytes."""
    return lambda bucket: write(bucket, commit_path(BAD), change(read(bucket, commit_path(BAD))))


def spoilt(change: Callable[[bytes], bytes]) -> Callable[[Troubled], None]:
    """A delta of other bytes."""

    def do(bucket: Troubled) -> None:
        [path] = paths(bucket, f"deltas/{BAD}/")
        write(bucket, path, change(read(bucket, path)))

    return do


def of_other_weights(bucket: Troubled) -> None:
    """A commit that names a good delta, with its hash: but one for other weights."""
    old, new = initial(), initial()
    old["norm"][:] = 17
    data = diff(old, new).to_bytes()
    [file] = commit_in(bucket, BAD).files
    sha256 = hashlib.sha256(data).hexdigest()
    write(bucket, data_path("delta", BAD, 2, 0, sha256), data)
    other = msgspec.structs.replace(file, path=data_path("delta", BAD, 2, 0, sha256), size=len(data), sha256=sha256)
    rewritten(files=(other,))(bucket)


def repeated(bucket: Troubled) -> None:
    write(bucket, commit_path(BAD), read(bucket, commit_path(HELD)))


def swapped(bucket: Troubled) -> None:
    """Another good delta in the place of one."""
    [other] = paths(bucket, f"deltas/{HELD}/")
    [path] = paths(bucket, f"deltas/{BAD}/")
    write(bucket, path, read(bucket, other).ljust(len(read(bucket, path)), b" "))


def without_rights(bucket: Troubled) -> None:
    bucket.trouble("get find list read_into", "", denied, ALWAYS)


def out_of_reach(bucket: Troubled) -> None:
    bucket.trouble("get find list read_into", "", failed, ALWAYS)


HARMS = [
    Harm("no JSON", replaced(lambda data: b"hello"), BrokenChain, "it is no JSON"),
    Harm("cut off", replaced(lambda data: data[:-9]), BrokenChain, "cannot be read"),
    Harm(
        "a newer format",
        replaced(lambda data: data.replace(b"weightwire/1", b"weightwire/2")),
        UnsupportedFormat,
        "has format version 2",
    ),
    Harm("another parent", rewritten(parent=sha("other")), BrokenChain, "its parent hash is another"),
    Harm("another state before", rewritten(before=sha("other")), BrokenChain, "starts from another state"),
    Harm("the version before", repeated, BrokenChain, "says it is version 3"),
    Harm("another run", rewritten(run=token("other")), ForeignRun, "belongs to run"),
    Harm("an epoch that is over", rewritten(epoch=1), BrokenChain, "from a publisher that had been replaced"),
    Harm("an epoch without a fence", rewritten(epoch=7), BrokenChain, "must begin with a fence"),
    Harm("another state after", rewritten(after=sha("other")), CorruptDelta, "the result has state"),
    Harm("a delta of other weights", of_other_weights, WrongBase, "was made for"),
    Harm("a delta cut off", spoilt(lambda data: data[:-1]), BucketError, "cut off|shorter"),
    Harm("a bit of a delta", spoilt(lambda data: data[:-1] + bytes([data[-1] ^ 1])), CorruptDelta, "its bytes are not"),
    Harm("another delta", swapped, CorruptDelta, "its bytes are not those that were published"),
    Harm("a delta that is gone", lambda bucket: remove(bucket, f"deltas/{BAD}/"), DataGone, "no anchor leads"),
    Harm("no network", out_of_reach, Unavailable, "the request failed"),
    Harm("no rights", without_rights, PermissionDenied, "may not do that"),
]


@cache
def a_run() -> tuple[dict[str, bytes], Mapping[int, Bits]]:
    """Four versions, two of them by a second publisher: what is in the bucket, and the bits of each."""
    bucket = in_memory()
    trainer = Trainer(bucket.inner)
    trainer.publish()
    trainer.restart()
    trainer.publish(2)
    trainer.close()
    return copy_of(bucket), trainer.bits


@pytest.mark.parametrize("harm", HARMS, ids=str)
class TestBadInput:
    """The follower holds version 3; then something happens to version 4."""

    @pytest.fixture(autouse=True)
    def _held(self, bucket: Troubled, follower: Follower, harm: Harm) -> None:
        objects = a_run()[0]
        put_back(bucket, {path: data for path, data in objects.items() if path not in (commit_path(BAD), HEAD)})
        assert follower.once() == HELD
        put_back(bucket, objects)
        harm.do(bucket)

    def test_is_refused(self, bucket: Troubled, follower: Follower, into: Path, harm: Harm) -> None:
        objects, bits = a_run()
        for _ in range(2):
            with pytest.raises(harm.error, match=harm.says) as caught:
                follower.once()
            check(follower, bits, HELD)
        if harm.do not in (out_of_reach, without_rights):  # what is said of these is up to the bucket
            assert caught.value.hint
            assert bucket.url in caught.value.message

        follower.close()
        with Follower(bucket, into=into, on_event=ignore) as again:
            with pytest.raises(harm.error):
                again.once()
            assert current(into) == HELD
            assert bits_of(again.checkpoint()) == bits[HELD]
            put_back(bucket, objects)
            assert again.once() == BAD
            check(again, bits, BAD)

    def test_is_said_once_and_got_over(
        self, bucket: Troubled, follower: Follower, heard: list[Event], harm: Harm
    ) -> None:
        objects, bits = a_run()
        heard.clear()
        follower.start()
        until(lambda: follower.trouble)
        said = follower.trouble
        for _ in range(3):
            asked = len(bucket.asked)
            follower.wake()
            until(lambda asked=asked: len(bucket.asked) > asked)  # type: ignore[misc]
        check(follower, bits, HELD)
        assert follower.trouble == said
        [warning] = warnings(heard)
        assert warning.startswith(said)

        put_back(bucket, objects)
        until(lambda: settled(follower, BAD))
        check(follower, bits, BAD)
        assert [event.message for event in heard if event.stage == "recovered"] == [f"over: {said}"]


def test_a_bucket_that_was_deleted(bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
    """Not only the run in it."""

    async def missing(act: Act) -> NoReturn:
        raise NoBucket("there is no such bucket")

    trainer.publish()
    follower.once()
    bucket.trouble("get find list read_into", "", missing, ALWAYS)
    with pytest.raises(NoBucket):
        follower.once()


def test_a_delta_that_would_fill_the_disk(bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
    """By what its commit says."""
    trainer.publish()
    follower.once()
    trainer.publish()
    [file] = commit_in(bucket, 2).files
    commit = msgspec.structs.replace(commit_in(bucket, 2), files=(msgspec.structs.replace(file, size=2**50),))
    write(bucket, commit_path(2), seal(commit).data)
    with pytest.raises(BucketError, match=file.path) as caught:
        follower.once()
    assert caught.value.hint
    check(follower, trainer.bits, 1)


def test_what_is_good_before_something_bad_is_taken(bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
    trainer.publish()
    follower.once()
    trainer.publish(5)
    write(bucket, commit_path(4), b"hello")
    with pytest.raises(BrokenChain):
        follower.once()
    assert follower.version == 3
    assert bits_of(follower.replica.weights) == trainer.bits[3]
    assert bits_of(follower.checkpoint()) == trainer.bits[3]


class TestDataThatIsGone:
    def test_is_no_matter_where_an_anchor_leads_past_it(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=4)
        trainer.publish()
        follower.once()
        trainer.publish(6)
        trainer.close()
        remove(bucket, "deltas/3/")
        assert follower.once() == 7
        check(follower, trainer.bits, 7)
        assert bucket.count("read_into", "anchors/5/") == 1

    def test_from_nothing(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=4)
        trainer.publish(10)
        trainer.close()
        remove(bucket, "anchors/9/")
        assert follower.once() == 10
        check(follower, trainer.bits, 10)

    def test_is_waited_for(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        """An anchor that comes later is as good."""
        trainer.publish()
        follower.once()
        trainer.publish(2)
        remove(bucket, "deltas/2/")
        with pytest.raises(DataGone) as caught:
            follower.once()
        assert str(caught.value.hint).startswith("publish a new anchor, or ")
        check(follower, trainer.bits, 1)
        trainer.close()
        trainer._settings |= {"anchor_every": 1, "published": trainer.weights}
        trainer.restart()
        version = trainer.publish()
        trainer.close()
        assert follower.once() == version
        check(follower, trainer.bits, version)

    def test_of_all_versions(self, bucket: Troubled, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish(3)
        remove(bucket, "anchors/")
        with pytest.raises(DataGone, match="no anchor leads"):
            follower.once()
        assert not (into / "current").exists()
        assert follower.version is None


def missing_is_denied(bucket: Troubled) -> None:
    """As S3 answers to a key that may not list."""

    async def get(act: Act) -> Any:
        try:
            return await act()
        except NotFound as problem:
            raise PermissionDenied("403") from problem

    async def find(act: Act) -> Any:
        found = await act()
        if found is None:
            raise PermissionDenied("403")
        return found

    bucket.trouble("get read_into", "", get, ALWAYS)
    bucket.trouble("find", "", find, ALWAYS)
    bucket.trouble("list", "", denied, ALWAYS)


class TestAKeyThatMayNotList:
    def test_is_enough(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        missing_is_denied(bucket)
        trainer.publish(3)
        assert follower.once() == 3
        assert follower.once() == 3
        for versions in (1, 2, 70):
            version = trainer.publish(versions)
            assert follower.once() == version
            check(follower, trainer.bits, version)

    def test_finds_the_newest_anchor(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=5)
        trainer.publish(14)
        trainer.close()
        assert json.loads(read(bucket, HEAD))["anchor"]
        missing_is_denied(bucket)
        assert follower.once() == 14
        check(follower, trainer.bits, 14)
        assert bucket.count("read_into", "anchors/11/") == 1

    def test_gets_past_data_that_is_gone(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=4)
        trainer.publish()
        follower.once()
        trainer.publish(6)
        trainer.close()
        remove(bucket, "deltas/3/")
        missing_is_denied(bucket)
        assert follower.once() == 7
        check(follower, trainer.bits, 7)

    def test_is_told_from_one_that_may_nothing(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        bucket.trouble("get find list read_into", "", denied, ALWAYS)
        with pytest.raises(PermissionDenied):
            follower.once()


class TestABucketThatWasRolledBack:
    def roll_back(self, bucket: Troubled, version: int) -> None:
        for path in paths(bucket, "commits/"):
            if path >= commit_path(version):
                remove(bucket, path)

    def test_does_not_take_the_replica_back(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish(4)
        with Follower(bucket, into=into) as follower:
            follower.once()
        before = copy_of(bucket)
        self.roll_back(bucket, 3)
        with Follower(bucket, into=into) as follower:
            with pytest.raises(BrokenChain, match="has no version 4, which this replica holds; it stays") as caught:
                follower.once()
            assert caught.value.hint == "the bucket was rolled back or replaced: follow it into a new directory"
            assert bits_of(follower.checkpoint()) == trainer.bits[4]
            put_back(bucket, before)
            assert follower.once() == 4
            check(follower, trainer.bits, 4)

    def test_and_went_another_way(self, bucket: Troubled, trainer: Trainer, into: Path, heard: list[Event]) -> None:
        trainer.publish(4)
        with Follower(bucket, into=into) as follower:
            follower.once()
        trainer.close()
        self.roll_back(bucket, 3)
        other = Trainer(bucket.inner)
        other.publish(3)
        other.close()
        with Follower(bucket, into=into, on_event=heard.append) as follower:
            with pytest.raises(BrokenChain, match="has another version 4 than this replica; it stays") as caught:
                follower.once()
            assert caught.value.hint
            follower.start()
            until(lambda: follower.trouble)
            assert current(into) == 4
            assert bits_of(follower.checkpoint()) == trainer.bits[4]
        assert len(warnings(heard)) == 1
        with Follower(bucket, into=into.with_name("another")) as follower:
            assert follower.once() == 6
            check(follower, other.bits, 6)

    def test_while_it_is_followed(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        """What comes then does not follow from what is held."""
        trainer.publish(4)
        follower.once()
        trainer.close()
        self.roll_back(bucket, 3)
        other = Trainer(bucket.inner)
        other.publish(3)
        other.close()
        with pytest.raises(BrokenChain, match="its parent hash is another"):
            follower.once()
        check(follower, trainer.bits, 4)

    def test_and_has_an_anchor_further_on(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        trainer.publish(4)
        follower.once()
        trainer.close()
        self.roll_back(bucket, 3)
        other = Trainer(bucket.inner, anchor_every=10)
        other.publish(80)
        other.close()
        with pytest.raises(BrokenChain):
            follower.once()
        check(follower, trainer.bits, 4)


class TestAnotherRun:
    @pytest.fixture
    def other(self, bucket: Troubled) -> Iterator[Trainer]:
        other = Trainer(bucket.inner)
        other.weights["norm"][:] = 17
        yield other
        other.close()

    def test_under_the_url_is_named_and_followed(
        self, bucket: Troubled, trainer: Trainer, other: Trainer, into: Path, heard: list[Event]
    ) -> None:
        trainer.publish(4)
        with Follower(bucket, into=into) as follower:
            follower.once()
        names = [json.loads(read(bucket, RUN))["run"][:12]]
        trainer.close()
        remove(bucket, "")
        other.publish(2)
        names.append(json.loads(read(bucket, RUN))["run"][:12])
        with Follower(bucket, into=into, on_event=heard.append) as follower:
            assert follower.once() == 2
            check(follower, other.bits, 2)
            update = taken(follower)
            assert update.patch is None
        assert warnings(heard) == [f"this replica is of run {names[0]}; rebuilding it for {names[1]}"]

    def test_that_cannot_be_fetched_leaves_the_replica_as_it_is(
        self, bucket: Troubled, trainer: Trainer, other: Trainer, into: Path
    ) -> None:
        trainer.publish(4)
        with Follower(bucket, into=into) as follower:
            follower.once()
        trainer.close()
        remove(bucket, "")
        other.publish(2)
        bucket.trouble("read_into", "", failed, ALWAYS)
        with Follower(bucket, into=into, on_event=ignore) as follower:
            with pytest.raises(Unavailable):
                follower.once()
            assert current(into) == 4
            assert follower.version is None
            bucket.calm()
            assert follower.once() == 2
            check(follower, other.bits, 2)

    def test_while_it_is_followed(
        self, bucket: Troubled, trainer: Trainer, other: Trainer, follower: Follower, into: Path
    ) -> None:
        trainer.publish(4)
        follower.once()
        trainer.close()
        remove(bucket, "")
        other.publish(6)
        with pytest.raises(ForeignRun, match="belongs to run"):
            follower.once()
        check(follower, trainer.bits, 4)
        follower.close()
        with Follower(bucket, into=into, on_event=ignore) as again:
            assert again.once() == 6
            check(again, other.bits, 6)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can be longer than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestAFullDisk:
    def test_when_a_version_is_applied(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        trainer.publish(2)
        with full_disk(100):
            with pytest.raises(WeightwireError, match="File too large") as caught:
                follower.once()
            assert caught.value.hint
        check(follower, trainer.bits, 1)
        assert follower.once() == 3
        check(follower, trainer.bits, 3)

    def test_when_there_is_nothing_yet(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish(2)
        with full_disk(50_000):
            with pytest.raises(WeightwireError, match="File too large") as caught:
                follower.once()
            assert caught.value.hint
        assert not (into / "current").exists()
        assert follower.once() == 2
        check(follower, trainer.bits, 2)

    def test_when_current_is_made(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        trainer.publish()
        follower.once()
        trainer.publish(2)
        with full_disk(50_000):
            with pytest.raises(ReplicaError, match="File too large") as caught:
                follower.once()
            assert caught.value.hint == "free some space, and go on"
            assert current(into) == 1
        trainer.publish()
        assert follower.once() == 4
        check(follower, trainer.bits, 4)

    def test_that_has_room_again_makes_current(self, trainer: Trainer, follower: Follower, into: Path) -> None:
        """Without waiting for the next version."""
        trainer.publish()
        follower.once()
        trainer.publish()
        with full_disk(50_000), pytest.raises(ReplicaError):
            follower.once()
        assert follower.once() == 2
        assert current(into) == 2

    def test_is_got_over(self, trainer: Trainer, follower: Follower, heard: list[Event]) -> None:
        trainer.publish()
        follower.start()
        until(lambda: settled(follower, 1))
        with full_disk(100):
            trainer.publish()
            until(lambda: follower.trouble)
            time.sleep(0.05)
            assert len(warnings(heard)) == 1
        until(lambda: settled(follower, 2))
        check(follower, trainer.bits, 2)


class TestSideFiles:
    FILES = {"config.json": b'{"model_type": "tiny"}', "tokenizer/vocab.txt": b"a\nb\n"}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _run(self, bucket: Troubled) -> None:
        trainer = Trainer(bucket.inner, files=self.FILES)
        trainer.publish(2)
        trainer.close()

    def test_arrive(self, follower: Follower, into: Path) -> None:
        follower.once()
        for name, content in self.FILES.items():
            assert (into / "current" / name).read_bytes() == content

    def test_that_were_tampered_with(self, bucket: Troubled, follower: Follower, into: Path) -> None:
        before = copy_of(bucket)
        [path] = [path for path in paths(bucket, "files/") if path.endswith("config.json")]
        write(bucket, path, b'{"model_type": "TINY"}')
        with pytest.raises(CorruptDelta, match=r"config.json: its bytes are not those that were published") as caught:
            follower.once()
        assert caught.value.hint
        assert not (into / "current").exists()
        put_back(bucket, before)
        assert follower.once() == 2
        assert (into / "current" / "config.json").read_bytes() == self.FILES["config.json"]

    def test_that_are_gone(self, bucket: Troubled, follower: Follower, into: Path) -> None:
        before = copy_of(bucket)
        remove(bucket, "files/")
        with pytest.raises(WeightwireError, match=r"files/.*is not there|files/.*not found") as caught:
            follower.once()
        assert "anchor" not in str(caught.value)
        assert caught.value.hint
        assert not (into / "current").exists()
        put_back(bucket, before)
        assert follower.once() == 2

    @pytest.mark.parametrize(
        "name",
        ["../../escape", "/escape", "a/../../escape", "..", "a//b", ".hidden", "a\\b", "model.safetensors", ""],
    )
    def test_of_hostile_names(
        self, bucket: Troubled, follower: Follower, into: Path, tmp_path: Path, name: str
    ) -> None:
        run = json.loads(read(bucket, RUN))
        run["files"][0]["name"] = name
        write(bucket, RUN, json.dumps(run).encode())
        with pytest.raises(BrokenChain, match=r"run.json: cannot be read") as caught:
            follower.once()
        assert caught.value.hint
        assert {path.name for path in tmp_path.iterdir()} == {"replica"}
        assert {path.name for path in into.iterdir()} <= {"lock", "name"}

    @pytest.mark.parametrize("path", ["../../commits", "commits/00000000000000000000.json", "files/x/y", "run.json"])
    def test_of_hostile_paths(self, bucket: Troubled, follower: Follower, path: str) -> None:
        run = json.loads(read(bucket, RUN))
        run["files"][0]["path"] = path
        write(bucket, RUN, json.dumps(run).encode())
        with pytest.raises(BrokenChain, match="no path of a side file"):
            follower.once()

    def test_never_stand_in_for_what_is_ours(self, bucket: Troubled, follower: Follower, into: Path) -> None:
        run = json.loads(read(bucket, RUN))
        run["files"][0]["name"] = "weightwire.json"
        write(bucket, RUN, json.dumps(run).encode())
        follower.once()
        assert current(into) == 2


class TestHeartbeat:
    def test_says_how_far_it_is(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        began = time.time()
        for version in (1, 2):
            trainer.publish()
            follower.once()
            beat = beat_in(bucket, "rollout-1")
            assert (beat.name, beat.version, beat.head, beat.trouble) == ("rollout-1", version, version, "")
            assert beat.run == json.loads(read(bucket, RUN))["run"]
            assert began <= beat.time <= time.time()
            assert beat.lease >= 10
            assert {"discover", "apply"} <= set(beat.stages)
            assert beat.stages["apply"].bytes == commit_in(bucket, version).nbytes

    def test_tells_of_the_last_versions_also_after_a_restart(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, into: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(3):
            trainer.publish()
            follower.once()
        told = beat_in(bucket, "rollout-1").recent
        assert [one.version for one in told] == [1, 2, 3]
        for one in told:
            stages = one.stages
            assert stages["fetch"].bytes == stages["apply"].bytes == commit_in(bucket, one.version).nbytes
            assert 0 < stages["discover"].at <= stages["fetch"].at <= stages["verify"].at <= stages["apply"].at
        follower.close()
        trainer.publish()
        with Follower(bucket, into=into, name="rollout-1", on_event=ignore) as again:
            again.once()
            assert beat_in(bucket, "rollout-1").recent[:3] == told
            assert beat_in(bucket, "rollout-1").recent[3].version == 4
            monkeypatch.setattr(heartbeat, "_RECENT", 2)
            trainer.publish()
            again.once()
            assert [one.version for one in beat_in(bucket, "rollout-1").recent] == [4, 5]

    def test_that_another_wrote_in_its_name_pushes_nothing_out(
        self, bucket: Troubled, trainer: Trainer, follower: Follower
    ) -> None:
        trainer.publish()
        run = json.loads(read(bucket, RUN))["run"]
        recent = tuple(PassedVersion(10**15 + number, {}) for number in range(100))
        forged = Heartbeat(run=run, name="rollout-1", version=1, head=1, lease=60.0, recent=recent)
        write(bucket, heartbeat_path("rollout-1"), seal(forged).data)
        follower.once()
        assert [one.version for one in beat_in(bucket, "rollout-1").recent] == [1]

    def test_is_what_the_publisher_waits_for(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.start()
        assert trainer.publisher.wait(replicas=1, timeout=20) == 1
        trainer.publish()
        assert trainer.publisher.wait(replicas=1, timeout=20) == 2

    def test_that_is_denied_stops_nobody(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, heard: list[Event]
    ) -> None:
        bucket.trouble("put", "replicas/", denied, ALWAYS)
        for version in (1, 2):
            trainer.publish()
            assert follower.once() == version
            check(follower, trainer.bits, version)
        assert warnings(heard) == ["this key may not write, so nobody sees how far this follower is"]
        assert not paths(bucket, "replicas/")
        bucket.calm()
        follower.once()
        assert beat_in(bucket, "rollout-1").version == 2
