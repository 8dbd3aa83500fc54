"""A real vLLM server on a CPU, with a tiny but complete model.

A server takes half a minute to start, so tests share those of `conftest.py`. It listens on 127.0.0.1, downloads and
reports nothing, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.stores import Server, answers, free_ports
from support.warm_vllm import WarmVllm, end_with_parent

__all__ = ["VLLM", "tiny_config", "tiny_model"]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_config(*, tied: bool = False) -> Any:
    """Qwen3 with all layers that engines fuse, share or split: grouped heads, norms of heads, gate and up."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )


def tiny_model(directory: Path, *, tied: bool = False, seed: int = 0, chat_template: str | None = None) -> Path:
    """A checkpoint of half a million bf16 weights with a tokenizer of bytes. A seed gives the same bits every time."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(tiny_config(tied=tied)).to(torch.bfloat16)
    model.save_pretrained(directory)
    _tokenizer(chat_template).save_pretrained(directory)
    return directory


def _tokenizer(chat_template: str | None) -> Any:
    """One token per byte, and those of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
    )


class VLLM(Server):
    """The vLLM server in developer mode, with a weight transfer backend."""

    def __init__(
        self,
        root: Path,
        model: Path,
        *,
        backend: str | None = "weightwire",
        tensor_parallel: int = 1,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        is_warm: bool = True,
    ) -> None:
        """`is_warm`: forked from a process that has imported vLLM. Otherwise it starts as it does for users."""
        self.model = model
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        # `vllm serve` looks for a distribution named vllm; the one that is built for CPUs has another name.
        module = "vllm.entrypoints.openai.api_server"
        sizes = ["--max-model-len", "256", "--max-num-seqs", "8", "--dtype", "bfloat16", "--enforce-eager"]
        if is_warm:  # for tests: the smallest cache that vLLM makes otherwise is a gigabyte
            sizes += ["--num-gpu-blocks-override", "128"]
        # A single worker runs in the process of the engine: one import of vLLM less.
        workers = ["--tensor-parallel-size", str(tensor_parallel)]
        workers += ["--distributed-executor-backend", "uni"] if tensor_parallel == 1 else []
        place = ["--host", "127.0.0.1", "--port", str(port), *workers]
        transfer = ["--weight-transfer-config", json.dumps({"backend": backend})] if backend else []
        command = ["-m", module, "--model", str(model), *place, *sizes, *transfer, *options]
        self._server: WarmVllm | subprocess.Popen[bytes] | None = None
        self._is_warm = is_warm
        self._env = {**os.environ, **_environment(tensor_parallel), **(env or {})}
        super().__init__(root, command, lambda: answers("GET", f"{self.url}/health"))

    def start(self) -> None:
        self._server = self._started()
        deadline = time.monotonic() + 600
        while not self._is_ready():
            if self._server.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"vLLM did not start:\n{self.log()[-6000:]}")
            time.sleep(0.1)

    def _started(self) -> WarmVllm | subprocess.Popen[bytes]:
        if self._is_warm:
            return WarmVllm([str(one) for one in self._command], self.root / "log", self.root, self._env)
        with (self.root / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *self._command],
                cwd=self.root,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A separate process group, which includes its workers.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def kill(self) -> None:
        """Kills the server and its workers."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None

    stop = kill

    def pause(self) -> None:
        """Stops all processes of the server. Connections stay open."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGCONT)

    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")

    def get(self, path: str) -> Any:
        return _ask(urllib.request.Request(f"{self.url}{path}"))

    def post(self, path: str, body: object = None) -> Any:
        return _ask(self._request(path, body))

    def _request(self, path: str, body: object) -> urllib.request.Request:
        data = b"" if body is None else json.dumps(body).encode()
        return urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method="POST")

    def post_text(self, path: str, body: object) -> str:
        """For endpoints that answer with plain text."""
        with urllib.request.urlopen(self._request(path, body), timeout=60) as reply:
            return str(reply.read().decode())

    @property
    def weight_version(self) -> str:
        return str(self.get("/weight_info")["weight_version"])

    def checksums(self) -> Any:
        """SHA-256 of every tensor in the workers: equal for equal bits."""
        return self.post("/weight_checker", {"action": "checksum"})

    def complete(self, prompt: str, tokens: int = 8) -> str:
        """The likeliest continuation."""
        body = {"model": str(self.model), "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return str(self.post("/v1/completions", body)["choices"][0]["text"])


def _environment(tensor_parallel: int) -> dict[str, str]:
    shared = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"} if tensor_parallel > 1 else {}
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        **shared,
    }


def _ask(request: urllib.request.Request) -> Any:
    with urllib.request.urlopen(request, timeout=60) as reply:
        text = reply.read()
    return json.loads(text) if text else None
