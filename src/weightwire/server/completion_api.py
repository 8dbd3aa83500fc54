"""OpenAI's completions with vLLM's additions: parsing and checking requests, building answers.

Ignores unknown fields, and also `model`, because the server has only one.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import msgspec

from weightwire.errors import WeightwireError

__all__ = [
    "CompletionRequest",
    "FinishedChoice",
    "Refusal",
    "completion_body",
    "error_body",
    "parse_request",
    "version_name",
]

_MOST_CHOICES = 4096  # in one answer
_MOST_TOPS = 20  # as vLLM
_MOST_STOPS, _LONGEST_STOP = 16, 1000  # limited because each is searched after every token


class Refusal(WeightwireError):
    """A rejected request, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class CompletionRequest(msgspec.Struct, frozen=True):
    """A request for completions. null is the same as absent."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_MOST_CHOICES)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOPS)] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [one for one in self.prompt if isinstance(one, int)]
        if tokens and len(tokens) == len(self.prompt):
            return [tokens]
        return [one for one in self.prompt if not isinstance(one, int)]

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


_DECODER = msgspec.json.Decoder(CompletionRequest)


def parse_request(data: bytes) -> CompletionRequest:
    """Raises a Refusal if the request is invalid."""
    try:
        ask = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise Refusal(400, f"the request is malformed: {problem}") from problem
    except RecursionError as problem:  # also in ignored fields
        raise Refusal(400, "the request is malformed: it is nested too deeply") from problem
    for field in ("stream", "echo"):
        if getattr(ask, field):
            raise Refusal(400, f"{field} is not supported by this server")
    kinds = {type(one) for one in ask.prompt} if isinstance(ask.prompt, list) else {str}
    if len(kinds) != 1:
        raise Refusal(400, "prompt must be text, tokens, or a list of either, and not empty")
    if len(ask.prompts) * (ask.n or 1) > _MOST_CHOICES:
        raise Refusal(400, f"more than {_MOST_CHOICES} choices in one request: split it")
    if not math.isfinite(ask.temperature or 0.0):
        raise Refusal(400, "temperature must be finite")
    if not all(ask.stops):
        raise Refusal(400, "stop must not be empty")
    if len(ask.stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in ask.stops):
        raise Refusal(400, f"stop takes at most {_MOST_STOPS} texts of at most {_LONGEST_STOP} characters each")
    return ask


@dataclass(frozen=True)
class FinishedChoice:
    """A choice of an answer. `versions` has one entry per token."""

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[dict[int, float]]
    versions: Sequence[int | None]
    reason: str


def completion_body(
    ask: CompletionRequest, model: str, choices: Sequence[FinishedChoice], prompt_tokens: int, token_texts: Any
) -> dict[str, Any]:
    """Builds an answer. `token_texts` returns the text of a token."""
    generated = sum(len(choice.tokens) for choice in choices)
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(ask, index, choice, token_texts) for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        },
    }


def _choice(ask: CompletionRequest, index: int, choice: FinishedChoice, token_texts: Any) -> dict[str, Any]:
    body = {
        "index": index,
        "text": choice.text,
        "finish_reason": choice.reason,
        "logprobs": None if ask.logprobs is None else _logprobs(choice, token_texts),
        "weight_versions": list(_spans(choice.versions)),
    }
    if ask.return_token_ids:
        body["token_ids"] = list(choice.tokens)
    return body


def _logprobs(choice: FinishedChoice, token_texts: Any) -> dict[str, Any]:
    texts = [token_texts(token) for token in choice.tokens]
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": list(choice.logprobs),
        "top_logprobs": [{token_texts(token): value for token, value in top.items()} for top in choice.tops],
        "text_offset": offsets[:-1],
    }


def _spans(versions: Sequence[int | None]) -> Iterator[dict[str, Any]]:
    start = 0
    for version, tokens in groupby(versions):
        end = start + len(list(tokens))
        yield {"version": version_name(version), "start": start, "end": end}
        start = end


def version_name(version: int | None) -> str:
    """The version as vLLM writes it: "default" if the weights have no version."""
    return "default" if version is None else str(version)


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
