"""Adapters on a real vLLM server: each version equals a fresh load of it, and nothing else changes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from support.adapters import peft_model, train_step
from support.doc_pages import blocks
from support.stores import running
from support.vllm_server import VLLM, tiny_config
from weightwire import Follower, Publisher
from weightwire.engines.version_keeper import Keeper
from weightwire.engines.vllm import VllmLoraEngine, health_check

pytestmark = pytest.mark.slow
# Longer than a block of the prefix cache, which must not answer for an older version.
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CORE", "_FRONT_END"):  # this machine may be busy
        monkeypatch.setattr(health_check, name, 60.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[VLLM]:
    options = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "8"]
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "OMP_NUM_THREADS": "1"}
    made = VLLM(tmp_path_factory.mktemp("vllm-lora"), tiny, backend=None, options=options, env=env)
    with running(made):
        yield made


class Training:
    """Trains an adapter, publishes it as a run, and follows that run with the adapter `name` of the server."""

    def __init__(self, server: VLLM, model: Any, name: str, root: Path) -> None:
        self.server, self.model, self.name, self.root = server, model, name, root
        self.steps = 0
        with ExitStack() as stack:
            self.publisher = stack.enter_context(Publisher(root / "bucket"))
            self.follower = stack.enter_context(Follower(root / "bucket", into=root / "replica"))
            self.engine = VllmLoraEngine(f"{server.url},name={name}")
            self.keeper = stack.enter_context(closing(Keeper(self.follower, [self.engine])))
            self._stack = stack.pop_all()
        self.keeper.connect()

    def step(self) -> int:
        """Trains, publishes and serves the next version."""
        self.steps += 1
        train_step(self.model, self.steps)
        version = self.publisher.publish(self.model, step=self.steps).wait()
        self.follower.once()
        update = self.follower.take()
        assert update is not None
        self.keeper.bring(update, timeout=120)
        return version

    def fresh(self) -> Any:
        """The answer of the adapter as PEFT saves it, loaded under a new name."""
        name = f"fresh-{self.name}-{self.steps}"
        self.model.save_pretrained(self.root / name)
        self.server.post_text("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self.root / name)})
        answered = answer(self.server, name)
        self.server.post_text("/v1/unload_lora_adapter", {"lora_name": name})
        return answered

    def close(self) -> None:
        self._stack.close()


def answer(server: VLLM, model: str, tokens: int = 12) -> Any:
    """The likeliest tokens, with their probabilities."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    choice = server.post("/v1/completions", body)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


def served_path(server: VLLM, name: str) -> str:
    return next((str(one["root"]) for one in server.get("/v1/models")["data"] if one["id"] == name), "")


def test_versions_of_two_adapters_equal_fresh_loads_and_the_base_does_not_change(
    server: VLLM, tiny: Path, tmp_path: Path
) -> None:
    base = answer(server, str(tiny))
    seen = [base]
    with (
        closing(Training(server, peft_model(tiny), "math", tmp_path / "math")) as math,
        closing(Training(server, peft_model(tiny, rank=8), "code", tmp_path / "code")) as code,
    ):
        for _ in range(4):
            math.keeper.check_served(math.step())
            served = answer(server, "math")
            assert served == math.fresh()
            assert served not in seen
            seen.append(served)
        first = served_path(server, "math")
        code.keeper.check_served(code.step())
        # The fresh loads have pushed both adapters out of the server's memory: it reads them again.
        assert answer(server, "code") == code.fresh()
        assert code.fresh() != seen[-1]
        assert answer(server, "math") == seen[-1]
        assert served_path(server, "math") == first
        assert (math.keeper.served, code.keeper.served) == (math.publisher.version, code.publisher.version)
        assert math.keeper.served != code.keeper.served
    assert answer(server, str(tiny)) == base


def test_running_requests_go_on_while_versions_arrive(server: VLLM, tiny: Path, tmp_path: Path) -> None:
    with closing(Training(server, peft_model(tiny), "busy", tmp_path)) as training:
        training.step()
        long: list[Any] = []
        asking = [
            threading.Thread(target=lambda name=name: long.append(answer(server, name, 60)))
            for name in ("busy", str(tiny))
        ]
        for thread in asking:
            thread.start()
        for _ in range(3):
            training.step()
        for thread in asking:
            thread.join(300)
        assert [len(one[1]) for one in long] == [60, 60]
        assert answer(server, "busy") == training.fresh()


def test_a_lost_adapter_is_noticed_and_loaded_again_also_by_a_new_follower(
    server: VLLM, tiny: Path, tmp_path: Path
) -> None:
    with closing(Training(server, peft_model(tiny), "lost", tmp_path)) as training:
        version = training.step()
        expected = answer(server, "lost")
        server.post_text("/v1/unload_lora_adapter", {"lora_name": "lost"})  # as after a restart of the server
        until(lambda: f"does not report version {version} any more" in training.keeper.trouble)

        def recovers() -> bool:
            training.keeper.retry_failed()
            return not training.keeper.trouble

        until(recovers)
        assert answer(server, "lost") == expected
    path = served_path(server, "lost")
    # The command in the docs finds the version that the server has, and does not load it again.
    assert f"lost serves version {version}" in follow_as_documented(server, tmp_path, "lost")
    assert served_path(server, "lost") == path


def follow_as_documented(server: VLLM, root: Path, name: str) -> str:
    serve, follow = blocks("docs/engines.md", "Adapters")[0].strip().splitlines()
    running = [*server._command, *(f"{key}={value}" for key, value in server._env.items())]
    assert [word for word in shlex.split(serve) if word.startswith(("VLLM_", "--")) and word not in running] == []
    words = shlex.split(follow.replace("s3://bucket/adapter", str(root / "bucket")).replace("=math", f"={name}"))
    words = [word.replace("http://127.0.0.1:8000", server.url) for word in words]
    words[words.index("replica")] = str(root / "replica")
    ran = subprocess.run(
        [sys.executable, "-m", *words, "--once"], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def test_an_adapter_that_the_server_cannot_serve_is_refused_and_the_last_version_stays(
    server: VLLM, tiny: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    with closing(Training(server, peft_model(tiny), "good", tmp_path / "good")) as training:
        training.step()
    expected, path = answer(server, "good"), served_path(server, "good")
    config = tiny_config()
    config.hidden_size = 64
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "other")
    problems = {
        "rank": (peft_model(tiny, rank=16), r"rank 16 is greater than max_lora_rank 8.*hint: .*--max-lora-rank"),
        "base": (peft_model(tmp_path / "other"), r"for another base model than .*has shape .*hint: "),
    }
    for name, (model, message) in problems.items():
        with closing(Training(server, model, "good", tmp_path / name)) as training:
            training.step()
            with pytest.raises(Exception, match=rf"(?is){message}") as caught:
                training.keeper.check_served(1)
            assert caught.type.__name__ in ("EngineError", "ServerRefusal")
        assert served_path(server, "good") == path
        assert answer(server, "good") == expected


def until(check: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_adapter_is_not_read_again_for_every_token(server: VLLM, tiny: Path, tmp_path: Path) -> None:
    """Without the plugin vLLM 0.32 does so, and dies here. So this test is the last one."""
    peft_model(tiny).save_pretrained(tmp_path / "gone")
    body = {"lora_name": "gone", "lora_path": str(tmp_path / "gone"), "load_inplace": True}
    server.post_text("/v1/load_lora_adapter", body)
    shutil.rmtree(tmp_path / "gone")
    assert len(answer(server, "gone")[1]) == 12
