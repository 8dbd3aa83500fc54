"""Engines that are kept at their follower's version, by patches or reloads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.followers import until
from support.fused_model import Arrays, Fused, arrays, changed, contents, loaded, weights_of
from weightwire import Follower, Publisher
from weightwire.bucket.directory import DirectoryBucket
from weightwire.chain.record_paths import heartbeat_path
from weightwire.chain.records import Heartbeat, unseal
from weightwire.delta.file import Delta
from weightwire.engines import version_keeper
from weightwire.engines.engine import EngineHealth, ServedVersion, Swap
from weightwire.engines.torch import TorchEngine
from weightwire.engines.version_keeper import Keeper
from weightwire.errors import EngineError, EngineGone
from weightwire.telemetry.events import Event


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectoryBucket, "poll_interval", 0.005)
    monkeypatch.setattr(version_keeper, "_RETRY_AFTER", 0.0)
    monkeypatch.setattr(version_keeper, "_LONGEST", 60.0)  # this machine may be busy


class Patience:
    """In place of `time`: it passes only while an engine does not work, so that the keeper never gives up on it."""

    time = staticmethod(time.time)

    def __init__(self, keeper: Keeper, name: str) -> None:
        self._keeper, self._name = keeper, name
        self._now = 0.0

    def monotonic(self) -> float:
        work = self._keeper._busy.get(self._name)
        if work is None or work.done():
            self._now += version_keeper._LONGEST / 4
        return self._now


class Watched(TorchEngine):
    """An engine that records its calls, and fails while `gone` or `failing` is set."""

    def __init__(self, name: str = "engine") -> None:
        self.model = Fused()
        super().__init__(self.model, load=self.model.load_weights, name=name)
        self.asked: list[str] = []
        self.gone = False
        self.failing = ""

    def attach(self, run: str = "") -> ServedVersion | None:
        self._do("attach")
        return super().attach(run)

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        self._do("adopt")
        return super().adopt(checkpoint, target)

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        self._do(f"patch {target.version}")
        return super().patch(patch, target)

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        self._do(f"reload {target.version}")
        return super().reload(checkpoint, target)

    def forget(self) -> None:
        """Loses its weights, as a restarted server does."""
        self._live.holding = None
        self.model.norm.data.zero_()

    def _do(self, what: str) -> None:
        self.asked.append(what)
        if self.gone:
            raise EngineGone(f"{self.name}: cannot be reached")
        if self.failing and what.startswith(self.failing):
            raise EngineError(f"{self.name}: will not {what}")


class Scene:
    """A publisher, a follower, engines and their events."""

    def __init__(self, root: Path, publisher: Publisher, follower: Follower, engines: list[Watched]) -> None:
        self.bits: Arrays = arrays()
        self.events: list[Event] = []
        self.follower = follower
        self.keeper = Keeper(follower, engines, on_event=self.events.append)
        self._root, self._publisher = root, publisher

    def publish(self) -> int:
        self.bits = changed(self.bits, len(self.events) + 1)
        return self._publisher.publish(weights_of(self.bits)).wait()

    def bring(self) -> None:
        """Brings all engines to the newest version."""
        self.follower.once()
        update = self.follower.take()
        assert update is not None
        self.keeper.bring(update)

    def heartbeat(self) -> Heartbeat:
        self.follower.once()
        [path] = (self._root / "bucket/replicas").iterdir()
        return unseal(path.read_bytes(), Heartbeat, heartbeat_path(path.stem)).record

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if event.stage == "warning"]


@contextmanager
def scene(root: Path, *engines: Watched) -> Iterator[Scene]:
    with Publisher(root / "bucket") as publisher, Follower(root / "bucket", into=root / "replica") as follower:
        made = Scene(root, publisher, follower, list(engines))
        publisher.publish(weights_of(made.bits)).wait()
        try:
            yield made
        finally:
            made.keeper.close()


def test_the_first_update_is_a_reload_and_later_ones_are_patches(tmp_path: Path) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        one.bring()
        assert contents(engine.model) == loaded(one.bits)
        for _ in range(3):
            version = one.publish()
            one.bring()
            assert contents(engine.model) == loaded(one.bits)
            assert engine.version == version == one.keeper.served
        assert [what for what in engine.asked if what[:5] in ("patch", "reloa")] == [
            "reload 1",
            "patch 2",
            "patch 3",
            "patch 4",
        ]
        assert [(event.stage, event.version) for event in one.events[-2:]] == [("stage", 4), ("swap", 4)]
        assert not one.warnings


def test_a_checkpoint_stays_while_an_engine_loads_it(tmp_path: Path) -> None:
    """Newer versions are handed out meanwhile."""
    engine = Watched()
    with scene(tmp_path, engine) as one:
        first = loaded(one.bits)

        def reload(checkpoint: Path, target: ServedVersion) -> Swap:
            for _ in range(2):
                one.publish()
                one.follower.once()
                assert one.follower.checkpoint() != checkpoint
            return TorchEngine.reload(engine, checkpoint, target)

        engine.reload = reload  # type: ignore[method-assign]
        one.bring()
        assert contents(engine.model) == first
        assert one.warnings == []


def test_an_engine_that_already_holds_the_version_is_left_alone(tmp_path: Path) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        engine.model.load_weights(_tensors(one.bits))
        one.bring()
        assert engine.asked == ["attach", "attach", "adopt"]
        assert engine.version == 1


def test_several_versions_become_one_patch(tmp_path: Path) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        one.bring()
        for _ in range(4):
            one.publish()
        one.bring()
        assert engine.asked[-1] == "patch 5"
        assert contents(engine.model) == loaded(one.bits)


def test_a_lost_engine_blocks_no_other_and_is_reloaded_later(tmp_path: Path) -> None:
    one_engine, other = Watched("one"), Watched("other")
    with scene(tmp_path, one_engine, other) as one:
        one.bring()
        other.gone = True
        one.publish()
        one.bring()
        one.publish()
        one.bring()
        assert one_engine.version == 3
        assert one.keeper.trouble == "other: cannot be reached"
        assert one.warnings == ["other: cannot be reached"]
        assert one.keeper.served == 1
        other.gone = False
        one.keeper.retry_failed()
        assert contents(other.model) == contents(one_engine.model) == loaded(one.bits)
        assert one.keeper.trouble == ""
        assert one.keeper.served == 3
        one.publish()
        one.bring()
        assert other.asked[-1] == "patch 4"


def test_a_hanging_engine_blocks_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, stuck = Watched("quick"), Watched("stuck")
    with scene(tmp_path, quick, stuck) as one:
        one.bring()
        monkeypatch.setattr(version_keeper, "time", Patience(one.keeper, "quick"))
        with stuck.lock:  # a generation that never ends
            for _ in range(2):
                version = one.publish()
                one.bring()
                assert quick.version == version
            assert one.keeper.trouble == "stuck: still busy with an earlier version"
            assert one.keeper.served == 1

        def recovers() -> bool:
            one.keeper.retry_failed()
            return one.keeper.served == version and not one.keeper.trouble

        until(recovers)
        assert contents(stuck.model) == loaded(one.bits)


def test_an_unexpected_error_of_one_engine_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        monkeypatch.setattr(engine, "attach", lambda run: 1 / 0)
        one.bring()
        assert one.keeper.trouble == "engine: ZeroDivisionError: division by zero"


def test_a_restarted_engine_is_noticed_and_reloaded(tmp_path: Path) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        one.bring()
        engine.forget()
        one.keeper.retry_failed()
        assert engine.asked[-1] == "reload 1"
        assert contents(engine.model) == loaded(one.bits)


def test_a_version_of_another_run_is_not_served(tmp_path: Path) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        engine._live.holding = ServedVersion("b" * 32, 7, "")
        one.follower.once()
        one.keeper.connect()
        until(lambda: engine.asked == ["attach"])
        assert one.keeper.served is None
        one.bring()
        assert one.keeper.served == 1


def test_an_engine_that_refuses_to_be_updated_at_all_is_an_error(tmp_path: Path) -> None:
    engine = Watched()
    engine.failing = "attach"
    with scene(tmp_path, engine) as one:
        one.keeper.check_accepted()
        one.keeper.connect()
        until(lambda: one.keeper._refusal is not None)
        with pytest.raises(EngineError, match="will not attach"):
            one.keeper.check_accepted()
        assert one.warnings == []  # the error is enough
        with pytest.raises(EngineError, match="engine: serves no version, not version 1"):
            one.keeper.check_served(1)


def test_an_engine_that_hangs_at_the_start_delays_no_other(tmp_path: Path) -> None:
    """It is not waited for, because a check has noticed that it hangs."""
    quick, stuck = Watched("quick"), HangingEngine("stuck")
    with scene(tmp_path, quick, stuck) as one:
        try:
            one.keeper.connect()
            until(lambda: one.keeper.trouble == "stuck: does not answer")
            began = time.monotonic()
            for _ in range(3):
                version = one.publish()
                one.bring()
                assert quick.version == version
            assert time.monotonic() - began < version_keeper._LONGEST
            assert stuck.asked == []
        finally:
            stuck.go.set()
        until(lambda: one.keeper.trouble == "")
        one.keeper.retry_failed()
        assert one.keeper.served == version
        assert contents(stuck.model) == loaded(one.bits)


class HangingEngine(Watched):
    """An engine that answers nothing until `go` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.go = threading.Event()

    def check_health(self) -> EngineHealth:
        if not self.go.is_set():
            raise EngineGone(f"{self.name}: does not answer")
        return EngineHealth(self.version)

    def attach(self, run: str = "") -> ServedVersion | None:
        self.go.wait(120)
        return super().attach(run)


