"""The vLLM server that pause.py measures: its model, how to start it, and requests to update it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from child_process import PATIENCE
from rounds import Times

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.stores import running
from support.vllm_server import VLLM

__all__ = ["VLLM", "Admin", "make_model", "serving"]

HERE = Path(__file__).parent
LONGEST = 256  # tokens of a request, prompt included


def make_model(checkpoint: Path, directory: Path) -> Path:
    """A model directory for vLLM: the weights, a config, and a tokenizer with one word per token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    directory.mkdir()
    (directory / "model.safetensors").symlink_to((checkpoint / "model.safetensors").resolve())
    if (checkpoint / "config.json").exists():
        shutil.copy(checkpoint / "config.json", directory)
    else:
        qwen3_config().save_pretrained(directory)
    config = AutoConfig.from_pretrained(directory)
    if config.architectures != ["Qwen3ForCausalLM"]:
        raise SystemExit(f"{checkpoint}: not a generative model: record one with `record.py --model qwen3`")
    words = {f"t{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1").save_pretrained(directory)
    return directory


def qwen3_config() -> Any:
    """The config of `synthetic.qwen3_shapes`."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )


@contextmanager
def serving(model: Path, scratch: Path, backend: str | None, requests: int, longest: int = LONGEST) -> Iterator[VLLM]:
    """A vLLM server for `requests` requests of `longest` tokens at once, with a weight transfer backend or without.

    Only checkpoint_patches.py is copied to its PYTHONPATH, so other modules of this directory cannot shadow packages.
    """
    extension = scratch / "extension"
    extension.mkdir(parents=True)
    shutil.copy(HERE / "checkpoint_patches.py", extension)
    options = ["--max-model-len", str(longest), "--max-num-seqs", str(requests)]
    # Prompts are computed whole: on CPUs, vLLM 0.32 crashes if a request with a seed is computed in parts.
    options += ["--max-num-batched-tokens", str(requests * longest)]
    options += ["--worker-extension-cls", "checkpoint_patches.CheckpointPatches"]
    path = os.pathsep.join(filter(None, [str(extension), os.environ.get("PYTHONPATH")]))
    server = VLLM(scratch, model, backend=backend, options=options, env={"PYTHONPATH": path}, is_warm=False)
    with running(server):
        yield server


class Admin:
    """Sends requests to a server over one connection, as our engine does, and times each."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
        self.times: Times = {}

    def begin(self) -> None:
        """Connects again, because the server closes idle connections after some seconds."""
        self.times = {}
        self._connection.close()
        self._connection.connect()

    def request(self, name: str, path: str, body: dict[str, Any] | None = None) -> Any:
        began = time.perf_counter()
        self._connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise SystemExit(f"{path}: HTTP {response.status}: {text[:500]!r}")
        self.times[name] = time.perf_counter() - began
        return json.loads(text) if text else None

    def reload(self, checkpoint: Path) -> None:
        self.request("to pause", "/pause?mode=keep")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        self.request("to update", "/collective_rpc", body)
        self.request("to resume", "/resume")

    def load_patches(self, file: Path) -> None:
        self.request("to pause", "/pause?mode=keep")
        self.request("to start", "/start_weight_update")
        answer = self.request("to update", "/collective_rpc", {"method": "load_patches_from", "args": [str(file)]})
        self.request("to finish", "/finish_weight_update")
        self.request("to resume", "/resume")
        self.times |= answer["results"][0]
