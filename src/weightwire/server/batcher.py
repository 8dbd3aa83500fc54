"""The thread that generates: takes in what waits at every step, and hands out what has finished.

Knows sequences, queues and futures; no HTTP, and nothing of what happens inside a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import TracebackType
from typing import Self

from weightwire.errors import EngineError
from weightwire.server.generation import Generation, Running, Task

__all__ = ["Batcher", "FairLock"]

_MOST_RUNNING = 256  # sequences
_MOST_WAITING = 16_384  # sequences: who comes then would wait for long, and is better told so
_MOST_READ = 1024  # tokens of prompts, padding and all, in one step: the others, and a new version, wait for it


class FairLock:
    """A lock that nobody gets twice in a row while another waits: a new version is not kept out by a busy server."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._held = threading.Lock()

    def __enter__(self) -> Self:
        with self._next:
            self._held.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.release()


class Batcher:
    """`submit` tasks from any thread. Started at once; `close` leaves nobody waiting."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._waiting: deque[Running] = deque()
        self._jobs: dict[Future[list[Running]], list[Running]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="weightwire-generation", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """How many sequences are being generated."""
        return len(self._generation.running)

    @property
    def waiting(self) -> int:
        """How many have not been begun."""
        return len(self._waiting)

    def submit(self, tasks: Iterable[Task]) -> Future[list[Running]]:
        """What becomes of the tasks, once all of them have finished. Cancel it, and they are dropped.

        Raises an EngineError if too many wait already.
        """
        future: Future[list[Running]] = Future()
        sequences = [Running(task) for task in tasks]
        with self._changed:
            if self._closed:
                raise EngineError("the server is stopping", hint="ask another one")
            if len(self._waiting) + len(sequences) > _MOST_WAITING:
                raise EngineError(
                    f"the server is busy: {len(self._waiting)} sequences wait already", hint="ask later, or another one"
                )
            self._jobs[future] = sequences
            self._waiting.extend(sequences)
            self._changed.notify()
        return future

    def close(self) -> None:
        """What still runs is cut off."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._fail(EngineError("the server is stopping", hint="ask another one"))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._has_work():
            try:
                self._drop_cancelled()
                while newcomers := self._next_batch():
                    self._generation.join(newcomers)
                if self._generation.running:
                    self._generation.advance()
                self._hand_out()
            except EngineError as problem:
                self._fail(problem)
            except Exception as problem:  # out of memory, most likely: no reason to serve nobody any more
                reason = str(problem).partition("\n")[0]
                self._fail(EngineError(f"the model failed ({type(problem).__name__}: {reason})"))

    def _has_work(self) -> bool:
        """Waits for some; False when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._jobs)
            return not self._closed

    def _next_batch(self) -> list[Running]:
        """Some that may be begun now: who has waited longest, and whose prompts are about as long, to pad little."""
        with self._changed:
            free = _MOST_RUNNING - len(self._generation.running)
            if not self._waiting or free <= 0:
                return []
            length = len(self._waiting[0].task.prompt)
            near = sorted(self._waiting, key=lambda one: abs(len(one.task.prompt) - length))
            taken = list(_fitting(near[:free]))
            begun = set(taken)
            self._waiting = deque(one for one in self._waiting if one not in begun)
            return taken

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [future for future in self._jobs if future.cancelled()]
            dropped = {one for future in gone for one in self._jobs.pop(future)}
            self._waiting = deque(one for one in self._waiting if one not in dropped) if dropped else self._waiting
        if any(one in dropped for one in self._generation.running):
            self._generation.keep([one not in dropped for one in self._generation.running])

    def _hand_out(self) -> None:
        with self._changed:
            done = [future for future, sequences in self._jobs.items() if all(one.reason for one in sequences)]
            finished = [(future, self._jobs.pop(future)) for future in done]
        for future, sequences in finished:
            with suppress(InvalidStateError):  # cancelled just now
                future.set_result(sequences)

    def _fail(self, problem: EngineError) -> None:
        """Nobody waits for what will not come."""
        with self._changed:
            jobs, self._jobs = self._jobs, {}
            self._waiting.clear()
        self._generation.keep([False] * len(self._generation.running))
        for future in jobs:
            with suppress(InvalidStateError):
                future.set_exception(problem)


def _fitting(sequences: list[Running]) -> Iterator[Running]:
    """The first of them, and as many more as can be read in one step. The same prompt is read once."""
    prompts: set[tuple[int, ...]] = set()
    width = 0
    for one in sequences:
        width = max(width, len(one.task.prompt))
        prompts.add(one.task.prompt)
        if len(prompts) > 1 and width * len(prompts) > _MOST_READ:
            return
        yield one