def test_a_failed_patch_becomes_a_reload(tmp_path: Path) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        one.bring()
        engine.failing = "patch"
        one.publish()
        one.bring()
        assert contents(engine.model) == loaded(one.bits)
        assert one.warnings == ["engine: will not patch 2; reloading all weights"]
        engine.failing = ""
        one.publish()
        one.bring()
        assert engine.asked[-1] == "patch 3"


def test_an_engine_that_refuses_updates_keeps_its_version(tmp_path: Path) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        one.bring()
        before = contents(engine.model)
        engine.gone = True
        one.publish()
        one.bring()
        one.keeper.retry_failed()
        assert contents(engine.model) == before
        assert engine.version == 1


def test_the_heartbeat_reports_the_served_version(tmp_path: Path) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        assert (one.heartbeat().served, one.heartbeat().reached) == (-1, -1)
        one.bring()
        assert (one.heartbeat().served, one.heartbeat().reached) == (1, 1)
        assert {"stage", "swap"} <= one.heartbeat().stages.keys()
        [passed] = one.heartbeat().recent
        stages = passed.stages
        assert passed.version == 1
        assert 0 < stages["apply"].at <= stages["stage"].at < stages["swap"].at
        engine.gone = True
        one.publish()
        one.bring()
        beat = one.heartbeat()
        assert (beat.version, beat.served, beat.reached) == (2, 1, 1)
        assert beat.trouble == "engine: cannot be reached"
        with pytest.raises(TimeoutError):
            one._publisher.wait(replicas=1, timeout=0.5)
        engine.gone = False
        one.keeper.retry_failed()
        one.follower.once()
        assert one._publisher.wait(replicas=1, timeout=60) == 2


