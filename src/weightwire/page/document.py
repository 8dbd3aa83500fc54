"""The page as an HTML document, with its own CSS and JavaScript and plotly's from the installed package.

A live document links to its parts and polls for snapshots. An exported document contains everything and makes no
requests. In both, a Content-Security-Policy allows these scripts only. Knows no bucket.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from importlib import import_module, resources

from weightwire.errors import MissingDependency

__all__ = ["LIVE_POLICY", "SCRIPTS", "exported", "live", "part", "plotly", "plotly_gzipped"]

SCRIPTS = ("format.js", "charts.js", "timeline.js", "chain.js", "replicas.js", "page.js")

# Plotly sets inline styles and draws heat maps as data: images.
_LOOKS = "style-src 'self' 'unsafe-inline'; img-src data: blob:"
_ELSE = "default-src 'none'; base-uri 'none'; form-action 'none'"
LIVE_POLICY = f"{_ELSE}; script-src 'self'; connect-src 'self'; frame-ancestors 'none'; {_LOOKS}"

_HEAD, _TAIL = "<!-- head -->", "<!-- tail -->"


@cache
def part(name: str) -> str:
    """The text of a file in this package."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


@cache
def plotly() -> str:
    try:
        offline = import_module("plotly.offline")
    except ImportError as problem:
        raise MissingDependency(
            "the page needs plotly, which is not installed", hint=MissingDependency.hint_for("page")
        ) from problem
    return str(offline.get_plotlyjs())


@cache
def plotly_gzipped() -> bytes:
    return gzip.compress(plotly().encode(), 6, mtime=0)


def live() -> bytes:
    """All links are relative, so the page also works behind a reverse proxy."""
    tail = "\n".join(f'<script src="{name}" defer></script>' for name in ("plotly.js", *SCRIPTS))
    return _filled('<link rel="stylesheet" href="page.css">', tail)


def exported(snapshot: bytes) -> bytes:
    """One self-contained file around a snapshot in JSON."""
    scripts = [plotly(), *map(part, SCRIPTS)]
    allowed = " ".join(map(_hash, scripts))
    policy = f"{_ELSE}; script-src {allowed}; {_LOOKS}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{part("page.css")}</style>'
    # An escaped "<" means the same in JSON, and cannot end the script block in HTML.
    data = snapshot.decode().replace("<", "\\u003c")
    blocks = [f'<script type="application/json" id="snapshot">{data}</script>']
    blocks += [f"<script>{script}</script>" for script in scripts]
    return _filled(head, "\n".join(blocks))


def _filled(head: str, tail: str) -> bytes:
    before, rest = part("page.html").split(_HEAD)
    between, after = rest.split(_TAIL)
    return "".join((before, head, between, tail, after)).encode()


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
