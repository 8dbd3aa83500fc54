"""Plays many games at once: guesses from rollout servers, marks and rewards from the environment.

At the table of each rollout server sit several groups of games, all of a group with the same answer. A turn is one
request to the server, with the games of the table that still go on, and one message per game to the environment. A
server that fails costs the games at its table; it is looked for again every second or two, while the others play on.

Knows both servers' wires, and where each token came from: its log-probability and the version of the weights. Knows
nothing of learning. HTTP by httpx2, and websockets.
"""

from __future__ import annotations

import asyncio
import json
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from game import LETTERS
from policy import OPENING, guess_of, marked
from weightwire.engines.vllm import oldest_version, served_version
from weightwire.errors import WeightwireError

__all__ = ["EnvironmentGone", "Group", "Player", "Sample", "playing"]

_PATIENCE = 60.0  # seconds, with a rollout server that does not answer
_PAUSE = 1.5  # seconds, until one that failed is looked for again


class EnvironmentGone(WeightwireError):
    """The environment does not answer, or not as one."""


class _RolloutGone(Exception):
    """A rollout server does not answer, or not as one."""


@dataclass
class Sample:
    """A game: all of its tokens, and of those that the policy wrote, how likely they were to it.

    - `written`: which ones those are.
    - `versions`: for each guess, the oldest that wrote any of it; 0 for weights that are of no version.
    """

    tokens: list[int] = field(default_factory=lambda: list(OPENING))
    written: list[bool] = field(default_factory=lambda: [False] * len(OPENING))
    logprobs: list[float] = field(default_factory=lambda: [0.0] * len(OPENING))
    versions: list[int] = field(default_factory=list)
    reward: float = 0.0
    solved: bool = False

    def wrote(self, tokens: Sequence[int], logprobs: Sequence[float], version: int | None) -> None:
        self._extend(tokens, logprobs, written=True)
        self.versions.append(version or 0)

    def was_told(self, tokens: Sequence[int]) -> None:
        self._extend(tokens, [0.0] * len(tokens), written=False)

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float], *, written: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.written += [written] * len(tokens)


Group = list[Sample]  # games with the same answer


class Player:
    """Plays until it is cancelled, and hands over each group when its games are over.

    - `seeds`: one for each group; they choose the answers.
    - `take`: whom to hand a group. It may wait, which makes the table of this group wait.
    - `say`: whom to tell that a server is gone, or back.
    """

    def __init__(
        self,
        environment: str,
        rollouts: Sequence[str],
        *,
        groups: int,
        games: int,
        seeds: Iterator[int],
        take: Callable[[Group], Any],
        say: Callable[[str], None],
    ) -> None:
        self._environment = environment.rstrip("/")
        self._rollouts = [_Rollout(url.rstrip("/")) for url in rollouts]
        self._groups, self._games = groups, games
        self._seeds, self._take, self._say = seeds, take, say

    async def play(self) -> None:
        async with asyncio.TaskGroup() as tables:
            for rollout in self._rollouts:
                tables.create_task(self._sit_at(rollout))

    async def _sit_at(self, rollout: _Rollout) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(rollout.close)
            chairs = [_Chair(self._environment) for _ in range(self._groups * self._games)]
            for chair in chairs:
                stack.push_async_callback(chair.close)
            while True:
                await self._find(rollout)
                try:
                    groups = await self._play_once(rollout, chairs)
                except _RolloutGone as problem:
                    self._say(f"{rollout.url}: {problem}; its games are dropped")
                    rollout.there = False
                    await asyncio.sleep(_PAUSE)
                    continue
                for group in groups:
                    await self._take(group)

    async def _find(self, rollout: _Rollout) -> None:
        missed = False
        while not rollout.there and not await rollout.look():
            if not missed:
                self._say(f"{rollout.url}: no answer yet; it is looked for again and again")
            missed = True
            await asyncio.sleep(_PAUSE)
        if missed:
            self._say(f"{rollout.url}: is there")

    async def _play_once(self, rollout: _Rollout, chairs: Sequence[_Chair]) -> list[Group]:
        """A game on each chair, to its end."""
        seeds = [seed for _ in range(self._groups) for seed in [next(self._seeds)] * self._games]
        await asyncio.gather(*(chair.reset(seed) for chair, seed in zip(chairs, seeds, strict=True)))
        playing = list(chairs)
        while playing:
            await rollout.guess([chair.sample for chair in playing])
            over = await asyncio.gather(*(chair.step() for chair in playing))
            playing = [chair for chair, done in zip(playing, over, strict=True) if not done]
        samples = [chair.sample for chair in chairs]
        return [samples[first : first + self._games] for first in range(0, len(samples), self._games)]


