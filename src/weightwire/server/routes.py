"""The HTTP routes: completions, health and the current weights. `engine_routes` has those that trainers call.

POST /v1/completions         OpenAI's completions; every choice lists the versions of its tokens
POST /v1/chat/completions    the same for chats, with the tokenizer's template
GET /v1/models               the served model, by each of its names
GET /health                  200 once it serves, 503 before
GET /healthz                 200 as long as the process answers
GET /readyz                  200 while it serves a version of the run that is new enough, 503 otherwise
GET /weights                 run, version and digest of the live weights, computed on request
GET /metrics                 Prometheus' text format
POST /wake                   looks for a new version now; answers 202
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from prometheus_client import Counter, Gauge
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightwire.engines import ReplicaState
from weightwire.errors import EngineError, WeightwireError
from weightwire.server.api_reply import json_reply
from weightwire.server.completion_answer import AnswerFormat, ChatFormat, CompletionFormat
from weightwire.server.completion_request import parse_chat, parse_completion
from weightwire.server.engine_routes import engine_routes
from weightwire.server.event_stream import EventStream, until_disconnect
from weightwire.server.refusal import Refusal, error_body
from weightwire.telemetry import Metrics

if TYPE_CHECKING:  # imports torch, which takes seconds; /health must answer before that
    from weightwire.server.completion_stream import CompletionStream
    from weightwire.server.service import CompletionService

__all__ = ["Routes"]

Result = TypeVar("Result")

_MOST_BYTES = 16 << 20  # of a request
_BODY_SECONDS = 60.0  # until all of it must be there


class Routes:
    """`app` is the ASGI application. It answers 503 until `open` is called."""

    def __init__(self, metrics: Metrics) -> None:
        self._service: CompletionService | None = None
        self._state: Callable[[], ReplicaState] | None = None
        self._metrics = metrics
        registry = metrics.registry
        self._requests = Counter("weightwire_requests", "Requests answered.", ["status"], registry=registry)
        self._tokens = Counter("weightwire_tokens", "Tokens generated.", registry=registry)
        self._running = Gauge("weightwire_running", "Sequences being generated.", registry=registry)
        self._waiting = Gauge("weightwire_waiting", "Sequences waiting to start.", registry=registry)
        self._served = Gauge("weightwire_served", "Version served; -1 if none.", registry=registry)
        self._is_ready = Gauge("weightwire_ready", "1 while /readyz answers 200.", registry=registry)
        self._hashing = asyncio.Lock()  # /weights reads all weights: one request at a time
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/weights", self._weights),
                Route("/metrics", self._render),
                Route("/wake", self._wake, methods=["POST"]),
                *engine_routes(self._ready),
            ],
            exception_handlers={HTTPException: _http_problem, WeightwireError: _problem, Exception: _bug},
        )

    def open(self, service: CompletionService, state: Callable[[], ReplicaState] | None = None) -> None:
        """`state` decides about /readyz. Without it, the server is never ready."""
        self._service, self._state = service, state

    def _ready(self) -> CompletionService:
        if self._service is None:
            raise Refusal(503, "the server is starting: it has no weights yet")
        return self._service

    # --- completions ---------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._counted(self._generate(request, parse_completion, CompletionFormat))

    async def _chat_completions(self, request: Request) -> Response:
        return await self._counted(self._generate(request, parse_chat, ChatFormat))

    async def _counted(self, answer: Awaitable[Response]) -> Response:
        status = 500
        try:
            response = await answer
            status = response.status_code
        except (Refusal, EngineError) as problem:
            status = _status(problem)
            raise
        finally:
            self._requests.labels(str(status)).inc()
        return response

    async def _generate(self, request: Request, parse: Callable[[bytes], Any], form: Callable[..., Any]) -> Response:
        service = self._ready()
        ask = await run_in_threadpool(parse, await _body(request))
        service.check_model(ask.model)
        answer: AnswerFormat = form(ask, service.names[0], service.token_text)
        if ask.stream:
            stream, read = await service.stream(ask)
            usage = read if ask.includes_usage else None
            return EventStream(self._events(stream, answer, usage), on_close=stream.close)
        choices, read = await _unless_gone(request, service.complete(ask))
        self._tokens.inc(sum(len(choice.tokens) for choice in choices))
        return json_reply(await run_in_threadpool(answer.body, choices, read))

    async def _events(
        self, stream: CompletionStream, answer: AnswerFormat, prompt_tokens: int | None
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream. With `prompt_tokens`, the last one tells how many tokens there were."""
        try:
            async with aclosing(stream.parts()) as steps:
                async for parts in steps:
                    yield b"".join(_event(answer.chunk(part)) for part in parts)
            if prompt_tokens is not None:
                yield _event(answer.usage_chunk(prompt_tokens, stream.generated))
        except EngineError as problem:  # too late for a status
            yield _event(error_body(_status(problem), problem.message))
        finally:
            self._tokens.inc(stream.generated)
        yield b"data: [DONE]\n\n"

    async def _models(self, request: Request) -> Response:
        service = self._ready()
        about = {"object": "model", "created": 0, "owned_by": "weightwire", "root": service.names[0]}
        about["max_model_len"] = service.model.positions
        return json_reply({"object": "list", "data": [{"id": name, **about} for name in service.names]})

    # --- health and weights --------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return json_reply({"status": "ok", "version": self._ready().version})

    async def _healthz(self, request: Request) -> Response:
        return json_reply({"status": "alive"})

    async def _readyz(self, request: Request) -> Response:
        state = self._readiness()
        return json_reply(state, 200 if state["ready"] else 503)

    def _readiness(self) -> dict[str, Any]:
        """Without the messages of errors: a load balancer needs no token to read this."""
        if self._service is None or self._state is None:
            return {"ready": False, "reasons": ["the server is starting"]}
        state = self._state()
        [engine] = state.engines
        reasons = ["the model could not take a version: see the output of the server"] if engine.trouble else []
        reasons += [one for one in state.reasons if one != engine.trouble]
        reasons += ["paused: POST /resume continues"] if self._service.batcher.paused else []
        about = {"version": engine.version, "head": state.head, "behind": engine.behind}
        return {"ready": not reasons, "reasons": reasons, **about, "behind_seconds": engine.behind_seconds}

    async def _weights(self, request: Request) -> Response:
        service = self._ready()
        async with self._hashing:
            return json_reply(await run_in_threadpool(service.weights))

    async def _wake(self, request: Request) -> Response:
        self._ready().wake()
        return json_reply({}, 202)

    async def _render(self, request: Request) -> Response:
        service = self._service
        self._running.set(service.batcher.running if service else 0)
        self._waiting.set(service.batcher.waiting if service else 0)
        version = service.version if service else None
        self._served.set(-1 if version is None else version)
        self._is_ready.set(self._readiness()["ready"])
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
    gone = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise Refusal(499, "the client disconnected")
        return await wanted
    finally:
        gone.cancel()
        wanted.cancel()


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# --- errors ---------------------------------------------------------------------------------------------


def _status(problem: WeightwireError) -> int:
    return problem.status if isinstance(problem, Refusal) else 503


async def _problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, WeightwireError)
    return json_reply(error_body(_status(problem), problem.message), _status(problem))


async def _http_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    where = f"{request.method} {request.url.path}"
    messages = {404: f"not found: {request.url.path}", 405: f"method not allowed: {where}"}
    return json_reply(
        error_body(problem.status_code, messages.get(problem.status_code, problem.detail)), problem.status_code
    )


async def _bug(request: Request, problem: Exception) -> Response:
    return json_reply(error_body(500, f"the server failed ({type(problem).__name__}: {problem})"), 500)
