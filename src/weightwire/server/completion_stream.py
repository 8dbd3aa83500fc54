"""The choices of a request while they are generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from weightwire.server.batcher import Batcher
from weightwire.server.completion_answer import ChoicePart
from weightwire.server.sequence import Running, Task
from weightwire.server.text_stream import TextStream

__all__ = ["CompletionStream"]


class CompletionStream:
    """Starts to generate at construction, in an event loop. `close` stops it.

    A client that reads slowly gets larger parts: nothing is queued for it.
    """

    def __init__(self, batcher: Batcher, tasks: Sequence[Task], decode: Callable[[Sequence[int]], str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stepped = asyncio.Event()
        self._open = {index: _OpenChoice(index, Running(task), decode) for index, task in enumerate(tasks)}
        self.generated = 0  # tokens of all parts so far
        sequences = [one.sequence for one in self._open.values()]
        self._future: Future[list[Running]] = batcher.start(sequences, on_step=self._wake)
        self._future.add_done_callback(lambda _: self._wake())

    async def parts(self) -> AsyncGenerator[list[ChoicePart], None]:
        """What was generated since the last time, until all choices are finished. Raises an EngineError."""
        while self._open:
            await self._stepped.wait()
            self._stepped.clear()
            done = self._future.done()
            parts = await asyncio.to_thread(self._collect)
            if parts:
                yield parts
            if done:
                self._future.result()

    def close(self) -> None:
        """Frees the places of unfinished choices."""
        self._future.cancel()

    def _wake(self) -> None:
        """Called on the thread that generates."""
        with suppress(RuntimeError):  # the event loop is closed: the server is stopping
            self._loop.call_soon_threadsafe(self._stepped.set)

    def _collect(self) -> list[ChoicePart]:
        parts = [part for one in self._open.values() if (part := one.next_part()) is not None]
        self._open = {index: one for index, one in self._open.items() if not one.finished}
        self.generated += sum(len(part.tokens) for part in parts)
        return parts


class _OpenChoice:
    def __init__(self, index: int, sequence: Running, decode: Callable[[Sequence[int]], str]) -> None:
        self.sequence = sequence
        self.finished = False
        self._index = index
        self._text = TextStream(decode, sequence.task.stops)
        self._seen = 0  # tokens

    def next_part(self) -> ChoicePart | None:
        """The tokens since the last part, and their text as far as it is certain. None if there are none."""
        one = self.sequence
        reason = one.reason  # before the tokens: none follows it
        since, self._seen = self._seen, len(one.tops)  # appended last, so the other lists are as long
        if self._seen == since and not reason:
            return None
        text = self._text.finish(one.text) if reason else self._text.add(one.tokens[: self._seen])
        self.finished = bool(reason)
        new = slice(since, self._seen)
        versions = tuple(one.versions) if reason else ()
        return ChoicePart(self._index, text, one.tokens[new], one.logprobs[new], one.tops[new], versions, reason)
