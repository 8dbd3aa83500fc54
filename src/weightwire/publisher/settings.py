"""How to publish: what a `Publisher` was told, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightwire.weights import Weights

__all__ = ["PublisherSettings"]


@dataclass(frozen=True)
class PublisherSettings:
    """See `Publisher` for the meaning."""

    base: Weights | None = None
    source: str = ""
    published: Weights | None = None
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    anchor_every: int | None = None
    retry_seconds: float = 300.0
    blocking: bool = False
    insist: bool = False
    threads: int | None = None
