"""The thread that generates: at every step it admits waiting sequences and returns finished ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from weightwire.errors import EngineError, first_line
from weightwire.server.generation import Generation
from weightwire.server.sequence import Running, Task

__all__ = ["Batcher", "FairLock"]

_MOST_RUNNING = 256  # sequences
_MOST_WAITING = 16_384  # sequences; more would wait too long, so they are rejected
_MOST_READ = 1024  # prompt tokens per step, with padding; other sequences and new versions wait for a step


class FairLock:
    """A lock in order of arrival, so that a busy server cannot keep a new version out."""

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


@dataclass(frozen=True)
class _PendingRequest:
    """The sequences of one request. `on_step` is called after each step."""

    sequences: Sequence[Running]
    on_step: Callable[[], None]


def _ignore_step() -> None:
    pass


class Batcher:
    """Call `submit` from any thread. Starts at construction. `close` fails all pending futures."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._waiting: deque[Running] = deque()
        self._jobs: dict[Future[list[Running]], _PendingRequest] = {}
        self._changed = threading.Condition()
        self._closed = self._paused = False
        self._resting = False  # the thread waits for work
        self._thread = threading.Thread(target=self._work, name="weightwire-generation", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """The number of sequences being generated."""
        return len(self._generation.running)

    @property
    def waiting(self) -> int:
        """The number of sequences that have not started."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        return self._paused

    def submit(self, tasks: Iterable[Task]) -> Future[list[Running]]:
        """Returns a future for all of the tasks. Cancelling it drops them.

        Raises an EngineError if too many sequences wait.
        """
        return self.start([Running(task) for task in tasks])

    def start(self, sequences: Sequence[Running], on_step: Callable[[], None] = _ignore_step) -> Future[list[Running]]:
        """Like `submit`, for sequences that the caller reads while they grow.

        `on_step` is called on the thread that generates, after each step. It must be quick and must not raise.
        """
        future: Future[list[Running]] = Future()
        with self._changed:
            if self._closed:
                raise EngineError("the server is stopping", hint="use another server")
            if len(self._waiting) + len(sequences) > _MOST_WAITING:
                raise EngineError(
                    f"{len(sequences)} sequences do not fit: {len(self._waiting)} of {_MOST_WAITING} places are taken",
                    hint="try later, or use another server",
                )
            self._jobs[future] = _PendingRequest(sequences, on_step)
            self._waiting.extend(sequences)
            self._changed.notify_all()
        future.add_done_callback(self._note_cancelled)
        return future

    def pause(self) -> None:
        """Stops after the current step. Running and new sequences wait for `resume`."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._resting or self._closed or not self._paused)

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self) -> None:
        """Stops the thread. Running sequences fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._fail(EngineError("the server is stopping", hint="use another server"))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._has_work():
            try:
                self._drop_cancelled()
                if self._paused:
                    continue
                while newcomers := self._next_batch():
                    self._generation.join(newcomers)
                if self._generation.running:
                    self._generation.advance()
                self._hand_out()
            except EngineError as problem:
                self._fail(problem)
            except Exception as problem:  # mostly out of memory: keep serving the next requests
                hint = "retry; if it fails again, see the server's log"
                self._fail(
                    EngineError(f"the model failed ({type(problem).__name__}: {first_line(problem)})", hint=hint)
                )

    def _has_work(self) -> bool:
        """Waits for work. Returns False once closed."""
        with self._changed:
            self._resting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._can_work())
            self._resting = False
            return not self._closed

    def _can_work(self) -> bool:
        return any(future.cancelled() for future in self._jobs) if self._paused else bool(self._jobs)

    def _note_cancelled(self, future: Future[list[Running]]) -> None:
        """Wakes a paused thread, so that it drops the sequences."""
        if future.cancelled():
            with self._changed:
                self._changed.notify_all()

    def _next_batch(self) -> list[Running]:
        """The sequences to start now: the one that waited longest, and others with prompts of similar length."""
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
            dropped = {one for future in gone for one in self._jobs.pop(future).sequences}
            self._waiting = deque(one for one in self._waiting if one not in dropped) if dropped else self._waiting
        if any(one in dropped for one in self._generation.running):
            self._generation.keep([one not in dropped for one in self._generation.running])

    def _hand_out(self) -> None:
        with self._changed:
            jobs = list(self._jobs.values())
            done = [future for future, job in self._jobs.items() if all(one.reason for one in job.sequences)]
            finished = [(future, self._jobs.pop(future)) for future in done]
        for job in jobs:
            job.on_step()
        for future, job in finished:
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_result(list(job.sequences))

    def _fail(self, problem: EngineError) -> None:
        """Fails all pending futures."""
        with self._changed:
            jobs, self._jobs = self._jobs, {}
            self._waiting.clear()
        self._generation.keep([False] * len(self._generation.running))
        for future in jobs:
            with suppress(InvalidStateError):
                future.set_exception(problem)


def _fitting(sequences: list[Running]) -> Iterator[Running]:
    """The first sequence, and as many more as fit into one step. Equal prompts are read once."""
    prompts: set[tuple[int, ...]] = set()
    width = 0
    for one in sequences:
        width = max(width, len(one.task.prompt))
        prompts.add(one.task.prompt)
        if len(prompts) > 1 and width * len(prompts) > _MOST_READ:
            return
        yield one
