"""Where servers listen and what they are asked by: Host headers, and why an address cannot be had. Opens nothing."""

from __future__ import annotations

import errno
import re

from weightwire.errors import WeightwireError

__all__ = ["cannot_listen", "name_in"]

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+))(?::[0-9]*)?")  # a name and maybe a port


def name_in(host: str) -> str:
    """The name in a Host header, without the port; empty if it is none."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def cannot_listen(host: str, port: int, problem: Exception, *, options: str = "--") -> WeightwireError:
    """The error for an address that cannot be listened on; `options` is how host and port are asked for."""
    number = problem.errno if isinstance(problem, OSError) else None
    if number == errno.EADDRINUSE:
        hint = f"choose another {options}port, or 0 for any"
        return WeightwireError(f"{host}:{port}: another program listens there already", hint=hint)
    reason = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
    below = number == errno.EACCES
    hint = "ports below 1024 are for root: choose another" if below else f"check {options}host and {options}port"
    return WeightwireError(f"{host}:{port}: cannot be listened on ({reason})", hint=hint)
