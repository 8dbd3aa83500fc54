"""Plain torch: publishes a model whenever its optimizer has taken a step.

Knows optimizers and the processes of a training job; how weights are read and published is the `Publisher`'s.
"""

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
    """Publishes the weights that a model has now, and after `every` so many steps of its optimizer.

    Of several optimizers, give all in the order in which they step: a step is over when the last of them has made it.

    `with attach(optimizer, model, "s3://bucket/run"):` around the training loop is all it takes. `step` is where to
    count from, after a restart; `merge` publishes the weights of a PEFT model with its adapters merged into them. All
    other options are the `Publisher`'s. Where several processes train, call it in all of them: if they hold the same
    model (DDP) then the first one publishes, and if each holds some rows of it (FSDP2) then all of them do.
    """
    if every < 1:
        raise ValueError(f"every {every} steps is never: every is 1 or more")
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
    """A model that is published as it is trained. To close it publishes the last step, and lets go of the optimizer.

    `publisher` is None in a process for which another one publishes. `last` is what was published last.
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
        self._published: int | None = None  # the step that was published last

    def listen(self, optimizer: torch.optim.Optimizer) -> None:
        # A wrapper (accelerate's is one) hands on what it is told to its optimizer, but not who listens.
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner
        self._hook = optimizer.register_step_post_hook(self._stepped)

    def publish(self) -> Publication | None:
        """The weights as they are now, whether or not it is time."""
        if self.publisher is not None:
            self.last = self.publisher.publish(self._model, step=self.step, merge=self._merge)
        self._published = self.step
        return self.last

    def close(self) -> None:
        """Publishes the weights after the last step, if they were not, and waits until all is committed."""
        if self._hook is None:
            return
        self._let_go()
        try:
            if self._published != self.step:
                self.publish()
        except BaseException:
            self.abandon()
            raise
        if self.publisher is not None:
            self.publisher.close()

    def abandon(self) -> None:
        """Ends as after a failure: publishes nothing more, and does not wait for long."""
        self._let_go()
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

    def _let_go(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _check(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    """What is easily mixed up."""
    for one in optimizers:
        if not hasattr(one, "register_step_post_hook") and not hasattr(one, "optimizer"):
            raise TypeError(f"a {type(one).__name__} is no optimizer: write attach(optimizer, model, url)")
    if not optimizers or not isinstance(model, torch.nn.Module):
        raise TypeError(f"a {type(model).__name__} is no module: write attach(optimizer, model, url)")


def publisher_for(model: torch.nn.Module, url: str | os.PathLike[str] | Bucket, **options: Any) -> Publisher | None:
    """This process's publisher; None where another one publishes, since it holds the same model."""
    if options.get("ranks") is None and _is_sharded(model):
        options["ranks"] = Ranks()
    return Publisher(url, **options) if options.get("ranks") is not None or _is_main() else None


def _is_main() -> bool:
    """That this process is the first of the training job, or the only one."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _is_sharded(model: torch.nn.Module) -> bool:
    """That the ranks of the job hold different rows of it (FSDP2)."""
    return any(hasattr(one, "device_mesh") and one.device_mesh.size() > 1 for one in model.parameters())
