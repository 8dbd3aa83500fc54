"""A weight transfer backend for vLLM that patches a worker's model in place.

Each worker has one. Reading orders run in a thread while the worker generates. Writing orders run while the follower
has paused the server. Failures are returned as answers and not raised: if one worker raises, vLLM does not pass the
order to the others, and all workers must get the same orders.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightwire.delta import Delta, changes
from weightwire.engines.engine import ServedVersion
from weightwire.engines.live_model import LiveModel, StagedPatch, use_all_cores
from weightwire.engines.relaid_model import RelaidModel
from weightwire.engines.vllm.orders import Answer, check_place, write_answer
from weightwire.engines.vllm.packing import experts_on_cpu, relaid_out
from weightwire.engines.vllm.post_load import relaid_model_of
from weightwire.engines.weight_map import UnpatchableKind, torch_dtype
from weightwire.errors import EngineError, WeightwireError
from weightwire.weights import Checkpoint, as_torch_integers

__all__ = ["Order", "StatusOrder", "WeightwireEngine", "checkpoint_patches"]

_log = logging.getLogger("vllm.weightwire")  # a child of vLLM's logger, so that it is shown with vLLM's


@dataclass
class StatusOrder(WeightTransferInitInfo):  # type: ignore[misc]
    """Asks which version this worker holds."""

    directory: str
    token: str


@dataclass
class Order(WeightTransferUpdateInfo):  # type: ignore[misc]
    """See `orders`. `file` is a patch or checkpoint that leads to `run`, `version` and `state`."""

    action: str
    directory: str
    token: str
    file: str = ""
    run: str = ""
    version: int = -1
    state: str = ""

    @property
    def target(self) -> ServedVersion:
        return ServedVersion(self.run, self.version, self.state)


class WeightwireEngine(WeightTransferEngine[StatusOrder, Order]):  # type: ignore[misc]
    init_info_cls = StatusOrder
    update_info_cls = Order
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        layout = relaid_model_of(model)
        self._unpatchable = relaid_out(model) or _why_unpatchable(model, layout)
        self._knows_layout = isinstance(layout, RelaidModel) and not layout.problem
        relaid = layout if isinstance(layout, RelaidModel) and self._knows_layout and not layout.is_as_loaded else None
        self._live = LiveModel(model, model.load_weights, relaid=relaid)
        self._staged: StagedPatch | None = None
        self._patch: Delta | None = None
        self._busy: threading.Thread | None = None
        self._owner = ""  # the directory of the follower that staged it
        self._done = ""  # the token of the last order
        self._is_pristine = isinstance(layout, str)  # not written since vLLM loaded it, in an unknown layout
        if self._unpatchable:
            _log.warning("weightwire: %s: every version will be reloaded, which is slow", self._unpatchable)

    # --- vLLM's interface ----------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: StatusOrder) -> None:
        check_place(init_info.directory, init_info.token)
        self._answer(init_info, lambda: True)

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: Order) -> None:
        order = update_info
        check_place(order.directory, order.token)
        if order.token == self._done:  # sent again, because its reply was lost
            return
        self._done = order.token
        reading = {"adopt": self._adopt, "check": self._check, "stage": self._stage}
        writing = {"swap": self._swap, "undo": self._undo, "reload": self._reload}
        if self._busy is not None:
            self._busy.join()
        if order.action in reading:
            self._beside(order, reading[order.action])
        else:
            self._answer(order, lambda: writing[order.action](order))

    def finish_weight_update(self) -> None:
        self._staged = self._patch = None  # also drops the old values kept for `undo`

    def shutdown(self) -> None:
        self._staged = self._patch = None

    # --- orders --------------------------------------------------------------------------------------------------

    def _adopt(self, order: Order) -> bool:
        self._check_whole()
        return not self._unpatchable and self._live.adopt(order.file, order.target)

    def _check(self, order: Order) -> bool:
        """Checks that the checkpoint fits this model, before anything is written."""
        self._check_whole()
        if not self._unpatchable:
            self._live.learn(Checkpoint(order.file))
        return True

    def _stage(self, order: Order) -> bool:
        self._patch, self._owner = Delta.open(order.file), order.directory
        self._staged = self._live.stage(self._patch, order.target)
        for name in self._staged.unpatchable:
            why = self._live.unpatchable[name]
            if why.kind is not UnpatchableKind.CAST:
                raise EngineError(f"tensor {name!r}: cannot be patched ({why})", hint="reload the model")
            _log.info("weightwire: tensor %r is patched slowly: %s", name, why)
        return True

    def _swap(self, order: Order) -> bool:
        staged, patch = self._staged, self._patch
        if staged is None or patch is None or (self._owner, staged.target) != (order.directory, order.target):
            raise EngineError(f"no patch to version {order.version} is staged here", hint="stage the patch first")
        staged.swap()
        if staged.unpatchable:
            self._load_slowly(patch, staged)
        return True

    def _undo(self, order: Order) -> bool:
        if self._staged is not None:
            self._staged.undo()
            if self._staged.unpatchable:  # these cannot be undone
                self._live.holding, self._live.mixed = None, True
        return True

    def _reload(self, order: Order) -> bool:
        self._is_pristine = False
        if not self._unpatchable:
            self._live.reload(order.file, order.target)
            return True
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        self._check_whole()
        self._live.holding, self._live.mixed = None, True
        reload_weights(self.vllm_config, self.model, None, order.file, True)
        self._live.holding, self._live.mixed = order.target, False
        return True

    def _load_slowly(self, patch: Delta, staged: StagedPatch) -> None:
        """Loads `unpatchable` tensors with vLLM's own loader, which needs whole tensors and cannot be undone."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

        patches = checkpoint_patches(patch, staged.unpatchable)
        holding = self._live.holding
        self._live.holding, self._live.mixed = None, True
        load_checkpoint_weight_patches(self.model, patches)
        self._live.holding, self._live.mixed = holding, False

    def _check_whole(self) -> None:
        """Checks that the model holds plain checkpoint weights."""
        quantization = self.model_config.quantization
        if quantization is not None and not self._is_packed():
            raise EngineError(
                f"the model is served quantized ({quantization})",
                hint="serve it without quantization, or from a pack-quantized checkpoint",
            )
        if self.parallel_config.enable_eplb:
            raise EngineError(
                "vLLM moves experts between ranks while it serves (EPLB)", hint="serve it without --enable-eplb"
            )
        self._look_at_layout()
        if self._unpatchable and experts_on_cpu(self.model):
            raise EngineError(
                self._unpatchable, hint="serve it on a GPU: on a CPU, vLLM cannot reload a mixture of experts either"
            )

    def _is_packed(self) -> bool:
        """Whether the checkpoint itself is quantized, in a format whose kernels keep no copy that probes cannot see."""
        config = getattr(self.model_config.hf_config, "quantization_config", None)
        return self._knows_layout and isinstance(config, dict) and config.get("format") == "pack-quantized"

    def _look_at_layout(self) -> None:
        """If the layout was not learned: checks that vLLM kept the weights as loaded, so that patches are safe."""
        if not self._is_pristine:
            return
        self._is_pristine = False
        path = Path(self.model_config.model)
        try:
            if not self._unpatchable and path.is_dir() and not self._live.holds(Checkpoint(path)):
                self._unpatchable = "the weights are not kept as they were loaded"
        except WeightwireError as problem:
            _log.warning("weightwire: %s: cannot be compared with the served weights (%s)", path, problem.message)

    # --- answers -------------------------------------------------------------------------------------------------

    def _beside(self, order: Order, work: Callable[[Order], bool]) -> None:
        def answer() -> None:
            use_all_cores()
            self._answer(order, lambda: work(order))

        self._busy = threading.Thread(target=answer, name="weightwire-stage", daemon=True)
        self._busy.start()

    def _answer(self, order: StatusOrder | Order, work: Callable[[], bool]) -> None:
        done, problem, hint = False, "", ""
        try:
            done = work()
        except WeightwireError as error:
            problem, hint = error.message, error.hint or ""
        except Exception as error:
            _log.exception("weightwire: an order failed")
            problem = f"{type(error).__name__}: {error}"
        live = self._live
        answer = Answer(live.holding, done, live.mixed, problem, hint, self._unpatchable)
        try:
            write_answer(Path(order.directory), order.token, str(os.getpid()), answer)
        except OSError as error:
            _log.warning("weightwire: the answer cannot be written: the follower is gone (%s)", error)


def _why_unpatchable(model: torch.nn.Module, layout: RelaidModel | str) -> str:
    """Why the layout that was found at startup cannot be patched. Without one, dense models are compared later."""
    if isinstance(layout, RelaidModel):
        return layout.problem
    experts = experts_on_cpu(model)
    return f"{experts}: the experts are packed for the CPU, and {layout}" if experts else ""


def checkpoint_patches(patch: Delta, names: Iterable[str]) -> list[Any]:
    """Some tensors of a patch in the form that vLLM's own loader expects."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

    patches = []
    for name in names:
        entry = patch.entries[name]
        positions, values = changes({}, patch, name)
        dtype = torch_dtype(name, entry.dtype)
        new = as_torch_integers(np.array(values)).view(dtype)
        patches.append(CheckpointWeightPatch(name, entry.shape, dtype, new, torch.from_numpy(positions)))
    return patches
