"""Wakes followers after each version, by HTTP: they look now instead of at their next poll. Nobody relies on it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightwire.system import Runtime
from weightwire.telemetry import Listener, warning

__all__ = ["FollowerNotifier"]


@dataclass(frozen=True)
class FollowerNotifier:
    urls: tuple[str, ...]
    runtime: Runtime
    emit: Listener

    async def notify(self, version: int | None) -> None:
        for url in self.urls:
            try:
                await self.runtime.run_in_thread(_post, url, {"version": version})
            except (OSError, ValueError) as problem:
                self.emit(warning(f"{url}: could not be woken ({problem})", version, at=self.runtime.time()))


def _post(url: str, body: Mapping[str, Any]) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=2):
        pass
