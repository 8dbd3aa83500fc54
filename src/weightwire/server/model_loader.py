"""A checkpoint directory -> a module that generates, and its tokenizer.

Knows transformers, and what must be right before anybody is served; nothing of runs. Importing transformers' models
takes seconds: it is done here, when one is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weightwire.errors import CheckpointError, WeightwireError
from weightwire.server.generation import Generation, Running, Task
from weightwire.weights import Checkpoint

__all__ = ["Model", "load_model"]

# Positions up to which attention is computed the plain way: a third quicker in small batches on a CPU, but its memory
# grows with the square of the length.
_SHORT = 2048


@dataclass(frozen=True)
class Model:
    """A model to serve. `names` are the tensors of its checkpoint."""

    module: Any
    tokenizer: Any
    names: tuple[str, ...]

    @cached_property
    def positions(self) -> int:
        """How many tokens a prompt and what is made of it may have together."""
        config = self.module.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 1 << 20)

    @cached_property
    def characters(self) -> int:
        """How many a text may have to fit into the positions at all: all of it in the longest of tokens."""
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

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer(text)["input_ids"]]

    def decode(self, tokens: Sequence[int]) -> str:
        """Without tokens that are no text."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


def load_model(path: Path, threads: int | None = None) -> Model:
    """In bfloat16, as runs are. Raises a CheckpointError where it is no model that can be served here.

    - `threads`: that torch computes with, here and everywhere in this process.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: is no model (it has no config.json)",
            hint="give a checkpoint directory with config, tokenizer and weights",
        )
    names = tuple(Checkpoint(path))
    try:
        model = Model(_module(path), _tokenizer(path), names)
    except WeightwireError:
        raise
    except Exception as problem:  # transformers has no error of its own for what it cannot load
        raise CheckpointError(
            f"{path}: cannot be loaded ({_first_line(problem)})",
            hint="it must be a language model that this release of transformers knows, with its tokenizer",
        ) from problem
    if model.positions <= _SHORT:
        model.module.set_attn_implementation("eager")
    _try(model, path)
    return model


def _module(path: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    module, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    # In the place of both, something has been made up.
    for name in sorted(found["missing_keys"]):
        raise CheckpointError(f"{path}: tensor {name!r} is missing", hint="give a checkpoint that is whole")
    for name, held, wanted in sorted(found["mismatched_keys"]):
        raise CheckpointError(
            f"{path}: tensor {name!r} is {list(held)}, and {list(wanted)} by its config",
            hint="give weights and config of the same model",
        )
    return module.requires_grad_(False).eval()


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    # The first use drops settings that came with it (truncation, padding), which must not happen while threads use it.
    tokenizer("a")
    return tokenizer


def _try(model: Model, path: Path) -> None:
    """Two prompts of different lengths, some tokens: what is not made for that must not fail on the first request."""
    generation = Generation(model.module, lambda: nullcontext(None), ends=(), decode=model.decode)
    try:
        generation.join([Running(Task(prompt, 2, 0.0, 1.0, (), 0, 0, 0)) for prompt in ((0,), (0, 0))])
        generation.advance()
    except Exception as problem:
        raise CheckpointError(
            f"{path}: this kind of model cannot be served here ({_first_line(problem)})",
            hint="serve it with vLLM: weightwire follow --engine vllm=URL",
        ) from problem


def _first_line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0] or type(problem).__name__
