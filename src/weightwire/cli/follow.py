"""`weightwire follow`: keeps a replica of a run on this machine."""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weightwire.cli.shared.bucket_command import Base, Url, url_of
from weightwire.cli.shared.follow_output import (
    Arrival,
    FollowListener,
    check_name,
    current_version,
    find_run,
    report,
    wait_for_run,
)
from weightwire.cli.shared.json_output import write_json, write_json_line
from weightwire.cli.shared.listen_options import Insecure, TokenFile, access_of
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.cli.shared.run_output import FollowOutput
from weightwire.cli.shared.stop_signal import StopSignal, interrupt_leaves, stop_on_signal
from weightwire.cli.shared.terminal import AsJson, Threads, note_if_slow, say
from weightwire.cli.shared.trust_options import MaxAge, TrustedOrFirst
from weightwire.engines import Engine, Keeper, open_engine
from weightwire.errors import EngineError, EngineGone
from weightwire.follower import Follower, Update, WakeupServer
from weightwire.system import Access, parse_address
from weightwire.telemetry import Metrics
from weightwire.weights import nbytes_of

__all__ = ["follow"]

_LOOK = 0.25  # seconds within which a signal is noticed


def follow(
    url: Url,
    into: Annotated[
        Path, typer.Option("--into", metavar="DIR", help="Directory of the replica. DIR/current is the checkpoint.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Catch up with the newest version and exit.")] = False,
    base: Base = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="from the host name", help="Name of the replica.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve /wake (POST), /metrics and /status."),
    ] = None,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL", help="Engine to keep up to date, such as vllm=http://127.0.0.1:8000; repeatable."
        ),
    ] = None,
    trust: TrustedOrFirst = None,
    max_age: MaxAge = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Keep a replica of the run at URL up to date, until Ctrl-C.

    DIR/current is a complete checkpoint of exactly one version at any time. A follower that was stopped or killed
    continues where it was. Engines are patched while they serve; if that is not possible, they reload DIR/current.
    """
    engines = [_open_engine(text) for text in engine or ()]
    if listen is not None:
        if once:
            raise typer.BadParameter("cannot be used with --once", param_hint="--listen")
        parse_address(listen)
    elif token_file is not None or insecure:
        raise typer.BadParameter("needs --listen", param_hint="--insecure" if insecure else "--token-file")
    access = access_of(token_file, insecure) if listen is not None else Access()
    if name is not None:
        check_name(name)
    note_if_slow()
    # A wrong URL or missing permission fails here: waiting does not help.
    there = find_run(url, wait=not once)
    metrics = None if listen is None else Metrics("follower")
    listener = FollowListener(metrics, as_json=as_json and not once)
    with interrupt_leaves(lambda: _left(into)), ExitStack() as stack:
        stop = None if once else stack.enter_context(stop_on_signal())
        options: dict[str, Any] = {"trust": trust, "max_age": max_age, "threads": threads}
        options |= {"base": base, "name": name, "on_event": listener, "on_progress": listener.progress}
        follower = stack.enter_context(Follower(url, into=into, **options))
        if stop is None:
            _follow_once(url, follower, into, engines, listener, as_json)
            return
        if listen is not None and metrics is not None:
            server = stack.enter_context(_wakeup_server(listen, follower, metrics, access))
            say(f"listening on http://{server.address}")
        if there or wait_for_run(url, stop):
            keeper = stack.enter_context(closing(_keeper(follower, engines, listener))) if engines else None
            _follow(url, follower, keeper, listener, stop, as_json)
        stack.close()
        stop.finish(_left(into))


def _left(into: Path) -> str:
    version = current_version(into)
    return f"{into / 'current'} is version {version}" if version is not None else f"{into} holds no version yet"


def _follow_once(
    url: str, follower: Follower, into: Path, engines: list[Engine], listener: FollowListener, as_json: bool
) -> None:
    with progress_bar("catching up") as listener.progress.bar:
        follower.once()
        checkpoint = follower.checkpoint()
    update = follower.take()
    assert update is not None, "the first update is always there"
    arrival = listener.arrival(update)
    report(update, arrival, into / "current")
    if engines:
        arrival = replace(arrival, pauses=_update_once(follower, engines, update, listener))
    if as_json:
        write_json(_output(url, follower, update, arrival, checkpoint))


def _follow(
    url: str, follower: Follower, keeper: Keeper | None, listener: FollowListener, stop: StopSignal, as_json: bool
) -> None:
    with ExitStack() as first:
        listener.progress.bar = first.enter_context(progress_bar("catching up"))
        while not stop.is_set():
            for update in follower.watch(timeout=_LOOK):
                first.close()
                if keeper is not None:
                    keeper.bring(update)
                arrival = listener.arrival(update)
                report(update, arrival)
                if as_json:
                    directory = follower.replica.directory
                    current = directory / "current" if current_version(directory) == update.version else None
                    write_json_line(_output(url, follower, update, arrival, current and current.resolve()))
                if stop.is_set():
                    break
            if keeper is not None:
                keeper.retry_failed()


def _output(url: str, follower: Follower, update: Update, arrival: Arrival, checkpoint: Path | None) -> FollowOutput:
    position, weights = follower.replica.position, follower.replica.weights
    return FollowOutput(
        url=url_of(url),
        run="" if position is None else position.run,
        version=update.version,
        step=update.step,
        state=update.state,
        time=update.time,
        metrics=dict(update.metrics),
        bytes=arrival.bytes_fetched or 0,
        weights=sum(tensor.count for tensor in weights.values()),
        weights_bytes=nbytes_of(weights),
        checkpoint=None if checkpoint is None else str(checkpoint),
        seconds=round(arrival.seconds, 3),
        behind_seconds=None if arrival.behind_seconds is None else round(arrival.behind_seconds, 3),
        pause_seconds={engine: round(seconds, 6) for engine, seconds in arrival.pauses.items()},
    )


# --- engines -----------------------------------------------------------------------------------------------------


def _open_engine(text: str) -> Engine:
    try:
        return open_engine(text)
    except EngineError as problem:
        example = "use NAME=URL, such as vllm=http://127.0.0.1:8000"
        raise typer.BadParameter(f"{problem.message}; {problem.hint}; {example}", param_hint="--engine") from problem


def _keeper(follower: Follower, engines: list[Engine], listener: FollowListener) -> Keeper:
    """Attaches the engines. One that refuses fails here, before anything is followed."""
    for engine in engines:
        with suppress(EngineGone):  # it may still be starting
            engine.attach()
    return Keeper(follower, engines, on_event=listener)


def _update_once(
    follower: Follower, engines: list[Engine], update: Update, listener: FollowListener
) -> dict[str, float]:
    with closing(_keeper(follower, engines, listener)) as keeper:
        for engine in keeper.engines:
            engine.attach()
        keeper.bring(update)
        if keeper.trouble:
            raise EngineError(keeper.trouble, hint="fix the engine, then run this command again")
        pauses = listener.pop_pauses()
        for engine in keeper.engines:
            paused = f", paused for {1000 * pauses[engine.name]:.0f} ms" if engine.name in pauses else ""
            say(f"{engine.name} serves version {keeper.served}{paused}")
        return pauses


# --- the server of --listen ----------------------------------------------------------------------------------------


def _wakeup_server(address: str, follower: Follower, metrics: Metrics, access: Access) -> WakeupServer:
    def status() -> dict[str, Any]:
        version, head = follower.version, follower.head
        behind = None if version is None else max(0, head - version)
        return {"version": version, "head": None if head < 0 else head, "behind": behind, "trouble": follower.trouble}

    def render() -> bytes:
        metrics.see(follower.version, follower.head)
        return metrics.render()

    return WakeupServer(address, wake=follower.wake, status=status, metrics=render, access=access)
