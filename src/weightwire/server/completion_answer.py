"""Answers in OpenAI's format with vLLM's additions: whole ones, and the chunks of a stream.

Every choice lists the versions of its tokens, in a stream with its last chunk.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from weightwire.server.completion_request import ChatRequest, CompletionRequest

__all__ = ["AnswerFormat", "ChatFormat", "ChoicePart", "CompletionFormat", "version_name"]

TokenText = Callable[[int], str]


@dataclass(frozen=True)
class ChoicePart:
    """The text and tokens of one choice: all of them, or those since its last part in a stream.

    `reason` is empty unless the choice is finished. Then `versions` has one entry for each token of the whole choice.
    """

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[dict[int, float]]
    versions: Sequence[int | None]
    reason: str


class AnswerFormat:
    """One answer, whole or as a stream of chunks. `token_text` returns the text of a token."""

    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, ask: CompletionRequest | ChatRequest, model: str, token_text: TokenText) -> None:
        self._ask = ask
        self._model = model
        self._token_text = token_text
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def body(self, choices: Sequence[ChoicePart], prompt_tokens: int) -> dict[str, Any]:
        """A whole answer."""
        generated = sum(len(choice.tokens) for choice in choices)
        made = [self._choice(choice, self._message(choice)) for choice in choices]
        return self._about(self.kind, made) | {"usage": _usage(prompt_tokens, generated)}

    def chunk(self, part: ChoicePart) -> dict[str, Any]:
        """A part of a streamed answer."""
        return self._about(self.chunk_kind, [self._choice(part, self._delta(part))])

    def usage_chunk(self, prompt_tokens: int, generated: int) -> dict[str, Any]:
        """The last chunk, if the request asks for it."""
        return self._about(self.chunk_kind, []) | {"usage": _usage(prompt_tokens, generated)}

    def _about(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _choice(self, part: ChoicePart, content: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {"index": part.index, **content, "finish_reason": part.reason or None}
        made["logprobs"] = None if self._ask.tops is None or not part.tokens else self._logprobs(part)
        if part.reason:
            made["weight_versions"] = list(_spans(part.versions))
        if self._ask.return_token_ids:
            made["token_ids"] = list(part.tokens)
        return made

    def _message(self, part: ChoicePart) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, part: ChoicePart) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, part: ChoicePart) -> dict[str, Any]:
        raise NotImplementedError


class CompletionFormat(AnswerFormat):
    """The answer to a request for completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, ask: CompletionRequest, model: str, token_text: TokenText) -> None:
        super().__init__(ask, model, token_text)
        self._offsets: dict[int, int] = {}  # characters before the next token, by choice

    def _message(self, part: ChoicePart) -> dict[str, Any]:
        return {"text": part.text}

    _delta = _message

    def _logprobs(self, part: ChoicePart) -> dict[str, Any]:
        text_of = self._token_text
        texts = [text_of(token) for token in part.tokens]
        offsets = [self._offsets.get(part.index, 0)]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        self._offsets[part.index] = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": list(part.logprobs),
            "top_logprobs": [{text_of(token): value for token, value in top.items()} for top in part.tops],
            "text_offset": offsets,
        }


class ChatFormat(AnswerFormat):
    """The answer to a request for a chat message."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, ask: ChatRequest, model: str, token_text: TokenText) -> None:
        super().__init__(ask, model, token_text)
        self._opened: set[int] = set()  # choices whose role was sent

    def _message(self, part: ChoicePart) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": part.text}}

    def _delta(self, part: ChoicePart) -> dict[str, Any]:
        role = {} if part.index in self._opened else {"role": "assistant"}
        self._opened.add(part.index)
        return {"delta": {**role, "content": part.text}}

    def _logprobs(self, part: ChoicePart) -> dict[str, Any]:
        rows = zip(part.tokens, part.logprobs, part.tops, strict=True)
        return {"content": [self._entry(token, value) | self._best(top) for token, value, top in rows]}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    def _best(self, top: dict[int, float]) -> dict[str, Any]:
        best = sorted(top.items(), key=lambda item: -item[1])[: self._ask.tops]
        return {"top_logprobs": [self._entry(token, value) for token, value in best]}


def _usage(prompt_tokens: int, generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
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
