"""`weightwire follow`: keeps a replica of a run on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weightwire.cli.shared.bucket_command import Base, Url, url_of
from weightwire.cli.shared.engine_updates import late_engines, open_engines, update_once
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
from weightwire.cli.shared.listen_options import Insecure, MaxBehind, MaxLag, TokenFile, access_of
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.cli.shared.run_output import FollowOutput
from weightwire.cli.shared.status_server import open_status_server
from weightwire.cli.shared.stop_signal import StopSignal, interrupt_leaves, stop_on_signal
from weightwire.cli.shared.terminal import AsJson, Threads, note_if_slow, say
from weightwire.cli.shared.trust_options import MaxAge, TrustedOrFirst
from weightwire.engines import CachePolicy, Engine, EngineStatus, Keeper, ReadyCheck, ReadyLimits
from weightwire.follower import Follower, Update
from weightwire.system import Access, parse_address
from weightwire.telemetry import Metrics, each_listener
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
        typer.Option(metavar="HOST:PORT", help="Serve /wake (POST), /healthz, /readyz, /status and /metrics."),
    ] = None,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL", help="Engine to keep up to date, such as vllm=http://127.0.0.1:8000; repeatable."
        ),
    ] = None,
    cache: Annotated[
        CachePolicy,
        typer.Option(
            help="What a patch does to the KV cache of running requests: 'flush' lets them compute it again with the "
            "new weights, 'keep' leaves it, for a shorter gap. New requests never see cached prefixes of old weights."
        ),
    ] = "flush",
    max_behind: MaxBehind = None,
    max_lag: MaxLag = None,
    trust: TrustedOrFirst = None,
    max_age: MaxAge = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Keep a replica of the run at URL up to date, until Ctrl-C.

    DIR/current is a complete checkpoint of exactly one version at any time. A follower that was stopped or killed
    continues where it was. Engines are patched while they serve; if that is not possible, they reload DIR/current.
    """
    engines = open_engines(engine or (), cache)
    needs_listen: dict[str, Any] = {"--token-file": token_file, "--insecure": insecure or None}
    needs_listen |= {"--max-behind": max_behind, "--max-lag": max_lag}
    _check_listen(listen, once, [name for name, value in needs_listen.items() if value is not None])
    access = access_of(token_file, insecure) if listen is not None else Access()
    if name is not None:
        check_name(name)
    note_if_slow()
    # A wrong URL or missing permission fails here: waiting does not help.
    there = find_run(url, wait=not once)
    metrics = None if listen is None else Metrics("follower")
    listener = FollowListener(metrics, as_json=as_json and not once)
    check = ReadyCheck(ReadyLimits(max_behind, max_lag))
    with interrupt_leaves(lambda: _left(into)), ExitStack() as stack:
        stop = None if once else stack.enter_context(stop_on_signal())
        options: dict[str, Any] = {"trust": trust, "max_age": max_age, "threads": threads}
        options |= {
            "base": base,
            "name": name,
            "on_event": each_listener(check, listener),
            "on_progress": listener.progress,
        }
        follower = stack.enter_context(Follower(url, into=into, **options))
        if stop is None:
            _follow_once(url, follower, into, engines, listener, as_json)
            return
        keeper = stack.enter_context(closing(_keeper(follower, engines, listener))) if engines else None
        if listen is not None and metrics is not None:
            server = open_status_server(listen, follower, keeper, check, metrics, access)
            say(f"listening on http://{stack.enter_context(server).address}")
        if there or wait_for_run(url, stop):
            _follow(url, follower, keeper, listener, stop, as_json)
        statuses = keeper.statuses() if keeper is not None else ()
        stack.close()
        stop.finish(_left(into, statuses))


def _check_listen(listen: str | None, once: bool, options: list[str]) -> None:
    """`options` are those given that need --listen."""
    if listen is None and options:
        raise typer.BadParameter("needs --listen", param_hint=options[0])
    if listen is not None:
        if once:
            raise typer.BadParameter("cannot be used with --once", param_hint="--listen")
        parse_address(listen)


def _left(into: Path, statuses: Iterable[EngineStatus] = ()) -> str:
    version = current_version(into)
    held = f"{into / 'current'} is version {version}" if version is not None else f"{into} holds no version yet"
    return held + late_engines(statuses, version)


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
        pauses = update_once(follower, engines, update, listener)
        arrival = replace(arrival, pauses=pauses, served_version=update.version)
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
                arrival, late = listener.arrival(update), ""
                if keeper is not None:
                    arrival = replace(arrival, served_version=keeper.served)
                    late = late_engines(keeper.statuses(), update.version)
                report(update, arrival, engines=late)
                if as_json:
                    directory = follower.replica.directory
                    current = directory / "current" if current_version(directory) == update.version else None
                    write_json_line(_output(url, follower, update, arrival, current and current.resolve()))
                if stop.is_set():
                    break
            if keeper is not None:
                keeper.check_accepted()
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
        served_version=arrival.served_version,
        pause_seconds={engine: round(seconds, 6) for engine, seconds in arrival.pauses.items()},
    )


def _keeper(follower: Follower, engines: list[Engine], listener: FollowListener) -> Keeper:
    """Contacts the engines in the background: one that hangs must not delay the start."""
    keeper = Keeper(follower, engines, on_event=listener)
    keeper.connect()
    return keeper
