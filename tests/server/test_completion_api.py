"""Valid and invalid requests, and the shape of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weightwire.engines.vllm.sample_versions import VersionSpan, oldest_version, spans_of
from weightwire.server.completion_api import FinishedChoice, Refusal, completion_body, error_body, parse_request


def ask(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_text_or_tokens_one_or_several(prompt: Any, prompts: Any) -> None:
    assert parse_request(ask(prompt=prompt)).prompts == prompts


def test_null_fields_count_as_absent_and_unknown_ones_are_ignored() -> None:
    read = parse_request(ask(prompt="a", n=None, stop=None, user="me", model="whatever", best_of=1, stream=False))
    assert (read.n, read.stops) == (None, ())


def test_stop_may_be_one_text_or_several() -> None:
    assert parse_request(ask(prompt="a", stop="x")).stops == ("x",)
    assert parse_request(ask(prompt="a", stop=["x", "yz"])).stops == ("x", "yz")
    assert len(parse_request(ask(prompt="a", stop=["ä" * 1000] * 16)).stops) == 16


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
        (b'{"prompt": "a", "temperature": 1e999}', "malformed|must be a number"),
        (ask(prompt="a", top_p=0), r"\$\.top_p"),
        (ask(prompt="a", top_p=1.1), r"\$\.top_p"),
        (ask(prompt="a", logprobs=21), r"\$\.logprobs"),
        (ask(prompt="a", stop=""), "empty"),
        (ask(prompt="a", stop=[1]), r"\$\.stop"),
        (ask(prompt="a", stop=["x"] * 17), "at most 16 texts"),
        (ask(prompt="a", stop="x" * 1001), "at most 1000 characters"),
        (ask(prompt="a", stop=["x", "x" * 1001]), "at most 1000 characters"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (ask(prompt="a", stream=True), "stream is not supported"),
        (ask(prompt="a", echo=True), "echo is not supported"),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(body: bytes, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        parse_request(body)
    assert caught.value.status == 400


class TestAnswer:
    def choice(self, **fields: Any) -> Any:
        tops = [{7: -0.5}, {8: -0.25, 9: -2.0}, {10: -1.5}]
        finished = FinishedChoice("abcd", [7, 8, 10], [-0.5, -0.25, -1.5], tops, [4, 4, 6], "length")
        body = completion_body(
            parse_request(ask(prompt="p", **fields)), "m", [finished], 5, {7: "a", 8: "bc", 9: "x", 10: "d"}.get
        )
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        assert (body["object"], body["model"]) == ("text_completion", "m")
        return body["choices"][0]

    def test_answer_has_only_the_requested_fields(self) -> None:
        choice = self.choice()
        assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "abcd", "length")
        assert choice["logprobs"] is None
        assert "token_ids" not in choice

    def test_answer_has_tokens_and_their_logprobs(self) -> None:
        choice = self.choice(logprobs=1, return_token_ids=True)
        assert choice["token_ids"] == [7, 8, 10]
        assert choice["logprobs"] == {
            "tokens": ["a", "bc", "d"],
            "token_logprobs": [-0.5, -0.25, -1.5],
            "top_logprobs": [{"a": -0.5}, {"bc": -0.25, "x": -2.0}, {"d": -1.5}],
            "text_offset": [0, 1, 3],
        }

    def test_answer_has_versions_in_vllms_format(self) -> None:
        choice = self.choice()
        assert spans_of(choice) == [VersionSpan(4, 0, 2), VersionSpan(6, 2, 3)]
        assert oldest_version(choice) == 4

    def test_unpublished_weights_are_called_default(self) -> None:
        finished = FinishedChoice("a", [7], [-0.5], [{}], [None], "stop")
        choice = completion_body(parse_request(ask(prompt="p")), "m", [finished], 1, str)["choices"][0]
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 1}]
        assert oldest_version(choice) is None


def test_errors_have_openais_shape() -> None:
    body = {"message": "no", "type": "invalid_request_error", "param": None, "code": 404}
    assert error_body(404, "no") == {"error": body}
    assert error_body(503, "later")["error"]["type"] == "server_error"
