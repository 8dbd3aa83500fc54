"""A weight transfer backend for vLLM that patches a worker's models in place. Each worker has one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightwire.engines.live_model import LiveModel
from weightwire.engines.order_desk import refuse_order
from weightwire.engines.orders import Order
from weightwire.engines.relaid_model import RelaidModel
from weightwire.engines.vllm.drafts import DRAFT, draft_model, draft_names, is_in_checkpoint
from weightwire.engines.vllm.model_desk import ModelDesk
from weightwire.engines.vllm.model_with_draft import DraftLayout, with_draft
from weightwire.engines.vllm.packing import experts_on_cpu, relaid_out
from weightwire.engines.vllm.post_load import loaded_with, relaid_model_of
from weightwire.engines.vllm.prefix_cache import why_not_kept

__all__ = ["OrderInfo", "StatusInfo", "WeightwireEngine"]

_NO_DRAFT = (
    "the server has no draft model of its own checkpoint",
    "start vLLM with a draft model in --speculative-config; draft layers of the model's checkpoint need no engine",
)
_log = logging.getLogger("vllm.weightwire")  # a child of vLLM's logger, so that it is shown with vLLM's


@dataclass
class StatusInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Asks which version this worker holds."""

    directory: str
    token: str
    model: str = ""


@dataclass
class OrderInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of an `Order`."""

    action: str
    directory: str
    token: str
    file: str = ""
    run: str = ""
    version: int = -1
    state: str = ""
    model: str = ""


class WeightwireEngine(WeightTransferEngine[StatusInfo, OrderInfo]):  # type: ignore[misc]
    """The model that vLLM serves has a desk, and so has a separate draft model that can be patched."""

    init_info_cls = StatusInfo
    update_info_cls = OrderInfo
    supports_draft_weight_update = False  # vLLM's own sessions for drafts: ours name the model in each order

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        layout = relaid_model_of(model)
        is_used = isinstance(layout, RelaidModel) and not layout.problem and not layout.is_as_loaded
        relaid = layout if isinstance(layout, RelaidModel) and is_used else None
        unpatchable = relaid_out(model) or _why_unpatchable(model, layout)
        live = self._live_model(relaid, unpatchable)
        kept = why_not_kept(vllm_config)
        target = ModelDesk(vllm_config, self.model_config, model, live, layout, unpatchable, not_kept=kept)
        self._desks = {"": target}
        self._no_draft = _NO_DRAFT
        if draft_model(vllm_config) and not is_in_checkpoint(vllm_config):
            self._add_draft()

    def _live_model(self, relaid: RelaidModel | None, unpatchable: str) -> LiveModel:
        """The model, together with its draft if that is in the same checkpoint."""
        is_draft = draft_names(self.model_config.hf_config)
        draft = draft_model(self.vllm_config)
        if draft and is_in_checkpoint(self.vllm_config):
            drafter = loaded_with(self.vllm_config.speculative_config.draft_model_config)
            both = unpatchable or with_draft(self.model, drafter)
            if not isinstance(both, str):
                return LiveModel(both.module, self.model.load_weights, relaid=both, is_draft=is_draft)
            _log.warning(
                "weightwire: the draft (%s) is not updated: it will predict fewer tokens correctly (%s)", draft, both
            )
        return LiveModel(self.model, self.model.load_weights, relaid=relaid, is_draft=is_draft)

    def _add_draft(self) -> None:
        """Gives a separate draft model a desk, if it can be patched."""
        config = self.vllm_config.speculative_config.draft_model_config
        draft = loaded_with(config)
        layout = DraftLayout.of(self.model, draft)
        if draft is None or isinstance(layout, str):
            self._no_draft = (
                f"the draft cannot be patched: {layout}",
                "serve it unpacked, or without --engine vllm-draft",
            )
            return
        live = LiveModel(draft, draft.load_weights, relaid=layout)
        self._desks[DRAFT] = ModelDesk(self.vllm_config, config, draft, live, relaid_model_of(draft), "")
        _log.info("weightwire: the draft (%s) can follow a run of its own", draft_model(self.vllm_config))

    # --- vLLM's interface ----------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: StatusInfo) -> None:
        self._receive(Order("status", init_info.directory, init_info.token, model=init_info.model))

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: OrderInfo) -> None:
        self._receive(Order(**{one.name: getattr(update_info, one.name) for one in fields(Order)}))

    def finish_weight_update(self) -> None:
        for desk in self._desks.values():
            desk.drop()

    def shutdown(self) -> None:
        self.finish_weight_update()

    def forget_draft(self) -> None:
        """The weights of a draft may be gone: vLLM slept."""
        if DRAFT in self._desks:
            self._desks[DRAFT].forget()

    def _receive(self, order: Order) -> None:
        desk = self._desks.get(order.model)
        if desk is None:
            refuse_order(order, *self._no_draft)
        else:
            desk.receive(order)


def _why_unpatchable(model: torch.nn.Module, layout: RelaidModel | str) -> str:
    """Why the layout that was found at startup cannot be patched. Without one, dense models are compared later."""
    if isinstance(layout, RelaidModel):
        return layout.problem
    experts = experts_on_cpu(model)
    return f"{experts}: the experts are packed for the CPU, and {layout}" if experts else ""
