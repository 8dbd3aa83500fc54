"""The HTTP routes: completions, health and the current weights.

POST /v1/completions    OpenAI's completions; every choice lists the versions of its tokens
GET /v1/models          the served model
GET /health             200 once it serves, 503 before
GET /weights            run, version and digest of the live weights, computed on request
GET /weight_info        the version, in vLLM's format
GET /metrics            Prometheus' text format
POST /wake              looks for a new version now; answers 202
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

if TYPE_CHECKING:  # imports torch, which takes seconds; /health must answer before that
    from weightwire.server.service import CompletionService

__all__ = ["Routes"]

Result = TypeVar("Result")

_MOST_BYTES = 16 << 20  # of a request
_BODY_SECONDS = 60.0  # until all of it must be there


class Routes:
    """`app` is the ASGI application. It answers 503 until `open` is called."""

    def __init__(self, metrics: Metrics) -> None:
        self._service: CompletionService | None = None
        self._metrics = metrics
        registry = metrics.registry
        self._requests = Counter("weightwire_requests", "Requests answered.", ["status"], registry=registry)
        self._tokens = Counter("weightwire_tokens", "Tokens generated.", registry=registry)
        self._running = Gauge("weightwire_running", "Sequences being generated.", registry=registry)
        self._waiting = Gauge("weightwire_waiting", "Sequences waiting to start.", registry=registry)
        self._served = Gauge("weightwire_served", "Version served; -1 if none.", registry=registry)
        self._hashing = asyncio.Lock()  # /weights reads all weights: one request at a time
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
            raise Refusal(503, "the server is starting: it has no weights yet")
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
        service = self._ready
        async with self._hashing:
            return _json(await run_in_threadpool(service.weights))

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
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await _all_parts(request)
    except TimeoutError as problem:
        raise Refusal(408, f"the request did not arrive within {_BODY_SECONDS:.0f} seconds") from problem


async def _all_parts(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BYTES:
            raise Refusal(413, f"the request is larger than {_MOST_BYTES >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled if the client disconnects."""
    wanted = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(request.receive))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise Refusal(499, "the client disconnected")
        return await wanted
    finally:
        gone.cancel()
        wanted.cancel()


async def _hang_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- errors ---------------------------------------------------------------------------------------------


def _status(problem: WeightwireError) -> int:
    return problem.status if isinstance(problem, Refusal) else 503


async def _problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, WeightwireError)
    return _json(error_body(_status(problem), problem.message), _status(problem))


async def _http_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    where = f"{request.method} {request.url.path}"
    messages = {404: f"not found: {request.url.path}", 405: f"method not allowed: {where}"}
    return _json(
        error_body(problem.status_code, messages.get(problem.status_code, problem.detail)), problem.status_code
    )


async def _bug(request: Request, problem: Exception) -> Response:
    return _json(error_body(500, f"the server failed ({type(problem).__name__}: {problem})"), 500)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
