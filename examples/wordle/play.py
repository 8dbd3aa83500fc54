"""Plays many games at once: guesses from rollout servers, marks and rewards from the environment.

Each rollout server plays several groups of games at once; all games of a group have the same answer. A turn is one
request to the server with all unfinished games, and one message per game to the environment. If a server fails, its
games are dropped and it is retried every 1.5 seconds, while the other servers play on.

Records the log-probability and the version of each token. Needs httpx2 and websockets.
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

_TIMEOUT = 60.0  # seconds for a request to a rollout server
_PAUSE = 1.5  # seconds before a failed server is retried


class EnvironmentGone(WeightwireError):
    """The environment does not answer, or sends an error."""


class _RolloutGone(Exception):
    """A rollout server does not answer, or not with completions."""


@dataclass
class Sample:
    """A game as tokens.

    - `written`: marks the tokens that the policy wrote.
    - `logprobs`: their log-probabilities at that time; 0 for all others.
    - `versions`: for each guess, the oldest version that wrote any of it; 0 for weights without a version.
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

    def received(self, tokens: Sequence[int]) -> None:
        self._extend(tokens, [0.0] * len(tokens), written=False)

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float], *, written: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.written += [written] * len(tokens)


Group = list[Sample]  # games with the same answer


class Player:
    """Plays until it is cancelled, and hands over each group when its games are finished.

    - `seeds`: one per group; they choose the answers.
    - `take`: called with each finished group. While it waits, the games on the same server wait.
    - `say`: called with a message when a server fails or returns.
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
                self._say(f"{rollout.url}: no answer yet; retrying")
            missed = True
            await asyncio.sleep(_PAUSE)
        if missed:
            self._say(f"{rollout.url}: connected")

    async def _play_once(self, rollout: _Rollout, chairs: Sequence[_Chair]) -> list[Group]:
        """Plays one game per chair to its end."""
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
    """Plays in a background thread. Yields a function that returns the next group, or None if there is none yet.

    - `groups`: how many groups a training step takes; each has `games` games.
    """
    finished: queue.Queue[Group] = queue.Queue()

    async def take(group: Group) -> None:
        # Waiting games grow stale: keep no more than the next step takes.
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
            task.exception()  # retrieved, so that asyncio does not log it


def _cause(problem: BaseException | None) -> BaseException:
    """The first exception of a group."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem or RuntimeError("the games have stopped")


class _Rollout:
    """A completion server: `weightwire serve` or vLLM."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.there = False
        self._stamps = False  # it reports the version of every token
        self._client = httpx2.AsyncClient(base_url=url, timeout=_TIMEOUT, trust_env=False)

    async def look(self) -> bool:
        """Checks whether it is up and reports versions."""
        try:
            self.there = (await self._client.get("/health")).status_code == 200
            self._stamps = self.there and (await self._client.get("/weights")).status_code == 200
        except httpx2.HTTPError:
            self.there = False
        return self.there

    async def guess(self, samples: Sequence[Sample]) -> None:
        """Samples five more tokens for each game."""
        ask = {
            "prompt": [sample.tokens for sample in samples],
            "max_tokens": LETTERS,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        try:
            # Without stamps, ask for the version first: the tokens may come from a newer one, never an older one.
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
            raise _RolloutGone(f"is not a completion server ({problem!r})") from problem

    async def close(self) -> None:
        await self._client.aclose()


class _Chair:
    """A session with the environment: one game after the other."""

    def __init__(self, environment: str) -> None:
        self.sample = Sample()
        self._environment = environment
        self._socket: ClientConnection | None = None

    async def reset(self, seed: int) -> None:
        self.sample = Sample()
        await self._ask({"type": "reset", "data": {"seed": seed}})

    async def step(self) -> bool:
        """Submits the last guess. Returns whether the game is over."""
        sample = self.sample
        first = len(sample.written) - sample.written[::-1].index(False)
        guess = guess_of(sample.tokens[first:])
        told = await self._ask({"type": "step", "data": {"guess": guess}})
        if told["done"]:
            sample.reward, sample.solved = float(told["reward"]), bool(told["observation"]["solved"])
        else:
            sample.received(marked(guess, told["observation"]["marks"]))
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
