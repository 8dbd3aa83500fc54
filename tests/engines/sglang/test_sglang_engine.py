"""A follower's engine with a server that behaves as SGLang: chains, failures half way, deaths and restarts."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands import Running
from support.doc_pages import blocks
from support.fake_sglang import LOADER, FakeSglang
from support.fused_model import Arrays, changed, holding, save, weights_of
from support.sglang_model import loaded_contents, sglang_arrays, with_tied_head
from weightwire import Follower, Publisher, diff
from weightwire.cli.doctor.machine import ask_engine
from weightwire.engines import shared_directory, version_keeper
from weightwire.engines.engine import CheckedEngine, EngineHealth
from weightwire.engines.registry import open_engine
from weightwire.engines.sglang import SglangEngine, sglang_engine
from weightwire.engines.version_keeper import Keeper
from weightwire.errors import EngineError, EngineGone

VERSIONS = [sglang_arrays()]
for seed in range(1, 5):
    VERSIONS.append(with_tied_head(changed(VERSIONS[-1], seed)))
FIRST, SECOND = VERSIONS[:2]
CHECK_TIMES = (sglang_engine._FRONT_END, sglang_engine._SCHEDULER)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_directory, "_SHARED_MEMORY", tmp_path)
    for name in ("_FRONT_END", "_SCHEDULER"):  # this machine may be busy
        monkeypatch.setattr(sglang_engine, name, 60.0)
    monkeypatch.setattr(version_keeper, "_LONGEST", 60.0)
    return tmp_path


@pytest.fixture
def server() -> Iterator[FakeSglang]:
    with closing(FakeSglang()) as made:
        yield made


def patch_to(after: Arrays, before: Arrays = FIRST) -> Any:
    return diff(weights_of(before), weights_of(after), coo=True)


def started(server: FakeSglang, root: Path) -> SglangEngine:
    """An engine that serves the first version, loaded from a checkpoint."""
    engine = SglangEngine(server.url)
    assert engine.attach() is None
    engine.reload(save(FIRST, root / "first"), holding(FIRST, 1))
    return engine


def check(server: FakeSglang, bits: Arrays, version: str) -> None:
    """The server generates, with these weights."""
    assert server.weights == [loaded_contents(bits, rank, server.ranks) for rank in range(server.ranks)]
    assert server.weight_version == version
    assert not server.is_paused
    assert not server.violations


@pytest.mark.parametrize(("version", "ranks"), [("0.5.12", 1), ("0.5.20", 2), ("0.5.23", 1), ("0.5.23", 2)])
def test_chain_of_versions_is_patched(version: str, ranks: int, tmp_path: Path) -> None:
    with closing(FakeSglang(version, ranks)) as server, closing(started(server, tmp_path)) as engine:
        check(server, FIRST, "1")
        for number, (before, after) in enumerate(pairwise(VERSIONS), 2):
            engine.patch(patch_to(after, before), holding(after, number))
            check(server, after, str(number))
            assert engine.holding == holding(after, number)
        assert server.calls.count("/update_weights_from_disk") == 1
        assert engine.can_patch
        directory = engine._shared.path
    assert not directory.exists()


def test_server_with_the_checkpoint_is_adopted(server: FakeSglang, tmp_path: Path) -> None:
    first = save(FIRST, tmp_path / "first")
    with closing(started(server, tmp_path)):
        pass
    server.models[0].__dict__.pop("weightwire_worker")  # as if it had been started with this checkpoint
    server.weight_version = "default"
    with closing(SglangEngine(server.url)) as engine:
        assert engine.attach() is None
        assert not engine.adopt(save(SECOND, tmp_path / "second"), holding(SECOND, 2))
        assert engine.adopt(first, holding(FIRST, 1))
        check(server, FIRST, "1")
        assert server.calls.count("/update_weights_from_disk") == 1


@pytest.mark.parametrize(("version", "lost"), [("0.5.12", 3), ("0.5.20", 3), ("0.5.23", 0)])
def test_running_requests_continue_where_sglang_can_flush_its_cache(version: str, lost: int, tmp_path: Path) -> None:
    with closing(FakeSglang(version)) as server, closing(started(server, tmp_path)) as engine:
        server.running = 3
        engine.patch(patch_to(SECOND), holding(SECOND, 2))
        check(server, SECOND, "2")
        assert (server.aborted, server.running) == (lost, 3 - lost)


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_fence_keeps_cache_and_requests(version: str, tmp_path: Path) -> None:
    with closing(FakeSglang(version)) as server, closing(started(server, tmp_path)) as engine:
        server.running = 3
        flushes = server.calls.count("/flush_cache")
        engine.patch(patch_to(FIRST), holding(FIRST, 2))
        check(server, FIRST, "2")
        assert (server.running, server.calls.count("/flush_cache")) == (3, flushes)


# --- failures ----------------------------------------------------------------------------------------------------


def test_all_ranks_restore_their_weights_if_one_fails_half_way(tmp_path: Path) -> None:
    with closing(FakeSglang(ranks=2)) as server, closing(started(server, tmp_path)) as engine:
        server.models[1].embed_tokens.weight.data.view(torch.int16)[:] ^= 1
        before = server.weights
        with pytest.raises(EngineError, match=r"embed_tokens\.weight.* expected digest"):
            engine.patch(patch_to(SECOND), holding(SECOND, 2))
        assert server.weights == before
        assert engine.holding == holding(FIRST, 1)
        assert (server.weight_version, server.is_paused, server.violations) == ("1", False, [])
        engine.reload(save(SECOND, tmp_path / "second"), holding(SECOND, 2))
        check(server, SECOND, "2")


@pytest.mark.parametrize("dying", ["/pause_generation", "/update_weights_from_tensor", "/update_weight_version"])
def test_server_that_dies_in_a_swap_is_reloaded_after_its_restart(
    dying: str, server: FakeSglang, tmp_path: Path
) -> None:
    with closing(started(server, tmp_path)) as engine:

        def die(path: str, body: dict[str, Any]) -> None:
            if path == dying and (path != "/pause_generation" or body["mode"] == "retract"):
                server.is_dead = True
                raise ConnectionError("killed")

        server.before = die
        with pytest.raises(EngineGone):
            engine.patch(patch_to(SECOND), holding(SECOND, 2))
        assert engine.holding is None
        server.before = lambda path, body: None
        server.die()
        with pytest.raises(EngineGone):
            engine.attach()
        server.start()
        assert engine.attach("a" * 32) is None
        assert not server.is_paused
        engine.reload(save(SECOND, tmp_path / "second"), holding(SECOND, 2))
        check(server, SECOND, "2")
        assert not engine._shared.paused_mark.exists()


def test_half_loaded_checkpoint_is_not_served(server: FakeSglang, tmp_path: Path) -> None:
    """SGLang's own return to the old weights would read the new checkpoint."""
    second, target = save(SECOND, tmp_path / "second"), holding(SECOND, 2)
    with closing(started(server, tmp_path)) as engine:
        model, whole = server.models[0], server.models[0].load_weights

        def fail_half_way(weights: Any) -> None:
            whole(list(weights)[:5])
            raise RuntimeError("out of memory")

        model.load_weights = fail_half_way
        with pytest.raises(EngineError, match="Failed to update weights: out of memory"):
            engine.reload(second, target)
        assert (engine.holding, server.is_paused) == (None, True)
        del model.load_weights
        with closing(SglangEngine(server.url)) as another:  # of a restarted follower
            engine.close()
            assert another.attach("a" * 32) is None
            assert not another.adopt(second, target)
            assert server.is_paused
            another.reload(second, target)
            check(server, SECOND, "2")


