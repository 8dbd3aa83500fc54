"""The engine for a torch module in this process: patched in place under a lock.

engine = TorchEngine(model)
with Keeper(follower, [engine]) as keeper:
    with engine.serving() as version:  # does not change inside the block
        tokens = model.generate(...)
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
from weightwire.engines.adapter_module import AdapterModule
from weightwire.engines.engine import ServedVersion, Swap
from weightwire.engines.live_model import LiveModel
from weightwire.engines.weight_map import Load
from weightwire.errors import EngineError
from weightwire.weights import Checkpoint, has_adapters, note_torch_write, plain_names

__all__ = ["TorchEngine"]


class TorchEngine:
    """Serves a module. Run it inside `serving`, which holds one complete version.

    The module may be float32 where the run is bfloat16: every bfloat16 value is copied exactly. Any other difference
    in dtype is an error.

    If `model` is a PEFT model, the engine updates its active LoRA adapter, and the run must be an adapter. The base
    model stays as it is.

    Nothing else may change the weights. `patch` notices other values where it writes, by the digest, and raises. It
    cannot for tensors on a GPU or stored in several parts.

    - `load`: the module's own loader, if its parameters differ from those of the checkpoint (fused ones, for example).
      It takes pairs of names and tensors, and copies every tensor to its place.
    - `lock`: an existing lock to use.
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
        self._adapter = AdapterModule(model) if load is None and has_adapters(model) else None
        self._model = self._adapter or model
        self._live = LiveModel(self._model, load or _by_name(self._model), threads=threads)

    @property
    def holding(self) -> ServedVersion | None:
        return self._live.holding

    @property
    def can_patch(self) -> bool:
        return True  # `_check` refuses modules that cannot be patched

    @property
    def version(self) -> int | None:
        """The version served. Stable while `lock` is held."""
        return self._live.holding.version if self._live.holding else None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors, under their names in the run."""
        return _tensors(self._model)

    @contextmanager
    def serving(self) -> Iterator[int | None]:
        """Holds off updates. Yields the version served, or None before the first one.

        Raises an EngineError if a reload failed halfway: the module is then unusable until the next reload.
        """
        with self.lock:
            if self._live.mixed:
                raise EngineError(f"{self.name}: a reload failed halfway", hint="wait for the next reload")
            yield self.version

    def attach(self, run: str = "") -> ServedVersion | None:
        return self._live.holding

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        self._check(checkpoint)
        with self.lock:
            self._check_live()
            return self._live.adopt(checkpoint, target)

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        staged = self._live.stage(patch, target)
        ready = time.perf_counter()
        with self.lock:
            paused = time.perf_counter()
            self._check_live()
            staged.swap()
            self._note_write()
        return Swap(ready - began, time.perf_counter() - paused)

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        self._check(checkpoint)
        with self.lock:
            paused = time.perf_counter()
            self._check_live()
            self._live.reload(checkpoint, target)
            self._note_write()
            return Swap(0.0, time.perf_counter() - paused)

    def close(self) -> None:
        pass

    def _check(self, checkpoint: Path) -> None:
        """Checks that the checkpoint fits this module and can be patched in place."""
        if self._adapter is not None:
            self._adapter.check_config(checkpoint)
        self._live.learn(Checkpoint(checkpoint))
        for name, why in self._live.unpatchable.items():
            raise EngineError(
                f"tensor {name!r}: cannot be patched in place ({why})",
                hint="use the run's dtype: model.to(torch.bfloat16)",
            )

    def _check_live(self) -> None:
        """Under the lock: other threads may change a PEFT model."""
        if self._adapter is not None:
            self._adapter.check_live()

    def _note_write(self) -> None:
        """Tells autograd that the weights changed, so that it rejects saved tensors."""
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            note_torch_write(tensor)


def _by_name(model: torch.nn.Module) -> Load:
    """A loader for a module with the checkpoint's parameter names, apart from wrapper prefixes."""

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = _tensors(model)
        loaded = set()
        for name, value in weights:
            if name not in places:
                raise EngineError(f"tensor {name!r}: not in the module", hint="serve the same model as the run")
            if places[name].shape != value.shape:
                raise EngineError(
                    f"tensor {name!r}: has shape {list(places[name].shape)}, but {list(value.shape)} in the run",
                    hint="serve the same model as the run",
                )
            places[name].detach().copy_(value)
            loaded.add(_place(places[name]))
        for name, tensor in places.items():
            if _place(tensor) not in loaded:  # tied tensors share a place
                raise EngineError(f"tensor {name!r}: not in the run", hint="serve the same model as the run")

    return load


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(plain_names(list(model.state_dict(keep_vars=True).items())))


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.untyped_storage()._cdata), tensor.storage_offset()
