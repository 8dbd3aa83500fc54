"""The engines of `follow`: opening them, updating them once, and saying which of them are late."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing

import typer

from weightwire.cli.shared.follow_output import FollowListener
from weightwire.cli.shared.terminal import say
from weightwire.engines import CachePolicy, Engine, EngineStatus, Keeper, open_engine
from weightwire.errors import EngineError
from weightwire.follower import Follower, Update
from weightwire.telemetry import Event

__all__ = ["late_engines", "open_engines", "update_once"]


def open_engines(texts: Sequence[str], cache: CachePolicy) -> list[Engine]:
    if cache == "keep" and not texts:
        raise typer.BadParameter("needs --engine", param_hint="--cache")
    engines: dict[str, Engine] = {}
    for text in texts:
        engine = _open(text, cache)
        if engine.name in engines:
            raise typer.BadParameter(f"{engine.name} is given twice", param_hint="--engine")
        engines[engine.name] = engine
    return list(engines.values())


def _open(text: str, cache: CachePolicy) -> Engine:
    try:
        return open_engine(text, cache)
    except EngineError as problem:
        example = "use NAME=URL, such as vllm=http://127.0.0.1:8000"
        raise typer.BadParameter(f"{problem.message}; {problem.hint}; {example}", param_hint="--engine") from problem


def update_once(
    follower: Follower, engines: list[Engine], update: Update, listener: FollowListener
) -> dict[str, float]:
    """Brings the engines to the version of the update, and returns their pauses. Raises if one does not serve it."""
    events: list[Event] = []
    with closing(Keeper(follower, engines, on_event=events.append)) as keeper:
        keeper.connect()
        keeper.bring(update, timeout=math.inf)
        keeper.check_accepted()
        keeper.check_served(update.version)
    for event in events:  # not earlier: a warning would repeat the error
        listener(event)
    pauses = listener.pop_pauses()
    for engine in engines:
        paused = f", paused for {1000 * pauses[engine.name]:.0f} ms" if engine.name in pauses else ""
        say(f"{engine.name} serves version {update.version}{paused}")
    return pauses


def late_engines(statuses: Iterable[EngineStatus], version: int | None) -> str:
    """Names the engines that do not serve this version. Empty if there are none."""
    late = [one for one in statuses if one.version != version or one.trouble]
    return "".join(f"; {one.name} {_served(one)}" for one in late)


def _served(status: EngineStatus) -> str:
    served = "serves no version" if status.version is None else f"serves version {status.version}"
    return f"{served}, in trouble" if status.trouble else served
