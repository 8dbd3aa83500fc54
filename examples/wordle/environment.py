"""A Wordle server for any number of games at once. It speaks the protocol of OpenEnv (openenv-core 0.3).

    python examples/wordle/environment.py --port 8100

    /ws                          a WebSocket is a session: one game after the other. Messages:
                                 {"type": "reset", "data": {"seed": 7}}, {"type": "step", "data": {"guess": "crane"}},
                                 {"type": "state"} and {"type": "close"}
    POST /reset, /step           without a session: {"seed": 7}, then {"action": {"guess": "crane"}}. `episode_id`
                                 selects the game; the default is the one that was reset last
    GET /state, /health, /schema

The rules are in `game.py`. The reward comes with the last guess of a game, and is 0 before. There is
no authentication: it listens on this machine; `--insecure` lets others play. Needs starlette, uvicorn and websockets.
"""

from __future__ import annotations

import argparse
import errno
import json
import random
import socket
import sys
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, TypeGuard

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from game import LETTERS, TURNS, Game, answer_for

__all__ = ["Refused", "Session", "application", "main"]

_LARGEST = 1 << 20  # bytes of a message or body
_LONGEST = 255  # characters of a string in it
_MOST_CONNECTIONS = 1024
_MOST_GAMES = 4096  # kept for clients without a WebSocket; the oldest are dropped first


class Refused(Exception):
    """An invalid request, with OpenEnv's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.data = {"code": code, "message": message}


@dataclass
class Session:
    """One game after the other."""

    episode: str = field(default_factory=lambda: uuid.uuid4().hex)
    game: Game | None = None

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        seed, episode = data.get("seed"), data.get("episode_id")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise Refused("VALIDATION_ERROR", f"seed: must be an integer from 0 on, not {seed!r}")
        if episode is not None and not _is_text(episode):
            raise Refused("VALIDATION_ERROR", f"episode_id: must be a string of at most {_LONGEST} characters")
        self.episode = episode or uuid.uuid4().hex
        self.game = Game(answer_for(random.getrandbits(32) if seed is None else seed))
        return self._observation(self.game, reward=None)

    def step(self, action: Any) -> dict[str, Any]:
        guess = action.get("guess") if isinstance(action, Mapping) else None
        if not _is_text(guess):
            raise Refused(
                "VALIDATION_ERROR", f'an action must be {{"guess": "crane"}}, with at most {_LONGEST} characters'
            )
        if self.game is None or self.game.done:
            raise Refused(
                "EXECUTION_ERROR", "no game: send a reset first" if self.game is None else "this game is over"
            )
        self.game = self.game.guess(guess)
        return self._observation(self.game, reward=self.game.reward)

    def state(self) -> dict[str, Any]:
        turns = self.game.turns if self.game else ()
        shown = [{"guess": turn.guess, "marks": turn.marks} for turn in turns]
        return {"episode_id": self.episode, "step_count": len(turns), "turns": shown}

    def _observation(self, game: Game, reward: float | None) -> dict[str, Any]:
        last = game.turns[-1] if game.turns else None
        shown = {
            "episode_id": self.episode,
            "guess": last.guess if last else None,
            "marks": last.marks if last else None,
            "turns_left": TURNS - len(game.turns),
            "solved": game.solved,
            "answer": game.answer if game.done else None,
        }
        return {"observation": shown, "reward": reward, "done": game.done}


async def converse(socket: WebSocket) -> None:
    """Runs a session. Every message gets one answer; an invalid one gets an error and does not end the session."""
    await socket.accept()
    session = Session()
    with suppress(WebSocketDisconnect):
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            if (answer := _answer(session, message.get("text"))) is None:
                await socket.close()
                break
            await socket.send_text(json.dumps(answer))


def _answer(session: Session, text: str | None) -> dict[str, Any] | None:
    """The answer to a message; None ends the session. `text` is None for a binary message."""
    try:
        if text is None:
            raise Refused("INVALID_JSON", "Invalid JSON: a message must be text, not bytes")
        message = _object(text)
        data = message.get("data", {})
        if not isinstance(data, dict):
            raise Refused("VALIDATION_ERROR", "data: must be an object")
        match message.get("type"):
            case "reset":
                return {"type": "observation", "data": session.reset(data)}
            case "step":
                return {"type": "observation", "data": session.step(data)}
            case "state":
                return {"type": "state", "data": session.state()}
            case "close":
                return None
            case other:
                raise Refused("UNKNOWN_TYPE", f"Unknown message type: {other}")
    except Refused as refused:
        return {"type": "error", "data": refused.data}


class Visits:
    """Games of clients without a WebSocket, by episode."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    async def reset(self, request: Request) -> JSONResponse:
        session = Session()
        try:
            observation = session.reset(_object(await _body(request) or "{}"))
        except (Refused, UnicodeDecodeError) as problem:
            return _refusal(problem)
        self._sessions[session.episode] = session
        self._sessions.move_to_end(session.episode)
        while len(self._sessions) > _MOST_GAMES:
            self._sessions.popitem(last=False)
        return JSONResponse(observation)

    async def step(self, request: Request) -> JSONResponse:
        try:
            body = _object(await _body(request))
            return JSONResponse(self._find(body.get("episode_id")).step(body.get("action")))
        except (Refused, UnicodeDecodeError) as problem:
            return _refusal(problem)

    async def state(self, request: Request) -> JSONResponse:
        try:
            return JSONResponse(self._find(request.query_params.get("episode_id")).state())
        except Refused as problem:
            return _refusal(problem)

    def _find(self, episode: Any) -> Session:
        if episode is None:
            return next(reversed(self._sessions.values()), Session())
        session = self._sessions.get(episode) if isinstance(episode, str) else None
        if session is None:
            raise Refused("SESSION_ERROR", f"episode {episode!r}: not found")
        return session


