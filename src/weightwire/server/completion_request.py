"""Requests for completions and chat completions, in OpenAI's format with vLLM's additions.

Every field is either honoured, or accepted because it changes nothing, or refused. `NEUTRAL` and `IGNORED` list the
fields that are accepted. So a typo, or a setting that the server does not have, is an error and never a silent
difference. null is the same as absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from weightwire.server.refusal import bad_request

__all__ = [
    "IGNORED",
    "NEUTRAL",
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "parse_chat",
    "parse_completion",
]

_MOST_CHOICES = 4096  # in one answer
_MOST_TOPS = 20  # as vLLM
_MOST_STOPS, _LONGEST_STOP = 16, 1000  # limited because each is searched after every token
_DEFAULT_TOKENS = 16  # of a completion, as in OpenAI's API

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Known fields that the server does not have, with the values that change nothing. null is always one of them."""

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)
"""Fields that do not concern the answer, with any value."""

_Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Tops = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOPS)]
_Tokens = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream ends."""

    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that decide which token comes next."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: _Fraction | None = None
    # Bounded so that no penalty makes a logit infinite, which would fail the whole batch.
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: int | None = None


class GenerationRequest(SamplingFields, frozen=True, kw_only=True):
    """What requests for completions and for chat completions have in common."""

    model: str | None = None
    max_tokens: _Tokens | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_MOST_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def count(self) -> int:
        """The number of choices for each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """A request for completions of one or several prompts."""

    prompt: str | list[str | int | list[int]]
    logprobs: _Tops | None = None

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
    def tops(self) -> int | None:
        """The number of most likely tokens to report; None if logprobs are not wanted."""
        return self.logprobs

    @property
    def most(self) -> int | None:
        """The maximum number of tokens; None for as many as fit."""
        return self.max_tokens or _DEFAULT_TOKENS


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a chat."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    @property
    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": "\n".join(parts), **named}


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """A request for the next message of a chat. `chat_template_kwargs` are variables of the template."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: _Tops | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def tops(self) -> int | None:
        """The number of most likely tokens to report; None if logprobs are not wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most(self) -> int | None:
        """The maximum number of tokens; None for as many as fit."""
        return self.max_completion_tokens or self.max_tokens


Kind = TypeVar("Kind", bound=GenerationRequest)


def parse_completion(data: bytes) -> CompletionRequest:
    """Raises a Refusal if the request is invalid."""
    ask = _parse(data, CompletionRequest)
    kinds = {type(one) for one in ask.prompt} if isinstance(ask.prompt, list) else {str}
    if len(kinds) != 1:
        raise bad_request("prompt must be text, tokens, or a list of either, and not empty")
    if len(ask.prompts) * ask.count > _MOST_CHOICES:
        raise bad_request(f"more than {_MOST_CHOICES} choices in one request: split it")
    return ask


def parse_chat(data: bytes) -> ChatRequest:
    """Raises a Refusal if the request is invalid."""
    ask = _parse(data, ChatRequest)
    if ask.top_logprobs and not ask.logprobs:
        raise bad_request("top_logprobs needs logprobs: set logprobs to true")
    return ask


def _parse(data: bytes, kind: type[Kind]) -> Kind:
    try:
        given = msgspec.json.decode(data, type=dict[str, Any])
        known = {name: value for name, value in given.items() if name in kind.__struct_fields__}
        if isinstance(messages := known.get("messages"), list):
            known["messages"] = [_without_nulls(one) for one in messages]
        ask = msgspec.convert(known, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise bad_request(f"the request is malformed: {problem}") from problem
    except RecursionError as problem:  # also in ignored fields
        raise bad_request("the request is malformed: it is nested too deeply") from problem
    _check_others({name: value for name, value in given.items() if name not in known})
    _check_values(ask)
    return ask


def _without_nulls(message: Any) -> Any:
    """OpenAI's client sends the answers that it got back, with the fields that they do not use."""
    return {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else message


def _check_others(given: Mapping[str, Any]) -> None:
    """Refuses every field that would have to be honoured."""
    for name, value in given.items():
        if value is None or name in IGNORED or value in NEUTRAL.get(name, ()):
            continue
        if name not in NEUTRAL:
            raise bad_request(f"unknown field {name!r:.100}: remove it, or check its spelling")
        raise bad_request(f"{name} is not supported by this server: {_neutral(name)}")


def _neutral(name: str) -> str:
    values = " or ".join(msgspec.json.encode(value).decode() for value in NEUTRAL[name])
    return f"remove it, or set it to {values}" if values else "remove it"


def _check_values(ask: GenerationRequest) -> None:
    if not math.isfinite(ask.temperature or 0.0):
        raise bad_request("temperature must be finite")
    if not all(ask.stops):
        raise bad_request("stop must not be empty")
    if len(ask.stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in ask.stops):
        raise bad_request(f"stop takes at most {_MOST_STOPS} texts of at most {_LONGEST_STOP} characters each")
    if ask.stream_options is not None and not ask.stream:
        raise bad_request("stream_options needs stream: set stream to true")
