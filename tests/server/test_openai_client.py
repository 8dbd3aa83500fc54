"""The server with OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from support.completion_server import CompletionClient

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def openai(client: CompletionClient) -> Iterator[Any]:
    with OpenAI(base_url=f"{client.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_models_are_listed(openai: Any) -> None:
    assert [model.id for model in openai.models.list()] == ["tiny", "also tiny"]


def test_completions_honour_the_sampling_fields(openai: Any) -> None:
    def texts(**fields: Any) -> set[str]:
        more = {"repetition_penalty": 1.0, **fields}
        asked = [openai.completions.create(model="tiny", prompt="hi", max_tokens=8, extra_body=more) for _ in range(3)]
        return {answer.choices[0].text for answer in asked}

    assert len(texts()) == 3
    assert len(texts(top_k=1)) == 1
    assert texts(top_k=1) != texts(top_k=1, repetition_penalty=0.01)


def test_completions_are_streamed(openai: Any) -> None:
    asked = {"model": "also tiny", "prompt": "hi", "max_tokens": 12, "seed": 3, "presence_penalty": 0.5}
    whole = openai.completions.create(**asked, logprobs=2)
    parts = list(openai.completions.create(**asked, logprobs=2, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert parts[-1].choices[0].weight_versions == whole.choices[0].weight_versions
    assert (whole.model, len(whole.choices[0].logprobs.top_logprobs[0])) == ("tiny", 2)


def test_chats_are_streamed(openai: Any) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 12, "seed": 3, "frequency_penalty": 0.5}
    whole = openai.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    stream = openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *parts, last = list(stream)
    assert "".join(part.choices[0].delta.content for part in parts) == whole.choices[0].message.content
    assert last.usage == whole.usage
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2


def test_an_answer_can_be_continued(openai: Any) -> None:
    first = openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, seed=1)
    messages = [*HELLO, first.choices[0].message.to_dict(), *HELLO]
    second = openai.chat.completions.create(model="tiny", messages=messages, max_tokens=4, seed=1)
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_unsupported_settings_are_refused(openai: Any) -> None:
    with pytest.raises(
        BadRequestError, match=r"logit_bias is not supported by this server: remove it, or set it to \{\}"
    ):
        openai.chat.completions.create(model="tiny", messages=HELLO, logit_bias={"5": 3})
    with pytest.raises(BadRequestError, match="unknown field 'topk'"):
        openai.completions.create(model="tiny", prompt="hi", extra_body={"topk": 1})


def test_another_model_is_refused(openai: Any) -> None:
    with pytest.raises(NotFoundError, match="model 'huge' is not served here: use 'tiny', 'also tiny'"):
        openai.completions.create(model="huge", prompt="hi")
