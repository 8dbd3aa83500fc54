"""`weightwire demo`: a model learns Wordle while its weights travel through a bucket; everything on this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from weightwire.chain import FENCE
from weightwire.cli.demo.demo_board import beside_bytes, board, changed, fifths, full_bytes, sent_bytes
from weightwire.cli.shared.bucket_command import check_installed
from weightwire.cli.shared.terminal import AsJson, byte_size, note_if_slow, say, write_json
from weightwire.demo.programs import OWN_SERVER, needed_modules
from weightwire.demo.scenario import DemoOptions, DemoResult, run_demo
from weightwire.engines import engine_names
from weightwire.errors import EngineError, OutputError
from weightwire.page.document import exported
from weightwire.page.run_view import RunView

__all__ = ["demo"]

_STEPS, _QUICK = 45, 10
_NEEDED = ("plotly", "starlette", "torch", "transformers", "uvicorn", "websockets")


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{_QUICK} steps instead of {_STEPS}: under a minute.")
    ] = False,
    bucket: Annotated[
        str | None,
        typer.Option(
            metavar="URL", show_default="a directory", help="Where the weights travel: s3://, gs://, az://, hf://."
        ),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="What serves: torch or vllm, for example.")] = OWN_SERVER,
    replicas: Annotated[int, typer.Option(metavar="N", min=1, max=16, help="How many of them.")] = 2,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=2, show_default=str(_STEPS), help="Training steps.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="For another course of events.")] = 0,
    into: Annotated[
        Path, typer.Option("--into", metavar="DIR", help="Where logs, replicas and the page go: a folder per demo.")
    ] = Path("weightwire-demo"),
    as_json: AsJson = False,
) -> None:
    """Train a small model on Wordle, and watch its weights travel.

    An environment, a trainer and replicas are started as processes of their own, which are told URLs and nothing else.
    Half way a replica is killed, and catches up. In the end the bits of all of them are compared.
    """
    try:
        needed = needed_modules(engine)
    except EngineError as problem:
        known = ", ".join([OWN_SERVER, *engine_names()])
        raise typer.BadParameter(f"{problem.message}; choose one of {known}", param_hint="--engine") from problem
    check_installed("the demo", _NEEDED, "demo")
    check_installed("the demo", needed, engine)
    note_if_slow()
    steps = steps or (_QUICK if quick else _STEPS)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    root = (into / name).absolute()
    run = f"{bucket.rstrip('/')}/{name}" if bucket else str(root / "bucket")
    try:
        with board(steps) as view:
            result = run_demo(DemoOptions(run, root, steps, seed, engine, replicas), view)
    except (KeyboardInterrupt, SystemExit):
        say(f"stopped; what there is of it is in {root}")
        raise
    page = _write_page(result.picture, root / "page.html")
    if as_json:
        write_json(_figures(result, run, page))
    else:
        say(_learnt(result.picture, steps))
        for line in _summary(result, run, page):
            print(line)


def _write_page(picture: RunView, path: Path) -> Path:
    """All that was seen of the run, which is more than heartbeats still tell."""
    try:
        path.write_bytes(exported(msgspec.json.encode(picture)))
    except OSError as problem:
        raise OutputError(
            f"{path}: cannot be written ({problem.strerror})", hint="see whether the disk is full"
        ) from problem
    return path


def _summary(result: DemoResult, run: str, page: Path) -> Iterator[str]:
    picture = result.picture
    sent, full = sent_bytes(picture), full_bytes(picture)
    versions = sum(one.kind != FENCE for one in picture.versions)
    beside = beside_bytes(picture)
    more = f" (and {byte_size(beside)} of anchors, for who comes later)" if beside else ""
    full_sync = f"all weights each time would be {byte_size(full)}, {full / sent:.0f}x more"
    yield f"sent       {byte_size(sent)} for {versions} versions{more}; {full_sync}"
    same = f"hold the same bits: state {result.proof.state[:12]} of version {picture.versions[-1].version}"
    yield f"bit-exact  {', '.join(result.proof.holders)} {same}"
    yield f"page       {page} (live: {_program()} page {run})"


def _program() -> str:
    """What to type to run this again: the name alone, where a shell finds it."""
    found = shutil.which("weightwire")
    here = Path(sys.executable).parent / "weightwire"
    return "weightwire" if found and Path(found).resolve() == here.resolve() else os.path.relpath(here)


def _learnt(picture: RunView, steps: int) -> str:
    reward, share = fifths(picture), changed(picture)
    parts = []
    if reward is not None:
        few = " (too few steps to tell)" if steps < _STEPS // 2 else ""
        parts.append(f"reward {reward[0]:.3f} in the first fifth of the steps, {reward[1]:.3f} in the last{few}")
    if share is not None:
        parts.append(f"{share:.2%} of the weights changed per step")
    return "; ".join(parts)


def _figures(result: DemoResult, run: str, page: Path) -> dict[str, Any]:
    picture = result.picture
    learnt = fifths(picture)
    return {
        "run": run,
        "version": picture.versions[-1].version,
        "state": result.proof.state,
        "holders": list(result.proof.holders),
        "sent_bytes": sent_bytes(picture),
        "beside_bytes": beside_bytes(picture),
        "full_bytes": full_bytes(picture),
        "changed_fraction": changed(picture),
        "reward_first_fifth": learnt and learnt[0],
        "reward_last_fifth": learnt and learnt[1],
        "pause_seconds": {one.name: one.pause for one in picture.replicas},
        "seconds": round(result.seconds, 1),
        "page": str(page),
    }
