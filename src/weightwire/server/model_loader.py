"""A checkpoint directory -> a module that generates, and its tokenizer.

Imports transformers only when a model is loaded, because that takes seconds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weightwire.engines.adapter_module import lora_settings
from weightwire.errors import CheckpointError, WeightwireError, first_line
from weightwire.server.generation import Generation
from weightwire.server.sequence import Running, Sampling, Task
from weightwire.weights import ADAPTER_CONFIG, DEFAULT_DTYPE, Checkpoint

__all__ = ["Model", "load_model"]

# Positions up to which eager attention is used. It is a third faster for small batches on a CPU, but its memory grows
# with the square of the length.
_SHORT = 2048

_LARGEST_RANK = 4096  # of an adapter


@dataclass(frozen=True)
class Model:
    """A model to serve.

    - `names`: the tensors of its checkpoint.
    - `updated`: what an engine updates: the module, or the PEFT model around it.
    """

    module: Any
    tokenizer: Any
    names: tuple[str, ...]
    updated: Any

    @cached_property
    def positions(self) -> int:
        """The maximum number of tokens of a prompt and its completion together."""
        config = self.module.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 1 << 20)

    @cached_property
    def characters(self) -> int:
        """The maximum length of a text that can fit into the positions, if every token were the longest one."""
        return self.positions * max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def vocabulary(self) -> int:
        return int(self.module.config.get_text_config().vocab_size)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text."""
        found = getattr(self.module.generation_config, "eos_token_id", None)
        found = self.module.config.get_text_config().eos_token_id if found is None else found
        return frozenset(found if isinstance(found, list) else () if found is None else (found,))

    @cached_property
    def dtype(self) -> str:
        return str(self.module.dtype).removeprefix("torch.")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text. `special` adds those that begin or end every text, which chat templates contain."""
        return [int(token) for token in self.tokenizer(text, add_special_tokens=special)["input_ids"]]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


def load_model(
    path: Path, threads: int | None = None, dtype: str = DEFAULT_DTYPE, adapter: bytes | None = None
) -> Model:
    """Loads a model. Raises a CheckpointError if it cannot be served.

    - `threads`: the number of torch threads in this process.
    - `dtype`: the dtype of the run. Engines change weights in place, so both must be the same.
    - `adapter`: the adapter_config.json of the run, if that is an adapter. The model is its base, in its own dtype.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: not a model: config.json is missing",
            hint="use a checkpoint directory with config, tokenizer and weights",
        )
    names = tuple(Checkpoint(path))
    try:
        module = _module(path, dtype if adapter is None else "auto")
        updated = module if adapter is None else _with_adapter(module, adapter, getattr(torch, dtype), path)
        model = Model(module, _tokenizer(path), names, updated)
    except WeightwireError:
        raise
    except Exception as problem:  # transformers raises errors of many types
        raise CheckpointError(
            f"{path}: cannot be loaded ({first_line(problem)})",
            hint="use a language model that this release of transformers supports, with its tokenizer",
        ) from problem
    if model.positions <= _SHORT:
        model.module.set_attn_implementation("eager")
    _try(model, path)
    return model


def _module(path: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    module, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    # transformers fills these with random values.
    for name in sorted(found["missing_keys"]):
        raise CheckpointError(f"{path}: tensor {name!r} is missing", hint="use a complete checkpoint")
    for name, held, wanted in sorted(found["mismatched_keys"]):
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(held)}, but the config says {list(wanted)}",
            hint="use weights and config of the same model",
        )
    return module.requires_grad_(False).eval()


def _with_adapter(module: Any, config: bytes, dtype: torch.dtype, path: Path) -> Any:
    """Puts a LoRA adapter into the layers of a module. It starts at zero: nothing changes until weights are loaded.

    The config may come from a stranger: the follower verifies it with the first version, and the engine compares.
    """
    settings = lora_settings(config, ADAPTER_CONFIG)
    neutral = {"init_lora_weights": True, "base_model_name_or_path": None, "inference_mode": True}
    try:
        _check_neutral(settings)
        import peft

        with tempfile.TemporaryDirectory(prefix="weightwire-") as directory:
            Path(directory, ADAPTER_CONFIG).write_text(json.dumps(settings | neutral))
            wanted = peft.PeftConfig.from_pretrained(directory)
        adapted = peft.get_peft_model(module, wanted, autocast_adapter_dtype=False)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(dtype)
    except Exception as problem:  # PEFT raises errors of many types
        raise CheckpointError(
            f"{path}: the adapter of the run does not fit this model ({first_line(problem)})",
            hint="pass the base model that the adapter was trained on as MODEL, or serve the adapter with vLLM",
        ) from problem
    return adapted.requires_grad_(False).eval()


def _check_neutral(settings: dict[str, Any]) -> None:
    """Raises a ValueError if PEFT would change the base model, or must generate by itself, or needs much memory."""
    for key in ("layer_replication", "alora_invocation_tokens"):
        if settings.get(key):
            raise ValueError(f"it has {key}")
    if settings.get("init_lora_weights") not in (True, False, "gaussian", None):
        raise ValueError(f"its init_lora_weights is {settings['init_lora_weights']!r:.100}")
    if max(settings.get("r", 0), *(settings.get("rank_pattern") or {}).values(), 0) > _LARGEST_RANK:
        raise ValueError(f"its rank is over {_LARGEST_RANK}")


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    # The first use resets truncation and padding, which is not thread-safe. If there are no files, transformers may
    # return a tokenizer without a vocabulary.
    if not tokenizer("a")["input_ids"]:
        raise CheckpointError(f"{path}: has no tokenizer", hint="save it there: tokenizer.save_pretrained(DIR)")
    return tokenizer


def _try(model: Model, path: Path) -> None:
    """Generates a few tokens for two prompts, so that an unsupported model fails now and not at the first request."""
    generation = Generation(model.module, lambda: nullcontext(None), ends=(), decode=model.decode)
    try:
        greedy = Sampling(temperature=0.0)
        generation.join([Running(Task(prompt, 2, greedy)) for prompt in ((0,), (0, 0))])
        generation.advance()
    except Exception as problem:
        raise CheckpointError(
            f"{path}: this kind of model cannot be served here ({first_line(problem)})",
            hint="serve it with vLLM: weightwire follow --engine vllm=URL",
        ) from problem
