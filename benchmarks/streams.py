"""Client process that streams completions from a vLLM server. pause.py and cache_policy.py start it.

    python benchmarks/streams.py URL MODEL CLIENTS TOKENS PROMPT

Each client requests TOKENS tokens for a prompt of PROMPT tokens, again and again. Its first request is for fewer, a
different number for each client, so that the requests do not all end at once. The process prints "streaming" when every
client has received tokens. For each line on stdin it prints what arrived since, as JSON: [request, client, time, tokens
so far]. When stdin closes, it waits for the running requests and prints the errors of all requests.
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

from receiver import print_json

Arrival = tuple[int, int, float, int]
"""Request, client, time of arrival, and number of tokens received so far."""


@dataclass
class ClientLog:
    """Shared by all clients."""

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


def stream(url: str, model: str, client: int, first: int, tokens: int, length: int, log: ClientLog) -> None:
    """Runs one client until `log.stop` is set. The running request is finished."""
    parts = urllib.parse.urlsplit(url)
    for wanted in chain([first], repeat(tokens)):
        if log.stop.is_set():
            return
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        request = log.new_request()
        try:
            body = request_body(model, prompt_of(client, request, length), request, wanted)
            came, wrong = read_stream(connection, body, request, client, log)
            log.end(came, wrong or ("" if came == wanted else f"received {came} tokens, not {wanted}"))
        except (OSError, ValueError, http.client.HTTPException) as problem:
            log.end(0, f"{type(problem).__name__}: {problem}")
            log.started.add(client)
            return
        finally:
            connection.close()


def prompt_of(client: int, request: int, length: int) -> list[int]:
    """A unique prompt, so that nothing comes from a cache."""
    return [100 + client, 200 + request, *(300 + number % 100 for number in range(length - 2))]


def request_body(model: str, prompt: list[int], request: int, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": request,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def read_stream(
    connection: http.client.HTTPConnection, body: dict[str, Any], request: int, client: int, log: ClientLog
) -> tuple[int, str]:
    """Returns the number of tokens and any error. The server's own count must agree after every chunk."""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}: {response.read()[:500]!r}")
    came, wrong, reason = 0, "", ""
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise ValueError(str(chunk["error"]))
        for choice in chunk["choices"]:
            came += len(choice["token_ids"])
            reason = choice["finish_reason"] or reason
            log.note(request, client, came)
        counted = chunk["usage"]["completion_tokens"]
        if counted != came:
            wrong = wrong or f"received {came} tokens, but the server counted {counted}"
    return came, wrong or ("" if reason == "length" else f"ended by {reason or 'nothing'}")


def main() -> None:
    url, model = sys.argv[1:3]
    clients, tokens, length = map(int, sys.argv[3:])
    log = ClientLog()
    threads = [
        threading.Thread(target=stream, args=(url, model, index, part, tokens, length, log), daemon=True)
        for index, part in enumerate(tokens * (client + 1) // clients for client in range(clients))
    ]
    for thread in threads:
        thread.start()
    while len(log.started) < clients:
        time.sleep(0.05)
    print_json(stage="streaming")
    for _ in sys.stdin:
        print_json(stage="arrivals", arrivals=log.take())
    log.stop.set()
    for thread in threads:
        thread.join()
    print_json(stage="ended", requests=log.requests, tokens=log.tokens, wrong=log.wrong)


if __name__ == "__main__":
    main()
