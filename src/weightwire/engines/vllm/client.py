"""Beside vLLM: gives an engine its orders over HTTP, and leaves patches for it in shared memory.

Knows vLLM's endpoints and what they answer when something is wrong; no bucket, and not what is inside a patch.
"""

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
from weightwire.engines.engine import ServedVersion, Swap
from weightwire.engines.vllm.connection import QUICK, START, VllmConnection, VllmRefusal, public_url
from weightwire.engines.vllm.orders import Action, Answer, read_answers
from weightwire.errors import EngineError
from weightwire.system import durable_files

__all__ = ["VllmEngine"]

_SWAP, _LONG = 120.0, 1800.0  # seconds: for a swap, and for what takes as long as the model is large
_LOOK = 0.002  # seconds
_SHARED_MEMORY = Path("/dev/shm")


class VllmEngine:
    """A vLLM server, by its URL. It must run on this machine: patches are handed over as files.

    One follower keeps it up to date at a time. What it must remember after it was killed, that it has paused the
    server, lies beside the patches.
    """

    def __init__(self, url: str) -> None:
        self.name = public_url(url)
        self.unpatchable = ""  # why nothing can be patched in place
        self._holding: ServedVersion | None = None
        self._server, self._pausing = VllmConnection(url), VllmConnection(url)
        self._workers = self._replicas = 0
        self._torn = False
        # By its port, however its URL is written: it is on this machine.
        shared = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        self._directory = shared / f"weightwire-{os.getuid()}-{self._server.port}"
        self._paused_mark = self._directory / "paused"
        self._lock: int | None = None

    @property
    def holding(self) -> ServedVersion | None:
        return self._holding

    @property
    def can_patch(self) -> bool:
        return not self.unpatchable

    # --- the engine ----------------------------------------------------------------------------------------------

    def attach(self, run: str = "") -> ServedVersion | None:
        self._holding = None
        self._take_hold()
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
        self._hear(self._read(token, QUICK))
        if self._holding is not None and self._holding.run == run and served != str(self._holding.version):
            # Whoever swapped it in died before it could say so.
            self._server.post("/update_weight_version", {"new_version": str(self._holding.version)})
        if not self._torn:
            self._resume_forgotten()
        return self._holding

    def _take_hold(self) -> None:
        """One follower at a time; what one that was killed has left behind is removed."""
        if self._lock is not None and self._directory.is_dir():
            return
        self._let_go()
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._lock = durable_files.lock_file(self._directory / "lock")
        except OSError as problem:
            raise EngineError(
                f"{self._directory}: cannot be used ({problem.strerror})", hint="check whose it is, and make room there"
            ) from problem
        if self._lock is None:
            raise EngineError(
                f"{self.name}: another follower keeps it up to date", hint="stop that one, or leave this engine to it"
            )
        for path in self._directory.iterdir():
            if path.name not in ("lock", "paused"):
                path.unlink(missing_ok=True)

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
                with self._pause() as settled:
                    self._swap(target)
                    self._check_holding(target)
                    settled()
                    finish(str(target.version))
                return Swap(ready - began, time.perf_counter() - ready)
        except OSError as problem:
            raise EngineError(
                f"{file}: the patch cannot be written ({problem.strerror})", hint="make room in shared memory"
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
        self._server.close()
        self._pausing.close()
        self._let_go()

    # --- orders --------------------------------------------------------------------------------------------------

    def _swap(self, target: ServedVersion) -> None:
        answers = self._order("swap", None, target, _SWAP)
        if any(answer.problem for answer in answers):
            self._order("undo", None, target, _SWAP)  # those that did it, too
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
        self._holding, self._torn = None, action in ("swap", "undo", "reload")  # not known until all have answered
        self._server.post("/update_weights", {"update_info": order}, timeout)
        # What writes is done by now; what only reads goes on beside the generation.
        return self._hear(self._read(token, QUICK if self._torn else timeout))

    def _hear(self, answers: list[Answer]) -> list[Answer]:
        holdings = {answer.holding for answer in answers}
        self._holding = holdings.pop() if len(holdings) == 1 else None
        # Workers that hold different versions are as bad as one that holds two.
        self._torn = any(answer.torn for answer in answers) or len(holdings) > 1
        self.unpatchable = next((answer.unpatchable for answer in answers if answer.unpatchable), "")
        return answers

    def _read(self, token: str, timeout: float) -> list[Answer]:
        """The answers of all workers. Some of them are still at work when the server has replied."""
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
                    hint="the server must run on this machine, with the same weightwire, and see the same files",
                )
            self._server.check_alive()
            time.sleep(_LOOK)

    def _check_holding(self, target: ServedVersion) -> None:
        """Before anybody is told so."""
        if self._holding != target:
            raise EngineError(f"{self.name}: does not hold version {target.version}", hint="see the server's log")

    def _check(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.problem:
                raise EngineError(f"{self.name}: {answer.problem}", hint=answer.hint or "see the server's log")

    # --- vLLM's ways ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _session(self) -> Iterator[Any]:
        """An update, which vLLM must be told the beginning and the end of; the end with the version, if it succeeds."""
        finished: list[str] = []

        def finish(version: str) -> None:
            known, self._holding = self._holding, None  # should this fail: it is asked again, and then told the version
            self._server.post("/finish_weight_update", {"weight_version": version})
            self._holding = known
            finished.append(version)

        try:
            self._server.post("/start_weight_update", {})
        except VllmRefusal:  # one that a follower left open when it died
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
        """Requests are kept, and go on afterwards with what they have; the prefix cache is emptied.

        Nothing is generated any more from its beginning on, and what the workers are told to do comes after what was
        being generated. vLLM takes its time to say so. Who has used that calls what this yields, which waits for it.
        """
        self._paused_mark.touch()
        with ThreadPoolExecutor(1, thread_name_prefix="weightwire-pause") as pool:
            paused = pool.submit(self._pausing.post, "/pause?mode=keep", {}, _LONG)
            if self._replicas > 1:  # the server answers for one of them only
                paused.result()
            while not paused.done() and not self._server.get("/is_paused").get("is_paused"):
                pass
            try:
                if paused.done():
                    paused.result()
                yield partial(self._settle, paused)
            except BaseException:
                if not self._torn:  # else it serves nothing until it has been reloaded
                    self._settle(paused)
                    self._resume()
                raise
        self._resume()

    def _settle(self, paused: Future[dict[str, Any]]) -> None:
        try:
            paused.result()
        except EngineError:  # without it, the prefix cache might answer for old weights
            self._server.post("/pause?mode=keep", {}, _LONG)

    def _resume(self) -> None:
        self._server.post("/resume", {})
        self._paused_mark.unlink(missing_ok=True)

    def _resume_forgotten(self) -> None:
        """A server that a follower paused, and then died."""
        if self._paused_mark.exists():
            self._server.post("/pause?mode=keep", {}, _LONG)  # to the end, which empties the prefix cache
            self._resume()
