"""`follow --listen` with engines that hang, sleep, refuse versions or are restarted: `/readyz`, `/status`, messages.

One follower and two engines serve all tests of the first class, in this order.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_trainer import CheckpointTrainer
from support.commands import Running, weightwire
from support.fake_vllm import FakeVllm
from weightwire.engines.vllm import health_check

SOON = 60.0
"""Seconds until trouble must be visible: 5, and many more because the machine may be busy with other tests.

tests/engines/vllm/test_health_check.py adds up the 5."""


class Fleet:
    """A follower with two engines, the second of which hangs when the follower starts."""

    def __init__(self, here: Path, stack: ExitStack) -> None:
        self.trainer = CheckpointTrainer(here)
        stack.callback(self.trainer.close)
        self.version = 0
        self.publish()
        self.good, self.bad = stack.enter_context(FakeVllm()), stack.enter_context(FakeVllm())
        self.bad.pause()
        engines = ["--engine", f"vllm={self.good.url}", "--engine", f"vllm={self.bad.url}"]
        limits = ["--max-behind", "0", "--max-lag", "60s"]
        options: list[str | Path] = [
            "--into",
            here / "replica",
            "--name",
            "rollout",
            "--listen",
            "0",
            *engines,
            *limits,
        ]
        self.command = stack.enter_context(Running("follow", self.trainer.bucket, *options))
        self.address = self.command.wait_for("listening on ").split()[-1]
        self.listening = time.monotonic()

    def publish(self) -> None:
        self.trainer.publish()
        self.version += 1

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.address + path, timeout=60) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as reply:
            return reply.code, json.load(reply)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=60) as reply:
            return str(reply.read().decode())

    def seconds_to_update(self, engine: FakeVllm) -> float:
        """Publishes a version, and measures until the engine serves it."""
        began = time.monotonic()
        self.publish()
        until(lambda: engine.version == str(self.version), SOON)
        return time.monotonic() - began

    def status_of(self, engine: FakeVllm) -> dict[str, Any]:
        [found] = [one for one in self.get("/status")[1]["engines"] if one["name"] == engine.url]
        return dict(found)

    def wait_until_ready(self) -> None:
        self.bad.resume()
        until(lambda: self.get("/readyz") == (200, {"ready": True, "reasons": []}), SOON)

    def wait_for_trouble(self, text: str) -> None:
        """The trouble must be visible soon, everywhere."""
        until(lambda: any(text in reason for reason in self.get("/readyz")[1]["reasons"]), SOON)
        assert self.get("/readyz")[0] == 503
        assert self.get("/healthz")[0] == 200
        status = self.get("/status")[1]
        assert (status["ready"], text in status["trouble"]) == (False, True)
        assert text in self.status_of(self.bad)["trouble"]
        assert 'weightwire_ready{role="follower"} 0.0' in self.metrics()
        warned = f"warning: {self.bad.url}: "
        until(lambda: any(line.startswith(warned) and text in line for line in self.command.lines["err"]), SOON)


def until(check: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("fleet"), stack)


@pytest.mark.slow  # together
class TestReadiness:
    def test_hanging_engine_delays_neither_the_start_nor_the_others(self, fleet: Fleet) -> None:
        until(lambda: fleet.good.version == "1", SOON)  # the other engine has hung since before the start
        fleet.wait_for_trouble("does not answer")
        # A follower that waits for the other engine takes 7 seconds for each. For some, the machine may be busy.
        assert min(fleet.seconds_to_update(fleet.good) for _ in range(3)) < 5
        times = {"behind_seconds": 0, "pause_seconds": 0}
        fine = {"name": fleet.good.url, "version": 4, "behind": 0, **times, "trouble": "", "reasons": []}
        until(lambda: fleet.status_of(fleet.good) | times == fine, SOON)
        assert fleet.status_of(fleet.bad)["version"] is None
        assert fleet.get("/status")[1]["behind"] is None
        fleet.command.wait_for(f"; {fleet.bad.url} serves no version, in trouble")
        fleet.wait_until_ready()
        assert fleet.bad.version == "4"

    def test_metrics_show_each_engine(self, fleet: Fleet) -> None:
        fleet.wait_until_ready()
        labels = f'{{engine="{fleet.bad.url}",role="follower"}}'
        metrics = fleet.metrics()
        for line in (
            f"weightwire_engine_ready{labels} 1.0",
            f"weightwire_engine_version{labels} {fleet.version}.0",
            f"weightwire_engine_behind{labels} 0.0",
            f"weightwire_engine_pause_seconds{labels} 0.",
            'weightwire_ready{role="follower"} 1.0',
        ):
            assert line in metrics

    def test_engine_that_hangs_later_is_noticed(self, fleet: Fleet) -> None:
        fleet.wait_until_ready()
        fleet.bad.pause()
        fleet.wait_for_trouble("does not answer")
        assert fleet.status_of(fleet.bad)["version"] == fleet.version
        fleet.wait_until_ready()
        fleet.command.wait_for(f"recovered: {fleet.bad.url}")

    def test_engine_that_refuses_a_version_is_not_ready(self, fleet: Fleet) -> None:
        fleet.wait_until_ready()
        fleet.bad.ask("/test/refuse", {"problem": "tensor 'w': has another shape"})
        before = fleet.version
        fleet.publish()
        fleet.wait_for_trouble("tensor 'w': has another shape")
        assert (fleet.status_of(fleet.bad)["behind"], fleet.get("/status")[1]["behind"]) == (1, 1)
        beat = fleet.trainer.bucket / "replicas/rollout.json"
        until(lambda: "another shape" in json.loads(beat.read_bytes())["trouble"], SOON)
        assert json.loads(beat.read_bytes())["served"] == before
        fleet.command.wait_for(f"; {fleet.bad.url} serves version {before}, in trouble")
        fleet.bad.ask("/test/refuse", {"problem": ""})
        fleet.wait_until_ready()
        assert fleet.bad.version == str(fleet.version)

    @pytest.mark.parametrize(("level", "repair"), [(1, "adopt"), (2, "reload")])
    def test_sleeping_engine_is_not_ready_until_its_weights_are_verified(
        self, fleet: Fleet, level: int, repair: str
    ) -> None:
        fleet.wait_until_ready()
        before = fleet.bad.ask("/test/orders")
        fleet.bad.ask(f"/sleep?level={level}", {})
        fleet.wait_for_trouble("is asleep")
        time.sleep(0.3)
        assert fleet.bad.ask("/test/orders") == before  # its weights may not be in memory
        fleet.bad.ask("/wake_up", {})
        fleet.wait_until_ready()
        assert fleet.bad.ask("/test/orders")[-1] == f"{repair} {fleet.version}"

    def test_restarted_engine_is_not_ready_until_it_is_updated(self, fleet: Fleet) -> None:
        fleet.wait_until_ready()
        fleet.bad.kill()
        fleet.wait_for_trouble("cannot be reached")
        fleet.bad.start()
        fleet.wait_until_ready()
        assert fleet.bad.version == str(fleet.version)
        assert fleet.bad.ask("/test/orders")[-1] == f"reload {fleet.version}"

    def test_engine_that_restarts_within_a_second_is_noticed(self, fleet: Fleet) -> None:
        fleet.wait_until_ready()
        fleet.bad.kill()
        fleet.bad.start()
        until(lambda: f"reload {fleet.version}" in fleet.bad.ask("/test/orders"), SOON)
        fleet.wait_until_ready()

    def test_stopped_follower_leaves_nothing_in_shared_memory(self, fleet: Fleet) -> None:
        fleet.wait_until_ready()
        assert fleet.bad.directory.exists()
        fleet.bad.pause()
        began = time.monotonic()
        assert fleet.command.stop().code == 0
        assert time.monotonic() - began < 30
        assert not fleet.bad.directory.exists()
        assert not fleet.good.directory.exists()


class TestOnce:
    @pytest.fixture
    def engine(self) -> Iterator[FakeVllm]:
        with FakeVllm() as engine:
            yield engine

    def follow_once(self, trainer: CheckpointTrainer, replica: Path, engine: FakeVllm) -> str:
        ran = weightwire("follow", trainer.bucket, "--into", replica, "--once", "--engine", f"vllm={engine.url}")
        assert not engine.directory.exists()
        if ran.code == 0:
            assert ran.err.splitlines()[-1].startswith(f"{engine.url} serves version 1")
            return ""
        assert ran.code == 1
        assert "serves version" not in ran.err
        assert ran.err.count(f"{engine.url}: ") == 1
        return ran.err.splitlines()[-2]

    def test_engine_that_does_not_serve_the_version_is_an_error(
        self, trainer: CheckpointTrainer, replica: Path, engine: FakeVllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.publish()
        monkeypatch.setattr(health_check, "_CORE", 60.0)  # the machine may be busy
        engine.ask("/test/refuse", {"problem": "tensor 'w': has another shape"})
        assert f"error: {engine.url}: tensor 'w'" in self.follow_once(trainer, replica, engine)
        engine.ask("/test/refuse", {"problem": ""})
        engine.ask("/sleep?level=1", {})
        assert f"error: {engine.url}: is asleep" in self.follow_once(trainer, replica, engine)
        engine.pause()
        with monkeypatch.context() as patch:
            patch.setattr(health_check, "_CORE", 0.5)
            assert f"error: {engine.url}: does not answer within 0.5 s" in self.follow_once(trainer, replica, engine)
        engine.resume()
        engine.ask("/wake_up", {})
        assert self.follow_once(trainer, replica, engine) == ""

    def test_engine_given_twice_is_refused(self, trainer: CheckpointTrainer, replica: Path) -> None:
        engine = ["--engine", "vllm=http://127.0.0.1:9"]
        ran = weightwire("follow", trainer.bucket, "--into", replica, *engine, *engine)
        assert (ran.code, "http://127.0.0.1:9 is given twice" in ran.err) == (2, True)

    def test_cache_policy_needs_an_engine(self, trainer: CheckpointTrainer, replica: Path) -> None:
        ran = weightwire("follow", trainer.bucket, "--into", replica, "--cache", "keep")
        assert (ran.code, "--cache: needs --engine" in ran.err) == (2, True)

    def test_cache_is_kept_in_patches_but_not_in_reloads(
        self, trainer: CheckpointTrainer, replica: Path, engine: FakeVllm
    ) -> None:
        trainer.publish()
        options: list[str | Path] = ["--into", replica, "--engine", f"vllm={engine.url}", "--cache", "keep"]
        with Running("follow", trainer.bucket, *options) as command:
            command.wait_for("version 1")  # loaded
            trainer.publish()
            command.wait_for("version 2")  # patched
        kept = ["clear_cache=false", "/reset_prefix_cache"]
        assert engine.ask("/test/pauses") == ["clear_cache=true", *kept]

    @pytest.mark.parametrize("option", [["--max-behind", "1"], ["--max-lag", "10s"]])
    def test_limits_need_a_listener(self, trainer: CheckpointTrainer, replica: Path, option: list[str]) -> None:
        ran = weightwire("follow", trainer.bucket, "--into", replica, *option)
        assert (ran.code, f"{option[0]}: needs --listen" in ran.err) == (2, True)
