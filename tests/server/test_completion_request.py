"""Valid and invalid requests: every field is honoured, changes nothing, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightwire.server.completion_request import (
    IGNORED,
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from weightwire.server.refusal import Refusal, error_body

HELLO = [{"role": "user", "content": "hello"}]
NESTED = b"[" * 100_000 + b"]" * 100_000


def ask(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


class TestPrompt:
    @pytest.mark.parametrize(
        ("prompt", "prompts"),
        [
            ("hello", ["hello"]),
            (["a", "b"], ["a", "b"]),
            ([1, 2, 3], [[1, 2, 3]]),
            ([[1, 2], [3]], [[1, 2], [3]]),
        ],
    )
    def test_a_prompt_is_text_or_tokens_one_or_several(self, prompt: Any, prompts: Any) -> None:
        assert parse_completion(ask(prompt=prompt)).prompts == prompts

    def test_stop_may_be_one_text_or_several(self) -> None:
        assert parse_completion(ask(prompt="a", stop="x")).stops == ("x",)
        assert parse_completion(ask(prompt="a", stop=["x", "yz"])).stops == ("x", "yz")
        assert len(parse_completion(ask(prompt="a", stop=["ä" * 1000] * 16)).stops) == 16


class TestChat:
    def test_messages_are_text_or_parts_of_text(self) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts, "name": "Ada"}]
        read = parse_chat(ask(messages=messages))
        assert [message.for_template for message in read.messages] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one\ntwo", "name": "Ada"},
        ]

    def test_an_earlier_answer_can_be_sent_back(self) -> None:
        answer = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "audio": None}
        assert parse_chat(ask(messages=[*HELLO, answer])).messages[1].content == "hi"

    def test_a_chat_has_either_limit_of_tokens(self) -> None:
        assert parse_chat(ask(messages=HELLO)).most is None
        assert parse_chat(ask(messages=HELLO, max_tokens=3)).most == 3
        assert parse_chat(ask(messages=HELLO, max_tokens=9, max_completion_tokens=4)).most == 4

    def test_top_logprobs_are_reported_if_logprobs_are(self) -> None:
        assert parse_chat(ask(messages=HELLO)).tops is None
        assert parse_chat(ask(messages=HELLO, logprobs=False)).tops is None
        assert parse_chat(ask(messages=HELLO, logprobs=True)).tops == 0
        assert parse_chat(ask(messages=HELLO, logprobs=True, top_logprobs=5)).tops == 5

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "missing required field `messages`"),
            ({"messages": []}, r"length >= 1.*\$\.messages"),
            ({"messages": ["hi"]}, r"\$\.messages\[0\]"),
            ({"messages": [{"role": "user"}]}, "missing required field `content`"),
            ({"messages": [{"content": "hi"}]}, "missing required field `role`"),
            ({"messages": [HELLO[0] | {"tool_calls": [1]}]}, "unknown field `tool_calls`"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "image_url"),
            ({"messages": HELLO, "prompt": "a"}, "unknown field 'prompt'"),
            ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs needs logprobs"),
            ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, r"\$\.top_logprobs"),
            ({"messages": HELLO, "max_completion_tokens": 0}, r"\$\.max_completion_tokens"),
            ({"messages": HELLO, "n": 4097}, r"\$\.n"),
            (
                {"messages": HELLO, "tools": [{"type": "function"}]},
                r"tools is not supported.*: remove it, or set it to ",
            ),
            (
                {"messages": HELLO, "chat_template": "{{ 1 }}"},
                "chat_template is not supported by this server: remove it",
            ),
        ],
    )
    def test_an_invalid_chat_is_refused_with_the_reason(self, fields: Any, message: str) -> None:
        with pytest.raises(Refusal, match=message) as caught:
            parse_chat(ask(**fields))
        assert caught.value.status == 400


class TestFields:
    def test_null_is_the_same_as_absent(self) -> None:
        read = parse_completion(ask(prompt="a", n=None, stop=None, top_k=None, echo=None, tools=None, nonsense=None))
        assert read == parse_completion(ask(prompt="a"))

    @pytest.mark.parametrize("field", sorted(IGNORED))
    def test_fields_that_do_not_concern_the_answer_are_accepted(self, field: str) -> None:
        assert parse_completion(ask(prompt="a", **{field: "anything"})) == parse_completion(ask(prompt="a"))

    @pytest.mark.parametrize("field", sorted(NEUTRAL))
    def test_unsupported_fields_are_accepted_only_with_neutral_values(self, field: str) -> None:
        for value in NEUTRAL[field]:
            assert parse_chat(ask(messages=HELLO, **{field: value})) == parse_chat(ask(messages=HELLO))
        for parse, body in ((parse_completion, {"prompt": "a"}), (parse_chat, {"messages": HELLO})):
            with pytest.raises(Refusal, match=f"{field} is not supported by this server: remove it"):
                parse(ask(**body, **{field: ["other"]}))

    def test_no_field_is_in_two_tables(self) -> None:
        honoured = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
        assert not honoured & NEUTRAL.keys()
        assert not honoured & IGNORED
        assert not IGNORED & NEUTRAL.keys()

    def test_the_docs_list_every_accepted_field(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
        section = page.split("### Request fields")[1].split("\n### ")[0]
        names = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, *IGNORED}
        assert not {
            name for name in names if f"`{name}`" not in section.replace("`stream_options.", "`stream_options`")
        }

    def test_a_misspelt_field_is_refused(self) -> None:
        with pytest.raises(Refusal, match="unknown field 'temprature': remove it, or check its spelling"):
            parse_completion(ask(prompt="a", temprature=0))

    def test_sampling_fields_accept_their_limits(self) -> None:
        lowest = {"temperature": 0, "top_k": -1, "min_p": 0, "repetition_penalty": 0.01, "presence_penalty": -2}
        highest = {"top_p": 1, "top_k": 10**30, "min_p": 1, "repetition_penalty": 100, "frequency_penalty": 2}
        for fields in (lowest, highest):
            read = parse_completion(ask(prompt="a", seed=-(2**63), **fields))
            assert {name: getattr(read, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "malformed"),
        (b"[]", "malformed"),
        (b'{"prompt": "\xff"}', "malformed"),
        (ask(max_tokens=3), "missing required field `prompt`"),
        (ask(prompt=3), r"\$\.prompt"),
        (ask(prompt=[]), "prompt must be"),
        (ask(prompt=["a", 1]), "prompt must be"),
        (ask(prompt=[True]), r"\$\.prompt"),
        (ask(prompt="a", n="2"), r"Expected `int \| null`, got `str` - at `\$\.n`"),
        (ask(prompt="a", n=0), r"\$\.n"),
        (ask(prompt="a", n=1.5), r"\$\.n"),
        (ask(prompt=["a", "b"], n=4096), "more than 4096 choices"),
        (ask(prompt="a", max_tokens=0), r"\$\.max_tokens"),
        (ask(prompt="a", temperature=-1), r"\$\.temperature"),
        (ask(prompt="a", temperature="hot"), r"\$\.temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "malformed|must be finite"),
        (ask(prompt="a", top_p=0), r"\$\.top_p"),
        (ask(prompt="a", top_p=1.1), r"\$\.top_p"),
        (ask(prompt="a", top_k=-2), r"\$\.top_k"),
        (ask(prompt="a", top_k=1.5), r"\$\.top_k"),
        (ask(prompt="a", min_p=-0.1), r"\$\.min_p"),
        (ask(prompt="a", min_p=1.1), r"\$\.min_p"),
        (ask(prompt="a", repetition_penalty=0), r"\$\.repetition_penalty"),
        (ask(prompt="a", repetition_penalty=101), r"\$\.repetition_penalty"),
        (ask(prompt="a", presence_penalty=2.1), r"\$\.presence_penalty"),
        (ask(prompt="a", frequency_penalty=-2.1), r"\$\.frequency_penalty"),
        (ask(prompt="a", logprobs=21), r"\$\.logprobs"),
        (ask(prompt="a", logprobs=True), r"\$\.logprobs"),
        (ask(prompt="a", stop=""), "empty"),
        (ask(prompt="a", stop=[1]), r"\$\.stop"),
        (ask(prompt="a", stop=["x"] * 17), "at most 16 texts"),
        (ask(prompt="a", stop="x" * 1001), "at most 1000 characters"),
        (ask(prompt="a", stop=["x", "x" * 1001]), "at most 1000 characters"),
        (b'{"prompt": "a", "x": ' + NESTED + b"}", "nested too deeply"),
        (ask(prompt="a", stream="yes"), r"\$\.stream"),
        (ask(prompt="a", stream_options={"include_usage": True}), "stream_options needs stream"),
        (ask(prompt="a", stream=True, stream_options={"usage": True}), "unknown field `usage`"),
        (ask(prompt="a", messages=HELLO), "unknown field 'messages'"),
        (ask(prompt="a", **{"x" * 1000: 1}), "^unknown field 'x{90,100}: "),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(body: bytes, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        parse_completion(body)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300


def test_errors_have_openais_shape() -> None:
    body = {"message": "no", "type": "invalid_request_error", "param": None, "code": 404}
    assert error_body(404, "no") == {"error": body}
    assert error_body(503, "later")["error"]["type"] == "server_error"
