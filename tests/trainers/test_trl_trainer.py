"""TRL through a bucket: what a transfer guarantees, and asynchronous GRPO with a real vLLM server."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.commands import Running, versions_in
from support.run_contents import version_in
from support.stores import NOWHERE, SeaweedFS, use
from support.trl_on_cpu import grpo
from support.vllm_server import VLLM
from weightwire import digest
from weightwire.bucket.registry import open_bucket
from weightwire.errors import CheckpointError, EngineError, EngineGone, SchemaChanged
from weightwire.trainers.trl import BucketTransfer

Pairs = Iterator[tuple[str, Any]]


def masters(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights as TRL yields them: float32, with the names that vLLM uses."""
    made = torch.Generator().manual_seed(seed)
    return {f"model.layers.{layer}.weight": torch.randn(16, 8, generator=made) for layer in range(3)}


def in_bf16(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(torch.bfloat16) for name, value in weights.items()}


def until(fine: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not fine():
        assert time.monotonic() < end
        time.sleep(0.01)


@dataclass
class Server:
    """Answers like a vLLM server. The test sets the answers."""

    version: str = "default"
    backend: str | None = "weightwire"
    is_in_development: bool = True
    url: str = field(init=False)
    asked: int = 0  # for its version
    serves_after: int | None = None  # so many requests: version 1

    def answer(self, path: str, body: Any) -> Any:
        if path == "/weight_info" and self.is_in_development:
            self.asked += 1
            if self.serves_after is not None and self.asked > self.serves_after:
                self.version = "1"
            return {"weight_version": self.version}
        if path == "/server_info" and self.is_in_development:
            transfer = None if self.backend is None else {"backend": self.backend}
            return {"vllm_config": {"weight_transfer_config": transfer}}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True}
        return {"version": "0.32.0"} if path == "/version" else None

    def __enter__(self) -> Server:
        self.bind()
        self.listen()
        return self

    def bind(self) -> None:
        """Reserves a port, at which connections are refused."""
        said = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = said.answer(self.path.partition("?")[0], self._body())
                self.send_response(404 if answer is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(answer or {}).encode())

            do_POST = do_GET

            def _body(self) -> Any:
                length = int(self.headers.get("Content-Length") or 0)
                return json.loads(self.rfile.read(length)) if length else None

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.server_bind()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def listen(self) -> None:
        self._server.server_activate()
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


class Trainer:
    """Makes the calls of TRL's trainer, one transfer after the other."""

    def __init__(self, transfer: BucketTransfer) -> None:
        self.told: list[int] = []
        self.rollout_worker = SimpleNamespace(metrics_queue=queue.Queue(), update_model_version=self.told.append)
        self.state = SimpleNamespace(global_step=0)
        self.model_version = 0
        self.weights = masters()
        self.left: Pairs = iter(())
        self._transfer = transfer

    def _streaming_iter(self) -> Pairs:
        for name, value in self.weights.items():
            assert self is not None  # as in TRL, where the generator uses `self`
            yield name, value.clone()

    def sync(self) -> None:
        self._transfer.pause()
        self.left = self._streaming_iter()
        self._transfer.send_weights(self.left)
        self._transfer.resume()
        self.model_version += 1
        self.rollout_worker.update_model_version(self.model_version)

    def step(self) -> None:
        self.state.global_step += 1
        for value in self.weights.values():
            value += 0.01
        self.sync()

    @property
    def metrics(self) -> list[dict[str, float]]:
        logged = self.rollout_worker.metrics_queue
        return [logged.get_nowait() for _ in range(logged.qsize())]


class TestTransfer:
    def test_transfer_publishes_bf16_weights(self, tmp_path: Path) -> None:
        transfer = BucketTransfer(tmp_path, files={"config.json": b"{}"})
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        for _ in range(3):
            trainer.step()
            assert version_in(open_bucket(tmp_path)) == digest(in_bf16(trainer.weights))
        transfer.destroy()
        assert [commit["step"] for commit in versions_in(tmp_path)[-3:]] == [1, 2, 3]
        assert json.loads((tmp_path / "run.json").read_bytes())["files"][0]["name"] == "config.json"

    def test_transfer_accepts_the_dtype_options_of_a_publisher(self, tmp_path: Path) -> None:
        transfer = BucketTransfer(tmp_path, dtypes={"*.0.*": "float32"})
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        trainer.sync()
        transfer.destroy()
        first, *_ = trainer.weights
        assert version_in(open_bucket(tmp_path)) == digest(in_bf16(trainer.weights) | {first: trainer.weights[first]})

    def test_transfer_continues_in_the_dtypes_of_the_run(self, tmp_path: Path) -> None:
        for dtype in ("float16", "bfloat16"):
            transfer = BucketTransfer(tmp_path, dtype=dtype)
            trainer = Trainer(transfer)
            transfer.init_weight_transfer()
            trainer.step()
            transfer.destroy()
        assert version_in(open_bucket(tmp_path)) == digest({n: v.half() for n, v in trainer.weights.items()})

    def test_transfer_can_be_used_for_a_second_training(self, tmp_path: Path) -> None:
        """TRL does not call init_weight_transfer() again for a second train()."""
        transfer = BucketTransfer(tmp_path)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        trainer.step()
        transfer.destroy()
        trainer.step()
        transfer.destroy()
        assert version_in(open_bucket(tmp_path)) == digest(in_bf16(trainer.weights))

    def test_transfer_accepts_any_iterator(self, tmp_path: Path) -> None:
        transfer = BucketTransfer(tmp_path)
        transfer.init_weight_transfer()
        transfer.send_weights(iter(masters().items()))
        transfer.destroy()
        assert version_in(open_bucket(tmp_path)) == digest(in_bf16(masters()))

    def test_transfer_reports_metrics(self, tmp_path: Path) -> None:
        transfer = BucketTransfer(tmp_path)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        trainer.sync()
        transfer.destroy()
        [metrics] = trainer.metrics
        assert metrics.keys() == {"sync/seconds", "sync/bytes"}
        assert metrics["sync/bytes"] == versions_in(tmp_path)[-1]["files"][0]["size"]
        assert transfer.staleness is None