def test_mixture_that_turns_out_to_be_whole_is_served(server: FakeSglang, tmp_path: Path) -> None:
    """The follower was killed after SGLang had loaded the checkpoint."""
    with closing(started(server, tmp_path)) as engine:
        with engine._pause("retract"):
            engine._orders.order("forget", None, holding(SECOND, 2))
        assert server.is_paused
        assert engine.attach() is None
        assert server.is_paused
        assert engine.adopt(tmp_path / "first", holding(FIRST, 1))
        check(server, FIRST, "1")


@pytest.mark.parametrize("swapped", [False, True])
def test_server_left_paused_by_a_killed_follower_is_flushed_and_resumed(
    swapped: bool, server: FakeSglang, tmp_path: Path
) -> None:
    engine = started(server, tmp_path)
    with pytest.raises(EngineGone):
        _kill(engine, tmp_path, swapped)
    engine.close()
    server.is_open = True  # it could not close the update
    assert server.is_paused
    bits, version = (SECOND, 2) if swapped else (FIRST, 1)
    with closing(SglangEngine(server.url)) as another:
        assert another.attach("a" * 32) == holding(bits, version)
        check(server, bits, str(version))


def _kill(engine: SglangEngine, root: Path, swapped: bool) -> None:
    """Cuts its connection in a pause, so that it can neither report the version nor resume the server."""
    file = root / "patch"
    file.write_bytes(b"".join(patch_to(SECOND).chunks()))
    engine._orders.order("stage", file, holding(SECOND, 2))
    with engine._pause("retract" if swapped else "in_place"):
        if swapped:
            with engine._session():
                engine._orders.swap(holding(SECOND, 2))
        engine._server.close()
        engine._report(holding(SECOND, 2))


