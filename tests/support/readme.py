"""The blocks of code in the README, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["blocks", "filled"]

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def blocks(heading: str, language: str = "python") -> list[str]:
    """The fenced blocks below a heading, up to the next one."""
    [section] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", README, re.M | re.S)
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)


def filled(text: str, **places: object) -> str:
    """A block with places of ours."""
    for old, new in {
        "s3://bucket/run": places["bucket"],
        "path/to/model": places.get("model", ""),
        "http://127.0.0.1:8000": places.get("server", ""),
        '"replica"': f'"{places.get("replica", "")}"',
        "--into replica": f"--into {places.get('replica', '')}",
    }.items():
        text = text.replace(old, str(new))
    return text
