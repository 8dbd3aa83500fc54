"""`weightwire serve`: a completion server whose weights follow a run."""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from weightwire.bucket import BUCKET_URLS, Bucket
from weightwire.catchup import fetch_side_file
from weightwire.chain import ChainReader, Run, read_run
from weightwire.cli.shared.bucket_command import check_installed, with_bucket
from weightwire.cli.shared.follow_output import FollowListener, check_name, find_run, report, wait_for_run
from weightwire.cli.shared.listen_options import Insecure, MaxBehind, MaxLag, TokenFile, access_of
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.cli.shared.stop_signal import StopSignal, interrupt_leaves, stop_on_signal
from weightwire.cli.shared.terminal import note_if_slow, say
from weightwire.cli.shared.trust_options import MaxAge, TrustedOrFirst
from weightwire.engines import Keeper, ReadyCheck, ReadyLimits
from weightwire.errors import CheckpointError, EngineError, MissingDependency, NoRun, Unavailable
from weightwire.follower import Follower
from weightwire.telemetry import Metrics, each_listener
from weightwire.weights import ADAPTER_CONFIG, ADAPTER_FILE, DEFAULT_DTYPE, weights_file_name

__all__ = ["RunKind", "check_kind", "dtype_of_run", "serve"]

_LOOK = 0.25  # seconds within which a signal is noticed
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_TRIES = 20  # attempts to load the run's weights into the model


def serve(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Checkpoint with a tokenizer. It is served until the run has a version."),
    ],
    follow: Annotated[
        str,
        typer.Option("--follow", metavar="URL", help=f"The run: {BUCKET_URLS}."),
    ],
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="a temporary directory, removed at the end",
            help="Directory of the replica. Keep it for a fast restart.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="from the host name", help="Name of the replica.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="MODEL",
            help="Name of the model in requests. Repeatable; answers contain the first one.",
        ),
    ] = None,
    max_behind: MaxBehind = None,
    max_lag: MaxLag = None,
    trust: TrustedOrFirst = None,
    max_age: MaxAge = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default="one per core", help="Number of threads for generation."),
    ] = None,
) -> None:
    """Serve completions of MODEL with the newest weights of a run.

    Serves OpenAI's /v1/completions and /v1/chat/completions until Ctrl-C. Each choice names the versions that its
    tokens came from. New versions are swapped in between two tokens. MODEL is loaded in the dtype of the run, or in
    bfloat16 before the run exists. If the run is an adapter, MODEL is its base model, in its own dtype.
    """
    access, check = access_of(token_file, insecure), ReadyCheck(ReadyLimits(max_behind, max_lag))
    _check_arguments(model, name)
    from weightwire.server.http_listener import HttpListener
    from weightwire.server.routes import Routes

    note_if_slow()
    listener, routes = FollowListener(metrics := Metrics("follower")), Routes(metrics)
    served: list[int] = []
    with interrupt_leaves(lambda: _left(served)), ExitStack() as stack:
        listening = stack.enter_context(HttpListener(routes.app, host, port, access=access))
        # A wrong URL or missing permission fails here: waiting does not help.
        there = find_run(follow, wait=True)
        kind = _kind_at(follow, RunKind())
        say(f"listening on {listening.url}: it answers 503 until the weights are loaded")
        directory = into or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightwire-")))
        # MODEL may be the run's base, which is not in the bucket.
        options: dict[str, Any] = {"trust": trust, "max_age": max_age, "threads": threads}
        options |= {"base": model, "name": name, "on_event": each_listener(check, listener)}
        follower = stack.enter_context(Follower(follow, into=directory, on_progress=listener.progress, **options))
        say(f"loading {model}")
        # Here, because torch and transformers take seconds to import.
        from weightwire.server.service import serving

        service = stack.enter_context(serving(model, follower, threads, kind.dtype, served_model_name, kind.adapter))
        stop = stack.enter_context(stop_on_signal())
        keeper = stack.enter_context(closing(Keeper(follower, [service.engine], on_event=listener)))
        versions = _Versions(follower, keeper, listener)
        if there:
            check_kind(follow, kind)
            _catch_up(follow, versions, stop)
        routes.open(service, lambda: check.state(follower, keeper))
        say(f"serving {model if keeper.served is None else f'version {keeper.served}'} on {listening.url}")
        if there or _wait_for_run(follow, kind, stop):
            while not stop.is_set():
                versions.serve_new(stop)
        served += [] if keeper.served is None else [keeper.served]
        listening.close()  # before the rest, so that pending requests are answered
        stack.close()
        stop.finish(_left(served))


