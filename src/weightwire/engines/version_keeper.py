"""One follower, any number of engines: brings each of them to every version that the follower reaches.

A patch where the engine is at an earlier version that the patch starts from or goes past; else a reload from the
replica. An engine that has gone is looked for again, one that failed is reloaded. Knows followers and engines through
what they offer; no HTTP, and no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from weightwire.chain import StageTiming
from weightwire.engines.engine import Engine, ServedVersion, Swap
from weightwire.errors import EngineError, EngineGone, WeightwireError
from weightwire.follower import Follower, Update
from weightwire.replica import CheckpointAbout
from weightwire.system import Closeable
from weightwire.telemetry import Event, Listener, careful, log_event, warning

__all__ = ["Keeper"]

_LOOK_AGAIN = 2.0  # seconds
_LONGEST = 10.0  # seconds that an engine may take before the others go on without it


class Keeper(Closeable):
    """`bring` every update of a follower to all engines; `look` now and then, for engines that come and go.

    Or `with Keeper(follower, engines):`, which does both in the background.
    """

    def __init__(self, follower: Follower, engines: Sequence[Engine], *, on_event: Listener = log_event) -> None:
        self.engines = tuple(engines)
        self._follower = follower
        self._emit = careful(on_event)
        self._at: int | None = None  # the version of the update before
        self._trouble: dict[str, str] = {}
        self._stages: dict[str, StageTiming] = {}
        self._looked = 0.0
        self._pool = ThreadPoolExecutor(max(1, len(self.engines)), thread_name_prefix="weightwire-engine")
        self._busy: dict[str, Future[None]] = {}  # engines that take long, and hold up no other
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self.engines:
            follower.report_served(None)  # none yet, which is not the same as keeping no engines

    @property
    def served(self) -> int | None:
        """The lowest version that any of them serves; None if one serves none."""
        versions = [engine.holding.version if engine.holding else None for engine in self.engines]
        return None if None in versions else min((one for one in versions if one is not None), default=None)

    @property
    def trouble(self) -> str:
        """What keeps engines from going on, if anything does."""
        return "; ".join(self._trouble.values())

    def bring(self, update: Update) -> None:
        """Brings all engines to where the follower is. What goes wrong is told, and tried again by `look`."""
        began, self._at = self._at, update.version
        position = self._follower.replica.position
        if position is None:  # lost meanwhile: the next update has no patch
            return
        target = ServedVersion(position.run, update.version, update.state)
        self._each(lambda engine: self._advance(engine, update, began, target))

    def look(self) -> None:
        """Sees to engines that were gone or failed, or have been started anew since."""
        if time.monotonic() - self._looked < _LOOK_AGAIN or self._at is None:
            return
        self._looked = time.monotonic()
        self._each(self._see_to)

    def _each(self, work: Callable[[Engine], None]) -> None:
        for engine in self.engines:
            if engine.name not in self._busy:
                self._busy[engine.name] = self._pool.submit(self._carefully, engine, work)
        wait(self._busy.values(), timeout=_LONGEST)
        self._busy = {name: one for name, one in self._busy.items() if not one.done()}
        for name in self._busy:
            self._trouble.setdefault(name, f"{name}: is still busy with an earlier version")
        stages, self._stages = self._stages, {}
        self._follower.report_served(self.served, self.trouble, stages)

    def _carefully(self, engine: Engine, work: Callable[[Engine], None]) -> None:
        try:
            work(engine)
        except WeightwireError as problem:
            self._note(engine, problem.message, str(problem))
        except Exception as problem:  # of an engine that is not ours: no reason to leave the others alone
            message = f"{engine.name}: {type(problem).__name__}: {problem}"
            self._note(engine, message, message)
        else:
            if self._trouble.pop(engine.name, None):
                self._emit(Event("recovered", self._at, message=f"over: {engine.name} is back"))

    def _note(self, engine: Engine, message: str, whole: str) -> None:
        if self._trouble.get(engine.name) != message:
            self._warn(whole)
        self._trouble[engine.name] = message

    # --- one engine ----------------------------------------------------------------------------------------------

    def _advance(self, engine: Engine, update: Update, began: int | None, target: ServedVersion) -> None:
        held = engine.holding or engine.attach(target.run)
        if held == target:
            return
        # Positions with absolute values: right for any version from the first of them to the last.
        fits = (
            began is not None
            and held is not None
            and held.run == target.run
            and began <= held.version < target.version
            and engine.can_patch
        )
        patch = update.patch
        if patch is None or not fits:
            self._reload(engine)
            return
        try:
            self._tell(engine, target.version, engine.patch(patch, target), patch.nbytes)
        except EngineGone:
            raise
        except EngineError as problem:
            self._warn(f"{problem.message}; loading all weights anew")
            self._reload(engine)

    def _see_to(self, engine: Engine) -> None:
        failed = engine.holding is None and engine.name in self._trouble
        position = self._follower.replica.position
        held = engine.attach(position.run if position else "")
        behind = held is None or position is None or held.run != position.run or held.version < (self._at or 0)
        if failed or behind:
            self._reload(engine)

    def _reload(self, engine: Engine) -> None:
        # Others may be given a newer one meanwhile; this one stays as long as it is being loaded.
        with self._follower.borrow_checkpoint() as checkpoint:
            target = _version_of(checkpoint)
            held = engine.holding or engine.attach(target.run)
            if held == target or (held is None and engine.adopt(checkpoint, target)):
                return
            swap = engine.reload(checkpoint, target)
        self._tell(engine, target.version, swap, 0)

    def _tell(self, engine: Engine, version: int, swap: Swap, nbytes: int) -> None:
        self._stages = {
            "stage": StageTiming.of(swap.staged, nbytes, swap.at - swap.paused),
            "swap": StageTiming.of(swap.paused, nbytes, swap.at),
        }
        self._emit(Event("stage", version, nbytes, swap.staged, swap.at, engine.name))
        self._emit(Event("swap", version, nbytes, swap.paused, swap.at, engine.name))

    def _warn(self, message: str) -> None:
        self._emit(warning(message, self._at, at=time.time()))

    # --- in the background ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Follows from now on, in a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weightwire-keeper", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Lets the engines be; they go on serving what they serve. The follower is not closed."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        wait(self._busy.values(), timeout=_LONGEST)
        for engine in self.engines:
            engine.close()  # also one that does not answer, so that nobody waits for it
        self._pool.shutdown()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                for update in self._follower.watch(timeout=0.25):
                    self.bring(update)
                    if self._closing.is_set():
                        return
                self.look()
            except WeightwireError as problem:
                self._warn(str(problem))
                self._closing.wait(1.0)

    def __enter__(self) -> Self:
        self.start()
        return self


def _version_of(checkpoint: Path) -> ServedVersion:
    """What a replica's checkpoint says of itself."""
    about = CheckpointAbout.read(checkpoint)
    return ServedVersion(about.run, about.version, about.state)
