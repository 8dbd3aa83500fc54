"""The page as a document: its own HTML, CSS and JavaScript, and plotly's from the installed package.

Live, the document names its parts, and asks for the picture again and again; exported, it holds everything and asks for
nothing. In both a policy keeps out every script but these. Knows no bucket.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from importlib import import_module, resources

from weightwire.errors import WeightwireError

__all__ = ["LIVE_POLICY", "SCRIPTS", "exported", "live", "part", "plotly", "plotly_gzipped"]

SCRIPTS = ("format.js", "charts.js", "timeline.js", "chain.js", "page.js")

# Plotly sets styles on what it draws, and draws heat maps as images that it makes itself.
_LOOKS = "style-src 'self' 'unsafe-inline'; img-src data: blob:"
_ELSE = "default-src 'none'; base-uri 'none'; form-action 'none'"
LIVE_POLICY = f"{_ELSE}; script-src 'self'; connect-src 'self'; frame-ancestors 'none'; {_LOOKS}"

_HEAD, _TAIL = "<!-- head -->", "<!-- tail -->"


@cache
def part(name: str) -> str:
    """One of the files beside this one."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


@cache
def plotly() -> str:
    try:
        offline = import_module("plotly.offline")
    except ImportError as problem:
        raise WeightwireError(
            "the page needs plotly, which is not installed", hint="pip install 'weightwire[page]'"
        ) from problem
    return str(offline.get_plotlyjs())


@cache
def plotly_gzipped() -> bytes:
    return gzip.compress(plotly().encode(), 6, mtime=0)


def live() -> bytes:
    """Relative addresses only, so that it may lie behind any other server."""
    tail = "\n".join(f'<script src="{name}" defer></script>' for name in ("plotly.js", *SCRIPTS))
    return _filled('<link rel="stylesheet" href="page.css">', tail)


def exported(picture: bytes) -> bytes:
    """One file with everything in it, around a picture as JSON."""
    scripts = [plotly(), *map(part, SCRIPTS)]
    allowed = " ".join(map(_hash, scripts))
    policy = f"{_ELSE}; script-src {allowed}; {_LOOKS}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{part("page.css")}</style>'
    # As JSON spells it, "<" is the same text; as HTML, it could end the block.
    data = picture.decode().replace("<", "\\u003c")
    blocks = [f'<script type="application/json" id="picture">{data}</script>']
    blocks += [f"<script>{script}</script>" for script in scripts]
    return _filled(head, "\n".join(blocks))


def _filled(head: str, tail: str) -> bytes:
    before, rest = part("page.html").split(_HEAD)
    between, after = rest.split(_TAIL)
    return "".join((before, head, between, tail, after)).encode()


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