class TestFailedTransfer:
    def test_failed_transfer_raises_after_the_iterator_is_exhausted(self, tmp_path: Path) -> None:
        transfer = BucketTransfer(tmp_path)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        trainer.sync()
        trainer.weights["model.layers.0.weight"] = torch.ones(16, 8).to_sparse()
        with pytest.raises(CheckpointError):
            trainer.sync()
        assert list(trainer.left) == []
        assert trainer.model_version == 1
        transfer.destroy()

    def test_another_schema_is_refused(self, tmp_path: Path) -> None:
        transfer = BucketTransfer(tmp_path)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        trainer.sync()
        del trainer.weights["model.layers.0.weight"]
        with pytest.raises(SchemaChanged):
            trainer.sync()
        assert (trainer.model_version, trainer.told) == (1, [1])
        transfer.destroy()


class TestEngine:
    def test_the_first_transfer_waits_for_the_engine(self, tmp_path: Path, server: Server) -> None:
        transfer = BucketTransfer(tmp_path, server=server.url)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        server.asked, server.serves_after = 0, 5
        trainer.sync()
        assert server.asked > 5
        assert server.version == "1"
        [metrics] = trainer.metrics
        assert metrics["sync/behind"] == 1
        assert metrics["sync/waited"] > 0
        transfer.destroy()

    def test_engine_may_be_one_version_behind(self, tmp_path: Path, server: Server) -> None:
        transfer = BucketTransfer(tmp_path, server=server.url)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        server.version = "1"
        trainer.sync()
        trainer.step()
        assert transfer.staleness == 1
        transfer._timeout = 0.3
        with pytest.raises(EngineError, match=r"still 2 versions behind after 0.3 s") as caught:
            trainer.step()
        assert f"weightwire follow URL --into DIR --engine vllm={server.url}" in str(caught.value)
        assert trainer.model_version == 2
        transfer.destroy()

    def test_engine_must_serve_the_version_if_applied_is_set(self, tmp_path: Path, server: Server) -> None:
        transfer = BucketTransfer(tmp_path, server=server.url, applied=True)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        server.version = "1"
        trainer.sync()
        assert transfer.staleness == 0
        transfer._timeout = 0.3
        with pytest.raises(EngineError, match="1 version"):
            trainer.step()
        transfer.destroy()

    def test_engine_may_be_behind_without_limit(self, tmp_path: Path, server: Server) -> None:
        transfer = BucketTransfer(tmp_path, server=server.url, max_behind=None)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        for _ in range(4):
            trainer.step()
        assert transfer.staleness == 4
        server.version = "3"
        assert transfer.staleness == 1
        transfer.destroy()

    def test_fences_do_not_count_as_versions_behind(self, tmp_path: Path, server: Server) -> None:
        for _ in range(3):  # each adds a fence when it starts
            transfer = BucketTransfer(tmp_path, server=server.url, max_behind=None)
            transfer.init_weight_transfer()
            Trainer(transfer).sync()
            transfer.destroy()
        assert transfer.publisher is None
        assert transfer.staleness == 1

    def test_a_version_of_another_run_is_ignored(self, tmp_path: Path, server: Server) -> None:
        server.version = "1"  # of an earlier run; this one will also have a version 1
        transfer = BucketTransfer(tmp_path, server=server.url)
        transfer.init_weight_transfer()
        transfer._timeout = 0.3
        with pytest.raises(EngineError, match="1 version"):
            Trainer(transfer).sync()
        transfer.destroy()

    def test_a_version_of_the_same_run_counts(self, tmp_path: Path, server: Server) -> None:
        for version in ("1", "3"):
            transfer = BucketTransfer(tmp_path, server=server.url, max_behind=None)
            transfer.init_weight_transfer()
            Trainer(transfer).sync()
            transfer.destroy()
            server.version = version
        assert transfer.staleness == 0

    def test_an_unreachable_engine_counts_as_behind(self, tmp_path: Path, server: Server) -> None:
        transfer = BucketTransfer(tmp_path, server=server.url, max_behind=None)
        transfer.init_weight_transfer()
        Trainer(transfer).sync()
        server.version = "1"
        assert transfer.staleness == 0
        server.__exit__()
        assert transfer.staleness == 1
        transfer.destroy()
        server.__enter__()


