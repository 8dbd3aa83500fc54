"""The routes of a vLLM server that trainers call, such as TRL's asynchronous GRPO.

GET /version                  the version of weightwire
GET /get_world_size           1: one process generates
GET /server_info              dtype and weight transfer, in vLLM's format
GET /weight_info              the version of the weights
POST /pause?mode=keep         freezes generation after the current token; requests wait
POST /resume                  continues
GET /is_paused                whether it is paused

Weights come from the followed run only. The routes with which vLLM takes weights from a trainer answer 501.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version as package_version
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightwire.server.api_reply import json_reply
from weightwire.server.completion_answer import version_name
from weightwire.server.refusal import Refusal, bad_request

if TYPE_CHECKING:  # imports torch
    from weightwire.server.service import CompletionService

__all__ = ["engine_routes"]

_PUSHES = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)


def engine_routes(ready: Callable[[], CompletionService]) -> list[Route]:
    """`ready` returns the service, or raises a Refusal before there is one."""
    routes = _EngineRoutes(ready)
    return [
        Route("/version", routes.version),
        Route("/get_world_size", routes.world_size),
        Route("/server_info", routes.server_info),
        Route("/weight_info", routes.weight_info),
        Route("/pause", routes.pause, methods=["POST"]),
        Route("/resume", routes.resume, methods=["POST"]),
        Route("/is_paused", routes.is_paused),
        *(Route(path, routes.refuse_push, methods=["POST"]) for path in _PUSHES),
    ]


class _EngineRoutes:
    def __init__(self, ready: Callable[[], CompletionService]) -> None:
        self._ready = ready

    async def version(self, request: Request) -> Response:
        return json_reply({"version": package_version("weightwire"), "server": "weightwire serve"})

    async def world_size(self, request: Request) -> Response:
        return json_reply({"world_size": 1})

    async def server_info(self, request: Request) -> Response:
        service = self._ready()
        model = {
            "model": service.names[0],
            "served_model_name": list(service.names),
            "dtype": f"torch.{service.model.dtype}",
            "max_model_len": service.model.positions,
        }
        config = {
            "model_config": model,
            "parallel_config": {"world_size": 1, "data_parallel_size": 1},
            "lora_config": None,
            "weight_transfer_config": {"backend": "weightwire"},
        }
        return json_reply({"vllm_config": config})

    async def weight_info(self, request: Request) -> Response:
        return json_reply({"weight_version": version_name(self._ready().version)})

    async def pause(self, request: Request) -> Response:
        batcher = self._ready().batcher
        mode = request.query_params.get("mode", "abort")  # vLLM's default
        if mode != "keep":
            raise bad_request(f"mode={mode:.100} is not supported: use /pause?mode=keep, which keeps running requests")
        await run_in_threadpool(batcher.pause)
        return json_reply({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self._ready().batcher.resume()
        return json_reply({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return json_reply({"is_paused": self._ready().batcher.paused})

    async def refuse_push(self, request: Request) -> Response:
        raise Refusal(
            501,
            f"{request.url.path} is not supported: this server takes its weights from the run that it follows. "
            "Publish them there, with BucketTransfer in TRL",
        )
