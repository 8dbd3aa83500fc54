"""A real vLLM that is patched while it serves. It ends with the same bits and outputs as a fresh server."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.stores import SeaweedFS, running, use
from support.vllm_server import VLLM, tiny_model
from weightwire import Follower, Publisher
from weightwire.cli.doctor.machine import ask_engine
from weightwire.engines import version_keeper
from weightwire.engines.engine import ServedVersion
from weightwire.engines.version_keeper import Keeper
from weightwire.engines.vllm import VllmEngine, served_version
from weightwire.engines.vllm.sample_versions import oldest_version, spans_of
from weightwire.errors import EngineError, EngineGone
from weightwire.telemetry.events import Event
from weightwire.weights.source import read_weights

PROMPTS = [
    "the bucket is the wire",
    "weights",
    "a",
    "a longer prompt, of which the cache keeps several blocks of old values",
]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_keeper, "_LONGEST", 300.0)  # this machine may be busy


class Trainer:
    """Publishes versions of a model. About 1% of the weights change each time."""

    def __init__(self, model: Path, url: Any, seed: int = 0) -> None:
        read = read_weights(model)
        self.weights = {name: (read[name].dtype.name, read[name].shape, read[name].bits.copy()) for name in read}
        self._random = np.random.default_rng(seed)
        self.publisher = Publisher(url, base=model)

    def step(self, chance: float = 0.01) -> int:
        for _, _, bits in self.weights.values():
            # Flip signs: steps of one ulp would hardly change the output.
            bits ^= np.where(self._random.random(len(bits)) < chance, 0x8000, 0).astype(bits.dtype)
        return self.publisher.publish(self.weights).wait()


class Scene:
    def __init__(self, trainer: Trainer, follower: Follower, servers: Sequence[VLLM]) -> None:
        self.events: list[Event] = []
        self.trainer, self.follower = trainer, follower
        self.engines = [VllmEngine(one.url) for one in servers]
        self.keeper = Keeper(follower, self.engines, on_event=self.events.append)

    def bring(self) -> None:
        self.follower.once()
        update = self.follower.take()
        assert update is not None
        self.keeper.bring(update)

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if event.stage == "warning"]

    def stages(self) -> list[tuple[str, int | None]]:
        return [(event.stage, event.version) for event in self.events]


@contextmanager
def scene(root: Path, model: Path, *servers: VLLM, url: Any = None, seed: int = 0) -> Iterator[Scene]:
    url = url or root / "bucket"
    trainer = Trainer(model, url, seed)
    try:
        with Follower(url, into=root / "replica", base=model) as follower:
            made = Scene(trainer, follower, servers)
            try:
                yield made
            finally:
                made.keeper.close()
    finally:
        trainer.publisher.close()


def completions_of(server: VLLM) -> list[str]:
    return [server.complete(prompt, 12) for prompt in PROMPTS]


def generate(server: VLLM, tokens: int, prompt: int = 7) -> dict[str, Any]:
    """Generates one sample, with the versions of its tokens."""
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/inference/v1/generate", {"token_ids": [prompt, 8, 9], "sampling_params": sampling})
    choice: dict[str, Any] = answer["choices"][0]
    return choice


# --- the proof ---------------------------------------------------------------------------------------------------


def test_a_patched_server_equals_a_fresh_one(
    vllm: VLLM, tiny: Path, seaweedfs: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, seaweedfs.env)
    url = f"s3://{seaweedfs.bucket}/vllm-proof"
    with scene(tmp_path, tiny, vllm, url=url) as one:
        one.bring()
        for _ in range(6):
            version = one.trainer.step()
            completions_of(vllm)  # fills the prefix cache, which the update must clear
            one.bring()
            assert vllm.weight_version == str(version) == str(served_version(vllm.url))
        assert not one.warnings
        assert one.stages()[-2:] == [("stage", version), ("swap", version)]
        checksums, words = vllm.checksums(), completions_of(vllm)
        fresh = VLLM(_new(tmp_path / "fresh"), one.follower.checkpoint())
        with running(fresh):
            assert fresh.checksums() == checksums
            fresh.model = one.follower.checkpoint()
            assert completions_of(fresh) == words
        assert len(set(words)) > 1


def test_a_patched_server_of_two_workers_equals_a_reloaded_one(vllm_split: VLLM, tiny: Path, tmp_path: Path) -> None:
    with scene(tmp_path, tiny, vllm_split) as one:
        one.bring()
        before = vllm_split.checksums()
        for _ in range(4):
            version = one.trainer.step()
            one.bring()
        assert not one.warnings
        assert vllm_split.weight_version == str(version)
        checksums, words = vllm_split.checksums(), completions_of(vllm_split)
        assert checksums != before
        path = str(one.follower.checkpoint())
        vllm_split.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        vllm_split.post("/reset_prefix_cache")
        assert vllm_split.checksums() == checksums
        assert completions_of(vllm_split) == words


def test_the_follow_command_updates_two_servers(vllm: VLLM, vllm_split: VLLM, tiny: Path, tmp_path: Path) -> None:
    """One follower with two engines, which continues after a restart."""
    from support.commands import Running, weightwire

    trainer = Trainer(tiny, tmp_path / "bucket", seed=3)
    options: list[str | Path] = [tmp_path / "bucket", "--into", tmp_path / "replica", "--base", tiny]
    engines = ["--engine", f"vllm={vllm.url}", "--engine", f"vllm={vllm_split.url}"]
    first = trainer.step()
    ran = weightwire("follow", *options, *engines, "--once")
    assert ran.code == 0, ran.err
    assert vllm.weight_version == vllm_split.weight_version == str(first)
    with Running("follow", *options, *engines, "--json") as command:
        for _ in range(3):
            version = trainer.step()
            line = command.wait_for(f'"version": {version},', stream="out")
            assert json.loads(line)["pause_seconds"].keys() == {vllm.url, vllm_split.url}
        assert vllm.weight_version == vllm_split.weight_version == str(version)
        beat = next((tmp_path / "bucket/replicas").iterdir())
        until(lambda: json.loads(beat.read_bytes())["served"] == version)
    trainer.publisher.close()


def test_a_fence_does_not_pause_the_server(
    vllm: VLLM, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene(tmp_path, tiny, vllm, seed=8) as one:
        one.trainer.step()
        one.bring()
        checksums = vllm.checksums()
        pauses: list[str] = []
        monkeypatch.setattr(one.engines[0]._pausing, "post", lambda path, *rest: pauses.append(path))
        with Publisher(tmp_path / "bucket", published=one.trainer.weights) as second:
            version = second.publish(one.trainer.weights).wait()  # a fence, and a version without changes
        one.bring()
        assert vllm.weight_version == str(version)
        assert vllm.checksums() == checksums
        assert not pauses
        assert [event.seconds for event in one.events if (event.stage, event.version) == ("swap", version)] == [0.0]
        assert not one.warnings


# --- while it serves ---------------------------------------------------------------------------------------------


def test_no_token_is_lost_and_each_has_its_version(vllm: VLLM, tiny: Path, tmp_path: Path) -> None:
    choices: list[dict[str, Any]] = []
    done = threading.Event()

    def sample(prompt: int) -> None:
        while not done.is_set():
            choices.append(generate(vllm, 120, prompt))

    with scene(tmp_path, tiny, vllm, seed=5) as one, ThreadPoolExecutor(4) as pool:
        one.bring()
        samplers = [pool.submit(sample, prompt) for prompt in range(10, 14)]
        for update in range(50):
            newest = one.trainer.step()
            one.bring()
            if update >= 4 and any(len(spans_of(choice)) > 1 for choice in [*choices]):
                break
        done.set()
        for sampler in samplers:
            sampler.result()
        assert oldest_version(generate(vllm, 5)) == newest
        assert not one.warnings
    for choice in choices:
        assert len(choice["token_ids"]) == 120
        spans = spans_of(choice)
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == 120
        versions = [span.version for span in spans if span.version is not None]
        assert versions == sorted(set(versions))
        assert oldest_version(choice) == (versions[0] if len(versions) == len(spans) else None)
    assert max(len(spans_of(choice)) for choice in choices) > 1


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_run_of_another_model_is_refused(vllm: VLLM, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    words, checksums = completions_of(vllm), vllm.checksums()
    other = tiny_model(tmp_path / "other", seed=2)
    state = load_file(other / "model.safetensors")
    del state["model.layers.2.mlp.down_proj.weight"]
    state["model.norm.weight"] = state["model.norm.weight"][:64]
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    with scene(tmp_path, other, vllm) as one:
        one.bring()
        one.trainer.step()
        one.bring()
        assert any("model.norm.weight" in message and "hint: " in message for message in one.warnings)
        assert "model.norm.weight" in one.keeper.trouble
    assert (completions_of(vllm), vllm.checksums()) == (words, checksums)
    assert vllm.get("/is_paused") == {"is_paused": False}


def test_a_run_with_other_tied_weights_is_refused(vllm: VLLM, tmp_path: Path) -> None:
    """Otherwise its head would keep old weights beside new embeddings."""
    words, checksums = completions_of(vllm), vllm.checksums()
    with scene(tmp_path, tiny_model(tmp_path / "tied", tied=True), vllm) as one:
        one.bring()
        assert "parameter 'lm_head.weight': no tensor of the run fills all of it" in one.keeper.trouble
    assert (completions_of(vllm), vllm.checksums()) == (words, checksums)
    assert vllm.get("/is_paused") == {"is_paused": False}


def test_two_followers_do_not_share_a_server(vllm: VLLM, tiny: Path, tmp_path: Path) -> None:
    with scene(tmp_path, tiny, vllm, seed=6) as one:
        one.bring()
        with pytest.raises(EngineError, match="another follower updates this engine"):
            VllmEngine(vllm.url + "/v1").attach()
        one.trainer.step()
        one.bring()
        assert not one.warnings


def test_a_repeated_update_request_is_executed_once(
    vllm: VLLM, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost reply causes a repeated request. A second swap would undo the first."""
    with scene(tmp_path, tiny, vllm, seed=10) as one:
        one.bring()
        post = one.engines[0]._server.post

        def twice(path: str, *rest: Any) -> Any:
            if path == "/update_weights":
                post(path, *rest)
            return post(path, *rest)

        monkeypatch.setattr(one.engines[0]._server, "post", twice)
        version = one.trainer.step()
        one.bring()
        assert not one.warnings
        assert vllm.weight_version == str(version)
        checksums = vllm.checksums()
        one.engines[0].reload(one.follower.checkpoint(), _holding(one.follower))
        assert vllm.checksums() == checksums


