"""Which tokens of a sample came from which version. Pure: reads what vLLM says of them.

vLLM says it in answers of /inference/v1/generate (started with --enable-scale-out), for each choice:
`"weight_versions": [{"version": "41", "start": 0, "end": 17}, {"version": "42", "start": 17, "end": 64}]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["VersionSpan", "oldest_version", "spans_of"]


@dataclass(frozen=True)
class VersionSpan:
    """Tokens from `start` to before `end`. `version` is None where the server had not been given any yet."""

    version: int | None
    start: int
    end: int


def spans_of(choice: Mapping[str, Any]) -> list[VersionSpan]:
    """The spans of a choice; none where the server does not say."""
    return [
        VersionSpan(int(one["version"]) if one["version"].isdecimal() else None, one["start"], one["end"])
        for one in choice.get("weight_versions") or ()
    ]


def oldest_version(choice: Mapping[str, Any]) -> int | None:
    """The oldest version that any token came from; None if one came from an unknown one.

    A sample is `publisher.version - oldest_version(choice)` versions stale: leave out what is too stale to train on.
    """
    versions = [span.version for span in spans_of(choice)]
    return None if None in versions else min((one for one in versions if one is not None), default=None)