class TimedEngine(Watched):
    """An engine whose patches report a fixed time, and wait for `go`."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name)
        self.go = threading.Event()
        self.go.set()
        self._seconds = seconds

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        self.go.wait(120)
        super().patch(patch, target)
        return Swap(self._seconds, self._seconds)


@pytest.mark.parametrize("first", ["slow", "fast"])
def test_the_heartbeat_reports_the_slowest_engine(tmp_path: Path, first: str) -> None:
    engines = {"slow": TimedEngine("slow", 5.0), "fast": TimedEngine("fast", 1.0)}
    last = next(engine for name, engine in engines.items() if name != first)
    with scene(tmp_path, *engines.values()) as one:
        one.bring()
        version = one.publish()
        last.go.clear()
        threading.Thread(target=lambda: _until(lambda: engines[first].version == version, last.go.set)).start()
        one.bring()
        stages = one.heartbeat().stages
        assert (stages["stage"].seconds, stages["swap"].seconds) == (5.0, 5.0)


def test_an_engine_that_finishes_late_is_not_reported_for_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, fast = TimedEngine("late", 5.0), TimedEngine("fast", 1.0)
    with scene(tmp_path, late, fast) as one:
        one.bring()
        late.go.clear()
        version = one.publish()
        with monkeypatch.context() as patched:
            patched.setattr(version_keeper, "time", Patience(one.keeper, "fast"))
            one.bring()
        assert one.heartbeat().stages["swap"].seconds == 1.0
        one.publish()
        fast.go.clear()
        threading.Thread(target=lambda: _until(lambda: late.version == version, fast.go.set)).start()
        late.go.set()
        one.bring()
        assert one.heartbeat().stages["swap"].seconds == 1.0


def _until(condition: Callable[[], bool], then: Callable[[], None]) -> None:
    until(condition)
    then()


def test_engines_are_kept_up_to_date_in_the_background(tmp_path: Path) -> None:
    engine = Watched()
    with scene(tmp_path, engine) as one:
        one.keeper.start()
        for _ in range(5):
            version = one.publish()
            until(lambda version=version: engine.version == version)  # type: ignore[misc]
            with engine.lock:
                assert contents(engine.model) == loaded(one.bits)


def _tensors(bits: Arrays) -> Any:
    from support.fused_model import tensors_of

    return tensors_of(bits).items()


def test_a_heartbeat_without_engines_reports_no_served_version(tmp_path: Path) -> None:
    with scene(tmp_path) as one:
        assert one.heartbeat().served is None
