"""The errors that a client sees, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from weightwire.errors import WeightwireError

__all__ = ["Refusal", "bad_request", "error_body"]


class Refusal(WeightwireError):
    """A rejected request, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def bad_request(message: str) -> Refusal:
    """The error for a request that its sender must change."""
    return Refusal(400, message)


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
