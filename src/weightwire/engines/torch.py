"""The engine for a torch module in this process: patched in place under a lock.

    engine = TorchEngine(model)
    with Keeper(follower, [engine]) as keeper:
        with engine.serving() as version:  # which stays the same in here
            tokens = model.generate(...)

Knows the module and its names; where its weights lie is learnt by `weight_map`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weightwire.delta import Delta
from weightwire.engines.engine import ServedVersion, Swap
from weightwire.engines.live_model import LiveModel
from weightwire.engines.weight_map import Load
from weightwire.errors import EngineError
from weightwire.weights import Checkpoint, note_torch_write, plain_names

__all__ = ["TorchEngine"]


class TorchEngine:
    """Serves a module. Whoever runs it does so inside of `serving`, and so sees one version, all of it.

    - `load`: the module's own loader, where its parameters are not simply those of the checkpoint (fused ones, say): it
      takes pairs of names and tensors, and copies every tensor to where it belongs.
    - `lock`: one that others use already.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        load: Load | None = None,
        lock: Any = None,
        name: str = "torch",
        threads: int | None = None,
    ) -> None:
        self.name = name
        self.lock: Any = lock or threading.RLock()
        self._model = model
        self._live = LiveModel(model, load or _by_name(model), threads=threads)

    @property
    def holding(self) -> ServedVersion | None:
        return self._live.holding

    @property
    def can_patch(self) -> bool:
        return True  # one that does not is refused

    @property
    def version(self) -> int | None:
        """What it serves, while `lock` is held."""
        return self._live.holding.version if self._live.holding else None

    @contextmanager
    def serving(self) -> Iterator[int | None]:
        """No version comes in between. Yields the one that is there, None if that is what the module began with.

        Raises where a reload failed half way: the module is good for nothing until the next one.
        """
        with self.lock:
            if self._live.torn:
                raise EngineError(f"{self.name}: a reload failed half way", hint="wait for the next one")
            yield self.version

    def attach(self, run: str = "") -> ServedVersion | None:
        return self._live.holding

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        self._check(checkpoint)
        with self.lock:
            return self._live.adopt(checkpoint, target)

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        staged = self._live.stage(patch, target)
        ready = time.perf_counter()
        with self.lock:
            paused = time.perf_counter()
            staged.swap()
            self._tell()
        return Swap(ready - began, time.perf_counter() - paused)

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        self._check(checkpoint)
        with self.lock:
            paused = time.perf_counter()
            self._live.reload(checkpoint, target)
            self._tell()
            return Swap(0.0, time.perf_counter() - paused)

    def close(self) -> None:
        pass

    def _check(self, checkpoint: Path) -> None:
        """That it is one of this module, and can be patched in place from then on."""
        self._live.learn(Checkpoint(checkpoint))
        for name, why in self._live.odd.items():
            raise EngineError(
                f"tensor {name!r}: cannot be patched in place ({why})",
                hint="serve the model in the run's own dtype: model.to(torch.bfloat16)",
            )

    def _tell(self) -> None:
        """autograd must not use what it saved of them."""
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            note_torch_write(tensor)


def _by_name(model: torch.nn.Module) -> Load:
    """The loader of a module whose parameters have the checkpoint's names, but for what wrappers put before them."""

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = dict(plain_names(list(model.state_dict(keep_vars=True).items())))
        loaded = set()
        for name, value in weights:
            if name not in places:
                raise EngineError(f"tensor {name!r}: the module has none", hint="it is another model than the run's")
            if places[name].shape != value.shape:
                raise EngineError(
                    f"tensor {name!r}: is {list(places[name].shape)}, and {list(value.shape)} in the checkpoint",
                    hint="it is another model than the run's",
                )
            places[name].detach().copy_(value)
            loaded.add(_place(places[name]))
        for name, tensor in places.items():
            if _place(tensor) not in loaded:  # which one that is tied to another is
                raise EngineError(f"tensor {name!r}: the run has none", hint="it is another model than the run's")

    return load


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.untyped_storage()._cdata), tensor.storage_offset()