class TestSamples:
    def test_samples_are_stamped_with_the_served_version(self, tmp_path: Path, server: Server) -> None:
        transfer = BucketTransfer(tmp_path, server=server.url, max_behind=3)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        server.version = "1"
        trainer.sync()
        assert trainer.told[-1] == 1
        trainer.step()
        trainer.step()
        assert (trainer.model_version, trainer.told[-1]) == (3, 1)
        server.version = "2"
        until(lambda: trainer.told[-1] == 2)
        server.version = "3"
        until(lambda: trainer.told[-1] == 3)
        transfer.destroy()
        assert trainer.told == sorted(trainer.told)

    def test_samples_are_stamped_by_trl_after_destroy(self, tmp_path: Path, server: Server) -> None:
        transfer = BucketTransfer(tmp_path, server=server.url, max_behind=None)
        trainer = Trainer(transfer)
        transfer.init_weight_transfer()
        trainer.sync()
        transfer.destroy()
        assert trainer.told == []
        trainer.rollout_worker.update_model_version(7)
        assert trainer.told == [7]


class TestBeforeTraining:
    def test_an_unreachable_server_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(EngineGone, match="cannot be reached"):
            BucketTransfer(tmp_path / "bucket", server=NOWHERE, timeout=0.1).init_weight_transfer()
        assert not (tmp_path / "bucket").exists()  # no other publisher was fenced off

    def test_a_starting_server_is_waited_for(self, tmp_path: Path) -> None:
        server = Server()
        server.bind()
        threading.Timer(0.3, server.listen).start()
        transfer = BucketTransfer(tmp_path, server=server.url)
        transfer.init_weight_transfer()
        transfer.destroy()
        server.__exit__()

    def test_a_server_without_development_mode_is_refused(self, tmp_path: Path, server: Server) -> None:
        server.is_in_development = False
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            BucketTransfer(tmp_path, server=server.url).init_weight_transfer()

    @pytest.mark.parametrize(("backend", "said"), [("nccl", "nccl"), (None, "no backend")])
    def test_a_server_with_another_backend_is_refused(
        self, tmp_path: Path, server: Server, backend: str | None, said: str
    ) -> None:
        server.backend = backend
        with pytest.raises(EngineError, match=rf"weightwire backend \({said}\)\nhint: start vLLM with"):
            BucketTransfer(tmp_path, server=server.url).init_weight_transfer()

    def test_contradicting_options_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="must be 0 or more, or None"):
            BucketTransfer(tmp_path, max_behind=-1)
        with pytest.raises(ValueError, match="pass server="):
            BucketTransfer(tmp_path, applied=True)


# --- the whole ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("trl_on_cpu")
def test_async_grpo_through_a_bucket_ends_with_the_trained_bits(
    vllm: VLLM, tiny: Path, seaweedfs: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends with the trained bits. Only its follower pauses it, once per version."""
    use(monkeypatch, seaweedfs.env)
    url = seaweedfs.url("trl")
    paused = vllm.log().count("POST /pause")
    trainer = grpo(tiny, vllm.url, url, tmp_path)
    transfer = trainer.weight_transfer
    with Running("follow", url, "--into", tmp_path / "replica", "--engine", f"vllm={vllm.url}"):
        trainer.train()
        until(lambda: transfer.staleness == 0)
        assert trainer.model_version == 6  # before the first step, and after each
        assert 0 < vllm.log().count("POST /pause") - paused <= 6
        served = vllm.checksums()
        trained = {name: value.detach() for name, value in trainer.model.named_parameters()}
        assert version_in(open_bucket(url)) == digest(in_bf16(trained)) != digest(tiny)

        # A restarted trainer sends the same weights: only the version changes.
        again = BucketTransfer(url, server=vllm.url, applied=True, timeout=60)
        again.init_weight_transfer()
        again.send_weights(iter(trained.items()))
        assert again.publisher is not None
        assert vllm.weight_version == str(again.publisher.version)
        again.destroy()
        assert vllm.checksums() == served

    trainer.model.to(torch.bfloat16).save_pretrained(tmp_path / "trained")
    vllm.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "trained")}})
    assert vllm.checksums() == served
    behind = [entry["sync/behind"] for entry in trainer.state.log_history if "sync/behind" in entry]
    assert behind  # how many depends on the load: a log has none if no sync has ended since the one before
    assert max(behind) <= 2
