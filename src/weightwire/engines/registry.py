"""Engines by name, for `--engine NAME=URL`, the demo and a trainer's transfer.

A built-in engine is one line in `_BUILT_IN`. Any other package adds one with an entry point:

    [project.entry-points."weightwire.engines"]
    myengine = "mypackage:MyEngine"

It names an `EngineKind`, or a class or function that takes a URL and returns an `Engine`. An engine is imported when it
is first used by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from weightwire.engines.engine import CachePolicy, Engine, RolloutServer
from weightwire.errors import EngineError, WeightwireError

__all__ = ["EngineKind", "Program", "engine_names", "find_engine", "open_engine", "split_engine"]

_BUILT_IN = {
    "sglang": "weightwire.engines.sglang.sglang_kind:SGLANG",
    "vllm": "weightwire.engines.vllm.engine_kind:VLLM",
    "vllm-draft": "weightwire.engines.vllm.engine_kind:VLLM_DRAFT",
    "vllm-lora": "weightwire.engines.vllm.engine_kind:VLLM_LORA",
}
_GROUP = "weightwire.engines"


@dataclass(frozen=True)
class Program:
    """A command line with its environment."""

    argv: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineKind:
    """The operations of engines of one name. Following a run needs only `connect`.

    - `connect`: returns the engine at a URL, without connecting yet. Raises an EngineError if the URL is malformed.
    - `rollout`: returns a trainer's view of the server at a URL. Needed for a trainer's transfer.
    - `launch`: returns the command that serves a model directory at a local port. Needed for the demo.
    - `needs`: the modules that must be installed to launch it.
    - `connect_keeping`: like `connect`, but running requests keep their KV cache. Needed for `--cache keep`.
    """

    connect: Callable[[str], Engine]
    rollout: Callable[[str], RolloutServer] | None = None
    launch: Callable[[Path, int], Program] | None = None
    needs: tuple[str, ...] = ()
    connect_keeping: Callable[[str], Engine] | None = None


def engine_names() -> list[str]:
    """The names of all engines, built in or installed."""
    return sorted({*_BUILT_IN, *_installed()})


def find_engine(name: str) -> EngineKind:
    """Imports the engine of that name."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return _as_kind(name, getattr(import_module(module), attribute))
    entry = _installed().get(name)
    if entry is None:
        raise EngineError(f"unknown engine {name!r}", hint=_known())
    try:
        found = entry.load()
    except Exception as problem:  # an import can raise anything
        raise EngineError(
            f"engine {name!r} cannot be loaded from {entry.value} ({type(problem).__name__}: {problem})",
            hint="reinstall the package that provides it, with its dependencies",
        ) from problem
    return _as_kind(name, found)


def split_engine(text: str, default: str = "") -> tuple[str, str]:
    """The name and URL of `NAME=URL`. For a URL alone, the name is `default`."""
    name, equals, url = text.partition("=")
    if not equals or "/" in name:  # the "=" belongs to the URL
        name, url = default, text
    if not name or not url:  # do not repeat the text: a URL may hold a password
        raise EngineError("an engine must be given as 'NAME=URL'", hint=_known())
    return name, url


def open_engine(text: str, cache: CachePolicy = "flush") -> Engine:
    """The engine of `NAME=URL`, not connected yet."""
    name, url = split_engine(text)
    kind = find_engine(name)
    connect = kind.connect_keeping if cache == "keep" else kind.connect
    if connect is None:
        raise EngineError(
            f"engine {name!r} cannot keep the KV cache of running requests", hint="use --cache flush for it"
        )
    try:
        engine = connect(url)
    except WeightwireError:
        raise
    except Exception as problem:  # third-party code can raise anything
        raise EngineError(
            f"engine {name!r} cannot be opened ({type(problem).__name__}: {problem})",
            hint="see the engine's documentation",
        ) from problem
    if engine is None:
        raise EngineError(
            f"engine {name!r} cannot be opened: its entry point returned None", hint="return an Engine from it"
        )
    return engine


def _known() -> str:
    return f"known engines: {', '.join(engine_names())}"


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def _as_kind(name: str, found: Any) -> EngineKind:
    if isinstance(found, EngineKind):
        return found
    if not callable(found):
        raise EngineError(
            f"engine {name!r} has an entry point of type {type(found).__name__}",
            hint="make it an EngineKind or a callable",
        )
    return EngineKind(found)
