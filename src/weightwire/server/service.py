"""The server's operations, without HTTP: completions, and the digest of the weights."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from weightwire.delta import digest
from weightwire.engines.torch import TorchEngine
from weightwire.follower import Follower
from weightwire.server.batcher import Batcher, FairLock
from weightwire.server.completion_api import CompletionRequest, FinishedChoice, Refusal
from weightwire.server.generation import Generation, Running, Task
from weightwire.server.model_loader import Model, load_model
from weightwire.weights import DEFAULT_DTYPE

__all__ = ["CompletionService", "serving"]

_TOKENS = 16  # the default of max_tokens, as in OpenAI's API


class CompletionService:
    """Available once the model is loaded.

    - `name`: the model's name in answers.
    - `names_of_run`: returns the names of the run's tensors.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        batcher: Batcher,
        engine: TorchEngine,
        names_of_run: Callable[[], tuple[str, ...]],
        wake: Callable[[], None],
    ) -> None:
        self.name = name
        self.model = model
        self.batcher = batcher
        self.engine = engine
        self.wake = wake
        self.token_text = lru_cache(maxsize=1 << 16)(model.token_text)
        self._names_of_run = names_of_run

    async def complete(self, ask: CompletionRequest) -> tuple[list[FinishedChoice], int]:
        """Returns the choices and the number of prompt tokens. Raises a Refusal if the request does not fit."""
        # In a thread: long prompts must not block other requests.
        asked = await asyncio.to_thread(self._tasks, ask)
        sequences = await asyncio.wrap_future(self.batcher.submit(task for tasks in asked for task in tasks))
        return [_finished(one) for one in sequences], sum(len(tasks[0].prompt) for tasks in asked)

    @property
    def version(self) -> int | None:
        holding = self.engine.holding
        return holding.version if holding else None

    def _tasks(self, ask: CompletionRequest) -> list[list[Task]]:
        """The tasks of each prompt: one per choice."""
        seed = secrets.randbits(64) if ask.seed is None else ask.seed
        count = ask.n or 1
        return [
            [self._task(ask, prompt, seed, place * count + index) for index in range(count)]
            for place, prompt in enumerate(map(self._prompt, ask.prompts))
        ]

    def _prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str) and len(prompt) > self.model.characters:
            raise Refusal(
                400,
                f"the prompt has {len(prompt)} characters, but the model's {self.model.positions} positions "
                f"hold at most {self.model.characters}",
            )
        tokens = self.model.encode(prompt) if isinstance(prompt, str) else prompt
        if not tokens:
            raise Refusal(400, "the prompt is empty")
        if not all(0 <= token < self.model.vocabulary for token in tokens):
            raise Refusal(400, f"the prompt has a token outside the model's vocabulary of {self.model.vocabulary}")
        if len(tokens) >= self.model.positions:
            raise Refusal(
                400, f"the prompt has {len(tokens)} tokens, but the model has {self.model.positions} positions"
            )
        return tuple(tokens)

    def _task(self, ask: CompletionRequest, prompt: tuple[int, ...], seed: int, index: int) -> Task:
        return Task(
            prompt=prompt,
            most=min(ask.max_tokens or _TOKENS, self.model.positions - len(prompt)),
            temperature=1.0 if ask.temperature is None else ask.temperature,
            top_p=1.0 if ask.top_p is None else ask.top_p,
            stops=ask.stops,
            tops=min(ask.logprobs or 0, self.model.vocabulary),
            seed=seed,
            index=index,
        )

    def weights(self) -> dict[str, Any]:
        """The run, version and digest of the live weights. Reads all of them."""
        with self.engine.serving():
            holding = self.engine.holding
            held = self.model.module.state_dict(keep_vars=True)
            names = self.model.names if holding is None else self._names_of_run()
            state = digest({name: held[name] for name in names if name in held}).hex
        run, version = (None, None) if holding is None else (holding.run, holding.version)
        return {"run": run, "version": version, "state": state}


@contextmanager
def serving(
    path: Path, follower: Follower, threads: int | None = None, dtype: str = DEFAULT_DTYPE
) -> Iterator[CompletionService]:
    """Loads a model and everything that generates with it. A Keeper updates its `engine`."""
    model = load_model(path, threads, dtype)
    engine = TorchEngine(model.module, lock=FairLock(), threads=threads)
    generation = Generation(model.module, engine.serving, ends=model.ends, decode=model.decode)
    with closing(Batcher(generation)) as batcher:
        yield CompletionService(
            str(path), model, batcher, engine, lambda: tuple(follower.replica.weights), follower.wake
        )


def _finished(one: Running) -> FinishedChoice:
    return FinishedChoice(one.text, one.tokens, one.logprobs, one.tops, one.versions, one.reason)
