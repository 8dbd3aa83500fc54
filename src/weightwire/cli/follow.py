"""`weightwire follow`: a run -> a replica on this machine, once or for as long as it runs."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Event as Stop
from typing import Annotated, Any

import typer

from weightwire.cli.shared.bucket_command import Url
from weightwire.cli.shared.follow_output import FollowListener, check_name, find_run, tell, wait_for_run
from weightwire.cli.shared.stop_signal import stop_on_signal
from weightwire.cli.shared.terminal import (
    AsJson,
    Threads,
    byte_size,
    note_if_slow,
    progress_bar,
    say,
    write_json,
    write_json_line,
)
from weightwire.engines import Engine, Keeper, open_engine
from weightwire.errors import EngineError, EngineGone
from weightwire.follower import Follower, Update, WakeupServer
from weightwire.system import parse_address
from weightwire.telemetry import Metrics

__all__ = ["follow"]

_LOOK = 0.25  # seconds, in which a signal is noticed


def follow(
    url: Url,
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="The replica: DIR/current is the checkpoint.")],
    once: Annotated[bool, typer.Option("--once", help="Catch up with what is there, and exit.")] = False,
    base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The checkpoint that the run starts from, if it has no anchor.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="by the host", help="What others see it under.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Take wake-ups (POST), and serve /metrics and /status."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL", help="An engine to keep up to date, such as vllm=http://127.0.0.1:8000; repeatable."
        ),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Keep a replica of the run at URL up to date, until Ctrl-C.

    DIR/current is a complete checkpoint of exactly one version at any time. A follower that was stopped or killed goes
    on where it was. Engines are patched while they serve, and reloaded from DIR/current where that is not possible.
    """
    engines = [_open_engine(text) for text in engine or ()]
    if listen is not None:
        if once:
            raise typer.BadParameter("is of no use with --once", param_hint="--listen")
        parse_address(listen)
    if name is not None:
        check_name(name)
    note_if_slow()
    # What is wrong with the URL or the rights to it does not pass by waiting.
    there = find_run(url, wait=not once)
    metrics = None if listen is None else Metrics("follower")
    listener = FollowListener(metrics)
    if once:
        with Follower(url, into=into, base=base, name=name, threads=threads, on_event=listener) as follower:
            figures = _follow_once(follower, listener)
            if engines:
                _bring_once(follower, engines, listener)
            if as_json:
                write_json(figures)
        return
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signal())
        follower = Follower(url, into=into, base=base, name=name, threads=threads, on_event=listener)
        stack.enter_context(follower)
        if listen is not None and metrics is not None:
            server = stack.enter_context(_wakeup_server(listen, follower, metrics))
            say(f"listening on http://{server.address}")
        if there or wait_for_run(url, stop):
            keeper = stack.enter_context(closing(_keeper(follower, engines, listener))) if engines else None
            _follow(follower, keeper, listener, stop, as_json)
    say(f"stopped at {_name(follower.version)}: {into / 'current'}" if follower.version is not None else "stopped")


def _follow_once(follower: Follower, listener: FollowListener) -> dict[str, Any]:
    began = time.perf_counter()
    with progress_bar("catching up"):
        version = follower.once()
    seconds, nbytes = time.perf_counter() - began, listener.fetched_bytes(version)
    where = follower.checkpoint()
    news = "nothing new" if nbytes is None else f"{byte_size(nbytes)}, {seconds:.2f} s"
    say(f"{_name(version)}: {news}")
    return {"version": version, "bytes": nbytes or 0, "seconds": round(seconds, 3), "checkpoint": str(where)}


def _follow(follower: Follower, keeper: Keeper | None, listener: FollowListener, stop: Stop, as_json: bool) -> None:
    while not stop.is_set():
        for update in follower.watch(timeout=_LOOK):
            if keeper is not None:
                keeper.bring(update)
            _tell(update, listener, as_json)
            if stop.is_set():
                break
        if keeper is not None:
            keeper.look()


# --- engines -----------------------------------------------------------------------------------------------------


def _open_engine(text: str) -> Engine:
    try:
        return open_engine(text)
    except EngineError as problem:
        example = "write NAME=URL, such as vllm=http://127.0.0.1:8000"
        raise typer.BadParameter(f"{problem.message}; {problem.hint}; {example}", param_hint="--engine") from problem


def _keeper(follower: Follower, engines: list[Engine], listener: FollowListener) -> Keeper:
    """Each must be there and willing now: what is wrong with it is better said before anything is followed."""
    for engine in engines:
        with suppress(EngineGone):  # it may still be starting
            engine.attach()
    return Keeper(follower, engines, on_event=listener)


def _bring_once(follower: Follower, engines: list[Engine], listener: FollowListener) -> None:
    with closing(_keeper(follower, engines, listener)) as keeper:
        for engine in keeper.engines:
            engine.attach()
        update = follower.take()
        if update is not None:
            keeper.bring(update)
        if keeper.trouble:
            raise EngineError(keeper.trouble, hint="see above")
        for engine in keeper.engines:
            paused = (
                f", paused for {1000 * listener.pauses[engine.name]:.0f} ms" if engine.name in listener.pauses else ""
            )
            say(f"{engine.name} serves {_name(keeper.served)}{paused}")


# --- what is told ------------------------------------------------------------------------------------------------


def _tell(update: Update, listener: FollowListener, as_json: bool) -> None:
    nbytes, behind, pauses = tell(update, listener)
    if as_json:
        line = {
            "version": update.version,
            "step": update.step,
            "state": update.state,
            "bytes": nbytes,
            "behind_seconds": None if behind is None else round(behind, 3),
            "metrics": dict(update.metrics),
            "pause_seconds": {engine: round(seconds, 6) for engine, seconds in pauses.items()},
        }
        write_json_line(line)


def _name(version: int | None) -> str:
    return f"version {version}"


# --- what it says of itself --------------------------------------------------------------------------------------


def _wakeup_server(address: str, follower: Follower, metrics: Metrics) -> WakeupServer:
    def status() -> dict[str, Any]:
        version, head = follower.version, follower.head
        behind = None if version is None else max(0, head - version)
        return {"version": version, "head": None if head < 0 else head, "behind": behind, "trouble": follower.trouble}

    def render() -> bytes:
        metrics.see(follower.version, follower.head)
        return metrics.render()

    return WakeupServer(address, wake=follower.wake, status=status, metrics=render)
