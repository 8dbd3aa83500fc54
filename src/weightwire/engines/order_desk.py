"""A worker's side of orders: carries them out on its model, and answers each with a file.

Reading orders run in a thread while the worker generates. Writing orders run while the follower has paused the server.
Failures are answered and not raised: all workers must get the same orders, whatever happens in one of them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from weightwire.delta import Delta
from weightwire.engines.live_model import LiveModel, StagedPatch, use_all_cores
from weightwire.engines.orders import Answer, Order, check_place, write_answer
from weightwire.errors import EngineError, WeightwireError

__all__ = ["OrderDesk", "OrderWork", "PatchDesk", "refuse_order"]

OrderWork = Callable[[Order], bool]
"""Carries out an order. Returns whether it is done, for orders that ask."""


def refuse_order(order: Order, problem: str, hint: str) -> None:
    """Answers an order for a model that this worker does not have."""
    check_place(order.directory, order.token)
    write_answer(Path(order.directory), order.token, str(os.getpid()), Answer(None, False, problem=problem, hint=hint))


class OrderDesk:
    """Passes each order to the function for its action.

    `unpatchable` is why the model cannot be patched, and `not_kept` why running requests cannot keep their KV cache.
    """

    def __init__(
        self, live: LiveModel, reading: Mapping[str, OrderWork], writing: Mapping[str, OrderWork], log: logging.Logger
    ) -> None:
        self.unpatchable = self.not_kept = ""
        self._live = live
        self._reading = reading
        self._writing = writing
        self._log = log
        self._busy: threading.Thread | None = None
        self._done = ""  # the token of the last order

    def receive(self, order: Order) -> None:
        """Raises a ValueError if nobody can be answered, and a KeyError if the action is unknown."""
        check_place(order.directory, order.token)
        if order.token == self._done:  # sent again, because its reply was lost
            return
        self._done = order.token
        if order.action == "status":  # waits for nothing: the worker may generate
            self._answer(order, lambda _: True)
            return
        if self._busy is not None:
            self._busy.join()
        if order.action in self._reading:
            self._start(order, self._reading[order.action])
        else:
            self._answer(order, self._writing[order.action])

    def _start(self, order: Order, work: OrderWork) -> None:
        def answer() -> None:
            use_all_cores()
            self._answer(order, work)

        self._busy = threading.Thread(target=answer, name="weightwire-stage", daemon=True)
        self._busy.start()

    def _answer(self, order: Order, work: OrderWork) -> None:
        done, problem, hint = False, "", ""
        try:
            done = work(order)
        except WeightwireError as error:
            problem, hint = error.message, error.hint or ""
        except Exception as error:
            self._log.exception("weightwire: an order failed")
            problem = f"{type(error).__name__}: {error}"
        live = self._live
        answer = Answer(live.holding, done, live.mixed, problem, hint, self.unpatchable, self.not_kept)
        try:
            # A process has several desks if it serves several models.
            write_answer(Path(order.directory), order.token, f"{os.getpid()}-{id(self)}", answer)
        except OSError as error:
            self._log.warning("weightwire: the answer cannot be written: the follower is gone (%s)", error)


class PatchDesk:
    """The patch that was staged last. It can be swapped in only by the follower that staged it."""

    def __init__(self, live: LiveModel) -> None:
        self._live = live
        self._staged: StagedPatch | None = None
        self._patch: Delta | None = None  # if tensors must be loaded slowly
        self._owner = ""  # the directory of the follower that staged it

    def stage(self, order: Order) -> StagedPatch:
        patch, self._owner = Delta.open(order.file), order.directory
        self._staged = self._live.stage(patch, order.target)
        self._patch = patch if self._staged.unpatchable else None  # otherwise it would be freed during the pause
        return self._staged

    def swap(self, order: Order) -> tuple[StagedPatch, Delta | None]:
        """Returns the patch only if it has tensors that must be loaded slowly."""
        staged = self._staged
        if staged is None or (self._owner, staged.target) != (order.directory, order.target):
            raise EngineError(f"no patch to version {order.version} is staged here", hint="stage the patch first")
        staged.swap()
        return staged, self._patch

    def undo(self) -> StagedPatch | None:
        if self._staged is not None:
            self._staged.undo()
        return self._staged

    def drop(self) -> None:
        """Also drops the old values that are kept for `undo`."""
        self._staged = self._patch = None