def test_cache_that_cannot_be_flushed_keeps_the_server_paused(
    server: FakeSglang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_engine, "_FLUSHING", 0.0)
    with closing(started(server, tmp_path)) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(server, "_flush_cache", lambda body: (400, "Flush cache failed."))
            with pytest.raises(EngineError, match="Flush cache failed"):
                engine.patch(patch_to(SECOND), holding(SECOND, 2))
        assert (engine.holding, server.is_paused) == (None, True)
        assert engine.attach("a" * 32) == holding(SECOND, 2)
        check(server, SECOND, "2")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"custom_weight_loader": None}, "does not serve with weightwire's loader"),
        ({"dp_size": 2}, "data parallel"),
        ({"pp_size": 2}, "pipeline parallel"),
        ({"nnodes": 2}, "several machines"),
        ({"quantization": "fp8"}, "quantization"),
        ({"enable_eplb": True}, "expert load balancing"),
    ],
)
def test_server_that_cannot_be_updated_is_refused(settings: dict[str, Any], reason: str, server: FakeSglang) -> None:
    server.settings |= settings
    with closing(SglangEngine(server.url)) as engine, pytest.raises(EngineError, match=reason):
        engine.attach()
    assert reason in str(ask_engine(f"sglang={server.url}").problem)
    assert set(server.calls) == {"/server_info"}


# --- checks ------------------------------------------------------------------------------------------------------


def test_health_tells_version_pause_and_death(server: FakeSglang, tmp_path: Path) -> None:
    with closing(started(server, tmp_path)) as engine:
        assert isinstance(engine, CheckedEngine)
        assert engine.check_health() == EngineHealth(1)
        engine._shared.paused_mark.touch()
        assert engine.check_health() == EngineHealth(is_paused=True)
        engine._shared.paused_mark.unlink()
        server.die()
        with pytest.raises(EngineGone):
            engine.check_health()
        server.start()
        assert engine.check_health() == EngineHealth(None)  # restarted


def test_scheduler_that_hangs_is_noticed(server: FakeSglang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "_SCHEDULER", 0.2)
    checked = threading.Event()
    server.before = lambda path, body: checked.wait(120) if path == "/server_info" else None
    with closing(SglangEngine(server.url)) as engine:
        assert engine.check_health() == EngineHealth(is_stuck=True)
    checked.set()


def test_check_and_the_time_between_two_take_less_than_five_seconds() -> None:
    from weightwire.engines import engine_monitor

    assert sum(CHECK_TIMES) + engine_monitor._EVERY < 5


def test_doctor_reports_software_and_version(server: FakeSglang, tmp_path: Path) -> None:
    started(server, tmp_path).close()
    answer = ask_engine(f"sglang={server.url}")
    assert (answer.software, answer.version, answer.problem) == ("SGLang 0.5.23", 1, None)


# --- a whole run -------------------------------------------------------------------------------------------------


def test_keeper_follows_a_run_through_a_restart(server: FakeSglang, tmp_path: Path) -> None:
    engine = open_engine(f"sglang={server.url}")
    with (
        Publisher(tmp_path / "bucket") as publisher,
        Follower(tmp_path / "bucket", into=tmp_path / "replica") as follower,
        Keeper(follower, [engine], on_event=lambda event: None) as keeper,
    ):
        last = publisher.publish(weights_of(FIRST)).wait()
        _until(lambda: keeper.served == last)
        last = publisher.publish(weights_of(SECOND)).wait()
        _until(lambda: keeper.served == last)
        check(server, SECOND, str(last))
        assert server.calls.count("/update_weights_from_disk") == 1
        server.die()
        server.start()
        _until(lambda: server.weight_version == str(last) and keeper.served == last and not keeper.trouble)
        check(server, SECOND, str(last))


def test_documented_commands_serve_published_versions(server: FakeSglang, tmp_path: Path) -> None:
    [block] = blocks("docs/engines.md", "SGLang")
    serve, follow = (shlex.split(one) for one in block.strip().splitlines())
    assert serve[serve.index("--custom-weight-loader") + 1] == LOADER
    bucket = tmp_path / "bucket"
    with Publisher(bucket) as publisher:
        version = publisher.publish(weights_of(FIRST)).wait()
        places = {"s3://bucket/run": str(bucket), "replica": str(tmp_path / "replica")}
        words = [places.get(one, one).replace("http://127.0.0.1:30000", server.url) for one in follow]
        with Running(*words[1:]) as running:
            running.wait_for(f"version {version}")
            _until(lambda: server.weight_version == str(version) and not server.is_paused)
            version = publisher.publish(weights_of(SECOND)).wait()
            _until(lambda: server.weight_version == str(version) and not server.is_paused)
    check(server, SECOND, str(version))


def _until(reached: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)
