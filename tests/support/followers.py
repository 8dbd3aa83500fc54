"""A trainer that publishes into a bucket, direct access to the bucket, and checks of its followers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from support.clocked_bucket import finish_background
from support.failing_bucket import Troubled
from support.samples import base as bits_for
from support.small_run import Bits, bits_of
from weightwire import Follower, Publisher, Update, digest, patch
from weightwire.bucket.bucket import Bucket
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import commit_path, heartbeat_path
from weightwire.chain.records import Commit, Heartbeat, back_versions, seal, unseal
from weightwire.errors import WeightwireError
from weightwire.telemetry.events import Event
from weightwire.weights import DTYPES

Arrays = dict[str, Any]
ALWAYS = NEVER = 10**9


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


def cancel() -> None:
    raise WeightwireError("cancelled")


class Trainer:
    """A publisher, and the bits of every version it has published."""

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
        """Trains and publishes some steps, with their anchors. Returns the last version."""
        for _ in range(versions):
            self._steps += 1
            train(self.weights, self._steps, self._every)
            version = self.publisher.publish(self.weights, step=self._steps, metrics={"reward": 0.5}).wait()
            finish_background(self.publisher)
            self.bits[version] = bits_of(self.weights)
        return version

    def close(self) -> None:
        """Closes the publisher, which completes pending anchor uploads."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def restart(self) -> int:
        """Starts another publisher and cancels its first version. Returns the version of its fence."""
        self.close()
        with pytest.raises(WeightwireError, match="cancelled"):
            self.publisher.publish(self.weights, check=cancel).wait()
        version = self.publisher.version
        assert version is not None
        self.bits[version] = self.bits[version - 1]
        return version


# --- direct access to the bucket ---------------------------------------------------------------------------------


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


def last_commit(bucket: Troubled) -> Commit:
    return commit_in(bucket, len(paths(bucket, "commits/")) - 1)


def append_version(bucket: Troubled, key: PrivateKey | None, **fields: Any) -> None:
    """Adds a next version that changes nothing, signed with any key."""
    before = last_commit(bucket)
    version = before.version + 1
    hashes = [hashlib.sha256(read(bucket, commit_path(one))).hexdigest() for one in range(version)]
    given: dict[str, Any] = {"version": version, "kind": "delta", "parent": hashes[-1], "before": before.after}
    given |= {"back": tuple(hashes[one] for one in back_versions(version)), "files": (), "keys": (), "changed": 0}
    made = msgspec.structs.replace(before, **given | {"keys_from": before.next_keys_from} | fields)
    write(bucket, commit_path(version), seal(made, key).data)


def beat_in(bucket: Troubled, name: str) -> Heartbeat:
    return unseal(read(bucket, heartbeat_path(name)), Heartbeat, "").record


def copy_of(bucket: Troubled) -> dict[str, bytes]:
    return asyncio.run(_read_all(bucket.inner))


async def _read_all(bucket: Bucket) -> dict[str, bytes]:
    return {one.path: await bucket.get(one.path) for one in await bucket.list("")}


def put_back(bucket: Troubled, objects: dict[str, bytes]) -> None:
    """Restores the objects of a bucket. Writes only those that changed."""

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


def warnings(heard: list[Event]) -> list[str]:
    return [event.message for event in heard if event.stage == "warning"]


def until(reached: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"the condition was not met within {seconds} s"
        time.sleep(0.002)


def current(into: Path) -> int:
    """The version in `current`, whose weights must match its digest."""
    about = json.loads((into / "current" / "weightwire.json").read_bytes())
    loaded = safetensors.numpy.load_file(into / "current" / "model.safetensors")
    assert digest(loaded).hex == about["state"]
    return int(about["version"])


def check(follower: Follower, bits: Mapping[int, Bits], version: int) -> None:
    """Checks that a follower holds a version bit for bit and has a checkpoint of it ready."""
    assert follower.version == version
    assert bits_of(follower.replica.weights) == bits[version]
    assert current(follower.replica.directory) == version
    assert bits_of(follower.replica.directory / "current") == bits[version]


def settled(follower: Follower, version: int) -> bool:
    """Whether the follower has reached a version without trouble. Wakes it first: after failures it polls rarely."""
    follower.wake()
    if follower.version != version or follower.trouble:
        return False
    return (follower.replica.directory / "current").resolve().name.startswith(f"{version}-")


class Engine:
    """Takes updates like an inference server."""

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


def lose_weights(into: Path) -> None:
    """Deletes the weights of a replica, but not its memory of what it has seen."""
    for name in ("works", "checkpoints"):
        shutil.rmtree(into / name)
    for name in ("work", "current"):
        (into / name).unlink()
