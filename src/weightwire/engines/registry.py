"""The engines that have a name: what `--engine NAME=URL`, the demo and a trainer's transfer can ask for.

A built-in engine is one line in `_BUILT_IN`. Any other package adds one with an entry point:

    [project.entry-points."weightwire.engines"]
    myengine = "mypackage:MyEngine"

It names an `EngineKind`, or just a class or function that takes a URL and returns an `Engine`. Nothing of an engine is
imported before it is asked for by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from weightwire.engines.engine import Engine, RolloutServer
from weightwire.errors import EngineError, WeightwireError

__all__ = ["EngineKind", "Program", "engine_names", "find_engine", "open_engine", "split_engine"]

_BUILT_IN = {"vllm": "weightwire.engines.vllm.engine_kind:VLLM"}
_GROUP = "weightwire.engines"


@dataclass(frozen=True)
class Program:
    """How a program is started."""

    argv: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineKind:
    """What can be done with engines of one name. Only `connect` is needed to follow a run.

    - `connect`: the engine at a URL. It makes no contact yet, and raises an EngineError where that is not a URL.
    - `rollout`: what a trainer asks the server at a URL. Needed for a trainer's transfer.
    - `launch`: the command that serves a model directory at a port of this machine. Needed for the demo.
    - `needs`: the modules that must be installed to launch it.
    """

    connect: Callable[[str], Engine]
    rollout: Callable[[str], RolloutServer] | None = None
    launch: Callable[[Path, int], Program] | None = None
    needs: tuple[str, ...] = ()


def engine_names() -> list[str]:
    """All engines that can be asked for, built in or installed."""
    return sorted({*_BUILT_IN, *_installed()})


def find_engine(name: str) -> EngineKind:
    """The engine of that name; it is imported now."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return _as_kind(name, getattr(import_module(module), attribute))
    entry = _installed().get(name)
    if entry is None:
        raise EngineError(f"unknown engine {name!r}", hint=_known())
    try:
        found = entry.load()
    except Exception as problem:  # whatever a module does when it is imported
        raise EngineError(
            f"engine {name!r} cannot be loaded from {entry.value} ({type(problem).__name__}: {problem})",
            hint="install the package that it comes from again, with what it needs",
        ) from problem
    return _as_kind(name, found)


def split_engine(text: str, default: str = "") -> tuple[str, str]:
    """Name and URL of `NAME=URL`; of a URL alone, the `default` name."""
    name, equals, url = text.partition("=")
    if not equals or "/" in name:  # a URL may have a "=" of its own
        name, url = default, text
    if not name or not url:  # the text is not repeated: a URL may hold a password
        raise EngineError("an engine is given as NAME=URL", hint=_known())
    return name, url


def open_engine(text: str) -> Engine:
    """The engine of `NAME=URL`, not yet contacted."""
    name, url = split_engine(text)
    connect = find_engine(name).connect
    try:
        engine = connect(url)
    except WeightwireError:
        raise
    except Exception as problem:  # of an engine that is not ours
        raise EngineError(
            f"engine {name!r} cannot be opened ({type(problem).__name__}: {problem})", hint="see its documentation"
        ) from problem
    if engine is None:
        raise EngineError(f"engine {name!r} opened nothing", hint="its entry point must return an Engine")
    return engine


def _known() -> str:
    return f"known engines: {', '.join(engine_names())}"


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def _as_kind(name: str, found: Any) -> EngineKind:
    if isinstance(found, EngineKind):
        return found
    if not callable(found):
        raise EngineError(f"engine {name!r} is a {type(found).__name__}", hint="make it an EngineKind, or take a URL")
    return EngineKind(found)
