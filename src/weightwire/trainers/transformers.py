"""Hugging Face Trainers, including TRL's: a callback that publishes the model while it is trained."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from weightwire.bucket import Bucket
from weightwire.chain import DELTA
from weightwire.errors import WeightwireError
from weightwire.publisher import Publication, Publisher
from weightwire.trainers.torch import publisher_for
from weightwire.weights import DEFAULT_DTYPE, has_adapters, unwrapped

__all__ = ["WeightwireCallback", "model_files"]

_FINAL = "train_runtime"  # a key of the last record that a Trainer logs


class WeightwireCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the initial weights and every step: `Trainer(..., callbacks=[WeightwireCallback("s3://bucket/run")])`.

    `every` counts optimizer steps; the last step is always published. A PEFT model gives its adapter; `merge` publishes
    the whole model with its adapters merged in. All other options are passed to `Publisher`. Unless `files` or a `base`
    directory is given, config and tokenizer are published with the weights. With DDP the first process publishes, with
    FSDP2 all of them.

    After a restart, resume from the Trainer's own checkpoint, which also holds masters and optimizer state:
    `trainer.train(resume_from_checkpoint=True)`. Without one, load the newest published weights. Otherwise the initial
    weights become the newest version, with a warning.

        # weightwire restore s3://bucket/run -o resumed
        model = AutoModelForCausalLM.from_pretrained("resumed", dtype=torch.float32)
        Trainer(model, ..., callbacks=[WeightwireCallback("s3://bucket/run")]).train()

    Every log record gets these keys:

    - `sync/version`: the newest committed version of this training. In the last record, the last version.
    - `sync/bytes`: the size of that version in the bucket.
    - `sync/changed`: the fraction of weights that it changed, 0 to 1. Missing for an anchor, which holds all weights.
    - `sync/behind_steps`: optimizer steps between that version and this record.
    - `sync/seconds`: seconds that training spent in `publish` since the last record.
    - `sync/superseded`: how many captured steps were replaced by newer ones before their upload began, so far.
    - `sync/failed`: how many publishes failed so far. The next version includes their changes.
    """

    def __init__(
        self, url: str | os.PathLike[str] | Bucket, every: int = 1, *, merge: bool = False, **options: Any
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: must be 1 or more")
        self.publisher: Publisher | None = None
        self._url = url
        self._every = every
        self._merge = merge
        self._options = options
        self._progress = _VersionTally()
        self._last: Publication | None = None  # of the final weights

    # --- events --------------------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._go_first(sys._getframe(1).f_locals.get("self"))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._go_first(sys._getframe(1).f_locals.get("self"))
        self._abandon()
        self._progress, self._last = _VersionTally(), None
        options = dict(self._options)
        if "files" not in options and not isinstance(options.get("base"), str | os.PathLike):
            # The publisher adds the config of an adapter. That of its base would not fit the weights.
            model = None if has_adapters(given["model"]) and not self._merge else given["model"]
            options["files"] = model_files(model, given.get("processing_class"), options)
        self.publisher = publisher_for(given["model"], self._url, **options)
        self._publish(given["model"], state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if state.global_step % self._every == 0:
            self._publish(given["model"], state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        if self.publisher is None or logs is None:
            return
        if _FINAL in logs:
            self._publish_last(args, given["model"], state)
        metrics = self._progress.metrics(state.global_step, self.publisher.parameters)
        logs.update(metrics)
        if state.log_history:  # the Trainer adds the record before it calls any callback
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.publisher is None:
            return
        last = self._publish_last(args, given["model"], state)
        publisher, self.publisher = self.publisher, None
        publisher.close()
        if last.error is not None:
            raise last.error

    # --- publishing ----------------------------------------------------------------------------------------------

    def _publish_last(self, args: TrainingArguments, model: Any, state: TrainerState) -> Publication:
        """Publishes the final weights, once, and waits until that succeeds or fails."""
        if self._last is None:
            # load_best_model_at_end may have replaced the weights of the last step.
            if (
                self._progress.last is None
                or self._progress.last.step != state.global_step
                or args.load_best_model_at_end
            ):
                self._publish(model, state)
            self._last = self._progress.last
        assert self._last is not None
        with suppress(WeightwireError):  # on_train_end raises it
            self._last.wait()
        return self._last

    def _publish(self, model: Any, state: TrainerState) -> None:
        if self.publisher is None:
            return
        began = time.perf_counter()
        published = self.publisher.publish(model, step=state.global_step, merge=self._merge)
        self._progress.add(published, time.perf_counter() - began)

    def _abandon(self) -> None:
        """Closes the publisher of a training that failed: on_train_end is not called then."""
        if self.publisher is not None:
            self.publisher.__exit__(RuntimeError, None, None)
            self.publisher = None

    def _go_first(self, handler: Any) -> None:
        """Moves this callback before the reporting ones (TensorBoard, wandb), so that they log the sync keys.

        A callback gets no reference to its handler: `handler` is found on the caller's stack.
        """
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)


class _VersionTally:
    """Counts the outcomes of all publishes so far."""

    def __init__(self) -> None:
        self.last: Publication | None = None
        self._open: list[Publication] = []
        self._newest: Publication | None = None
        self._seconds = 0.0
        self._superseded = 0
        self._failed = 0

    def add(self, publication: Publication, seconds: float) -> None:
        self.last = publication
        self._open.append(publication)
        self._seconds += seconds

    def metrics(self, step: int, weights: int | None) -> dict[str, float]:
        self._look()
        seconds, self._seconds = self._seconds, 0.0
        found: dict[str, float] = {
            "sync/seconds": round(seconds, 6),
            "sync/superseded": self._superseded,
            "sync/failed": self._failed,
        }
        newest = self._newest
        if newest is not None and newest.commit is not None:
            found |= {"sync/version": newest.commit.version, "sync/bytes": newest.commit.nbytes}
            found["sync/behind_steps"] = step - (newest.step or 0)
            if newest.commit.kind == DELTA and weights:
                found["sync/changed"] = newest.commit.changed / weights
        return found

    def _look(self) -> None:
        done = [one for one in self._open if one.done]
        self._open = [one for one in self._open if one not in done]
        for one in done:
            self._superseded += one.superseded_by is not None
            self._failed += one.error is not None
            if one.version is not None:
                self._newest = one


# --- side files --------------------------------------------------------------------------------------------------


def model_files(model: Any, processing_class: Any, options: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that turn weights into a loadable model: the config, with the published dtype, and the tokenizer.

    Without a model, for an adapter, only the tokenizer.
    """
    model = unwrapped(model)
    with tempfile.TemporaryDirectory(prefix="weightwire-") as directory:
        parts: list[Any] = [getattr(model, "config", None), processing_class]
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(directory)
        if (generation := getattr(model, "generation_config", None)) is not None:
            with suppress(ValueError):  # contradictory generation settings: not needed to load the weights
                generation.save_pretrained(directory)
        paths = [path for path in Path(directory).rglob("*") if path.is_file()]
        files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(paths)}
    if "config.json" in files:
        files["config.json"] = _as_published(files["config.json"], model, options)
    return files


def _as_published(config: bytes, model: Any, options: Mapping[str, Any]) -> bytes:
    """Sets the dtype and architecture of the published weights: a trainer's config may say float32, or neither."""
    settings = json.loads(config)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    if dtype == "float32":
        dtype = str(options.get("dtype", DEFAULT_DTYPE) or dtype).removeprefix("torch.")
    if dtype:
        settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = dtype
    settings["architectures"] = settings.get("architectures") or [type(model).__name__.removeprefix("FSDP")]
    return (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