def application() -> Starlette:
    visits = Visits()
    return Starlette(
        routes=[
            Route("/health", _health),
            Route("/schema", _schema),
            Route("/reset", visits.reset, methods=["POST"]),
            Route("/step", visits.step, methods=["POST"]),
            Route("/state", visits.state),
            WebSocketRoute("/ws", converse),
        ]
    )


async def _health(request: Request) -> JSONResponse:
    return JSONResponse({"status": "healthy"})


async def _schema(request: Request) -> JSONResponse:
    text, whole, flag = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
    maybe = {"type": ["string", "null"]}
    turn = {"type": "object", "properties": {"guess": text, "marks": text}}
    fields: dict[str, dict[str, Any]] = {
        "action": {"guess": {**text, "description": f"{LETTERS} letters"}},
        "observation": {
            "episode_id": text,
            "guess": maybe,
            "marks": {**maybe, "description": "+ in place, ? elsewhere, - absent, all ! if not a known word"},
            "turns_left": whole,
            "solved": flag,
            "answer": {**maybe, "description": "once the game is over"},
        },
        "state": {"episode_id": text, "step_count": whole, "turns": {"type": "array", "items": turn}},
    }
    return JSONResponse(
        {
            name: {"title": f"Wordle{name.title()}", "type": "object", "properties": shape, "required": list(shape)}
            for name, shape in fields.items()
        }
    )


async def _body(request: Request) -> str:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST:
            raise Refused("VALIDATION_ERROR", f"the body is larger than {_LARGEST:,} bytes")
    return body.decode()


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a string that can be sent back: JSON can encode lone surrogates, which UTF-8 cannot."""
    return isinstance(value, str) and len(value) <= _LONGEST and not any("\ud800" <= one <= "\udfff" for one in value)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise Refused("INVALID_JSON", f"Invalid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise Refused("VALIDATION_ERROR", "a message must be an object")
    return value


def _refusal(problem: Refused | UnicodeDecodeError) -> JSONResponse:
    """An error response in OpenEnv's format."""
    detail = problem.data if isinstance(problem, Refused) else {"code": "INVALID_JSON", "message": str(problem)}
    return JSONResponse({"detail": detail}, status_code=409 if detail["code"] == "EXECUTION_ERROR" else 422)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve games of Wordle with the protocol of OpenEnv.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="default 8100; 0 picks a free port")
    parser.add_argument("--insecure", action="store_true", help="allow a host that other machines can reach")
    arguments = parser.parse_args()
    listener = _listen(arguments.host, arguments.port, arguments.insecure)
    host, port = listener.getsockname()[:2]
    print(f"wordle: http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
    # Clients leave sessions open: do not wait for them at shutdown.
    config = uvicorn.Config(
        application(),
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
        ws_max_size=_LARGEST,
        http="h11",  # which limits the size of headers
        limit_concurrency=_MOST_CONNECTIONS,
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int, insecure: bool) -> socket.socket:
    """Binds the socket here, so that a port in use is reported in one clear line."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not (insecure or ip_address(place[0]).is_loopback):
            sys.exit(f"error: {host}: anyone who reaches this address could play\nhint: use 127.0.0.1, or --insecure")
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(2048)
    except (OSError, OverflowError, UnicodeError) as problem:
        taken = isinstance(problem, OSError) and problem.errno == errno.EADDRINUSE
        reason = "the port is in use by another program" if taken else f"cannot listen ({problem})"
        sys.exit(f"error: {host}:{port}: {reason}\nhint: choose another port, or 0 for a free one")
    return listener


if __name__ == "__main__":
    main()
