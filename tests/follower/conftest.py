"""Fixtures for followers: a bucket with a trainer and a follower, or a scene in virtual time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.simulated_runtime import SimLoop
from support.failing_bucket import Troubled, in_memory
from support.follow_scene import Scene
from support.followers import Trainer
from weightwire import Follower
from weightwire.bucket import silence
from weightwire.telemetry.events import Event


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tests fast: none of them cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(autouse=True)
def _unhurried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine does not mean a silent store, and writes its last heartbeat late. Scenes have their own time."""
    if "play" not in request.fixturenames:
        monkeypatch.setattr(silence, "_SECONDS", 600.0)
    monkeypatch.setattr("weightwire.follower.follower._LAST_HEARTBEAT", 60.0)


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


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    def play(act: Callable[[Scene], Awaitable[None]], **settings: Any) -> None:
        async def whole() -> None:
            scene = Scene(tmp_path / "replica", **settings)
            try:
                await act(scene)
            finally:
                await scene.stop()
                scene.replica.close()

        with asyncio.Runner(loop_factory=SimLoop) as runner:
            runner.run(whole())

    return play
