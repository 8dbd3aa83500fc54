"""One model of a worker: carries out the orders for it, and refuses runs that do not fit how vLLM holds it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightwire.delta import Delta, changes
from weightwire.engines.live_model import LiveModel, StagedPatch
from weightwire.engines.order_desk import OrderDesk, PatchDesk
from weightwire.engines.orders import Order
from weightwire.engines.relaid_model import RelaidModel
from weightwire.engines.vllm.packing import experts_on_cpu
from weightwire.engines.vllm.quantization_scheme import PATCHABLE, check_same_scheme, scheme_of
from weightwire.engines.weight_map import UnpatchableKind, torch_dtype
from weightwire.errors import EngineError, WeightwireError
from weightwire.weights import Checkpoint, as_torch_integers

__all__ = ["ModelDesk", "checkpoint_patches"]

_log = logging.getLogger("vllm.weightwire")  # a child of vLLM's logger, so that it is shown with vLLM's


class ModelDesk:
    """`layout` is what was learned when vLLM loaded the model, or the reason why nothing was."""

    def __init__(
        self,
        vllm_config: Any,
        model_config: Any,
        model: torch.nn.Module,
        live: LiveModel,
        layout: RelaidModel | str,
        unpatchable: str,
        *,
        not_kept: str = "",
    ) -> None:
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._model = model
        self._live = live
        self._knows_layout = isinstance(layout, RelaidModel) and not layout.problem
        self._is_pristine = isinstance(layout, str)  # not written since vLLM loaded it, in an unknown layout
        self._patches = PatchDesk(live)
        reading = {"adopt": self._adopt, "check": self._check, "stage": self._stage}
        writing = {"swap": self._swap, "undo": self._undo, "reload": self._reload}
        self._desk = OrderDesk(live, reading, writing, _log)
        self._desk.unpatchable, self._desk.not_kept = unpatchable, not_kept
        if unpatchable:
            _log.warning("weightwire: %s: every version will be reloaded, which is slow", unpatchable)

    def receive(self, order: Order) -> None:
        self._desk.receive(order)

    def drop(self) -> None:
        self._patches.drop()

    def forget(self) -> None:
        """The weights may have changed: they must be compared or loaded again."""
        self._live.holding = None

    # --- orders --------------------------------------------------------------------------------------------------

    def _adopt(self, order: Order) -> bool:
        self._check_whole(Path(order.file))
        return not self._desk.unpatchable and self._live.adopt(order.file, order.target)

    def _check(self, order: Order) -> bool:
        """Checks that the checkpoint fits this model, before anything is written."""
        self._check_whole(Path(order.file))
        if not self._desk.unpatchable:
            self._live.learn(Checkpoint(order.file))
        return True

    def _stage(self, order: Order) -> bool:
        for name in self._patches.stage(order).unpatchable:
            why = self._live.unpatchable[name]
            if why.kind is not UnpatchableKind.CAST:
                raise EngineError(f"tensor {name!r}: cannot be patched ({why})", hint="reload the model")
            _log.info("weightwire: tensor %r is patched slowly: %s", name, why)
        return True

    def _swap(self, order: Order) -> bool:
        staged, patch = self._patches.swap(order)
        if patch is not None:
            self._load_slowly(patch, staged)
        return True

    def _undo(self, order: Order) -> bool:
        staged = self._patches.undo()
        if staged is not None and staged.unpatchable:  # these cannot be undone
            self._live.holding, self._live.mixed = None, True
        return True

    def _reload(self, order: Order) -> bool:
        self._is_pristine = False
        if not self._desk.unpatchable:
            self._live.reload(order.file, order.target)
            return True
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        self._check_whole(Path(order.file))
        self._live.holding, self._live.mixed = None, True
        reload_weights(self._vllm_config, self._model, None, order.file, True)
        self._live.holding, self._live.mixed = order.target, False
        return True

    def _load_slowly(self, patch: Delta, staged: StagedPatch) -> None:
        """Loads `unpatchable` tensors with vLLM's own loader, which needs whole tensors and cannot be undone."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

        patches = checkpoint_patches(patch, staged.unpatchable)
        holding = self._live.holding
        self._live.holding, self._live.mixed = None, True
        load_checkpoint_weight_patches(self._model, patches)
        self._live.holding, self._live.mixed = holding, False

    def _check_whole(self, checkpoint: Path) -> None:
        """Checks that the model holds weights as they are in this checkpoint."""
        self._check_quantization(checkpoint)
        if self._vllm_config.parallel_config.enable_eplb:
            raise EngineError(
                "vLLM moves experts between ranks while it serves (EPLB)", hint="serve it without --enable-eplb"
            )
        self._look_at_layout()
        if self._desk.unpatchable and experts_on_cpu(self._model):
            raise EngineError(
                self._desk.unpatchable,
                hint="serve it on a GPU: on a CPU, vLLM cannot reload a mixture of experts either",
            )

    def _check_quantization(self, checkpoint: Path) -> None:
        """A quantized model must be of a checkpoint that is quantized itself, in a layout that was learned."""
        served = scheme_of(getattr(self._model_config.hf_config, "quantization_config", None))
        quantization = self._model_config.quantization
        if quantization is not None and (served not in PATCHABLE or not self._knows_layout):
            why = f": {self._desk.unpatchable}" if self._desk.unpatchable else ""
            raise EngineError(
                f"the model is served quantized ({served or quantization}){why}",
                hint=f"serve it without quantization, or from a checkpoint in one of {', '.join(PATCHABLE)}",
            )
        check_same_scheme(checkpoint, served)

    def _look_at_layout(self) -> None:
        """If the layout was not learned: checks that vLLM kept the weights as loaded, so that patches are safe."""
        if not self._is_pristine:
            return
        self._is_pristine = False
        path = Path(self._model_config.model)
        try:
            if not self._desk.unpatchable and path.is_dir() and not self._live.holds(Checkpoint(path)):
                self._desk.unpatchable = "the weights are not kept as they were loaded"
        except WeightwireError as problem:
            _log.warning("weightwire: %s: cannot be compared with the served weights (%s)", path, problem.message)


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
