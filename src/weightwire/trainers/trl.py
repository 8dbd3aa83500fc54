"""TRL's asynchronous GRPO: what its trainer sends to vLLM goes through a bucket, while vLLM generates.

Knows what TRL asks of a weight transfer and of a rollout worker, and how a server says what it serves; nothing of
how a follower brings it there. Imports neither TRL nor torch.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from weightwire.bucket import Bucket
from weightwire.engines.registry import find_engine, split_engine
from weightwire.errors import EngineError, EngineGone
from weightwire.publisher import Publication, Publisher
from weightwire.weights import DEFAULT_DTYPE, Casting, Dtype, Tensor, as_mapping, plain_names, read_live

__all__ = ["BucketTransfer"]

_TRLS_OWN = "vllm"  # the engine that TRL drives, where only a URL is given
_LOOK = 0.05  # seconds between two looks at what the server serves
_NOW_AND_THEN = 1.0  # seconds, where it serves what was sent last
_PATIENCE = 10.0  # seconds of waiting for it, after which people are told
_log = logging.getLogger("weightwire")


class BucketTransfer:
    """`AsyncGRPOTrainer(..., weight_transfer=BucketTransfer("s3://bucket/run", server="http://127.0.0.1:8000"))`.

    Beside each vLLM runs `weightwire follow URL --into DIR --engine vllm=SERVER`. A transfer returns when the version
    is committed, and the engine no more than `max_behind` versions behind: None lets it be any number, and with
    `applied` it serves this very version. The first one it always does, since nobody knows what it had before. vLLM
    generates all the time, but for the moment in which its follower swaps the weights.

    - `server`: the URL of the vLLM that generates, or NAME=URL for another engine. Without it nothing is known of what
      is served, and nothing waited for.
    - `timeout`: seconds for the server to start, and for a version to be served.

    All other options are the `Publisher`'s; with `files`, the model's directory, a follower can start from nothing.

    TRL drops samples that are too stale, by the version that they are stamped with. That is the one which the engine
    says that it serves when they are begun, not the one that was sent last. What TRL logs gets, under `sync/`: the
    `bytes` of a version, the `seconds` until it was committed, how many versions the engine was `behind` then, and the
    seconds that were `waited` for it.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Bucket,
        *,
        server: str | None = None,
        applied: bool = False,
        max_behind: int | None = 1,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        if max_behind is not None and max_behind < 0:
            raise ValueError(f"an engine cannot be {max_behind} versions behind: max_behind is 0 or more, or None")
        if applied and server is None:
            raise ValueError("what is applied only a server can tell: pass server=")
        self.publisher: Publisher | None = None
        self._url = url
        self._options = options
        self._timeout = timeout
        self._max_behind = 0 if applied else max_behind
        self._casting = Casting.of(options.get("dtype", DEFAULT_DTYPE), options.get("dtypes"))
        self._copies: dict[str, Tensor] = {}
        self._engine = None if server is None else _EngineLag(server)
        self._trainer: Any = None
        self._samples: _Samples | None = None

    # --- what TRL calls, in the process that talks to vLLM -------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Looks at everything that could be wrong, before anything is trained."""
        self._open_publisher()

    def pause(self) -> None:
        """Not yet: vLLM generates while the weights are on their way. Its follower pauses it, to swap them."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publishes what the iterator yields. What goes wrong is raised, and TRL's version stays what it was."""
        self._attach(_trainer_of(iterator))
        try:
            publisher = self.publisher or self._open_publisher()  # for a second train(): TRL begins only once
            weights = self._copy(iterator, publisher.dtypes)
        except BaseException:
            for _ in iterator:  # the other ranks gather each tensor, and wait for this one to take part
                pass
            raise
        self._send(publisher, weights)

    def resume(self) -> None:
        """It has been going on all the time."""

    def destroy(self) -> None:
        if self._samples is not None:
            self._samples.close()
        publisher, self.publisher, self._samples, self._trainer = self.publisher, None, None, None
        if publisher is not None:
            publisher.__exit__(*sys.exc_info())  # in a hurry, if training has failed

    # --- for people ----------------------------------------------------------------------------------------------

    @property
    def staleness(self) -> int | None:
        """How many of the versions that were sent the engine does not serve yet; None if there is no telling."""
        return None if self._engine is None else self._engine.behind()

    # --- one transfer --------------------------------------------------------------------------------------------

    def _open_publisher(self) -> Publisher:
        if self._engine is not None:
            self._engine.check(self._timeout)
        self.publisher = Publisher(self._url, blocking=True, **self._options)
        if self._engine is not None:
            self._engine.forget_other_runs(self.publisher.version)
        return self.publisher

    def _copy(self, iterator: Iterator[tuple[str, Any]], dtypes: Mapping[str, Dtype]) -> dict[str, Tensor]:
        """Into memory of our own, one by one: what a sharded trainer gathers for us would fill its device."""
        copies = [(name, self._copy_one(name, value, dtypes)) for name, value in iterator]
        return as_mapping(plain_names(copies))  # what is in all names only all of them tell

    def _copy_one(self, name: str, value: Any, dtypes: Mapping[str, Dtype]) -> Tensor:
        [tensor] = read_live([(name, value)], self._casting, dtypes)[0].values()
        copy = self._copies.get(name)
        if copy is None or (copy.dtype, copy.shape) != (tensor.dtype, tensor.shape):
            bits = np.empty(tensor.count, f"<u{tensor.dtype.unit}")
            copy = self._copies[name] = Tensor(tensor.dtype, tensor.shape, bits)
        tensor.copy_to(0, tensor.count, copy.bits)
        return copy

    def _send(self, publisher: Publisher, weights: Mapping[str, Tensor]) -> None:
        began = time.perf_counter()
        publication = publisher.publish(weights, step=self._step)
        metrics = {"sync/seconds": time.perf_counter() - began, "sync/bytes": float(_size(publication))}
        if self._engine is not None:
            metrics |= self._wait(self._engine, publication.wait(0))
        if self._trainer is not None:
            with suppress(queue.Full):
                self._trainer.rollout_worker.metrics_queue.put_nowait(metrics)

    def _wait(self, engine: _EngineLag, version: int) -> dict[str, float]:
        first = not engine.sent
        engine.sent.append(version)
        behind, began = engine.behind(), time.perf_counter()
        if self._max_behind is not None:
            engine.wait(0 if first else self._max_behind, self._timeout)
        return {"sync/behind": float(behind), "sync/waited": time.perf_counter() - began}

    @property
    def _step(self) -> int | None:
        return None if self._trainer is None else int(self._trainer.state.global_step)

    def _attach(self, trainer: Any) -> None:
        if trainer is not None and self._trainer is None:
            self._trainer = trainer
            self._samples = None if self._engine is None else _Samples(trainer.rollout_worker, self._engine)


