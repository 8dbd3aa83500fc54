"""The shape of answers and of the chunks of a stream."""

from __future__ import annotations

import json
from typing import Any

from weightwire.engines.vllm.sample_versions import VersionSpan, oldest_version, spans_of
from weightwire.server.completion_answer import ChatFormat, ChoicePart, CompletionFormat
from weightwire.server.completion_request import parse_chat, parse_completion

TEXTS = {7: "a", 8: "bc", 9: "x", 10: "d"}
TOPS = [{7: -0.5}, {8: -0.25, 9: -2.0}, {10: -1.5}]
WHOLE = ChoicePart(0, "abcd", [7, 8, 10], [-0.5, -0.25, -1.5], TOPS, [4, 4, 6], "length")
FIRST = ChoicePart(0, "a", [7, 8], [-0.5, -0.25], TOPS[:2], (), "")
LAST = ChoicePart(0, "bcd", [10], [-1.5], TOPS[2:], [4, 4, 6], "length")
NOTHING_NEW = ChoicePart(0, "", [], [], [], [4, 4, 6], "stop")
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def completion(**fields: Any) -> CompletionFormat:
    ask = parse_completion(json.dumps({"prompt": "p", **fields}).encode())
    return CompletionFormat(ask, "m", TEXTS.__getitem__)


def chat(**fields: Any) -> ChatFormat:
    ask = parse_chat(json.dumps({"messages": [{"role": "user", "content": "p"}], **fields}).encode())
    return ChatFormat(ask, "m", TEXTS.__getitem__)


class TestCompletion:
    def choice(self, **fields: Any) -> Any:
        body = completion(**fields).body([WHOLE], 5)
        assert body["usage"] == USAGE
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
        finished = ChoicePart(0, "a", [7], [-0.5], [{}], [None], "stop")
        choice = completion().body([finished], 1)["choices"][0]
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 1}]
        assert oldest_version(choice) is None

    def test_chunks_add_up_to_the_answer(self) -> None:
        answer = completion(logprobs=1, return_token_ids=True)
        first, last = (answer.chunk(part) for part in (FIRST, LAST))
        whole = answer.body([WHOLE], 5)
        assert first["id"] == last["id"] == whole["id"]
        assert (first["object"], "usage" in first) == ("text_completion", False)
        [one], [two], [all_of_it] = first["choices"], last["choices"], whole["choices"]
        assert one["text"] + two["text"] == "abcd"
        assert one["token_ids"] + two["token_ids"] == [7, 8, 10]
        assert one["logprobs"]["text_offset"] + two["logprobs"]["text_offset"] == [0, 1, 3]
        assert (one["finish_reason"], "weight_versions" in one) == (None, False)
        assert (two["finish_reason"], two["weight_versions"]) == ("length", all_of_it["weight_versions"])

    def test_a_chunk_without_tokens_has_no_logprobs(self) -> None:
        assert completion(logprobs=1).chunk(NOTHING_NEW)["choices"][0]["logprobs"] is None

    def test_the_usage_chunk_has_no_choices(self) -> None:
        chunk = completion().usage_chunk(5, 3)
        assert (chunk["choices"], chunk["usage"]) == ([], USAGE)


class TestChat:
    def test_answer_is_a_message_of_the_assistant(self) -> None:
        body = chat().body([WHOLE], 5)
        assert (body["object"], body["usage"], body["id"][:9]) == ("chat.completion", USAGE, "chatcmpl-")
        [choice] = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": "abcd"}
        assert (choice["finish_reason"], choice["logprobs"], oldest_version(choice)) == ("length", None, 4)

    def test_answer_has_the_most_likely_tokens(self) -> None:
        [choice] = chat(logprobs=True, top_logprobs=1).body([WHOLE], 5)["choices"]
        entries = choice["logprobs"]["content"]
        assert entries[1] == {
            "token": "bc",
            "logprob": -0.25,
            "bytes": [98, 99],
            "top_logprobs": [{"token": "bc", "logprob": -0.25, "bytes": [98, 99]}],
        }
        [plain] = chat(logprobs=True).body([WHOLE], 5)["choices"]
        assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[], [], []]

    def test_only_the_first_chunk_of_a_choice_has_the_role(self) -> None:
        answer = chat()
        other = ChoicePart(1, "a", [7], [-0.5], [{}], (), "")
        deltas = [answer.chunk(part)["choices"][0]["delta"] for part in (FIRST, other, LAST)]
        role = {"role": "assistant"}
        assert deltas == [{**role, "content": "a"}, {**role, "content": "a"}, {"content": "bcd"}]
        assert answer.chunk(LAST)["object"] == "chat.completion.chunk"
