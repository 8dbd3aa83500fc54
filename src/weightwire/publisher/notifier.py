"""Wakes followers by HTTP after each version, so that they look before their next poll. Best effort.

It sends the token in WEIGHTWIRE_TOKEN, if there is one, and follows no redirects: they could take the token elsewhere.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, InvalidURL
from typing import Any

from weightwire.errors import WeightwireError, first_line, public_url
from weightwire.system import Runtime, read_token
from weightwire.telemetry import Listener, warning

__all__ = ["FollowerNotifier"]

_TIMEOUT = 2.0  # seconds


@dataclass(frozen=True)
class FollowerNotifier:
    urls: tuple[str, ...]
    runtime: Runtime
    emit: Listener

    async def notify(self, version: int | None) -> None:
        for url in self.urls:
            try:
                await self.runtime.run_in_thread(_post, url, {"version": version})
            except (OSError, ValueError, HTTPException, WeightwireError) as problem:
                self.emit(
                    warning(
                        f"{public_url(url)}: the follower could not be woken ({_reason(problem)})",
                        version,
                        at=self.runtime.time(),
                    )
                )


def _reason(problem: Exception) -> str:
    """Errors about a malformed URL quote parts of it, which may hold a password."""
    return "malformed URL" if isinstance(problem, ValueError | InvalidURL) else first_line(problem)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, body: Mapping[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    if token := read_token():
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT):
        pass
