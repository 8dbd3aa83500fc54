"""Text is sent as soon as it is certain, and all pieces together are the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from weightwire.server.text_stream import TextStream


def as_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def as_words(tokens: Sequence[int]) -> str:
    """A tokenizer that drops the space of the first token, like SentencePiece."""
    return "".join(f" {token}" for token in tokens)[1:]


def pieces(text: str | bytes, *stops: str) -> list[str]:
    tokens = list(text.encode() if isinstance(text, str) else text)
    stream = TextStream(as_bytes, stops)
    sent = [stream.add(tokens[: count + 1]) for count in range(len(tokens) - 1)]
    whole = as_bytes(tokens)
    end = min((at for stop in stops if (at := whole.find(stop)) >= 0), default=len(whole))
    return [*sent, stream.finish(whole[:end])]


def test_every_character_is_sent_at_once() -> None:
    assert pieces("hello") == ["h", "e", "l", "l", "o"]


def test_a_character_of_several_tokens_is_sent_when_it_is_complete() -> None:
    assert pieces("aä€!") == ["a", "", "ä", "", "", "€", "!"]


def test_an_incomplete_character_at_the_end_is_sent_last() -> None:
    assert pieces(b"ab\xe2\x82") == ["a", "b", "", "\ufffd"]
    assert pieces(b"\xffa\xc3") == ["", "\ufffda", "\ufffd"]


@pytest.mark.parametrize(
    ("text", "stops", "sent"),
    [
        ("ab</s>", ("</s>",), ["a", "b", "", "", "", ""]),
        ("a<b", ("</s>",), ["a", "", "<b"]),
        ("a<<b", ("</s>",), ["a", "", "<", "<b"]),
        ("a</", ("</s>",), ["a", "", "</"]),
        ("xyz", ("z", "yz"), ["x", "", ""]),
        ("aab", ("ab",), ["", "a", ""]),
    ],
)
def test_the_beginning_of_a_stop_text_is_held_back(text: str, stops: tuple[str, ...], sent: list[str]) -> None:
    assert pieces(text, *stops) == sent


def test_tokens_may_depend_on_the_token_before() -> None:
    stream = TextStream(as_words, ())
    sent = [stream.add([1]), stream.add([1, 2]), stream.add([1, 2, 3, 4])]
    assert [*sent, stream.finish("1 2 3 4 5")] == ["1", " 2", " 3 4", " 5"]


def test_the_pieces_of_random_bytes_are_the_text() -> None:
    numbers = random.Random(7)
    for _ in range(200):
        data = bytes(numbers.choice(b"ab\xc3\xa4\xe2\x82\xac\xff") for _ in range(40))
        assert "".join(pieces(data)) == as_bytes(list(data))
