"""What `weightwire doctor --json` writes. See `json_output` for the rules of names."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from weightwire.cli.shared.json_output import JsonOutput
from weightwire.cli.shared.run_output import RunUrl

__all__ = ["CheckOutput", "DoctorOutput"]


class CheckOutput(JsonOutput, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="what was checked: `store`, `list`, `read`, `write`, `create`, ...")]
    result: Annotated[str, Meta(description="`ok`, `warning` or `problem`")]
    message: Annotated[str, Meta(description="what was found")]
    hint: Annotated[str | None, Meta(description="what to do next")]


class DoctorOutput(JsonOutput, frozen=True, kw_only=True):
    """One document. The exit code is 1 if `ok` is false."""

    url: RunUrl
    ok: Annotated[bool, Meta(description="whether there are no problems; warnings are allowed")]
    can_follow: Annotated[bool, Meta(description="whether a follower works here")]
    can_publish: Annotated[bool, Meta(description="whether a publisher works here")]
    latency_seconds: Annotated[float | None, Meta(description="median of a few small requests")]
    clock_offset_seconds: Annotated[float | None, Meta(description="how far the store's clock is ahead of this one")]
    upload_bytes_per_second: Annotated[float | None, Meta(description="null if it was not measured")]
    download_bytes_per_second: Annotated[float | None, Meta(description="null if it was not measured")]
    checks: Annotated[list[CheckOutput], Meta(description="one per line of the report")]
