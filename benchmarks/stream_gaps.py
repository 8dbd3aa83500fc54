"""When tokens arrived at the clients of a server during updates, and the gaps between them."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rounds import Times
from streams import Arrival

__all__ = [
    "Gap",
    "Measured",
    "Slot",
    "gaps",
    "gaps_before_pause",
    "gaps_in",
    "gaps_without_prompts",
    "longest_gaps",
    "stalls",
    "tokens_per_second",
]


SAME_STEP = 0.05  # seconds between the arrivals of tokens that the server computed together


@dataclass(frozen=True)
class Slot:
    """Some seconds of streaming, and the update that ran during that time."""

    what: str
    began: float
    ready: float  # start of the pause
    ended: float
    until: float
    times: Times


@dataclass
class Measured:
    """Everything measured on one server."""

    slots: list[Slot] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    ended: dict[str, Any] = field(default_factory=dict)
    patch_bytes: int = 0

    def of(self, what: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.what == what]

    def times(self, what: str) -> list[Times]:
        return [slot.times | {"pause": self._pause_in(slot)} for slot in self.of(what)]

    def _pause_in(self, slot: Slot) -> float:
        return slot.ended - max(at for _, _, at, _ in self.arrivals if at <= slot.ended)


@dataclass(frozen=True)
class Gap:
    """The time between two arrivals of the same request."""

    client: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def gaps(measured: Measured) -> list[Gap]:
    last: dict[int, float] = {}
    found = []
    for request, client, at, _ in measured.arrivals:
        if request in last:
            found.append(Gap(client, last[request], at))
        last[request] = at
    return found


def gaps_in(all_gaps: list[Gap], slots: list[Slot]) -> list[float]:
    """The seconds of gaps that began during these slots, sorted."""
    return sorted(gap.seconds for gap in all_gaps for slot in slots if slot.began < gap.began <= slot.until)


def gaps_before_pause(all_gaps: list[Gap], slots: list[Slot]) -> list[float]:
    """The seconds of gaps that ended before the pause: the cost of staging."""
    return sorted(gap.seconds for gap in all_gaps for slot in slots if slot.began < gap.ended <= slot.ready)


def gaps_without_prompts(measured: Measured) -> list[Gap]:
    """The gaps in which no new request began to answer: the server computes its prompt, which delays all others."""
    began: dict[int, float] = {}
    for request, _, at, _ in measured.arrivals:
        began.setdefault(request, at)
    firsts = sorted(began.values())
    return [gap for gap in gaps(measured) if bisect(firsts, gap.began) == bisect(firsts, gap.ended + SAME_STEP)]


def longest_gaps(measured: Measured, update: str) -> Iterator[Times]:
    """The seconds of the longest gap of any client in each round: without an update, and with one.

    Gaps during the prompt of a new request do not count: with long prompts they are the longest, in any round.
    """
    seen = gaps_without_prompts(measured)
    for nothing, changed in zip(measured.of("nothing"), measured.of(update), strict=True):
        yield {"nothing": gaps_in(seen, [nothing])[-1], update: gaps_in(seen, [changed])[-1]}


def stalls(all_gaps: list[Gap], slots: list[Slot]) -> list[float]:
    """For each update and client, the gap that contains the end of the update."""
    return [gap.seconds for gap in all_gaps for slot in slots if gap.began < slot.ended <= gap.ended]


def tokens_per_second(measured: Measured) -> list[Times]:
    """The rate in each slot without an update."""
    so_far: dict[int, int] = {}
    came = []
    for request, _, at, tokens in measured.arrivals:
        came.append((at, tokens - so_far.get(request, 0)))
        so_far[request] = tokens
    return [
        {"rate": sum(tokens for at, tokens in came if slot.began < at <= slot.until) / (slot.until - slot.began)}
        for slot in measured.of("nothing")
    ]
