"""Inside SGLang: the loader that each worker calls with an order.

SGLang imports it by the name given to `--custom-weight-loader` and calls it between two batches. It never raises: that
would end the worker, and the server with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from weightwire.engines.live_model import LiveModel
from weightwire.engines.order_desk import OrderDesk, PatchDesk
from weightwire.engines.orders import Order
from weightwire.engines.scratch_layout import ScratchLayout
from weightwire.engines.sglang.order_payload import unpack_order
from weightwire.engines.skeleton import tensors_in
from weightwire.engines.weight_map import storage_of, tensors_of
from weightwire.errors import EngineError
from weightwire.weights import Checkpoint

__all__ = ["load"]

_log = logging.getLogger("sglang.weightwire")
_WORKER = "weightwire_worker"  # an attribute of the model
_PLAIN = "Unquantized"  # how the quantization methods begin that keep weights as they are


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """For `--custom-weight-loader weightwire.engines.sglang.load`."""
    try:
        order = unpack_order(named_tensors)
        if _WORKER not in model.__dict__:
            model.__dict__[_WORKER] = _SglangWorker(model)
        model.__dict__[_WORKER].receive(order)
    except Exception:
        _log.exception("weightwire: an order cannot be answered")


class _SglangWorker:
    """One worker's model. Its weights count as plain once they were found equal to a checkpoint, bit by bit."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._live = LiveModel(model, model.load_weights, relaid=ScratchLayout(model, _is_part))
        self._patches = PatchDesk(self._live)
        reading = {"adopt": self._adopt, "check": self._check, "stage": self._stage}
        writing = {"swap": self._swap, "undo": self._undo, "forget": self._forget, "reload": self._note_reload}
        self._desk = OrderDesk(self._live, reading, writing, _log)
        self._desk.unpatchable = _computed_weights(model)
        self._is_plain = False

    def receive(self, order: Order) -> None:
        self._desk.receive(order)

    def _adopt(self, order: Order) -> bool:
        self._check_whole()
        if self._desk.unpatchable:
            return False
        is_equal = self._live.adopt(order.file, order.target)
        self._is_plain |= is_equal
        return is_equal

    def _check(self, order: Order) -> bool:
        """Checks that the checkpoint fits this model, before SGLang loads it."""
        self._check_whole()
        if not self._desk.unpatchable:
            self._live.learn(Checkpoint(order.file))
        return True

    def _stage(self, order: Order) -> bool:
        self._patches.stage(order)
        return True

    def _swap(self, order: Order) -> bool:
        self._wait_for_device()  # a batch may still be running
        self._patches.swap(order)
        self._wait_for_device()
        return True

    def _undo(self, order: Order) -> bool:
        self._patches.undo()
        self._patches.drop()
        self._wait_for_device()
        return True

    def _forget(self, order: Order) -> bool:
        """SGLang is about to load a checkpoint."""
        self._patches.drop()
        self._live.holding, self._live.mixed = None, True
        return True

    def _note_reload(self, order: Order) -> bool:
        """SGLang has loaded a checkpoint: compares it with the model."""
        if not self._adopt(order):
            if self._is_plain:
                raise EngineError(
                    f"{order.file}: the model's weights differ from the checkpoint after SGLang loaded it",
                    hint="restart the server",
                )
            reason = self._desk.unpatchable or "the weights are not kept as they were loaded"
            self._desk.unpatchable = reason
            _log.warning("weightwire: %s: every version will be reloaded, which is slow", reason)
            self._live.holding, self._live.mixed = order.target, False
        return True

    def _check_whole(self) -> None:
        for name, module in self._model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is not None and not type(method).__name__.startswith(_PLAIN):
                raise EngineError(
                    f"layer {name!r}: is served quantized ({type(method).__name__})",
                    hint="serve it without quantization",
                )

    def _wait_for_device(self) -> None:
        if any(one.is_cuda for one in self._model.parameters()):
            torch.cuda.synchronize()


def _computed_weights(model: torch.nn.Module) -> str:
    """The first tensor in a layer that is not a weight, and may have been computed from some; empty if none.

    Such as the absorbed projections of multi-head latent attention. A patch would leave it as it was.
    """
    known = {storage_of(one) for one in tensors_of(model).values()}
    for path, tensor in tensors_in(model, _is_part).items():
        if tensor.is_floating_point() and tensor.numel() > 1 and storage_of(tensor) not in known:
            return f"{path[1:]}: may be computed from weights"
    return ""


def _is_part(value: object) -> bool:
    """Objects in SGLang's layers that hold or process weights."""
    is_layer = type(value).__module__.startswith("sglang.srt.layers.")
    return is_layer and hasattr(value, "__dict__") and not isinstance(value, type)
