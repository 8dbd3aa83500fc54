"""The follower's side of vLLM: sends orders over HTTP, and passes patches through shared memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from weightwire.delta import Delta
from weightwire.engines.engine import EngineHealth, ServedVersion, Swap, asleep
from weightwire.engines.vllm.connection import QUICK, START, VllmConnection, VllmRefusal
from weightwire.engines.vllm.health_check import VllmHealthCheck, is_asleep
from weightwire.engines.vllm.orders import Action, Answer, read_answers
from weightwire.engines.vllm.shared_directory import PAUSED, SharedDirectory
from weightwire.errors import EngineError, public_url

__all__ = ["VllmEngine"]

_SWAP, _LONG = 120.0, 1800.0  # seconds: for a swap, and for work that grows with the model
_LOOK = 0.002  # seconds
_SHARED_MEMORY = Path("/dev/shm")


class VllmEngine:
    """A vLLM server at a URL. It must run on this machine, because patches are passed as files.

    Only one follower may update it at a time. A file beside the patches marks that the server is paused, so that a
    restarted follower can resume it.
    """

    def __init__(self, url: str) -> None:
        self.name = public_url(url).rstrip("/")
        self.unpatchable = ""  # the reason why it cannot be patched in place
        self._holding: ServedVersion | None = None
        self._server, self._pausing = VllmConnection(url), VllmConnection(url)
        self._workers = self._replicas = 0
        self._mixed = False
        # By port, not by URL: the same local server may have several names.
        shared = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        self._directory = shared / f"weightwire-{os.getuid()}-{self._server.port}"
        self._shared = SharedDirectory(self._directory, self.name)
        self._health = VllmHealthCheck(url)

    @property
    def _paused_mark(self) -> Path:
        return self._directory / PAUSED

    @property
    def holding(self) -> ServedVersion | None:
        return self._holding

    @property
    def can_patch(self) -> bool:
        return not self.unpatchable

    # --- the engine ----------------------------------------------------------------------------------------------

    def attach(self, run: str = "") -> ServedVersion | None:
        self._holding = None
        self._shared.lock()
        served = self._server.get("/weight_info").get("weight_version")
        self._workers = int(self._server.get("/get_world_size").get("world_size", 1))
        one = int(self._server.get("/get_world_size?include_dp=false").get("world_size", self._workers))
        self._replicas = self._workers // max(1, one)
        token = secrets.token_hex(8)
        try:
            self._server.post(
                "/init_weight_transfer_engine", {"init_info": {"directory": str(self._directory), "token": token}}
            )
        except VllmRefusal as problem:
            raise EngineError(
                f"{self.name}: does not serve with the weightwire backend ({problem.message})", hint=START
            ) from problem
        self._note_answers(self._read(token, QUICK))
        if self._holding is not None and self._holding.run == run and served != str(self._holding.version):
            # The follower that swapped it in died before it could report the version.
            self._server.post("/update_weight_version", {"new_version": str(self._holding.version)})
        if not self._mixed:
            self._resume_if_left_paused()
        return self._holding

    def check_health(self) -> EngineHealth:
        health = self._health.check()
        if health.is_asleep and self._paused_mark.exists():
            return EngineHealth(is_paused=True)
        return health

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        with self._session() as finish:
            answers = self._order("adopt", checkpoint, target, _LONG)
            self._check(answers)
            if not all(answer.done for answer in answers):
                return False
            self._check_holding(target)
            finish(str(target.version))
            return True

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        file = self._directory / f"{target.version}.safetensors"
        try:
            with file.open("wb") as out:
                for chunk in patch.chunks():
                    out.write(chunk)
            with self._session() as finish:
                self._check(self._order("stage", file, target, _LONG))
                ready = time.perf_counter()
                if not patch.entries:  # a fence: only the version changes
                    self._swap(target)
                    self._check_holding(target)
                    finish(str(target.version))
                    return Swap(ready - began, 0.0)
                with self._pause() as settled:
                    self._swap(target)
                    self._check_holding(target)
                    settled()
                    finish(str(target.version))
                return Swap(ready - began, time.perf_counter() - ready)
        except OSError as problem:
            raise EngineError(
                f"{file}: the patch cannot be written ({problem.strerror})", hint="free some shared memory"
            ) from problem
        finally:
            file.unlink(missing_ok=True)

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        with self._session() as finish:
            self._check(self._order("check", checkpoint, target, _LONG))
            ready = time.perf_counter()
            with self._pause() as settled:
                settled()
                self._check(self._order("reload", checkpoint, target, _LONG))
                self._check_holding(target)
                finish(str(target.version))
            return Swap(ready - began, time.perf_counter() - ready)

    def close(self) -> None:
        for connection in (self._server, self._pausing, self._health):
            connection.close()
        self._shared.close()

    # --- orders --------------------------------------------------------------------------------------------------

    def _swap(self, target: ServedVersion) -> None:
        answers = self._order("swap", None, target, _SWAP)
        if any(answer.problem for answer in answers):
            self._order("undo", None, target, _SWAP)  # also in workers that succeeded
            self._check(answers)

    def _order(self, action: Action, file: Path | None, target: ServedVersion, timeout: float) -> list[Answer]:
        token = secrets.token_hex(8)
        order = {
            "action": action,
            "directory": str(self._directory),
            "token": token,
            "file": "" if file is None else str(file),
            "run": target.run,
            "version": target.version,
            "state": target.state,
        }
        self._holding, self._mixed = (
            None,
            action in ("swap", "undo", "reload"),
        )  # unknown until all workers have answered
        self._server.post("/update_weights", {"update_info": order}, timeout)
        # Writing orders are done by now. Reading orders run while the workers generate.
        return self._note_answers(self._read(token, QUICK if self._mixed else timeout))

    def _note_answers(self, answers: list[Answer]) -> list[Answer]:
        holdings = {answer.holding for answer in answers}
        self._holding = holdings.pop() if len(holdings) == 1 else None
        # Workers with different versions are as bad as one worker with a mixture.
        self._mixed = any(answer.mixed for answer in answers) or len(holdings) > 1
        self.unpatchable = next((answer.unpatchable for answer in answers if answer.unpatchable), "")
        return answers

    def _read(self, token: str, timeout: float) -> list[Answer]:
        """Waits for the answers of all workers: some are still at work when the server replies."""
        until = time.monotonic() + timeout
        while True:
            answers = read_answers(self._directory, token)
            if len(answers) >= self._workers:
                for path in self._directory.glob(f"{token}.*"):
                    path.unlink(missing_ok=True)
                return answers
            if time.monotonic() > until:
                raise EngineError(
                    f"{self.name}: {len(answers)} of {self._workers} workers answered within {timeout:g} s",
                    hint="run the server on this machine, with the same weightwire and the same files",
                )
            self._server.check_alive()
            time.sleep(_LOOK)

    def _check_holding(self, target: ServedVersion) -> None:
        """Called before the new version is reported."""
        if self._holding != target:
            raise EngineError(
                f"{self.name}: does not hold version {target.version} after the update", hint="see the server's log"
            )

    def _check(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.problem:
                raise EngineError(f"{self.name}: {answer.problem}", hint=answer.hint or "see the server's log")

    # --- vLLM's ways ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _session(self) -> Iterator[Any]:
        """Brackets an update with vLLM's start and finish calls. Yields `finish`, to be called with the new version."""
        finished: list[str] = []

        def finish(version: str) -> None:
            known, self._holding = self._holding, None  # if this fails, `attach` reports the version
            self._server.post("/finish_weight_update", {"weight_version": version})
            self._holding = known
            finished.append(version)

        if not self._paused_mark.exists() and is_asleep(self._server, QUICK):
            raise asleep(self.name)  # its weights may not be in memory
        try:
            self._server.post("/start_weight_update", {})
        except VllmRefusal:  # a killed follower left an update open
            with contextlib.suppress(VllmRefusal):
                self._server.post("/finish_weight_update", {})
            self._server.post("/start_weight_update", {})
        try:
            yield finish
        finally:
            if not finished:
                with contextlib.suppress(EngineError):
                    self._server.post("/finish_weight_update", {})

    @contextlib.contextmanager
    def _pause(self) -> Iterator[Callable[[], object]]:
        """Pauses generation. Running requests continue afterwards; the prefix cache is cleared.

        Generation stops at once, and later orders run after the current step, but vLLM confirms the pause only after a
        while. Orders may be sent meanwhile. Call the yielded function to wait for the confirmation.
        """
        self._paused_mark.touch()
        with ThreadPoolExecutor(1, thread_name_prefix="weightwire-pause") as pool:
            paused = pool.submit(self._pausing.post, "/pause?mode=keep", {}, _LONG)
            if self._replicas > 1:  # /is_paused covers only one of them
                paused.result()
            while not paused.done() and not self._server.get("/is_paused").get("is_paused"):
                pass
            try:
                if paused.done():
                    paused.result()
                yield partial(self._settle, paused)
            except BaseException:
                if not self._mixed:  # otherwise it must not serve before a reload
                    self._settle(paused)
                    self._resume()
                raise
        self._resume()

    def _settle(self, paused: Future[dict[str, Any]]) -> None:
        try:
            paused.result()
        except EngineError:  # pause again: otherwise the prefix cache might hold values of old weights
            self._server.post("/pause?mode=keep", {}, _LONG)

    def _resume(self) -> None:
        self._server.post("/resume", {})
        self._paused_mark.unlink(missing_ok=True)

    def _resume_if_left_paused(self) -> None:
        """Resumes a server that a killed follower left paused."""
        if self._paused_mark.exists():
            self._server.post("/pause?mode=keep", {}, _LONG)  # a full pause clears the prefix cache
            self._resume()
