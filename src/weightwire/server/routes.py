"""The routes: completions, health, and what the weights are just now.

    POST /v1/completions    OpenAI's, every choice with the versions that its tokens came from
    GET /v1/models          the one that is served
    GET /health             200 once it serves, 503 before
    GET /weights            run, version, and the digest of the live weights, computed when asked
    GET /weight_info        the version, as vLLM tells it
    GET /metrics            Prometheus' text format
    POST /wake              looks for a new version now; answers 202

Knows HTTP and whom to ask; what a request means is in `completion_api`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from prometheus_client import Counter, Gauge
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightwire.errors import EngineError, WeightwireError
from weightwire.server.completion_api import Refusal, completion_body, error_body, parse_request, version_name
from weightwire.telemetry import Metrics

if TYPE_CHECKING:  # it brings torch, and this is to answer before that is there
    from weightwire.server.service import CompletionService

__all__ = ["Routes"]

Result = TypeVar("Result")

_MOST_BYTES = 16 << 20  # of a request


class Routes:
    """What the network sees: `app`, which says that it is not ready until `open` is called."""

    def __init__(self, metrics: Metrics) -> None:
        self._service: CompletionService | None = None
        self._metrics = metrics
        registry = metrics.registry
        self._requests = Counter("weightwire_requests", "Requests answered.", ["status"], registry=registry)
        self._tokens = Counter("weightwire_tokens", "Tokens generated.", registry=registry)
        self._running = Gauge("weightwire_running", "Sequences that are being generated.", registry=registry)
        self._waiting = Gauge("weightwire_waiting", "Sequences that have not been begun.", registry=registry)
        self._served = Gauge("weightwire_served", "The version that is served; -1 if none.", registry=registry)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/weights", self._weights),
                Route("/weight_info", self._weight_info),
                Route("/metrics", self._render),
                Route("/wake", self._wake, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _http_problem, WeightwireError: _problem, Exception: _bug},
        )

    def open(self, service: CompletionService) -> None:
        self._service = service

    @property
    def _ready(self) -> CompletionService:
        if self._service is None:
            raise Refusal(503, "the server is starting: it has no weights to serve yet")
        return self._service

    async def _completions(self, request: Request) -> Response:
        status = 500
        try:
            response = await self._complete(request)
            status = response.status_code
        except (Refusal, EngineError) as problem:
            status = _status(problem)
            raise
        finally:
            self._requests.labels(str(status)).inc()
        return response

    async def _complete(self, request: Request) -> Response:
        service = self._ready
        ask = await run_in_threadpool(parse_request, await _body(request))
        choices, read = await _unless_gone(request, service.complete(ask))
        self._tokens.inc(sum(len(choice.tokens) for choice in choices))
        return _json(await run_in_threadpool(completion_body, ask, service.name, choices, read, service.token_text))

    async def _models(self, request: Request) -> Response:
        model = {"id": self._ready.name, "object": "model", "created": 0, "owned_by": "weightwire"}
        return _json({"object": "list", "data": [model | {"max_model_len": self._ready.model.positions}]})

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok", "version": self._ready.version})

    async def _weights(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._ready.weights))

    async def _weight_info(self, request: Request) -> Response:
        return _json({"weight_version": version_name(self._ready.version)})

    async def _wake(self, request: Request) -> Response:
        self._ready.wake()
        return _json({}, 202)

    async def _render(self, request: Request) -> Response:
        service = self._service
        self._running.set(service.batcher.running if service else 0)
        self._waiting.set(service.batcher.waiting if service else 0)
        version = service.version if service else None
        self._served.set(-1 if version is None else version)
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BYTES:
            raise Refusal(413, f"the request is larger than {_MOST_BYTES >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """What was asked for; given up if the one who asked hangs up meanwhile."""
    wanted = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(request.receive))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise Refusal(499, "the one who asked has hung up")
        return await wanted
    finally:
        gone.cancel()
        wanted.cancel()


async def _hang_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- what goes wrong ---------------------------------------------------------------------------------------------


def _status(problem: WeightwireError) -> int:
    return problem.status if isinstance(problem, Refusal) else 503


async def _problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, WeightwireError)
    return _json(error_body(_status(problem), problem.message), _status(problem))


async def _http_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    where = f"{request.method} {request.url.path}"
    told = {404: f"there is no {request.url.path}", 405: f"there is no {where}"}
    return _json(error_body(problem.status_code, told.get(problem.status_code, problem.detail)), problem.status_code)


async def _bug(request: Request, problem: Exception) -> Response:
    return _json(error_body(500, f"the server failed ({type(problem).__name__}: {problem})"), 500)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
