"""The interface that `SingleProcess` and `RankProcess` implement. What they share is in `publish_loop`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from weightwire.chain import ChainWriter, Commit, Run, Sealed
from weightwire.delta import State
from weightwire.errors import Interrupted, WeightwireError
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.weights import Dtype, Tensor, Weights

__all__ = ["PublishProcess", "Taken", "interrupted", "next_capture"]


@dataclass(frozen=True)
class Taken:
    """Weights that were taken to become a version. `problem` is the error that prevents publishing them, if any.

    They may be overwritten once they are released or, if the trainer waits, once this is `over`.
    """

    publication: Publication
    weights: Weights
    copies: HostCopies[Publication]
    problem: WeightwireError | None = None
    over: asyncio.Event | None = None

    def end(self, failure: WeightwireError | None) -> None:
        """Releases everything that may be waiting, after success or failure."""
        self.copies.release_all()
        if not self.publication.done:
            self.publication.fail(failure or interrupted())
        if self.over is not None:
            self.over.set()


class PublishProcess(Protocol):
    """Opens a run, takes captures, makes versions of them, and leaves.

    `own_rows`, `skip` and `capture` are called in the trainer's thread, everything else in the loop's thread.
    """

    @property
    def run_record(self) -> Run | None: ...

    @property
    def version(self) -> int | None:
        """The newest known version, including fences; None before the run exists."""
        ...

    @property
    def state(self) -> State | None:
        """The state that was published last."""
        ...

    @property
    def dtypes(self) -> dict[str, Dtype]:
        """The dtypes of the run or, before it exists, of the first capture."""
        ...

    @property
    def copies(self) -> HostCopies[Publication] | None: ...

    @property
    def writer(self) -> ChainWriter | None: ...

    async def start(self) -> None: ...

    @property
    def is_joined(self) -> bool:
        """Whether this process knows which rows it publishes. Until it does, call `join` before each capture."""
        ...

    async def join(self, weights: Weights, aliases: Mapping[str, str]) -> None: ...

    def own_rows(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows that this process publishes. May wait until the other ranks give up a publish that failed here."""
        ...

    def skip(self) -> None:
        """Counts a publish that failed before its capture."""
        ...

    def capture(self, publication: Publication, weights: Weights) -> None: ...

    async def take(self) -> Taken | None:
        """Waits for the next capture and takes it; None at the end."""
        ...

    async def offer(self, publication: Publication, weights: Weights) -> Taken | None:
        """Accepts weights of a trainer that waits until they are published, so no capture is needed.

        Returns what the caller must publish, or None once all ranks have published it together.
        """
        ...

    async def make_version(self, taken: Taken) -> Sealed[Commit]: ...

    async def follow_up(self, commit: Sealed[Commit]) -> None:
        """Starts the work after a commit, without delaying the next version."""
        ...

    def leave(self) -> None:
        """Ends the participation of this process."""
        ...


def interrupted() -> Interrupted:
    return Interrupted("the publisher was interrupted", hint="create a new publisher")


async def next_capture(
    context: PublishContext,
    find_copies: Callable[[], HostCopies[Publication] | None],
    prepare: Callable[[], Awaitable[WeightwireError | None]],
) -> Taken | None:
    """Waits for a capture and takes it; None once the publisher closes and none is left.

    `prepare` runs before the capture is taken, so that captures can continue while it waits for the bucket. It returns
    the error that prevents publishing, or None.
    """
    lifecycle = context.lifecycle
    while True:
        while (copies := find_copies()) is not None and copies.waiting:
            problem = await prepare()
            publication = await context.runtime.run_in_thread(copies.take)
            if publication is not None:
                return Taken(publication, copies.latest, copies, problem)
        if lifecycle.closing and not lifecycle.is_woken:  # woken: a capture may have just arrived
            return None
        await lifecycle.sleep()
