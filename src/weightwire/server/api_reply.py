"""Replies as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

__all__ = ["json_reply"]


def json_reply(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