def _trainer_of(iterator: Any) -> Any:
    """Whose method yields the weights, since TRL does not say. Only stamps, metrics and steps depend on it."""
    local = getattr(getattr(iterator, "gi_frame", None), "f_locals", {})
    trainer = local.get("self")
    return trainer if hasattr(getattr(trainer, "rollout_worker", None), "update_model_version") else None


def _size(publication: Publication) -> int:
    return 0 if publication.commit is None else publication.commit.nbytes


# --- the engine --------------------------------------------------------------------------------------------------


class _EngineLag:
    """What a server says that it serves, compared with what was sent."""

    def __init__(self, server: str) -> None:
        self.name, self.url = split_engine(server.rstrip("/"), default=_TRLS_OWN)
        rollout = find_engine(self.name).rollout
        if rollout is None:
            raise EngineError(f"engine {self.name!r} does not tell a trainer what it serves", hint="leave out server=")
        self._server = rollout(self.url)
        self.sent: list[int] = []  # versions, which only rise

    def check(self, timeout: float) -> None:
        """Whether it is there, and a follower can update it. One that is still starting is waited for."""
        until, told = time.monotonic() + timeout, False
        while True:
            try:
                return self._server.check()
            except EngineGone:
                if time.monotonic() > until:
                    raise
            if not told:
                _log.warning("%s: cannot be reached yet; waiting for it", self.url)
                told = True
            time.sleep(10 * _LOOK)

    def forget_other_runs(self, newest: int | None) -> None:
        """A version that this run has not reached is one of another run, and would be taken for one of ours."""
        served = self._server.served_version()
        if served is not None and served > (-1 if newest is None else newest):
            self._server.forget_version()

    def served(self) -> int | None:
        """The version, if it can name one; None also while it cannot be reached, since it may come back."""
        with suppress(EngineGone):
            return self._server.served_version()
        return None

    def behind(self) -> int:
        """How many of the versions that were sent it does not serve yet."""
        served = self.served()
        return len(self.sent) if served is None else len(self.sent) - bisect_right(self.sent, served)

    def wait(self, allowed: int, timeout: float) -> None:
        """Until it is at most so many versions behind."""
        began, told = time.monotonic(), False
        while (behind := self.behind()) > allowed:
            waited = time.monotonic() - began
            told = told or (waited > _PATIENCE and self._tell(behind))
            if waited > timeout:
                raise EngineError(
                    f"{self.url}: still {_versions(behind)} behind after {timeout:g} s",
                    hint=f"see what `{self._follow}` says beside it",
                )
            time.sleep(_LOOK)

    def _tell(self, behind: int) -> bool:
        _log.warning("%s: %s behind; is `%s` running beside it?", self.url, _versions(behind), self._follow)
        return True

    @property
    def _follow(self) -> str:
        """The command that should keep it up to date."""
        return f"weightwire follow URL --into DIR --engine {self.name}={self.url}"


def _versions(count: int) -> str:
    return f"{count} version" if count == 1 else f"{count} versions"


# --- the samples -------------------------------------------------------------------------------------------------


class _Samples:
    """Stands between TRL's trainer and its rollout worker, so that this stamps samples with what the engine serves.

    TRL counts its transfers, and tells the worker how many there were.
    """

    def __init__(self, worker: Any, engine: _EngineLag) -> None:
        self._worker = worker
        self._engine = engine
        self._tell = worker.update_model_version
        self._counts: list[tuple[int, int]] = []  # a version, and TRL's count of it; the first is served, or awaited
        self._lock = threading.Lock()
        self._closing = threading.Event()
        worker.update_model_version = self._update
        threading.Thread(target=self._watch, name="weightwire-samples", daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._worker.update_model_version = self._tell

    def _update(self, count: int) -> None:
        """In place of the worker's own, when a transfer is over."""
        with self._lock:
            self._counts.append((self._engine.sent[-1], count))
        self._stamp()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK if len(self._counts) > 1 else _NOW_AND_THEN):
            with suppress(EngineError):
                self._stamp()

    def _stamp(self) -> None:
        with self._lock:  # or what was read before would be told afterwards
            served = self._engine.served()
            if served is None or self._closing.is_set():
                return
            while len(self._counts) > 1 and self._counts[1][0] <= served:
                del self._counts[0]
            if self._counts:
                version, count = self._counts[0]
                self._tell(count if version <= served else count - 1)
