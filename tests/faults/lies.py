"""What a lying store shows to one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from faults.forgery import Chain
from faults.simulated_runtime import View
from faults.simulated_store import Objects, Store


@dataclass
class Lie(View):
    """The store as one process sees it. `shown` replaces objects of `below`; None hides one.

    With `flaps`, each request may see the real store instead. A `trap` is shown once a process tries to create it.
    """

    below: Store | Objects
    shown: dict[str, tuple[bytes, float] | None] = field(default_factory=dict)
    name: str = ""
    alerts: bool = False  # a follower that holds a version must notice, even if it is idle
    is_due: Callable[[], bool] = lambda: True  # whether it could notice by now
    is_refused: bool = False  # a process that starts with it must not reach any version
    needs_restart: bool = False  # a follower looks at this only when it starts
    needs_loss: bool = False  # a follower looks at this only when it has lost its replica
    needs_rot: bool = False  # the same, and it has lost its memory, too
    flaps: random.Random | None = None
    honest: Store | None = None
    alive: Callable[[], bytes] | None = None  # makes alive.json, always a recent one
    trap: str = ""
    is_shadow: bool = False  # what the process creates is not stored, but shown to it
    lasts: float | None = None  # seconds; by default a few
    newest: tuple[tuple[str, ...], int] | None = None  # hides these folders above a version, also what is new in them
    rewrites: tuple[Callable[[bytes], bytes], int] | None = None  # changes the commits above a version, also new ones

    @property
    def _objects(self) -> Objects:
        return self.below.objects if isinstance(self.below, Store) else self.below

    def find(self, path: str) -> tuple[bytes, float] | None:
        if self._is_honest():
            assert self.honest is not None
            return self.honest.find(path)
        if path == "alive.json" and self.alive is not None:
            return self.alive(), 0.0
        if self._is_too_new(path):
            return None
        found = self.shown[path] if path in self.shown and path != self.trap else self._objects.get(path)
        if found and self.rewrites and path.startswith("commits/") and number_of(path) > self.rewrites[1]:
            return self.rewrites[0](found[0]), found[1]
        return found

    def paths(self, prefix: str) -> list[str]:
        known = {*self._objects, *(path for path, one in self.shown.items() if one is not None)}
        hidden = {path for path, one in self.shown.items() if one is None} | {self.trap}
        return [path for path in known - hidden if path.startswith(prefix) and not self._is_too_new(path)]

    def creates(self, path: str) -> bool:
        """Whether a process may create an object. Springs the trap."""
        self.trap = "" if path == self.trap else self.trap
        return self.find(path) is None

    def keeps(self, path: str, data: bytes) -> bool:
        """Whether an object that a process creates is kept from the store."""
        if self.is_shadow:
            self.shown[path] = data, 0.0
        return self.is_shadow

    def _is_too_new(self, path: str) -> bool:
        return self.newest is not None and path.startswith(self.newest[0]) and number_of(path) > self.newest[1]

    def _is_honest(self) -> bool:
        return self.flaps is not None and self.flaps.random() < 0.5

    def hide(self, *prefixes: str, above: int = -1) -> None:
        for path in self._objects:
            if path.startswith(prefixes) and path not in self.shown and number_of(path) > above:
                self.shown[path] = None


LieMaker = Callable[[Chain, int], Lie | None]
"""Makes a lie from the real chain and the version that the follower holds, -1 if none; None if it is not possible."""


def number_of(path: str) -> int:
    text = path.split("/")[1].removesuffix(".json")
    return int(text) if text.isdecimal() else 0
