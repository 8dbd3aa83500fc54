"""A real vLLM that sleeps, hangs or loses its version while a follower keeps it up to date."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from support.vllm_server import VLLM
from weightwire import Follower, Publisher
from weightwire.engines.version_keeper import Keeper
from weightwire.engines.vllm import VllmEngine
from weightwire.errors import EngineError
from weightwire.telemetry.events import Event
from weightwire.weights.source import read_weights


def test_server_that_sleeps_hangs_or_loses_its_version_is_noticed_and_recovers(
    vllm: VLLM, tiny: Path, tmp_path: Path
) -> None:
    events: list[Event] = []
    weights = {name: (one.dtype.name, one.shape, one.bits.copy()) for name, one in read_weights(tiny).items()}
    with (
        Publisher(tmp_path / "bucket", base=tiny) as publisher,
        Follower(tmp_path / "bucket", into=tmp_path / "replica", base=tiny) as follower,
        closing(Keeper(follower, [VllmEngine(vllm.url)], on_event=events.append)) as keeper,
    ):

        def step() -> str:
            for _, _, bits in weights.values():
                bits ^= np.where(np.arange(len(bits)) % 101 == 7, 0x8000, 0).astype(bits.dtype)
            version = publisher.publish(weights).wait()
            follower.once()
            update = follower.take()
            assert update is not None
            keeper.bring(update, timeout=120)
            return str(version)

        def recovers() -> bool:
            keeper.retry_failed()
            return not keeper.trouble

        def serves(version: str) -> bool:
            """A check finds trouble if this machine is too busy, and then no more."""
            if not recovers() or vllm.weight_version != version:
                return False
            with suppress(EngineError):
                keeper.check_served(int(version))
                return True
            return False

        keeper.connect()
        version = step()
        until(lambda: serves(version))
        # A sleeping server is not touched, and updated when it is awake.
        vllm.post("/sleep?level=1")
        until(lambda: "is asleep, or was paused by another program" in keeper.trouble)
        version = step()
        assert vllm.weight_version != version
        vllm.post("/wake_up")
        until(recovers)
        assert vllm.weight_version == version
        # A sleep that ends before a check looks has the same effect: its weights are compared.
        vllm.post("/sleep?level=1")
        vllm.post("/wake_up")
        assert vllm.weight_version != version
        until(lambda: keeper.trouble != "")
        until(recovers)
        assert vllm.weight_version == version
        # A server that hangs is only waited for.
        vllm.pause()
        until(lambda: "does not answer within 3 s" in keeper.trouble)
        vllm.resume()
        until(recovers)
        # A trainer that starts makes it forget its version.
        vllm.post("/update_weight_version", {"new_version": "unknown"})
        until(lambda: f"does not report version {version} any more" in keeper.trouble)
        until(recovers)
        assert vllm.weight_version == version
        checksums = vllm.checksums()
        version = step()
        until(lambda: serves(version))
        assert "reloading all weights" not in " ".join(event.message for event in events)
        assert vllm.checksums() != checksums


def until(check: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)