def test_weights_changed_from_outside_are_reloaded(vllm: VLLM, tiny: Path, tmp_path: Path) -> None:
    with scene(tmp_path, tiny, vllm, seed=7) as one:
        one.bring()
        one.trainer.step()
        one.bring()
        good = vllm.checksums()
        vllm.post("/weight_checker", {"action": "reset"})  # all zeros
        version = one.trainer.step()
        one.bring()
        assert any("the expected digest" in message and "reloading all weights" in message for message in one.warnings)
        assert vllm.weight_version == str(version)
        assert vllm.checksums() != good
        checksums = vllm.checksums()
        one.engines[0].reload(one.follower.checkpoint(), _holding(one.follower))
        assert vllm.checksums() == checksums


def test_a_server_left_paused_by_a_killed_follower_resumes(vllm: VLLM, tiny: Path, tmp_path: Path) -> None:
    with scene(tmp_path, tiny, vllm, seed=8) as one:
        one.bring()
        engine = one.engines[0]
        # The state that a killed follower leaves behind.
        engine._shared.paused_mark.touch()
        vllm.post("/start_weight_update")
        vllm.post("/pause?mode=keep")
        engine.close()
        assert vllm.get("/is_paused") == {"is_paused": True}
        another = VllmEngine(vllm.url)
        assert another.attach() == _holding(one.follower)
        assert vllm.get("/is_paused") == {"is_paused": False}
        version = one.trainer.step()
        one.follower.once()
        update = one.follower.take()
        assert update is not None
        assert update.patch is not None
        another.patch(update.patch, ServedVersion(_holding(one.follower).run, update.version, update.state))
        assert vllm.weight_version == str(version)
        another.close()


