"""TRL's asynchronous GRPO: weights travel from its trainer to vLLM through a bucket, while vLLM generates.

Implements TRL's weight transfer. Imports neither TRL nor torch.
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

_DEFAULT_ENGINE = "vllm"  # if `server` is only a URL
_POLL = 0.05  # seconds between two requests for the served version
_IDLE_POLL = 1.0  # seconds, while the engine serves the newest version
_PATIENCE = 10.0  # seconds of waiting before a warning
_log = logging.getLogger("weightwire")


class BucketTransfer:
    """`AsyncGRPOTrainer(..., weight_transfer=BucketTransfer("s3://bucket/run", server="http://127.0.0.1:8000"))`.

    Run `weightwire follow URL --into DIR --engine vllm=SERVER` beside each vLLM server. vLLM keeps generating, except
    for the moment in which its follower swaps the weights.

    - `server`: the URL of the vLLM server, or NAME=URL for another engine. Without it, transfers do not wait for the
      engine, and samples are stamped by TRL.
    - `max_behind`: a transfer returns when its version is committed and the engine is at most this many versions
      behind. None means no limit. The first transfer always waits until the engine serves it.
    - `applied`: every transfer waits until the engine serves its version, like `max_behind=0`.
    - `timeout`: seconds for the server to start, and for a version to be served.

    All other options are passed to `Publisher`. Pass the model's directory as `files`, so that a follower can start
    without a checkpoint. After a restart, load the newest weights before you train, as `attach` in
    `weightwire.trainers.torch` shows.

    TRL drops stale samples by the version they are stamped with. With `server`, that is the version that the engine
    served when the sample was started. TRL's log records get these keys:

    - `sync/bytes`: the size of the version in the bucket.
    - `sync/seconds`: seconds that training spent in `publish`, which here returns after the commit.
    - `sync/behind`: versions that the engine was behind at that moment.
    - `sync/waited`: seconds that the transfer then waited for the engine.
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
            raise ValueError(f"max_behind={max_behind}: must be 0 or more, or None")
        if applied and server is None:
            raise ValueError("applied=True needs a server: pass server=")
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

    # --- called by TRL, in the process that sends weights --------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Opens the run and checks the server before training starts."""
        self._open_publisher()

    def pause(self) -> None:
        """Does nothing: vLLM generates during the transfer, and its follower pauses it for the swap."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publishes the weights that the iterator yields. If it raises, TRL does not count a new version."""
        self._attach(_trainer_of(iterator))
        try:
            publisher = self.publisher or self._open_publisher()  # TRL calls init_weight_transfer() only once
            weights = self._copy(iterator, publisher.dtypes)
        except BaseException:
            for _ in iterator:  # every rank must take part in gathering each tensor
                pass
            raise
        self._send(publisher, weights)

    def resume(self) -> None:
        """Does nothing: vLLM was not paused."""

    def destroy(self) -> None:
        if self._samples is not None:
            self._samples.close()
        publisher, self.publisher, self._samples, self._trainer = self.publisher, None, None, None
        if publisher is not None:
            publisher.__exit__(*sys.exc_info())  # does not wait long if training failed

    @property
    def staleness(self) -> int | None:
        """How many sent versions the engine does not serve yet; None without `server`."""
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
        """Copies to host memory one by one: all gathered tensors together would fill the trainer's device."""
        copies = [(name, self._copy_one(name, value, dtypes)) for name, value in iterator]
        return as_mapping(plain_names(copies))  # a common prefix shows only in all names together

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
    """Finds the trainer that made the iterator: TRL does not pass it. Only stamps, metrics and steps need it."""
    local = getattr(getattr(iterator, "gi_frame", None), "f_locals", {})
    trainer = local.get("self")
    return trainer if hasattr(getattr(trainer, "rollout_worker", None), "update_model_version") else None


def _size(publication: Publication) -> int:
    return 0 if publication.commit is None else publication.commit.nbytes


