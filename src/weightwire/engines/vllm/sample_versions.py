"""Which tokens of a sample came from which version.

vLLM reports this in answers of /inference/v1/generate (started with --enable-scale-out), for each choice:
`"weight_versions": [{"version": "41", "start": 0, "end": 17}, {"version": "42", "start": 17, "end": 64}]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["VersionSpan", "oldest_version", "spans_of"]


@dataclass(frozen=True)
class VersionSpan:
    """Tokens from `start` up to, but excluding, `end`. `version` is None before the server's first version."""

    version: int | None
    start: int
    end: int


def spans_of(choice: Mapping[str, Any]) -> list[VersionSpan]:
    """The spans of a choice. Empty if the server does not report them."""
    return [
        VersionSpan(int(one["version"]) if one["version"].isdecimal() else None, one["start"], one["end"])
        for one in choice.get("weight_versions") or ()
    ]


def oldest_version(choice: Mapping[str, Any]) -> int | None:
    """The oldest version of any token, or None if the version of a token is unknown.

    A sample is `publisher.version - oldest_version(choice)` versions stale. Skip samples that are too stale.
    """
    versions = [span.version for span in spans_of(choice)]
    return None if None in versions else min((one for one in versions if one is not None), default=None)
