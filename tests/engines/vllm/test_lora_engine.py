"""The engine for adapters, with a server in this process: what it loads, what it reports, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.fake_lora_server import FakeLoraServer, fake_lora_server
from weightwire import Follower, Publisher
from weightwire.engines import open_engine
from weightwire.engines.engine import EngineHealth
from weightwire.engines.version_keeper import Keeper
from weightwire.engines.vllm import VllmLoraEngine, health_check
from weightwire.errors import EngineError, EngineGone

FACTOR = "base_model.model.model.layers.0.q_proj.lora_A.weight"


def weights(value: int) -> dict[str, Any]:
    return {FACTOR: np.full((2, 4), value, np.float32)}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CORE", "_FRONT_END"):  # this machine may be busy
        monkeypatch.setattr(health_check, name, 60.0)


@pytest.fixture
def server() -> Iterator[FakeLoraServer]:
    with fake_lora_server() as server:
        yield server


class Scene:
    """A run of an adapter, its follower and one engine."""

    def __init__(self, root: Path, server: FakeLoraServer, name: str = "math") -> None:
        files = {"adapter_config.json": b"{}"}
        self.publisher = Publisher(root / "bucket", files=files, blocking=True)
        self.follower = Follower(root / "bucket", into=root / "replica")
        self.engine = VllmLoraEngine(f"{server.url},name={name}")
        self.keeper = Keeper(self.follower, [self.engine])

    def step(self, value: int) -> int:
        version = self.publisher.publish(weights(value)).wait()
        self.bring()
        return version

    def bring(self) -> None:
        self.follower.once()
        update = self.follower.take()
        assert update is not None
        self.keeper.bring(update, timeout=60)

    def close(self) -> None:
        for one in (self.keeper, self.publisher, self.follower):
            one.close()


def value_at(path: str) -> float:
    from safetensors.numpy import load_file

    return float(load_file(Path(path) / "adapter_model.safetensors")[FACTOR][0, 0])


def test_each_version_gets_a_new_path_and_old_paths_lead_to_the_newest(server: FakeLoraServer, tmp_path: Path) -> None:
    paths = []
    with closing(Scene(tmp_path, server)) as scene:
        for value in (1, 2, 3):
            version = scene.step(value)
            scene.keeper.check_served(version)
            paths.append(server.paths["math"])
            assert scene.engine.check_health() == EngineHealth(version)
            assert [value_at(path) for path in paths] == [value] * len(paths)
        assert [float(one[FACTOR][0, 0]) for one in server.loaded] == [1, 2, 3]
        assert len({*paths}) == 3
        assert len([*Path(paths[0]).parent.glob("data-*")]) == 1


def test_adapters_of_several_runs_on_one_server_have_their_own_versions(server: FakeLoraServer, tmp_path: Path) -> None:
    with (
        closing(Scene(tmp_path / "one", server, "math")) as math,
        closing(Scene(tmp_path / "two", server, "code")) as code,
    ):
        math.step(1)
        code.step(2)
        math.step(3)
        assert (math.engine.check_health().version, code.engine.check_health().version) == (2, 1)
        assert math.engine.name == f"{server.url},name=math"
    assert {name: value_at(path) for name, path in server.paths.items()} == {"math": 3, "code": 2}


def test_two_engines_of_one_replica_do_not_disturb_each_other(server: FakeLoraServer, tmp_path: Path) -> None:
    with closing(Scene(tmp_path, server)) as scene:
        scene.step(1)
        other = VllmLoraEngine(f"{server.url},name=other")
        with closing(Keeper(scene.follower, [other])):
            with scene.follower.borrow_checkpoint() as checkpoint:
                assert scene.engine.holding is not None
                other.reload(checkpoint, scene.engine.holding)
            scene.step(2)
            assert {name: value_at(path) for name, path in server.paths.items()} == {"math": 2, "other": 1}


def test_a_new_follower_finds_what_the_server_has(server: FakeLoraServer, tmp_path: Path) -> None:
    with closing(Scene(tmp_path, server)) as scene:
        version = scene.step(1)
    with closing(Scene(tmp_path, server)) as scene:
        scene.bring()
        scene.keeper.check_served(version)
        assert len(server.loaded) == 1


@pytest.mark.parametrize("path", ["", "current", "an old path"])
def test_an_adapter_from_elsewhere_is_not_taken_for_a_version(
    server: FakeLoraServer, tmp_path: Path, path: str
) -> None:
    with closing(Scene(tmp_path, server)) as scene:
        scene.step(1)
        old = server.paths["math"]
        scene.step(2)
        found = {"": "", "current": str(tmp_path / "replica" / "current"), "an old path": old}[path]
        server.paths = {"math": found} if found else {}
        assert scene.engine.check_health() == EngineHealth(None)
        assert scene.engine.attach() is None


def test_a_refused_version_leaves_the_last_one(server: FakeLoraServer, tmp_path: Path) -> None:
    with closing(Scene(tmp_path, server)) as scene:
        scene.step(1)
        path = server.paths["math"]
        server.refusal = (500, "LoRA rank 64 is greater than max_lora_rank 16.")
        scene.step(2)
        assert scene.keeper.served == 1
        assert "greater than max_lora_rank" in scene.keeper.trouble
        assert (server.paths["math"], value_at(path)) == (path, 1)
        assert (
            len([*Path(path).parent.iterdir()]) == 3
        )  # its path, the newest, and its data: nothing of the refused one
        server.refusal = None
        scene.keeper.check_served(scene.step(3))


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        ((500, "LoRA is not enabled. Use --enable-lora to enable LoRA."), "--enable-lora"),
        ((500, "LoRA rank 64 is greater than max_lora_rank 16."), "--max-lora-rank"),
        ((400, "The lora adapter 'math' conflicts with a served base model."), "choose another name"),
        ((404, "No adapter found for PATH"), "access to the replica's directory"),
        ((500, "something else"), "see the server's log"),
    ],
)
def test_refusals_have_a_hint(server: FakeLoraServer, tmp_path: Path, refusal: tuple[int, str], hint: str) -> None:
    with closing(Scene(tmp_path, server)) as scene:
        server.refusal = refusal
        scene.step(1)
        with pytest.raises(EngineError) as caught:
            scene.keeper.check_served(1)
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"updates": False}, "does not load adapters while it runs"),
        ({"version": "0.31.2"}, "too old"),
        ({"key": "secret"}, "needs an API key"),
    ],
)
def test_a_server_that_cannot_be_updated_is_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with fake_lora_server(**settings) as server, closing(VllmLoraEngine(f"{server.url},name=math")) as engine:
        with pytest.raises(EngineError, match=message) as caught:
            engine.attach()
        assert not isinstance(caught.value, EngineGone)  # it would be waited for


def test_the_api_key_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with fake_lora_server(key="secret") as server, closing(VllmLoraEngine(f"{server.url},name=math")) as engine:
        assert engine.attach() is None


def test_a_sleeping_server_is_not_updated(server: FakeLoraServer, tmp_path: Path) -> None:
    with closing(Scene(tmp_path, server)) as scene:
        server.is_sleeping = True
        scene.step(1)
        assert "is asleep" in scene.keeper.trouble
        assert scene.engine.check_health() == EngineHealth(is_asleep=True)
        assert server.loaded == []


def test_a_run_of_a_whole_model_is_refused(server: FakeLoraServer, tmp_path: Path) -> None:
    with closing(Scene(tmp_path, server)) as scene:
        scene.publisher.publish({"w": np.ones(4, np.float32)}).wait()
        scene.bring()
        assert "the run is not an adapter" in scene.keeper.trouble


@pytest.mark.parametrize("text", ["", ",name=", ",name= ", ",names=math"])
def test_the_name_of_the_adapter_is_required(text: str) -> None:
    with pytest.raises(EngineError, match="needs the name of the adapter"):
        open_engine(f"vllm-lora=http://127.0.0.1:8000{text}")


def test_a_server_that_is_not_there_is_gone() -> None:
    with fake_lora_server() as server:
        engine = VllmLoraEngine(f"{server.url},name=math")
    with closing(engine), pytest.raises(EngineGone):
        engine.attach()
