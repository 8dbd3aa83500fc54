"""The page as a document: it is complete, and nothing in a snapshot can become markup or script."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import msgspec

from weightwire.page.document import SCRIPTS, exported, live, part, plotly
from weightwire.telemetry.stages import STAGES

HOSTILE = "</script><script>alert(1)</script><!-- <b>&amp;</b> \"' \u2028"


def blocks(document: str) -> list[tuple[str, str]]:
    """The script blocks of a document: attributes and text."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", document, re.DOTALL)


def test_a_live_document_links_to_its_parts() -> None:
    document = live().decode()
    assert re.findall(r'(?:src|href)="([^":]+)"', document) == ["page.css", "plotly.js", *SCRIPTS]
    assert all(not text for _, text in blocks(document))


def test_an_exported_document_links_to_nothing() -> None:
    document = exported(b"{}").decode()
    own = document.replace(plotly(), "")
    assert not re.findall(r'(?:src|href)="(?!data:)', own)
    assert "https://" not in own
    for name in (*SCRIPTS, "page.css"):
        assert part(name) in document


def test_a_hostile_snapshot_stays_data() -> None:
    document = exported(msgspec.json.encode({HOSTILE: HOSTILE})).decode()

    kinds = [attributes for attributes, _ in blocks(document)]
    data = blocks(document)[0][1]

    assert kinds == [' type="application/json" id="snapshot"', *[""] * (1 + len(SCRIPTS))]
    assert "<" not in data
    assert json.loads(data) == {HOSTILE: HOSTILE}


def test_the_policy_allows_only_the_scripts_of_the_page() -> None:
    document = exported(b"{}").decode()
    policy = re.findall(r'Content-Security-Policy" content="([^"]+)"', document)[0]
    assert "default-src 'none'" in policy
    for attributes, script in blocks(document):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert (f"'sha256-{digest}'" in policy) == (not attributes)


def test_no_script_can_end_its_block() -> None:
    for text in (plotly(), *map(part, SCRIPTS)):
        assert "</script" not in text.lower()
        assert "<!--" not in text
        assert "\r" not in text


def test_stages_in_css_and_scripts_are_those_of_the_table() -> None:
    known = {stage.name for stage in STAGES}
    colours = set(re.findall(r"--([a-z]+): light-dark", part("page.css")))
    assert known - colours == {"commit"}  # drawn as a diamond, not as a bar
    for script in SCRIPTS:
        assert set(re.findall(r"stage [=!]== \"(\w+)\"", part(script))) <= known
