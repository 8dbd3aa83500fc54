"""The server's operations, without HTTP: completions, whole or streamed, and the digest of the weights."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from weightwire.delta import digest
from weightwire.engines.torch import TorchEngine
from weightwire.follower import Follower
from weightwire.server.batcher import Batcher, FairLock
from weightwire.server.chat_template import render_chat
from weightwire.server.completion_answer import ChoicePart
from weightwire.server.completion_request import ChatRequest, CompletionRequest
from weightwire.server.completion_stream import CompletionStream
from weightwire.server.generation import Generation
from weightwire.server.model_loader import Model, load_model
from weightwire.server.refusal import Refusal, bad_request
from weightwire.server.sequence import Running, Sampling, Task
from weightwire.weights import DEFAULT_DTYPE

__all__ = ["CompletionService", "serving"]

_AnyRequest = CompletionRequest | ChatRequest


class CompletionService:
    """Available once the model is loaded.

    - `names`: the names of the model in requests. The first one is in answers.
    - `names_of_run`: returns the names of the run's tensors.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: Model,
        batcher: Batcher,
        engine: TorchEngine,
        names_of_run: Callable[[], tuple[str, ...]],
        wake: Callable[[], None],
    ) -> None:
        self.names = tuple(names)
        self.model = model
        self.batcher = batcher
        self.engine = engine
        self.wake = wake
        self.token_text = lru_cache(maxsize=1 << 16)(model.token_text)
        self._names_of_run = names_of_run

    def check_model(self, name: str | None) -> None:
        """Raises a Refusal if a request names another model."""
        if name is not None and name not in self.names:
            served = ", ".join(map(repr, self.names))
            raise Refusal(404, f"model {name!r:.200} is not served here: use {served}, or leave it out")

    async def complete(self, ask: _AnyRequest) -> tuple[list[ChoicePart], int]:
        """Returns the choices and the number of prompt tokens. Raises a Refusal if the request does not fit."""
        # In a thread: long prompts must not block other requests.
        asked = await asyncio.to_thread(self._tasks, ask)
        sequences = await asyncio.wrap_future(self.batcher.submit(task for tasks in asked for task in tasks))
        return [_finished(index, one) for index, one in enumerate(sequences)], _prompt_tokens(asked)

    async def stream(self, ask: _AnyRequest) -> tuple[CompletionStream, int]:
        """Like `complete`, while the choices are generated. Close the stream in any case."""
        asked = await asyncio.to_thread(self._tasks, ask)
        tasks = [task for tasks in asked for task in tasks]
        return CompletionStream(self.batcher, tasks, self.model.decode), _prompt_tokens(asked)

    @property
    def version(self) -> int | None:
        holding = self.engine.holding
        return holding.version if holding else None

    def _tasks(self, ask: _AnyRequest) -> list[list[Task]]:
        """The tasks of each prompt: one per choice."""
        seed = secrets.randbits(64) if ask.seed is None else ask.seed
        prompts = [self._chat(ask)] if isinstance(ask, ChatRequest) else list(map(self._prompt, ask.prompts))
        return [
            [self._task(ask, prompt, seed, place * ask.count + index) for index in range(ask.count)]
            for place, prompt in enumerate(prompts)
        ]

    def _chat(self, ask: ChatRequest) -> tuple[int, ...]:
        messages = [message.for_template for message in ask.messages]
        variables = ask.chat_template_kwargs or {}
        text = render_chat(self.model.tokenizer, messages, variables, reply=ask.add_generation_prompt is not False)
        self._check_length(text)
        return self._checked(self.model.encode(text, special=False))

    def _prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return self._checked(prompt)
        self._check_length(prompt)
        return self._checked(self.model.encode(prompt))

    def _check_length(self, text: str) -> None:
        """Before a text is encoded, which takes long for a long one."""
        if len(text) > self.model.characters:
            raise bad_request(
                f"the prompt has {len(text)} characters, but the model's {self.model.positions} positions "
                f"hold at most {self.model.characters}"
            )

    def _checked(self, tokens: Sequence[int]) -> tuple[int, ...]:
        if not tokens:
            raise bad_request("the prompt is empty")
        if not all(0 <= token < self.model.vocabulary for token in tokens):
            raise bad_request(f"the prompt has a token outside the model's vocabulary of {self.model.vocabulary}")
        if len(tokens) >= self.model.positions:
            raise bad_request(
                f"the prompt has {len(tokens)} tokens, but the model has {self.model.positions} positions"
            )
        return tuple(tokens)

    def _task(self, ask: _AnyRequest, prompt: tuple[int, ...], seed: int, index: int) -> Task:
        free = self.model.positions - len(prompt)
        return Task(
            prompt=prompt,
            most=free if ask.most is None else min(ask.most, free),
            sampling=_sampling(ask),
            stops=ask.stops,
            tops=min(ask.tops or 0, self.model.vocabulary),
            seed=seed,
            index=index,
        )

    def weights(self) -> dict[str, Any]:
        """The run, version and digest of the live weights, or of the live adapter. Reads all of them."""
        with self.engine.serving():
            holding = self.engine.holding
            held = self.engine.tensors
            names = self._names_before_the_run(held) if holding is None else self._names_of_run()
            state = digest({name: held[name] for name in names if name in held}).hex
        run, version = (None, None) if holding is None else (holding.run, holding.version)
        return {"run": run, "version": version, "state": state}

    def _names_before_the_run(self, held: Mapping[str, Any]) -> Iterable[str]:
        return held if self.model.updated is not self.model.module else self.model.names


@contextmanager
def serving(
    path: Path,
    follower: Follower,
    threads: int | None = None,
    dtype: str = DEFAULT_DTYPE,
    names: Sequence[str] | None = None,
    adapter: bytes | None = None,
) -> Iterator[CompletionService]:
    """Loads a model and everything that generates with it. A Keeper updates its `engine`.

    `names` are the names of the model in requests; by default its path. `adapter` is the adapter_config.json of the
    run, if it is an adapter.
    """
    model = load_model(path, threads, dtype, adapter)
    engine = TorchEngine(model.updated, lock=FairLock(), threads=threads)
    generation = Generation(model.module, engine.serving, ends=model.ends, decode=model.decode)
    with closing(Batcher(generation)) as batcher:
        yield CompletionService(
            names or [str(path)], model, batcher, engine, lambda: tuple(follower.replica.weights), follower.wake
        )


def _finished(index: int, one: Running) -> ChoicePart:
    return ChoicePart(index, one.text, one.tokens, one.logprobs, one.tops, one.versions, one.reason)


def _prompt_tokens(asked: list[list[Task]]) -> int:
    return sum(len(tasks[0].prompt) for tasks in asked)


def _sampling(ask: _AnyRequest) -> Sampling:
    """The fields that the request gives."""
    given = {one.name: getattr(ask, one.name) for one in fields(Sampling)}
    return Sampling(**{name: value for name, value in given.items() if value is not None})