def _check_arguments(model: Path, name: str | None) -> None:
    if name is not None:
        check_name(name)
    _check_is_local(model)
    check_installed("serve", ("starlette", "torch", "transformers", "uvicorn"), "serve")


def _check_is_local(model: Path) -> None:
    """Names of the Hub are not downloaded."""
    if model.exists():
        return
    on_hub = _HUB_NAME.fullmatch(str(model))
    hint = f"download it with `hf download {model} --local-dir DIR`, and pass DIR" if on_hub else "check the path"
    raise CheckpointError(f"{model}: no such file or directory", hint=hint)


def _left(served: list[int]) -> str:
    return f"version {served[-1]} was served last" if served else "no version was served"


# --- the run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunKind:
    """What MODEL must be loaded for: the dtype of a run and, if it is an adapter, its adapter_config.json."""

    dtype: str = DEFAULT_DTYPE
    adapter: bytes | None = None


def dtype_of_run(run: Run) -> str:
    """The dtype of most float weights, under its name in torch."""
    sizes: Counter[str] = Counter()
    for dtype, shape in run.schema.values():
        sizes[dtype.array_name] += math.prod(shape) if dtype.is_castable else 0
    (name, size), *_ = sizes.most_common(1) or [("", 0)]
    return name if size else DEFAULT_DTYPE


async def _kind_in(bucket: Bucket) -> RunKind:
    run = await read_run(bucket)
    if weights_file_name(run.schema) != ADAPTER_FILE:
        return RunKind(dtype_of_run(run))
    if find_spec("peft") is None:
        raise MissingDependency(
            f"{bucket.url}: the run is an adapter, and peft is not installed", hint="pip install peft"
        )
    config = next((file for file in run.files if file.name == ADAPTER_CONFIG), None)
    if config is None:
        raise EngineError(
            f"{bucket.url}: the run is an adapter without {ADAPTER_CONFIG}",
            hint="publish the directory that PEFT has saved, or the PEFT model itself, to another URL",
        )
    return RunKind(dtype_of_run(run), await fetch_side_file(bucket, config))


def _kind_at(url: str, default: RunKind) -> RunKind:
    try:
        return with_bucket(url, _kind_in)
    except (NoRun, Unavailable):
        return default


def check_kind(url: str, kind: RunKind) -> None:
    """Raises if the model was loaded for another kind of run, before the run existed."""
    found = _kind_at(url, kind)
    if found.dtype != kind.dtype:
        raise EngineError(
            f"the weights of the run are {found.dtype}, but MODEL was loaded in {kind.dtype}",
            hint="run `weightwire serve` again: it loads MODEL in the dtype of the run",
        )
    if found.adapter != kind.adapter:
        raise EngineError(
            f"{url}: the run is an adapter that MODEL was not loaded for",
            hint="run `weightwire serve` again: it loads MODEL as the base of the adapter",
        )


def _wait_for_run(url: str, kind: RunKind, stop: StopSignal) -> bool:
    """Whether a run that fits the model has appeared."""
    if not wait_for_run(url, stop):
        return False
    check_kind(url, kind)
    return True


@dataclass(frozen=True)
class _Versions:
    """Passes versions from the follower to the model."""

    follower: Follower
    keeper: Keeper
    listener: FollowListener

    def serve_new(self, stop: StopSignal, *, once: bool = False) -> None:
        """Serves new versions until there has been none for a moment. With `once` it serves at most one."""
        for update in self.follower.watch(timeout=_LOOK):
            self.keeper.bring(update)
            report(update, self.listener.arrival(update))
            if once or stop.is_set():
                break
        self.keeper.retry_failed()


def _catch_up(url: str, versions: _Versions, stop: StopSignal) -> None:
    """Serves the newest version from the start, if there is one and it can be fetched."""
    try:
        newest = with_bucket(url, _newest)
    except Unavailable:
        return
    with progress_bar("catching up") as versions.listener.progress.bar:
        _update_to(newest, versions, stop)


def _update_to(newest: int, versions: _Versions, stop: StopSignal) -> None:
    failed, keeper = 0, versions.keeper
    while (-1 if keeper.served is None else keeper.served) < newest:
        if stop.is_set() or versions.follower.trouble:
            return
        versions.serve_new(stop, once=True)  # new versions may arrive faster than this loop ends
        failed = failed + 1 if keeper.trouble else 0
        if failed > _TRIES:
            raise EngineError(keeper.trouble, hint="pass a checkpoint of the run's model as MODEL")


async def _newest(bucket: Bucket) -> int:
    """The newest version; -1 before the first weights."""
    head = await ChainReader(bucket, await read_run(bucket)).read_head()
    return head.record.version if head is not None and head.record.after else -1
