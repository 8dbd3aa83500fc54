"""`weightwire follow`: a run -> a replica on this machine, once or for as long as it runs."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Event as Stop
from typing import Annotated, Any

import typer

from weightwire.bucket import open_bucket
from weightwire.chain import read_run
from weightwire.cli.running import Url, with_bucket
from weightwire.cli.stopping import stopping
from weightwire.cli.terminal import AsJson, Threads, byte_size, note_if_slow, progress_bar, say, write_json
from weightwire.commit import Heartbeat
from weightwire.engines.keeping import Keeper
from weightwire.engines.vllm.client import VllmEngine
from weightwire.errors import EngineError, EngineGone, NoRun, Unavailable
from weightwire.events import Event
from weightwire.follower import Follower, Update
from weightwire.follower.listen import Door, parse_address
from weightwire.metrics import Metrics

__all__ = ["follow"]

_LOOK = 0.25  # seconds, in which a signal is noticed
_SLOWEST = 10.0  # seconds between two looks for a run


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
        typer.Option(metavar="vllm=URL", help="A vLLM on this machine to keep up to date; may be given several times."),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Keep a replica of the run at URL up to date, until Ctrl-C.

    DIR/current is a complete checkpoint of exactly one version at any time. A follower that was stopped or killed goes
    on where it was. Engines are patched while they serve, and reloaded from DIR/current where that is not possible.
    """
    urls = [_engine_url(text) for text in engine or ()]
    if listen is not None:
        if once:
            raise typer.BadParameter("is of no use with --once", param_hint="--listen")
        parse_address(listen)
    if name is not None:
        _check_name(name)
    note_if_slow()
    # What is wrong with the URL or the rights to it does not pass by waiting.
    there = _find_run(url, wait=not once)
    ear = _Ear(Metrics("follower") if listen is not None else None)
    if once:
        with Follower(url, into=into, base=base, name=name, threads=threads, on_event=ear) as follower:
            _follow_once(follower, ear, as_json)
            if urls:
                _bring_once(follower, urls, ear)
        return
    with ExitStack() as stack:
        stop = stack.enter_context(stopping())
        follower = Follower(url, into=into, base=base, name=name, threads=threads, on_event=ear)
        stack.enter_context(follower)
        if listen is not None:
            _listen(stack.enter_context(_door(listen, follower, ear)))
        if there or _wait_for_run(url, stop):
            keeper = stack.enter_context(closing(_keeper(follower, urls, ear))) if urls else None
            _follow(follower, keeper, ear, stop, as_json)
    say(f"stopped at {_name(follower.version)}: {into / 'current'}" if follower.version is not None else "stopped")


def _check_name(name: str) -> None:
    try:
        Heartbeat(run="0" * 32, name=name, version=0, head=0, lease=0.0)
    except ValueError as problem:
        raise typer.BadParameter(
            "takes up to 100 letters, digits, dots, dashes and underscores", param_hint="--name"
        ) from problem


def _follow_once(follower: Follower, ear: _Ear, as_json: bool) -> None:
    began = time.perf_counter()
    with progress_bar("catching up"):
        version = follower.once()
    seconds, nbytes = time.perf_counter() - began, ear.take()
    where = follower.checkpoint()
    news = f"{byte_size(nbytes)}, {seconds:.2f} s" if ear.versions else "nothing new"
    say(f"{_name(version)}: {news}")
    if as_json:
        write_json({"version": version, "bytes": nbytes, "seconds": round(seconds, 3), "checkpoint": str(where)})


def _follow(follower: Follower, keeper: Keeper | None, ear: _Ear, stop: Stop, as_json: bool) -> None:
    while not stop.is_set():
        for update in follower.watch(timeout=_LOOK):
            if keeper is not None:
                keeper.bring(update)
            _tell(update, ear, as_json)
            if stop.is_set():
                break
        if keeper is not None:
            keeper.look()


# --- engines -----------------------------------------------------------------------------------------------------


def _engine_url(text: str) -> str:
    kind, _, url = text.partition("=")
    if kind != "vllm" or not url.startswith(("http://", "https://")):
        raise typer.BadParameter(
            f"{text!r} is no engine that is known: write vllm=http://127.0.0.1:8000", param_hint="--engine"
        )
    return url


