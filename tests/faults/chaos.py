"""Random faults against the processes of a run: kills, pauses, full disks, cut and slow networks.

`step` begins faults at random moments and ends those that are due. `end` ends all of them. One thread, so that the
seed decides what happens, and processes die with the thread that started them.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults.actors import Actor
from faults.proxy import METHODS, Proxy, Trouble, late, lose_reply, lose_request, slow, truncate
from faults.small_disks import SmallDisk
from support.stores import SeaweedFS

__all__ = ["Chaos", "Member"]

BETWEEN = 2.5
"""Seconds between two faults, on average."""


@dataclass
class Member:
    """A process, its way to the store, and the disk of its replica if that can be filled."""

    actor: Actor
    proxy: Proxy
    replica: Path | None = None
    disk: SmallDisk | None = None
    is_spared: bool = False
    """Never killed, so that its resources can be judged over a long life."""
    ails: set[str] = field(default_factory=set)
    """The faults that it has now: down, stopped, cut or full."""
    has_worked: bool = False
    """Whether it did something useful since it was started."""
    was_full: float = float("-inf")
    """When its disk was last full."""

    @property
    def name(self) -> str:
        return self.actor.name

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]


@dataclass(frozen=True)
class _Remedy:
    """Ends a fault."""

    due: float
    apply: Callable[[], None]


class Chaos:
    def __init__(
        self, server: SeaweedFS, members: Sequence[Member], seed: int, check_killed: Callable[[Member], None]
    ) -> None:
        self.happened: Counter[str] = Counter()
        self.is_server_up = True
        self._server = server
        self._members = members
        self._check_killed = check_killed
        self._random = random.Random(seed)
        self._remedies: list[_Remedy] = []
        self._next = 0.0
        self._faults: dict[Callable[[], bool], float] = {
            self._kill: 5.0,
            self._pause: 3.0,
            self._cut: 3.0,
            self._delay: 1.5,
            self._lose: 3.0,
            self._fill: 2.0,
            self._kill_server: 0.4,
            self._pause_server: 0.6,
            self._kill_everything: 0.2,
        }

    def step(self) -> None:
        now = time.monotonic()
        for remedy in [one for one in self._remedies if one.due <= now]:
            self._remedies.remove(remedy)
            remedy.apply()
        if now >= self._next:
            fault = self._random.choices(list(self._faults), list(self._faults.values()))[0]
            # A fault without a victim is replaced by another one at once.
            self._next = now + (self._random.expovariate(1 / BETWEEN) if fault() else 0.0)

    def end(self) -> None:
        """Ends all faults. All processes run then."""
        for remedy in self._remedies:
            remedy.apply()
        self._remedies = []

    # --- faults --------------------------------------------------------------------------------------------------

    def _kill(self) -> bool:
        """Kills a process. Sometimes its replica is deleted, and sometimes it comes back late."""
        one = self._choose(lambda one: not one.is_spared and self._is_due(one))
        if one is None:
            return False
        if one.replica is not None and self._random.random() < 0.15:
            self.happened["left (SIGTERM)"] += 1
            one.actor.leave()
        else:
            self.happened[f"killed {one.kind}"] += 1
            one.actor.kill()
        self._bring_down(one)
        return True

    def _bring_down(self, one: Member, seconds: float | None = None) -> None:
        one.has_worked = False
        self._check_killed(one)
        if one.replica is not None and self._random.random() < 0.1:
            self.happened["erased replica"] += 1
            shutil.rmtree(one.replica, ignore_errors=True)
        if seconds is None:
            seconds = self._duration(0.0, 3.0, 20.0)
            if one.replica is not None and self._random.random() < 0.05:  # longer than its lease
                self.happened["long absence"] += 1
                seconds = self._random.uniform(65.0, 90.0)
        self._ail(one, "down", one.actor.start, seconds)

    def _pause(self) -> bool:
        """Stops a process with SIGSTOP. Its connections stay open and its lease may run out."""
        one = self._choose(self._is_due)
        if one is None:
            return False
        self.happened[f"stopped {one.kind}"] += 1
        one.actor.pause()
        self._ail(one, "stopped", one.actor.resume, self._duration(0.5, 6.0, 25.0))
        return True

    def _cut(self) -> bool:
        """Cuts a process off: every request closes its connection."""
        return self._trouble("cut", lose_request, self._duration(0.5, 8.0, 30.0))

    def _delay(self) -> bool:
        return self._trouble("delayed", slow(self._random.uniform(0.02, 1.5)), self._duration(1.0, 8.0, 20.0))

    def _trouble(self, what: str, trouble: Trouble, seconds: float) -> bool:
        one = self._choose(lambda one: "cut" not in one.ails)
        if one is None:
            return False
        self.happened[f"{what} {one.kind}"] += 1
        for method in METHODS:
            one.proxy.trouble(method, "", trouble, float("inf"))
        self._ail(one, "cut", one.proxy.calm, seconds)
        return True

    def _lose(self) -> bool:
        """Loses some of the next requests or replies, or cuts replies short."""
        one = self._choose(lambda one: "cut" not in one.ails)
        if one is None:
            return False
        kinds = {
            "lost reply": lose_reply,
            "lost request": lose_request,
            "late request": late(self._random.uniform(0.5, 5.0)),
            "truncated reply": truncate,
        }
        what = self._random.choice(list(kinds))
        self.happened[what] += 1
        for method in METHODS:
            one.proxy.trouble(method, "", kinds[what], self._random.randint(1, 4))
        self._ail(one, "cut", one.proxy.calm, 5.0)
        return True

    def _fill(self) -> bool:
        one = self._choose(lambda one: one.disk is not None and "full" not in one.ails)
        if one is None or one.disk is None:
            return False
        self.happened["full disk"] += 1
        disk = one.disk
        disk.fill(self._random.choice([0, 0, 50_000, 1_000_000, 3_000_000]))

        def empty() -> None:
            disk.empty()
            one.was_full = time.monotonic()

        self._ail(one, "full", empty, self._duration(1.0, 8.0, 20.0))
        return True

    def _kill_server(self) -> bool:
        if not self.is_server_up:
            return False
        self.happened["killed store"] += 1
        self._server.kill()
        self.is_server_up = False
        self._later(self._random.uniform(0.0, 4.0), self._start_server)
        return True

    def _start_server(self) -> None:
        self._server.start()
        self.is_server_up = True

    def _pause_server(self) -> bool:
        if not self.is_server_up:
            return False
        self.happened["stopped store"] += 1
        self._server.pause()
        self.is_server_up = False
        self._later(self._duration(0.5, 5.0, 20.0), self._resume_server)
        return True

    def _resume_server(self) -> None:
        self._server.resume()
        self.is_server_up = True

    def _kill_everything(self) -> bool:
        """A power cut, but for the spared processes."""
        victims = [one for one in self._members if not one.is_spared and not one.ails & {"down", "stopped"}]
        if not self._kill_server():
            return False
        self.happened["killed everything"] += 1
        for one in victims:
            one.actor.kill()
        for one in victims:
            self._bring_down(one, self._random.uniform(0.0, 5.0))
        return True

    # --- victims and remedies ------------------------------------------------------------------------------------

    def _choose(self, fits: Callable[[Member], bool]) -> Member | None:
        """A random victim: the trainer and gc as often as four followers."""
        fitting = [one for one in self._members if fits(one)]
        weights = [1.0 if one.replica is not None else 4.0 for one in fitting]
        return self._random.choices(fitting, weights)[0] if fitting else None

    def _is_due(self, one: Member) -> bool:
        """Mostly strikes processes that have worked: on a busy machine, nothing would be published otherwise."""
        return not one.ails & {"down", "stopped"} and (one.has_worked or self._random.random() < 0.1)

    def _duration(self, least: float, usual: float, most: float) -> float:
        """Seconds. One fault in ten lasts long."""
        return self._random.uniform(usual, most) if self._random.random() < 0.1 else self._random.uniform(least, usual)

    def _ail(self, one: Member, what: str, remedy: Callable[[], None], seconds: float) -> None:
        one.ails.add(what)

        def cure() -> None:
            one.ails.discard(what)
            remedy()

        self._later(seconds, cure)

    def _later(self, seconds: float, apply: Callable[[], None]) -> None:
        self._remedies.append(_Remedy(time.monotonic() + seconds, apply))
