"""Wakes followers by HTTP after each version, so that they look before their next poll. Best effort.

A wake-up carries the commit as stored, and the token in WEIGHTWIRE_TOKEN, if there is one. Redirects are not followed:
they could take the token elsewhere.
"""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, InvalidURL
from typing import Any

from weightwire.chain import Commit, Sealed
from weightwire.errors import WeightwireError, first_line, public_url
from weightwire.system import Runtime, read_token
from weightwire.telemetry import Listener, warning

__all__ = ["FollowerNotifier"]

_TIMEOUT = 2.0  # seconds
_KIND = "application/x-ndjson"  # a signed commit has two lines


@dataclass(frozen=True)
class FollowerNotifier:
    urls: tuple[str, ...]
    runtime: Runtime
    emit: Listener

    async def notify(self, commit: Sealed[Commit]) -> None:
        """Wakes all followers at the same time: one that does not answer must not delay the others."""
        await asyncio.gather(*(self._wake(url, commit) for url in self.urls))

    async def _wake(self, url: str, commit: Sealed[Commit]) -> None:
        try:
            await self.runtime.run_in_thread(_post, url, commit.data)
        except (OSError, ValueError, HTTPException, WeightwireError) as problem:
            message = f"{public_url(url)}: the follower could not be woken ({_reason(problem)})"
            self.emit(warning(message, commit.record.version, at=self.runtime.time()))


def _reason(problem: Exception) -> str:
    """Errors about a malformed URL quote parts of it, which may hold a password."""
    return "malformed URL" if isinstance(problem, ValueError | InvalidURL) else first_line(problem)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, commit: bytes) -> None:
    headers = {"Content-Type": _KIND}
    if token := read_token():
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, commit, headers, method="POST")
    with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT):
        pass
