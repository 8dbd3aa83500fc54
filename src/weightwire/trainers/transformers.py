"""Hugging Face Trainers: a callback that publishes the model as it is trained, and tells the log how that goes.

Knows what callbacks are given, and which files make weights a whole model. Works with whatever is a `Trainer`, TRL's
included.
"""

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
from weightwire.publisher import Publication, Publisher
from weightwire.trainers.torch import publisher_for
from weightwire.weights import DEFAULT_DTYPE, unwrapped

__all__ = ["WeightwireCallback", "model_files"]


class WeightwireCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[WeightwireCallback("s3://bucket/run")])` publishes the first weights, and every step.

    `every` is in optimizer steps; the last one is published in any case. `merge` publishes the weights of a PEFT model
    with its adapters merged into them. All other options are the `Publisher`'s; without `files` or a `base` directory,
    the model's config and its tokenizer go along. Where several processes hold the same model (DDP), the first one
    publishes; where each holds some rows of it (FSDP2), all of them do.

    What is logged gets, under `sync/`: the newest `version` and its `bytes`, the `changed` fraction of the weights, how
    many steps it is `behind`, the `seconds` that training has waited for it since the last time, and how many versions
    were `superseded` by newer ones or `failed` so far.
    """

    def __init__(
        self, url: str | os.PathLike[str] | Bucket, every: int = 1, *, merge: bool = False, **options: Any
    ) -> None:
        if every < 1:
            raise ValueError(f"every {every} steps is never: every is 1 or more")
        self.publisher: Publisher | None = None
        self._url = url
        self._every = every
        self._merge = merge
        self._options = options
        self._progress = _VersionTally()

    # --- events --------------------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._go_first(sys._getframe(1).f_locals.get("self"))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._go_first(sys._getframe(1).f_locals.get("self"))
        self._abandon()
        self._progress = _VersionTally()
        options = dict(self._options)
        if "files" not in options and not isinstance(options.get("base"), str | os.PathLike):
            options["files"] = model_files(given["model"], given.get("processing_class"), options)
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
        metrics = self._progress.metrics(state.global_step, self.publisher.parameters)
        logs.update(metrics)
        if state.log_history:  # written before any callback hears of it
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.publisher is None:
            return
        # The best model may have been loaded in place of the last one.
        if self._progress.last_step != state.global_step or args.load_best_model_at_end:
            self._publish(given["model"], state)
        self.publisher.close()
        self.publisher = None

    # --- what they do --------------------------------------------------------------------------------------------

    def _publish(self, model: Any, state: TrainerState) -> None:
        if self.publisher is None:
            return
        began = time.perf_counter()
        published = self.publisher.publish(model, step=state.global_step, merge=self._merge)
        self._progress.add(published, time.perf_counter() - began)

    def _abandon(self) -> None:
        """Of a training that ended by an error no callback ever hears the end."""
        if self.publisher is not None:
            self.publisher.__exit__(RuntimeError, None, None)
            self.publisher = None

    def _go_first(self, handler: Any) -> None:
        """Before those that send logs away (TensorBoard, wandb): they come before everything that a user adds.

        Nobody tells a callback whose it is, but for the one that calls it.
        """
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)


class _VersionTally:
    """What has become of the versions so far."""

    def __init__(self) -> None:
        self.last_step: int | None = None
        self._open: list[Publication] = []
        self._newest: Publication | None = None
        self._seconds = 0.0
        self._superseded = 0
        self._failed = 0

    def add(self, publication: Publication, seconds: float) -> None:
        self.last_step = publication.step
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
            found["sync/behind"] = step - (newest.step or 0)
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
    """What makes weights a whole model: its config, as of a checkpoint of what is published, and its tokenizer."""
    model = unwrapped(model)
    with tempfile.TemporaryDirectory(prefix="weightwire-") as directory:
        parts: list[Any] = [getattr(model, "config", None), processing_class]
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(directory)
        if (generation := getattr(model, "generation_config", None)) is not None:
            with suppress(ValueError):  # settings that contradict each other; nobody needs them to load the weights
                generation.save_pretrained(directory)
        paths = [path for path in Path(directory).rglob("*") if path.is_file()]
        files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(paths)}
    if "config.json" in files:
        files["config.json"] = _as_published(files["config.json"], model, options)
    return files


def _as_published(config: bytes, model: Any, options: Mapping[str, Any]) -> bytes:
    """A trainer's config may say that weights are float32, and not whose they are: a checkpoint's says what is so."""
    settings = json.loads(config)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    if dtype == "float32":
        dtype = str(options.get("dtype", DEFAULT_DTYPE) or dtype).removeprefix("torch.")
    if dtype:
        settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = dtype
    settings["architectures"] = settings.get("architectures") or [type(model).__name__.removeprefix("FSDP")]
    return (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
