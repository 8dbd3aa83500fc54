"""The page as a document: that it is whole, and that nothing in a picture can become a part of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import msgspec

from weightwire.page.document import SCRIPTS, exported, live, part, plotly

HOSTILE = "</script><script>alert(1)</script><!-- <b>&amp;</b> \"' \u2028"


def blocks(document: str) -> list[tuple[str, str]]:
    """The scripts of a document as a browser finds them: attributes and text."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", document, re.DOTALL)


def test_live_it_names_its_parts() -> None:
    document = live().decode()
    assert re.findall(r'(?:src|href)="([^":]+)"', document) == ["page.css", "plotly.js", *SCRIPTS]
    assert all(not text for _, text in blocks(document))


def test_exported_it_names_nothing() -> None:
    document = exported(b"{}").decode()
    own = document.replace(plotly(), "")
    assert not re.findall(r'(?:src|href)="(?!data:)', own)
    assert "https://" not in own
    for name in (*SCRIPTS, "page.css"):
        assert part(name) in document


def test_a_picture_stays_data() -> None:
    document = exported(msgspec.json.encode({HOSTILE: HOSTILE})).decode()

    kinds = [attributes for attributes, _ in blocks(document)]
    data = blocks(document)[0][1]

    assert kinds == [' type="application/json" id="picture"', *[""] * (1 + len(SCRIPTS))]
    assert "<" not in data
    assert json.loads(data) == {HOSTILE: HOSTILE}


def test_no_script_may_run_but_these() -> None:
    document = exported(b"{}").decode()
    policy = re.findall(r'Content-Security-Policy" content="([^"]+)"', document)[0]
    assert "default-src 'none'" in policy
    for attributes, script in blocks(document):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert (f"'sha256-{digest}'" in policy) == (not attributes)


def test_no_part_could_end_its_block() -> None:
    for text in (plotly(), *map(part, SCRIPTS)):
        assert "</script" not in text.lower()
        assert "<!--" not in text
        assert "\r" not in text