# --- the engine --------------------------------------------------------------------------------------------------


class _EngineLag:
    """Compares the version that the engine serves with the versions that were sent."""

    def __init__(self, server: str) -> None:
        self.name, self.url = split_engine(server.rstrip("/"), default=_DEFAULT_ENGINE)
        rollout = find_engine(self.name).rollout
        if rollout is None:
            raise EngineError(f"engine {self.name!r} cannot report its version to a trainer", hint="leave out server=")
        self._server = rollout(self.url)
        self.sent: list[int] = []  # versions, ascending

    def check(self, timeout: float) -> None:
        """Checks that the server is up and a follower can update it. Waits for a server that is starting."""
        until, warned = time.monotonic() + timeout, False
        while True:
            try:
                self._server.check()
                return
            except EngineGone:
                if time.monotonic() > until:
                    raise
            if not warned:
                _log.warning("%s: cannot be reached yet; waiting for it", self.url)
                warned = True
            time.sleep(10 * _POLL)

    def forget_other_runs(self, newest: int | None) -> None:
        """Resets a version that is newer than this run: it belongs to another run."""
        served = self._server.served_version()
        if served is not None and served > (-1 if newest is None else newest):
            self._server.forget_version()

    def served(self) -> int | None:
        """The served version; None if the server reports none or cannot be reached for now."""
        with suppress(EngineGone):
            return self._server.served_version()
        return None

    def behind(self) -> int:
        """How many sent versions it does not serve yet."""
        served = self.served()
        return len(self.sent) if served is None else len(self.sent) - bisect_right(self.sent, served)

    def wait(self, allowed: int, timeout: float) -> None:
        """Waits until it is at most `allowed` versions behind."""
        began, warned = time.monotonic(), False
        while (behind := self.behind()) > allowed:
            waited = time.monotonic() - began
            warned = warned or (waited > _PATIENCE and self._warn(behind))
            if waited > timeout:
                raise EngineError(
                    f"{self.url}: still {_versions(behind)} behind after {timeout:g} s",
                    hint=f"check that `{self._follow}` runs beside it, and read its output",
                )
            time.sleep(_POLL)

    def _warn(self, behind: int) -> bool:
        _log.warning("%s: %s behind; is `%s` running beside it?", self.url, _versions(behind), self._follow)
        return True

    @property
    def _follow(self) -> str:
        """The command that updates this engine."""
        return f"weightwire follow URL --into DIR --engine {self.name}={self.url}"


def _versions(count: int) -> str:
    return f"{count} version" if count == 1 else f"{count} versions"


# --- the samples -------------------------------------------------------------------------------------------------


class _Samples:
    """Makes TRL's rollout worker stamp samples with the version that the engine serves.

    TRL stamps with its count of transfers. This replaces the worker's update_model_version.
    """

    def __init__(self, worker: Any, engine: _EngineLag) -> None:
        self._worker = worker
        self._engine = engine
        self._original = worker.update_model_version
        self._counts: list[tuple[int, int]] = []  # versions with TRL's counts; the first is served or awaited
        self._lock = threading.Lock()
        self._closing = threading.Event()
        worker.update_model_version = self._update
        threading.Thread(target=self._watch, name="weightwire-samples", daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._worker.update_model_version = self._original

    def _update(self, count: int) -> None:
        """Called by TRL after each transfer."""
        with self._lock:
            self._counts.append((self._engine.sent[-1], count))
        self._stamp()

    def _watch(self) -> None:
        while not self._closing.wait(_POLL if len(self._counts) > 1 else _IDLE_POLL):
            with suppress(EngineError):
                self._stamp()

    def _stamp(self) -> None:
        with self._lock:  # so that an older version cannot overwrite a newer one
            served = self._engine.served()
            if served is None or self._closing.is_set():
                return
            while len(self._counts) > 1 and self._counts[1][0] <= served:
                del self._counts[0]
            if self._counts:
                version, count = self._counts[0]
                self._original(count if version <= served else count - 1)
