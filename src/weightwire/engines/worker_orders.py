"""A follower's side of orders: sends them to all workers of a server, and knows what the workers hold."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from weightwire.engines.engine import ServedVersion
from weightwire.engines.orders import Action, Answer, Order, read_answers
from weightwire.engines.server_connection import QUICK
from weightwire.errors import EngineError

__all__ = ["LONG", "WorkerOrders"]

LONG = 1800.0  # seconds, for work that grows with the model
_SWAP = 120.0  # seconds
_LOOK = 0.002  # seconds
_WRITING = ("swap", "undo", "forget", "reload")

Send = Callable[[Order, float], object]
"""Sends an order through the server, within some seconds."""


class WorkerOrders:
    """Set `workers` to their number first. `model` is that of their orders.

    `holding` is the version that all workers hold, or None if that is not known. If `mixed`, their weights may be of
    several versions, and the server must not generate. `unpatchable` is why they cannot be patched in place, and
    `not_kept` why running requests cannot keep their KV cache; both are empty if they can.
    """

    def __init__(
        self, name: str, directory: Path, send: Send, check_alive: Callable[[], object], *, model: str = ""
    ) -> None:
        self.workers = 0
        self.holding: ServedVersion | None = None
        self.mixed = False
        self.unpatchable = self.not_kept = ""
        self._name = name
        self._directory = directory
        self._send = send
        self._check_alive = check_alive
        self._model = model

    def status(self, timeout: float | None = None) -> None:
        """Asks the workers what they hold."""
        self.holding = None
        order = Order("status", str(self._directory), secrets.token_hex(8), model=self._model)
        self.check(self._order(order, QUICK if timeout is None else timeout))

    def order(self, action: Action, file: Path | None, target: ServedVersion, timeout: float = _SWAP) -> list[Answer]:
        name = "" if file is None else str(file)
        token = secrets.token_hex(8)
        # Unknown until all workers have answered.
        self.holding, self.mixed = None, self.mixed or action in _WRITING
        place = str(self._directory)
        return self._order(
            Order(action, place, token, name, target.run, target.version, target.state, self._model), timeout
        )

    def swap(self, target: ServedVersion) -> None:
        """Swaps in the staged patch. If a worker fails, all restore the version before."""
        answers = self.order("swap", None, target)
        if any(answer.problem for answer in answers):
            self.order("undo", None, target)  # also in workers that succeeded
            self.check(answers)
        self.check_holding(target)

    def check(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.problem:
                raise EngineError(f"{self._name}: {answer.problem}", hint=answer.hint or "see the server's log")

    def check_holding(self, target: ServedVersion) -> None:
        """Call it before the new version is reported to clients."""
        if self.holding != target:
            raise EngineError(
                f"{self._name}: does not hold version {target.version} after the update", hint="see the server's log"
            )

    def _order(self, order: Order, timeout: float) -> list[Answer]:
        self._send(order, timeout)
        # Writing orders are done by now. Reading orders run while the workers generate.
        answers = self._read(order.token, QUICK if order.action in _WRITING else timeout)
        holdings = {answer.holding for answer in answers}
        self.holding = next(iter(holdings)) if len(holdings) == 1 else None
        # Workers with different versions are as bad as one worker with a mixture.
        self.mixed = any(answer.mixed for answer in answers) or len(holdings) > 1
        self.unpatchable = next((answer.unpatchable for answer in answers if answer.unpatchable), "")
        self.not_kept = next((answer.not_kept for answer in answers if answer.not_kept), "")
        return answers

    def _read(self, token: str, timeout: float) -> list[Answer]:
        """Waits for the answers of all workers: some are still at work when the server replies."""
        until = time.monotonic() + timeout
        while True:
            answers = read_answers(self._directory, token)
            if len(answers) >= self.workers:
                for path in self._directory.glob(f"{token}.*"):
                    path.unlink(missing_ok=True)
                return answers
            if time.monotonic() > until:
                raise EngineError(
                    f"{self._name}: {len(answers)} of {self.workers} workers answered within {timeout:g} s",
                    hint="run the server on this machine, with the same weightwire and the same files",
                )
            self._check_alive()
            time.sleep(_LOOK)
