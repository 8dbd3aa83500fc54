"""The options of a `Publisher`, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightwire.chain import Signer
from weightwire.telemetry import ProgressCallback, StartProgress, ignore_progress, start_progress
from weightwire.weights import Weights

__all__ = ["PublisherSettings"]


@dataclass(frozen=True)
class PublisherSettings:
    """See `Publisher` for their meaning."""

    base: Weights | None = None
    source: str = ""
    published: Weights | None = None
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    anchor_every: int | None = None
    retry_seconds: float = 300.0
    blocking: bool = False
    insist: bool = False
    resumes: bool = True
    signer: Signer | None = None
    threads: int | None = None
    on_progress: ProgressCallback = ignore_progress

    @property
    def progress(self) -> StartProgress:
        return start_progress(self.on_progress)
