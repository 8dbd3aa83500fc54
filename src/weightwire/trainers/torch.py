"""Plain torch: publishes a model after each step of its optimizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from weightwire.bucket import Bucket
from weightwire.publisher import Publication, Publisher
from weightwire.trainers.process_group import Ranks

__all__ = ["Attached", "Ranks", "attach", "publisher_for"]


def attach(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: torch.nn.Module,
    url: str | os.PathLike[str] | Bucket,
    *,
    every: int = 1,
    step: int = 0,
    merge: bool = False,
    **options: Any,
) -> Attached:
    """Publishes a model's weights now, and after every `every` steps of its optimizer.

    Put `with attach(optimizer, model, "s3://bucket/run"):` around the training loop. If there are several optimizers,
    pass all of them in the order in which they step: a step counts when the last of them has run.

    After a restart, load the newest weights before you attach, and continue the step count from there. Otherwise the
    model's initial weights become the newest version, with a warning.

        # weightwire restore s3://bucket/run -o resumed      (prints the version and its step)
        model = AutoModelForCausalLM.from_pretrained("resumed", dtype=torch.float32)
        with attach(optimizer, model, "s3://bucket/run", step=41):
            ...

    The run holds only the published weights. Save float32 master weights and optimizer state yourself, and load your
    own training checkpoint instead if you have one.

    A PEFT model gives its adapter; `merge` publishes the whole model with its adapters merged in. All other options are
    passed to `Publisher`. If several processes train, call this in all of them: with DDP the first one publishes, with
    FSDP2 all of them do.
    """
    if every < 1:
        raise ValueError(f"every={every}: must be 1 or more")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    _check(optimizers, model)
    publisher = publisher_for(model, url, **options)
    attached = Attached(publisher, model, every=every, step=step, merge=merge)
    try:
        attached.publish()
        attached.listen(optimizers[-1])
    except BaseException:
        attached.abandon()
        raise
    return attached


class Attached:
    """A model that is published while it is trained. Closing it publishes the last step and removes the hook.

    `publisher` is None if another process publishes the same model. `last` is the latest publication.
    """

    def __init__(
        self, publisher: Publisher | None, model: torch.nn.Module, *, every: int = 1, step: int = 0, merge: bool = False
    ) -> None:
        self.publisher = publisher
        self.step = step
        self.last: Publication | None = None
        self._model = model
        self._every = every
        self._merge = merge
        self._hook: Any = None
        self._published: int | None = None  # the latest published step

    def listen(self, optimizer: torch.optim.Optimizer) -> None:
        # Wrappers such as accelerate's forward step() to the inner optimizer, but not hooks.
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner
        self._hook = optimizer.register_step_post_hook(self._stepped)

    def publish(self) -> Publication | None:
        """Publishes the current weights, whatever the step."""
        if self.publisher is not None:
            self.last = self.publisher.publish(self._model, step=self.step, merge=self._merge)
        self._published = self.step
        return self.last

    def close(self) -> None:
        """Publishes the weights after the last step, unless that was done, and waits until they are committed."""
        if self._hook is None:
            return
        self._remove_hook()
        try:
            if self._published != self.step:
                self.publish()
        except BaseException:
            self.abandon()
            raise
        if self.publisher is not None:
            self.publisher.close()

    def abandon(self) -> None:
        """Ends after a failure: publishes nothing more, and does not wait long for what is in progress."""
        self._remove_hook()
        if self.publisher is not None:
            self.publisher.__exit__(RuntimeError, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.step += 1
        if self.step % self._every == 0:
            self.publish()

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _check(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    """Catches arguments in the wrong order."""
    for one in optimizers:
        if not hasattr(one, "register_step_post_hook") and not hasattr(one, "optimizer"):
            raise TypeError(f"{type(one).__name__} is not an optimizer: call attach(optimizer, model, url)")
    if not optimizers or not isinstance(model, torch.nn.Module):
        raise TypeError(f"{type(model).__name__} is not a torch module: call attach(optimizer, model, url)")


def publisher_for(model: torch.nn.Module, url: str | os.PathLike[str] | Bucket, **options: Any) -> Publisher | None:
    """The publisher of this process; None if another process holds the same model and publishes it."""
    if options.get("ranks") is None and _is_sharded(model):
        options["ranks"] = Ranks()
    return Publisher(url, **options) if options.get("ranks") is not None or _is_main() else None


def _is_main() -> bool:
    """Whether this process is the first or only one of the training job."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _is_sharded(model: torch.nn.Module) -> bool:
    """Whether each rank of the job holds different rows of the model (FSDP2)."""
    return any(hasattr(one, "device_mesh") and one.device_mesh.size() > 1 for one in model.parameters())
