"""Runs of very different sizes for tests of the page: empty, fenced, one version, 40 replicas, 2,000 versions.

The records are made by hand, so a run of any size takes less than a second to build. The deltas are real.
`python tests/support/page_runs.py DIR` exports every run and takes a screenshot of it: light, dark and on a phone.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from support.chromium import DESKTOP, PHONE, Chromium, chromium_path
from support.clocked_bucket import Clocked, clocked, run
from support.records import RUN_ID, a_run, grow, shortcut_to, token
from weightwire.chain.record_paths import RUN, commit_path, data_path, epoch_path, heartbeat_path
from weightwire.chain.records import (
    Commit,
    DataFile,
    Epoch,
    Heartbeat,
    PassedVersion,
    Sealed,
    StageTiming,
    seal,
    shortcut_path,
)
from weightwire.delta.maker import diff
from weightwire.page.document import exported
from weightwire.page.run_reader import RunReader
from weightwire.page.run_view import RunView
from weightwire.system.runtime import Runtime

__all__ = ["NOW", "RUNS", "empty_run", "fenced_run", "fleet_run", "long_run", "page_of", "short_run", "view_of"]

NOW = 1.79e9
_EVERY = 6.0  # seconds from one version to the next
_LAYERS, _SHAPE = 16, (64, 64)
_TENSORS = ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.weight" for n in range(_LAYERS)), "lm_head.weight"]


class Frozen(Runtime):
    """A clock that stands still at NOW."""

    def time(self) -> float:
        return NOW


@cache
def _delta(number: int) -> bytes:
    random = np.random.default_rng(number)
    before = {name: random.normal(0, 0.02, _SHAPE).astype(np.float16) for name in _TENSORS}
    after = {name: array.copy() for name, array in before.items()}
    for index, array in enumerate(after.values()):
        array.view(np.uint16).reshape(-1)[number % 7 :: 30 + 9 * index] ^= 1
    return diff(before, after).to_bytes()


def _file(kind: str, version: int, data: bytes) -> DataFile:
    sha256 = hashlib.sha256(data).hexdigest()
    return DataFile(data_path(kind, version, 1, 0, sha256), len(data), sha256)


def _fields(version: int, last: int) -> dict[str, Any]:
    """The fields of a commit that a training run fills."""
    at = NOW - 3.0 - (last - version) * _EVERY
    encode, upload = 0.4 + version % 3 / 10, 0.3 + version % 5 / 20
    noise = float(np.random.default_rng(version).normal(0, 0.04))
    return {
        "time": at,
        "step": version - 1 if version else None,
        "metrics": {"reward": 0.2 + 0.5 * version / (last + 20) + noise, "loss": 2 / (version + 2)} if version else {},
        "stages": {
            "capture": StageTiming(0.05, 10, at - upload - encode),
            "encode": StageTiming(encode, 10, at - upload),
            "upload": StageTiming(upload, 10, at),
        },
    }


def _chain(last: int, bucket: Clocked) -> None:
    """Versions 0 to `last` in a bucket: a fence, an anchor, deltas, and an anchor beside every 50th delta."""
    first = a_run(time=NOW - 3600, tensors=dict.fromkeys(_TENSORS, ("F16", _SHAPE)))
    publisher = Epoch(run=RUN_ID, epoch=1, write_id=token("epoch"), time=NOW - 3600, host="trainer-0")
    objects = {RUN: seal(first).data, epoch_path(1): seal(publisher).data}
    commits: list[Sealed[Commit]] = []
    for version in range(last + 1):
        fields = _fields(version, last)
        if version == 0:
            grow(commits, "fence", **{**fields, "stages": {}, "parent": seal(first).sha256})
        elif version == 1:
            grow(commits, "anchor", 2 * len(_TENSORS) * 64 * 64, **fields)
        else:
            data = _delta(version % 8)
            file = _file("delta", version, data)
            grow(commits, "delta", files=(file,), changed=900 + version % 400, **fields)
            objects[file.path] = data
        objects[commit_path(version)] = commits[-1].data
        if version and version % 50 == 0:
            shortcut = shortcut_to(commits[-1], 140_000)
            objects |= {shortcut_path(seal(shortcut)): seal(shortcut).data, shortcut.files[0].path: b""}
    run(_write(bucket, objects))


async def _write(bucket: Clocked, objects: dict[str, bytes]) -> None:
    for path, data in objects.items():
        await bucket.put(path, data)


def _follow(bucket: Clocked, name: str, reached: int, last: int, *, silent: float = 2.0, **fields: Any) -> None:
    """A heartbeat, written `silent` seconds ago, of a replica that serves `reached`."""
    pause = 0.004 + len(name) / 1000 + reached % 5 / 300
    passed = []
    for version in range(max(1, reached - 30), reached + 1):
        at = _fields(version, last)["time"] + sum(map(ord, name)) % 20 / 10
        ends = {"fetch": (0.3, 0.4), "verify": (0.1, 0.5), "apply": (0.15, 0.65), "stage": (0.1, 0.75)}
        stages = {stage: StageTiming(took, 1000, at + end) for stage, (took, end) in ends.items()}
        passed.append(PassedVersion(version, {**stages, "swap": StageTiming(pause, 10, at + 0.75 + pause)}))
    given: dict[str, Any] = {
        "lease": 60.0,
        "host": f"node-{sum(map(ord, name)) % 10}.cluster.internal",
        "stages": {"swap": StageTiming(pause)} if passed else {},
        "served": reached,
        "recent": tuple(passed),
    }
    beat = Heartbeat(run=RUN_ID, name=name, version=reached, head=last, **given | fields)
    bucket.now = NOW - silent
    bucket.write(heartbeat_path(name), seal(beat).data)


def empty_run() -> Clocked:
    """A bucket without a run."""
    return clocked()


def fenced_run() -> Clocked:
    """A publisher has started and published no weights yet."""
    bucket = clocked()
    _chain(0, bucket)
    return bucket


def short_run() -> Clocked:
    """One version and one replica that serves it."""
    bucket = clocked()
    _chain(1, bucket)
    _follow(bucket, "rollout-0", 1, 1)
    return bucket


def fleet_run(last: int = 120) -> Clocked:
    """40 replicas: most up to date, some a little behind, one of each kind that needs attention."""
    bucket = clocked()
    _chain(last, bucket)
    for number in range(36):
        _follow(bucket, f"rollout-{number:02}", last - (number % 9 == 4) - (number % 16 == 7), last)
    _follow(bucket, "rollout-36", last - 41, last)
    _follow(bucket, "rollout-37", last - 70, last, silent=400.0)
    _follow(bucket, "rollout-38", last, last, trouble="http://127.0.0.1:8000: connection refused")
    _follow(bucket, "rollout-39", last - 22, last, lease=0.0, silent=130.0)
    return bucket


def long_run() -> Clocked:
    """2,000 versions and three replicas."""
    bucket = clocked()
    last = 1999
    _chain(last, bucket)
    for name, lag in (("rollout-a", 0), ("rollout-b", 1), ("rollout-c", 30)):
        _follow(bucket, name, last - lag, last)
    return bucket


RUNS: dict[str, Callable[[], Clocked]] = {
    "empty": empty_run,
    "fenced": fenced_run,
    "short": short_run,
    "fleet": fleet_run,
    "long": long_run,
}


def view_of(bucket: Clocked) -> RunView:
    return run(RunReader(bucket, Frozen()).look())


def page_of(bucket: Clocked, path: Path) -> str:
    """Exports a run, which may be empty. Returns the URL of the file."""
    path.write_bytes(exported(msgspec.json.encode(view_of(bucket))))
    return path.as_uri()


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    path = chromium_path()
    if path is None:
        raise SystemExit("chromium is not installed: apt install chromium")
    with Chromium(path) as browser:
        for name in sys.argv[2:] or RUNS:
            url = page_of(RUNS[name](), out / f"{name}.html")
            for look, size, dark in (("light", DESKTOP, False), ("dark", DESKTOP, True), ("phone", PHONE, False)):
                tab = browser.tab(size, dark=dark)
                tab.open(url)
                time.sleep(0.5)
                tab.screenshot(out / f"{name}-{look}.png", whole=True)
                print(f"{name}-{look}", *tab.problems)
                tab.close()


if __name__ == "__main__":
    main()
