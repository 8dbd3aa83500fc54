"""What differs between a trainer of one process and one of many ranks; everything else is in `publish_loop`."""

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

__all__ = ["PublishProcess", "Taken", "next_capture"]


@dataclass(frozen=True)
class Taken:
    """Weights that were taken, to become a version. `problem` is why they cannot.

    They may be overwritten as soon as they are released, or where the trainer waits for it, when this is `over`.
    """

    publication: Publication
    weights: Weights
    copies: HostCopies[Publication]
    problem: WeightwireError | None = None
    over: asyncio.Event | None = None

    def end(self, failure: WeightwireError | None) -> None:
        """Whatever happened: nobody waits for ever."""
        self.copies.release_all()
        if not self.publication.done:
            self.publication.fail(failure or Interrupted("the publisher was interrupted", hint="make a new one"))
        if self.over is not None:
            self.over.set()


class PublishProcess(Protocol):
    """How a process gets hold of a run, takes captures, makes versions of them, and leaves.

    `own_rows`, `skip` and `capture` are called in the trainer's thread, everything else in the loop's.
    """

    @property
    def run_record(self) -> Run | None: ...

    @property
    def version(self) -> int | None:
        """The newest that is known, a fence included; None in a run that has not begun."""
        ...

    @property
    def state(self) -> State | None:
        """Of what was published last."""
        ...

    @property
    def dtypes(self) -> dict[str, Dtype]:
        """Of the run, if it has begun; else of what was captured first."""
        ...

    @property
    def copies(self) -> HostCopies[Publication] | None: ...

    @property
    def writer(self) -> ChainWriter | None: ...

    async def start(self) -> None: ...

    @property
    def is_joined(self) -> bool:
        """That this process knows what it is to publish: until then, `join` comes before each capture."""
        ...

    async def join(self, weights: Weights, aliases: Mapping[str, str]) -> None: ...

    def own_rows(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of its weights this process publishes. May wait until other ranks have given up what failed here."""
        ...

    def skip(self) -> None:
        """A publish failed before anything was captured."""
        ...

    def capture(self, publication: Publication, weights: Weights) -> None: ...

    async def take(self) -> Taken | None:
        """What is to be published next, as soon as there is something; None at the end."""
        ...

    async def offer(self, publication: Publication, weights: Weights) -> Taken | None:
        """Weights whose trainer waits until they are published, so that they need no capture.

        Returns what the caller is to publish; or None, once the rounds of all ranks have published it.
        """
        ...

    async def make_version(self, taken: Taken) -> Sealed[Commit]: ...

    async def follow_up(self, commit: Sealed[Commit]) -> None:
        """What follows a version, without holding up the next one."""
        ...

    def leave(self) -> None:
        """Nothing more comes from here."""
        ...


async def next_capture(
    context: PublishContext,
    find_copies: Callable[[], HostCopies[Publication] | None],
    prepare: Callable[[], Awaitable[WeightwireError | None]],
) -> Taken | None:
    """Waits for a capture, and takes it; None once the publisher closes and there is none left.

    `prepare` comes before anything is taken, and says why it cannot be published: while that waits for the bucket,
    captures need not wait for it.
    """
    lifecycle = context.lifecycle
    while True:
        while (copies := find_copies()) is not None and copies.waiting:
            problem = await prepare()
            publication = await context.runtime.run_in_thread(copies.take)
            if publication is not None:
                return Taken(publication, copies.latest, copies, problem)
        if lifecycle.closing and not lifecycle.is_woken:  # else something came just now
            return None
        await lifecycle.sleep()
