"""`weightwire demo`: a small model learns Wordle on this machine while its weights travel through a bucket."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from weightwire.bucket import BUCKET_URLS
from weightwire.chain import FENCE
from weightwire.cli.demo.demo_board import beside_bytes, board, changed, fifths, full_bytes, sent_bytes
from weightwire.cli.shared.bucket_command import check_installed
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.run_output import DemoOutput, RewardOutput
from weightwire.cli.shared.stop_signal import interrupt_leaves
from weightwire.cli.shared.terminal import AsJson, byte_size, note_if_slow, say
from weightwire.demo.programs import OWN_SERVER, needed_modules, startable_engines
from weightwire.demo.scenario import DemoOptions, DemoResult, run_demo
from weightwire.errors import EngineError, OutputError, printable
from weightwire.page.document import exported
from weightwire.page.run_view import RunView

__all__ = ["demo"]

_STEPS, _QUICK = 45, 10
_NEEDED = ("plotly", "starlette", "torch", "transformers", "uvicorn", "websockets")


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Train {_QUICK} steps instead of {_STEPS}: under a minute.")
    ] = False,
    bucket: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default="a new directory",
            help=f"Bucket for the weights: {BUCKET_URLS}.",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Inference engine of the replicas: torch or vllm.")
    ] = OWN_SERVER,
    replicas: Annotated[int, typer.Option(metavar="N", min=1, max=16, help="Number of replicas.")] = 2,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=2, show_default=str(_STEPS), help="Number of training steps.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the training.")] = 0,
    into: Annotated[
        Path,
        typer.Option(
            "--into", metavar="DIR", help="Directory for logs, replicas and the page. Each demo adds a folder."
        ),
    ] = Path("weightwire-demo"),
    as_json: AsJson = False,
) -> None:
    """Train a small model and watch its weights travel to replicas.

    The model learns Wordle. The environment, the trainer and the replicas are separate processes that know each other
    only by URL. Halfway, the demo kills a replica and lets it catch up. At the end it compares the weights of all of
    them, bit by bit.
    """
    try:
        needed = needed_modules(engine)
    except EngineError as problem:
        known = " or ".join(startable_engines())
        raise typer.BadParameter(f"{problem.message}; choose {known}", param_hint="--engine") from problem
    check_installed("the demo", _NEEDED, "demo")
    check_installed("the demo", needed, engine)
    note_if_slow()
    steps = steps or (_QUICK if quick else _STEPS)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    root = (into / name).absolute()
    run = f"{bucket.rstrip('/')}/{name}" if bucket else str(root / "bucket")
    left = f"logs and replicas are in {root}"
    try:
        with interrupt_leaves(lambda: left), board(steps) as view:
            result = run_demo(DemoOptions(run, root, steps, seed, engine, replicas), view)
    except SystemExit:
        say(f"stopped: {left}")
        raise
    page = _write_page(result.snapshot, root / "page.html")
    if as_json:
        write_json(_figures(result, run, page))
    else:
        say(_learned(result.snapshot, steps))
        for line in _summary(result, run, page):
            print(printable(line))


def _write_page(snapshot: RunView, path: Path) -> Path:
    """Exports the last snapshot: its history is longer than what heartbeats still hold."""
    try:
        path.write_bytes(exported(msgspec.json.encode(snapshot)))
    except OSError as problem:
        raise OutputError(
            f"{path}: cannot write the page ({problem.strerror})", hint="check the free disk space"
        ) from problem
    return path


def _summary(result: DemoResult, run: str, page: Path) -> Iterator[str]:
    snapshot = result.snapshot
    sent, full = sent_bytes(snapshot), full_bytes(snapshot)
    versions = sum(one.kind != FENCE for one in snapshot.versions)
    beside = beside_bytes(snapshot)
    more = f", plus {byte_size(beside)} of anchors for late joiners" if beside else ""
    yield f"sent       {byte_size(sent)} to each replica for {versions} versions{more}"
    yield f"full sync  {byte_size(full)}, {full / sent:.0f}x more"
    *others, last = result.proof.holders
    same = f"hold the same bits: version {snapshot.versions[-1].version}, state {result.proof.state[:12]}"
    yield f"bit-exact  {', '.join(others)} and {last} {same}"
    yield f"page       {page}"
    yield f"next       see this run live: {_program()} page {run}"
    yield f"           publish your own checkpoint: {_program()} publish DIR URL"


def _program() -> str:
    """The command that runs weightwire here: the name alone if it is on the PATH."""
    found = shutil.which("weightwire")
    here = Path(sys.executable).parent / "weightwire"
    return "weightwire" if found and Path(found).resolve() == here.resolve() else os.path.relpath(here)


def _learned(snapshot: RunView, steps: int) -> str:
    reward, share = fifths(snapshot), changed(snapshot)
    parts = []
    if reward is not None:
        few = " (too few steps to tell)" if steps < _STEPS // 2 else ""
        parts.append(f"mean reward {reward[0]:.3f} in the first fifth of the steps, {reward[1]:.3f} in the last{few}")
    if share is not None:
        parts.append(f"each step changed {share:.2%} of the weights on average")
    return "; ".join(parts)


def _figures(result: DemoResult, url: str, page: Path) -> DemoOutput:
    snapshot = result.snapshot
    reward = fifths(snapshot)
    return DemoOutput(
        url=url,
        version=snapshot.versions[-1].version,
        state=result.proof.state,
        holders=list(result.proof.holders),
        bytes=sent_bytes(snapshot),
        anchor_bytes=beside_bytes(snapshot),
        full_bytes=full_bytes(snapshot),
        changed_fraction=changed(snapshot),
        reward=None if reward is None else RewardOutput(first=reward[0], last=reward[1]),
        pause_seconds={one.name: one.pause for one in snapshot.replicas},
        seconds=round(result.seconds, 1),
        page=str(page),
    )