def _keeper(follower: Follower, urls: list[str], ear: _Ear) -> Keeper:
    """Each must be there and willing now: what is wrong with it is better said before anything is followed."""
    engines = [VllmEngine(url) for url in urls]
    for engine in engines:
        with suppress(EngineGone):  # it may still be starting
            engine.attach()
    return Keeper(follower, engines, on_event=ear)


def _bring_once(follower: Follower, urls: list[str], ear: _Ear) -> None:
    with closing(_keeper(follower, urls, ear)) as keeper:
        for engine in keeper.engines:
            engine.attach()
        update = follower.take()
        if update is not None:
            keeper.bring(update)
        if keeper.trouble:
            raise EngineError(keeper.trouble, hint="see above")
        for engine in keeper.engines:
            paused = f", paused for {1000 * ear.pauses[engine.name]:.0f} ms" if engine.name in ear.pauses else ""
            say(f"{engine.name} serves {_name(keeper.served)}{paused}")


# --- what is told ------------------------------------------------------------------------------------------------


def _tell(update: Update, ear: _Ear, as_json: bool) -> None:
    nbytes, committed = ear.take(), getattr(update, "time", 0.0)
    behind = max(0.0, time.time() - committed) if committed and nbytes else None
    late = "" if behind is None else f", {behind:.2f} s behind the commit"
    step = "" if update.step is None else f" (step {update.step})"
    pauses, ear.pauses = ear.pauses, {}
    fetched = byte_size(nbytes) if nbytes else "held already"
    paused = "".join(f", {engine} paused for {1000 * seconds:.0f} ms" for engine, seconds in pauses.items())
    say(f"{_name(update.version)}{step}: {fetched}{late}{paused}")
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
        print(json.dumps(line), flush=True)


def _name(version: int | None) -> str:
    return f"version {version}"


# --- the run -----------------------------------------------------------------------------------------------------


def _find_run(url: str, wait: bool) -> bool:
    """Whether there is one. What may pass is left to the follower, if it is to wait."""
    try:
        with_bucket(url, read_run)
    except NoRun:
        if not wait:
            raise
        return False
    except Unavailable:
        if not wait:
            raise
    return True


def _wait_for_run(url: str, stop: Stop) -> bool:
    """Returns whether there is one now; there is none if it was stopped before."""
    say(f"waiting for a run at {open_bucket(url).url}")
    seconds = 1.0
    while not stop.wait(seconds):
        if _find_run(url, wait=True):
            return True
        seconds = min(1.2 * seconds, _SLOWEST)
    return False


# --- what it says of itself --------------------------------------------------------------------------------------


class _Ear:
    """Hears of everything in the follower's thread: counts bytes, and passes warnings on."""

    def __init__(self, metrics: Metrics | None) -> None:
        self.metrics = metrics
        self.versions = 0
        self.pauses: dict[str, float] = {}  # engines, and for how long they did not serve
        self._nbytes = 0
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if self.metrics is not None:
            self.metrics(event)
        if event.stage == "apply":
            with self._lock:
                self._nbytes += event.nbytes
                self.versions += 1
        elif event.stage == "swap":
            self.pauses[event.message] = event.seconds
        elif event.stage == "warning":
            message, _, hint = event.message.partition("\nhint: ")
            say(f"warning: {message}")
            if hint:
                say(f"hint: {hint}")
        elif event.stage == "recovered":
            say(event.message)

    def take(self) -> int:
        """Bytes since it was asked last."""
        with self._lock:
            nbytes, self._nbytes = self._nbytes, 0
            return nbytes


def _door(address: str, follower: Follower, ear: _Ear) -> Door:
    metrics = ear.metrics
    assert metrics is not None

    def status() -> dict[str, Any]:
        version, head = follower.version, follower.head
        behind = None if version is None else max(0, head - version)
        return {"version": version, "head": None if head < 0 else head, "behind": behind, "trouble": follower.trouble}

    def render() -> bytes:
        metrics.see(follower.version, follower.head)
        return metrics.render()

    return Door(address, wake=follower.wake, status=status, metrics=render)


def _listen(door: Door) -> None:
    say(f"listening on http://{door.address}")