def test_a_restarted_server_is_updated(vllm: VLLM, tiny: Path, tmp_path: Path) -> None:
    with scene(tmp_path, tiny, vllm, seed=9) as one:
        one.bring()
        one.trainer.step()
        killer = threading.Timer(0.05, vllm.kill)
        killer.start()
        one.bring()  # while it stops, or just before
        killer.join()
        one.trainer.step()
        one.bring()
        assert vllm.url in one.keeper.trouble
        with pytest.raises(EngineGone, match="cannot be reached") as caught:
            one.engines[0].attach()
        assert "start vLLM there" in str(caught.value)
        vllm.start()  # with its first checkpoint
        one.keeper.retry_failed()
        assert not one.keeper.trouble
        assert vllm.weight_version == str(one.follower.version)
        checksums = vllm.checksums()
        path = str(one.follower.checkpoint())
        vllm.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        assert vllm.checksums() == checksums


@pytest.mark.slow  # starts its own server
def test_a_server_without_our_backend_is_refused(tiny: Path, tmp_path: Path) -> None:
    server = VLLM(_new(tmp_path / "server"), tiny, backend=None, env={"VLLM_SERVER_DEV_MODE": "0"})
    with running(server):
        engine = VllmEngine(server.url)
        with pytest.raises(EngineError, match=r"does not offer /weight_info \(it is vLLM .*developer mode") as caught:
            engine.attach()
        assert "VLLM_SERVER_DEV_MODE=1" in str(caught.value.hint)
        assert "--weight-transfer-config" in str(caught.value.hint)
        engine.close()
        with pytest.raises(urllib.error.HTTPError):
            server.get("/weight_info")


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://[::1", "http://a:99999", "http://x y"),
        *("http://u:secret@", "http://?token=secret"),
    ],
)
def test_a_malformed_url_is_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(EngineError, match="is not the URL of a server") as caught:
        VllmEngine(url)
    assert "secret" not in str(caught.value)


def test_an_unreachable_server_is_an_error() -> None:
    with pytest.raises(EngineGone, match="cannot be reached"):
        served_version("http://127.0.0.1:9")


# --- small things ------------------------------------------------------------------------------------------------


def _holding(follower: Follower) -> ServedVersion:
    position, state = follower.replica.position, follower.replica.state
    assert position is not None
    assert state is not None
    return ServedVersion(position.run, position.version, state.hex)


def _new(path: Path) -> Path:
    path.mkdir()
    return path


def until(check: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_doctor_reports_the_software_and_does_not_disturb_a_follower(vllm: VLLM) -> None:
    with closing(VllmEngine(vllm.url)) as engine:
        engine.attach()  # takes the lock of the follower
        answer = ask_engine(f"vllm={vllm.url}/v1")
    assert answer.problem is None
    assert re.match(r"vLLM \d", answer.software)
