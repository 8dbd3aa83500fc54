"""Clients that stream completions from a vLLM server, in a process of their own: pause.py starts it.

    python benchmarks/streams.py URL MODEL CLIENTS TOKENS

Each asks for TOKENS tokens, and as soon as they are there for as many more; the first time for fewer, each for another
number, so that they do not all end at once. Says "streaming" once all have had some;
then on every line of its input all that came since, as JSON: [request, client, when, how many tokens so far]. When its
input ends the requests under way are awaited, and what is wrong with any of them is said.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from receiver import say

Arrival = tuple[int, int, float, int]
"""A request, its client, when something came, and how many tokens had come by then."""


@dataclass
class Board:
    """What all clients write to."""

    arrivals: list[Arrival] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    started: set[int] = field(default_factory=set)
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def new_request(self) -> int:
        with self._lock:
            self.requests += 1
            return self.requests

    def note(self, request: int, client: int, tokens: int) -> None:
        with self._lock:
            self.arrivals.append((request, client, time.time(), tokens))
            self.started.add(client)

    def end(self, tokens: int, wrong: str) -> None:
        with self._lock:
            self.tokens += tokens
            if wrong:
                self.wrong.append(wrong)

    def take(self) -> list[Arrival]:
        with self._lock:
            arrivals, self.arrivals = self.arrivals, []
            return arrivals


def stream(url: str, model: str, client: int, first: int, tokens: int, board: Board) -> None:
    """One client, until it is told to stop: it ends what it has begun."""
    parts = urllib.parse.urlsplit(url)
    for wanted in chain([first], repeat(tokens)):
        if board.stop.is_set():
            return
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        request = board.new_request()
        try:
            came, wrong = read_stream(connection, ask(model, client, request, wanted), request, client, board)
            board.end(came, wrong or ("" if came == wanted else f"{came} tokens came, not {wanted}"))
        except (OSError, ValueError, http.client.HTTPException) as problem:
            board.end(0, f"{type(problem).__name__}: {problem}")
            board.started.add(client)
            return
        finally:
            connection.close()


def ask(model: str, client: int, request: int, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": [100 + client, 200 + request, 300, 400],  # of its own: nothing is to come from a cache
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": request,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def read_stream(
    connection: http.client.HTTPConnection, body: dict[str, Any], request: int, client: int, board: Board
) -> tuple[int, str]:
    """How many tokens came, and what was wrong: the server's own count must agree with every single one."""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}: {response.read()[:500]!r}")
    came, wrong, reason = 0, "", ""
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        told = json.loads(line[6:])
        if "error" in told:
            raise ValueError(str(told["error"]))
        for choice in told["choices"]:
            came += len(choice["token_ids"])
            reason = choice["finish_reason"] or reason
            board.note(request, client, came)
        counted = told["usage"]["completion_tokens"]
        if counted != came:
            wrong = wrong or f"token {came} came when the server had counted {counted}"
    return came, wrong or ("" if reason == "length" else f"ended by {reason or 'nothing'}")


def main() -> None:
    url, model, clients, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    board = Board()
    threads = [
        threading.Thread(target=stream, args=(url, model, index, part, tokens, board), daemon=True)
        for index, part in enumerate(tokens * (one + 1) // clients for one in range(clients))
    ]
    for thread in threads:
        thread.start()
    while len(board.started) < clients:
        time.sleep(0.05)
    say(stage="streaming")
    for _ in sys.stdin:
        say(stage="arrivals", arrivals=board.take())
    board.stop.set()
    for thread in threads:
        thread.join()
    say(stage="ended", requests=board.requests, tokens=board.tokens, wrong=board.wrong)


if __name__ == "__main__":
    main()
