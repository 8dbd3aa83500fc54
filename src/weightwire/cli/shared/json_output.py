"""What every command with `--json` shares: fields, errors, warnings, and how they are written.

`run_output` and `file_output` have one type per command. They are the single source of docs/json.md. Rules of names:
- `bytes` is the size of what a record is about; other sizes are `<what>_bytes`.
- Durations are `seconds` or `<what>_seconds`; a point in `time` is in seconds since 1970.
- Versions are `version` or `<what>_version`, null where there is none.
- `changed` is null where nothing was compared.
"""

from __future__ import annotations

import json
from typing import Annotated

from msgspec import Meta, Struct, to_builtins

from weightwire.cli.shared.terminal import warn

__all__ = [
    "After",
    "Before",
    "BytesPerChange",
    "Changed",
    "ErrorDetails",
    "ErrorOutput",
    "JsonOutput",
    "RecoveredOutput",
    "Seconds",
    "WarningOutput",
    "WeightCount",
    "WeightsBytes",
    "warn_as_json",
    "write_json",
    "write_json_line",
]

Changed = Annotated[int | None, Meta(description="weights that changed; null for an anchor, which compares nothing")]
WeightCount = Annotated[int, Meta(description="number of weights")]
WeightsBytes = Annotated[int, Meta(description="size of all weights")]
Seconds = Annotated[float, Meta(description="how long the command took")]
Before = Annotated[str | None, Meta(description="state that the delta applies to; null if unknown")]
After = Annotated[str | None, Meta(description="state that the delta leads to; null if unknown")]
BytesPerChange = Annotated[float | None, Meta(description="`bytes` / `changed`; null if `changed` is 0 or null")]


class JsonOutput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a command writes: every key is always there."""


def write_json(value: JsonOutput) -> None:
    """A document on stdout."""
    print(json.dumps(to_builtins(value), indent=2))


def write_json_line(value: JsonOutput) -> None:
    """One line of stdout, flushed: for commands that go on, and for errors."""
    print(json.dumps(to_builtins(value)) + "\n", end="", flush=True)  # in one write: other threads may write as well


def warn_as_json(message: str, hint: str | None = None) -> None:
    """A warning on stderr, and as a line on stdout."""
    warn(message, hint)
    write_json_line(WarningOutput(warning=WarningDetails(message=message, hint=hint or None)))


class ErrorDetails(JsonOutput, frozen=True, kw_only=True):
    code: Annotated[str, Meta(description="stable code, such as `WW-NO-RUN`")]
    message: Annotated[str, Meta(description="what failed, and why")]
    hint: Annotated[str | None, Meta(description="what to do next")]


class ErrorOutput(JsonOutput, frozen=True, kw_only=True):
    """A command that fails writes this as its last line. [Troubleshooting](troubleshooting.md) explains the codes."""

    error: Annotated[ErrorDetails, Meta(description="the only key of the line")]

    @classmethod
    def of(cls, code: str, message: str, hint: str | None = None) -> ErrorOutput:
        return cls(error=ErrorDetails(code=code, message=message, hint=hint))


class WarningDetails(JsonOutput, frozen=True, kw_only=True):
    message: Annotated[str, Meta(description="what went wrong and is being handled")]
    hint: Annotated[str | None, Meta(description="what to do next")]


class WarningOutput(JsonOutput, frozen=True, kw_only=True):
    """A line of `follow` (without `--once`) and `publish --watch`, between their records."""

    warning: Annotated[WarningDetails, Meta(description="the only key of the line")]


class RecoveredDetails(JsonOutput, frozen=True, kw_only=True):
    message: Annotated[str, Meta(description="which trouble is over")]


class RecoveredOutput(JsonOutput, frozen=True, kw_only=True):
    """A line of `follow` (without `--once`): an earlier warning is over."""

    recovered: Annotated[RecoveredDetails, Meta(description="the only key of the line")]

    @classmethod
    def of(cls, message: str) -> RecoveredOutput:
        return cls(recovered=RecoveredDetails(message=message))
