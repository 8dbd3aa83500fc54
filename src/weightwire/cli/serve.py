"""`weightwire serve`: a model as a completion server, whose weights follow a run."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event as Stop
from typing import Annotated

import typer

from weightwire.bucket import Bucket
from weightwire.chain import ChainReader, read_run
from weightwire.cli.shared.bucket_command import check_installed, with_bucket
from weightwire.cli.shared.follow_output import FollowListener, check_name, find_run, tell, wait_for_run
from weightwire.cli.shared.stop_signal import stop_on_signal
from weightwire.cli.shared.terminal import note_if_slow, say
from weightwire.engines.version_keeper import Keeper
from weightwire.errors import EngineError, Unavailable
from weightwire.follower import Follower
from weightwire.telemetry import Metrics

__all__ = ["serve"]

_LOOK = 0.25  # seconds, in which a signal is noticed
_TRIES = 20  # looks at a model that does not take the run's weights


def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint with tokenizer: what is served first.")],
    follow: Annotated[
        str, typer.Option("--follow", metavar="URL", help="The run: s3://BUCKET/PREFIX, another bucket, a directory.")
    ],
    host: Annotated[str, typer.Option(metavar="HOST", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Where to listen; 0 is any.")] = 8000,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="a temporary directory, removed at the end",
            help="The replica. One that is kept makes a restart quick.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="by the host", help="What others see it under.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default="one per core", help="How many threads to generate with."),
    ] = None,
) -> None:
    """Serve completions of MODEL, with the weights of the run at URL as they come, until Ctrl-C.

    OpenAI's POST /v1/completions; each choice says which versions its tokens came from. New versions are swapped in
    between two tokens. Until the run has one, MODEL is served as it is. It is loaded in bfloat16, as runs are.
    """
    if name is not None:
        check_name(name)
    check_installed("serve", ("starlette", "torch", "transformers", "uvicorn"), "serve")
    from weightwire.server.http_listener import HttpListener
    from weightwire.server.routes import Routes

    note_if_slow()
    metrics = Metrics("follower")
    listener, routes = FollowListener(metrics), Routes(metrics)
    with ExitStack() as stack:
        listening = stack.enter_context(HttpListener(routes.app, host, port))
        # What is wrong with the URL or the rights to it does not pass by waiting.
        there = find_run(follow, wait=True)
        directory = into or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightwire-")))
        # A run may start from just this checkpoint, and not have it in the bucket.
        follower = Follower(follow, into=directory, base=model, name=name, threads=threads, on_event=listener)
        stack.enter_context(follower)
        say(f"loading {model}")
        # Only now: torch and transformers take seconds to import.
        from weightwire.server.service import serving

        service = stack.enter_context(serving(model, follower, threads))
        stop = stack.enter_context(stop_on_signal())
        keeper = stack.enter_context(closing(Keeper(follower, [service.engine], on_event=listener)))
        if there:
            _catch_up(follow, follower, keeper, listener, stop)
        routes.open(service)
        what = f"{model}" if keeper.served is None else f"version {keeper.served}"
        say(f"serving {what} on {listening.url}")
        if there or wait_for_run(follow, stop):
            _follow(follower, keeper, listener, stop)
        listening.close()  # first, so that what has been asked is still answered
    say("stopped" if keeper.served is None else f"stopped at version {keeper.served}")


# --- the run -----------------------------------------------------------------------------------------------------


def _catch_up(url: str, follower: Follower, keeper: Keeper, listener: FollowListener, stop: Stop) -> None:
    """What the run has now is served from the start, if there is any and it can be had."""
    try:
        newest = with_bucket(url, _newest)
    except Unavailable:
        return
    failed = 0
    while (-1 if keeper.served is None else keeper.served) < newest and not stop.is_set() and not follower.trouble:
        for update in follower.watch(timeout=_LOOK):
            keeper.bring(update)
            tell(update, listener)
            break  # they may come so quickly that there is always another one
        keeper.look()
        failed = failed + 1 if keeper.trouble else 0
        if failed > _TRIES:
            raise EngineError(keeper.trouble, hint="MODEL must be the model of the run, in another version or the same")


async def _newest(bucket: Bucket) -> int:
    """The newest version; -1 while there are no weights."""
    head = await ChainReader(bucket, await read_run(bucket)).read_head()
    return head.record.version if head is not None and head.record.after else -1


def _follow(follower: Follower, keeper: Keeper, listener: FollowListener, stop: Stop) -> None:
    while not stop.is_set():
        for update in follower.watch(timeout=_LOOK):
            keeper.bring(update)
            tell(update, listener)
            if stop.is_set():
                break
        keeper.look()