@contextmanager
def playing(
    environment: str, rollouts: Sequence[str], *, groups: int, games: int, seed: int, say: Callable[[str], None]
) -> Iterator[Callable[[], Group | None]]:
    """Plays in a thread meanwhile. Yields whom to ask for the next group; None if there is none yet.

    - `groups`: how many of them are asked for at a time; each has so many `games`.
    """
    finished: queue.Queue[Group] = queue.Queue()

    async def take(group: Group) -> None:
        # What waits here grows stale: no more of it than will be asked for next.
        while finished.qsize() >= groups:
            await asyncio.sleep(0.02)
        finished.put(group)

    dice = random.Random(seed)
    player = Player(
        environment,
        rollouts,
        groups=max(1, groups // len(rollouts)),
        games=games,
        seeds=iter(lambda: dice.getrandbits(32), None),
        take=take,
        say=say,
    )
    loop = asyncio.new_event_loop()
    task = loop.create_task(player.play())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])), name="games", daemon=True)

    def ask() -> Group | None:
        if task.done():
            raise _cause(task.exception())
        try:
            return finished.get(timeout=0.2)
        except queue.Empty:
            return None

    thread.start()
    try:
        yield ask
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
        if not task.cancelled():
            task.exception()  # nobody asks any more


def _cause(problem: BaseException | None) -> BaseException:
    """The first of several that came together."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem or RuntimeError("nobody plays any more")


class _Rollout:
    """A server of completions: `weightwire serve`, or vLLM."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.there = False
        self._stamps = False  # that it says of every token which version it is from
        self._client = httpx2.AsyncClient(base_url=url, timeout=_PATIENCE, trust_env=False)

    async def look(self) -> bool:
        """Whether it is there, and of which kind it is."""
        try:
            self.there = (await self._client.get("/health")).status_code == 200
            self._stamps = self.there and (await self._client.get("/weights")).status_code == 200
        except httpx2.HTTPError:
            self.there = False
        return self.there

    async def guess(self, samples: Sequence[Sample]) -> None:
        """Five more tokens for each, as the policy draws them."""
        ask = {
            "prompt": [sample.tokens for sample in samples],
            "max_tokens": LETTERS,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        try:
            # Whoever stamps nothing is asked before: it may be newer by the time, never older.
            before = None if self._stamps else await asyncio.to_thread(served_version, self.url)
            reply = await self._client.post("/v1/completions", json=ask)
            reply.raise_for_status()
            choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
            for sample, choice in zip(samples, choices, strict=True):
                version = oldest_version(choice) if self._stamps else before
                sample.wrote(choice["token_ids"], choice["logprobs"]["token_logprobs"], version)
        except (httpx2.HTTPError, WeightwireError) as problem:
            raise _RolloutGone(str(problem) or type(problem).__name__) from problem
        except (ValueError, KeyError, TypeError) as problem:
            raise _RolloutGone(f"does not answer as a server of completions ({problem!r})") from problem

    async def close(self) -> None:
        await self._client.aclose()


class _Chair:
    """A session with the environment, in which one game is played after the other."""

    def __init__(self, environment: str) -> None:
        self.sample = Sample()
        self._environment = environment
        self._socket: ClientConnection | None = None

    async def reset(self, seed: int) -> None:
        self.sample = Sample()
        await self._ask({"type": "reset", "data": {"seed": seed}})

    async def step(self) -> bool:
        """Makes the guess that was written last. True if that was the end of the game."""
        sample = self.sample
        first = len(sample.written) - sample.written[::-1].index(False)
        guess = guess_of(sample.tokens[first:])
        told = await self._ask({"type": "step", "data": {"guess": guess}})
        if told["done"]:
            sample.reward, sample.solved = float(told["reward"]), bool(told["observation"]["solved"])
        else:
            sample.was_told(marked(guess, told["observation"]["marks"]))
        return bool(told["done"])

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._socket is None:
                url = f"ws{self._environment.removeprefix('http')}/ws"
                self._socket = await connect(url, compression=None, ping_interval=None, proxy=None)
            await self._socket.send(json.dumps(message))
            answer = json.loads(await self._socket.recv())
        except (OSError, ValueError, WebSocketException) as problem:
            raise EnvironmentGone(
                f"{self._environment}: the environment does not answer ({problem})",
                hint="start it: python examples/wordle/environment.py",
            ) from problem
        if answer["type"] == "error":
            raise EnvironmentGone(f"{self._environment}: {answer['data']['message']}")
        data: dict[str, Any] = answer["data"]
        return data

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
