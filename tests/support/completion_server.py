"""The completion server in this process, and a client of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightwire.engines import Keeper, ReadyCheck, ReadyLimits
from weightwire.follower.follower import Follower
from weightwire.server.http_listener import HttpListener
from weightwire.server.routes import Routes
from weightwire.server.service import CompletionService, serving
from weightwire.telemetry.events import Event
from weightwire.telemetry.metrics import Metrics

__all__ = ["CHAT_TEMPLATE", "CompletionClient", "completion_server", "nothing"]

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
{%- if hint is defined %}{{- hint }}{% endif %}"""


@dataclass
class CompletionClient:
    url: str
    service: CompletionService

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"{self.url}{path}", data, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as problem:
            return problem.code, json.loads(problem.read())

    def complete(self, **fields: Any) -> list[Any]:
        status, answer = self.call("/v1/completions", {"return_token_ids": True, "logprobs": 0, **fields})
        assert status == 200, answer
        return list(answer["choices"])

    def stream(self, path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """The chunks of a streamed answer."""
        body = json.dumps({"stream": True, **fields}).encode()
        with urllib.request.urlopen(f"{self.url}{path}", body, timeout=60) as reply:
            assert reply.headers["Content-Type"].startswith("text/event-stream")
            events = reply.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def refused(self, **fields: Any) -> str:
        """The message of a request for completions that must be changed."""
        status, answer = self.call("/v1/completions", {"prompt": "a", **fields})
        assert status == 400, answer
        return str(answer["error"]["message"])


def nothing(event: Event) -> None:
    pass


@contextmanager
def completion_server(model: Path, bucket: Path, into: Path, names: tuple[str, ...] = ()) -> Iterator[CompletionClient]:
    """Runs the whole server. Follows the run, if there is one."""
    routes = Routes(Metrics("follower"))
    with ExitStack() as stack:
        check = ReadyCheck(ReadyLimits())
        follower = stack.enter_context(Follower(bucket, into=into, on_event=check))
        service = stack.enter_context(serving(model, follower, names=names))
        keeper = Keeper(follower, [service.engine], on_event=nothing)
        if bucket.exists():
            stack.enter_context(keeper)
        else:
            stack.callback(keeper.close)
        listening = stack.enter_context(HttpListener(routes.app, "127.0.0.1", 0))
        client = CompletionClient(listening.url, service)
        assert client.call("/health")[0] == 503
        assert client.call("/readyz")[0] == 503
        assert client.call("/healthz")[0] == 200
        routes.open(service, lambda: check.state(follower, keeper))
        yield client
