"""The text of a growing sequence, as far as no later token can change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextStream"]

_INCOMPLETE = "\ufffd"  # how a tokenizer decodes a part of a character


class TextStream:
    """Call `add` with all tokens so far, and `finish` with the whole text.

    All pieces together are the whole text. Characters whose bytes are spread over tokens appear when they are
    complete, and text that may be the beginning of a stop text is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        # Tokens from `_context` to `_read` were decoded before. They are decoded again in front of new ones, because
        # the text of a token may depend on the token before.
        self._context = self._read = 0
        self._held = ""
        self._sent = 0  # characters

    def add(self, tokens: Sequence[int]) -> str:
        """The text that can be sent now. Decodes only the newest tokens."""
        before = self._decode(tokens[self._context : self._read])
        after = self._decode(tokens[self._context :])
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._context, self._read = self._read, len(tokens)
        text = self._held + after[len(before) :]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return self._send(text[: len(text) - kept])

    def finish(self, text: str) -> str:
        """The rest of the whole text."""
        return self._send(text[self._sent :])

    def _send(self, text: str) -> str:
        self._sent += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text with which the stop text begins."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
