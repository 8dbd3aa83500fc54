"""docs/troubleshooting.md has a section for every error code."""

from __future__ import annotations

import re
from pathlib import Path

from weightwire import errors

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
CODES = {getattr(errors, name).code for name in errors.__all__}
USAGE = "WW-USAGE"  # of a command that was called wrongly: no error class


def sections() -> dict[str, str]:
    """The text of each section, by the code that is its heading."""
    parts = re.split(r"^#{2,3} (.*)$", PAGE, flags=re.M)
    return {heading: text.strip() for heading, text in zip(parts[1::2], parts[2::2], strict=True) if "WW-" in heading}


def test_every_code_has_a_section() -> None:
    assert set(sections()) == CODES | {USAGE}
    assert re.findall(r"^### WW-", PAGE, re.M) == ["### WW-"] * len(sections())


def test_every_section_explains_its_code() -> None:
    assert not [code for code, text in sections().items() if len(text.split()) < 8]


def test_every_code_in_the_text_exists() -> None:
    assert set(re.findall(r"WW-[A-Z-]+[A-Z]", PAGE)) == CODES | {USAGE}


def test_the_usage_code_is_that_of_the_command_line() -> None:
    assert f'"{USAGE}"' in (ROOT / "src/weightwire/cli/entry_point.py").read_text(encoding="utf-8")
