"""`weightwire patch`: a checkpoint and a delta -> the checkpoint after it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from weightwire import Delta, OutputError, State
from weightwire.cli.shared.terminal import (
    AsJson,
    Threads,
    byte_size,
    counted,
    note_if_slow,
    progress_bar,
    say,
    write_json,
)
from weightwire.delta import patch_checkpoint
from weightwire.weights import Checkpoint, nbytes_of

__all__ = ["patch"]


def patch(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="A safetensors file or a checkpoint directory.")],
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="A delta that was made for it, or an anchor.")],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="The file or directory to write: like BASE.")
    ],
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write what BASE becomes by DELTA.

    BASE and the result are verified by their digests. OUT appears all at once or not at all, with the same
    shards and side files as BASE.
    """
    began = time.perf_counter()
    opened = Delta.open(delta)
    if out.exists() and out.samefile(delta):
        raise OutputError(f"{out}: is the delta itself", hint="name another place for the result")
    note_if_slow()
    total = nbytes_of(Checkpoint(base))
    with progress_bar("patching", 2 * total) as progress:
        state = patch_checkpoint(base, opened, out, threads=threads, progress=progress)
    seconds = time.perf_counter() - began
    _tell(opened, out, state, seconds)
    if as_json:
        summary = {
            "base": str(base),
            "delta": str(delta),
            "out": str(out),
            "before": opened.before or None,
            "after": opened.after or None,
            "changed": opened.changed,
            "weights_bytes": _weights_bytes(state),
            "seconds": round(seconds, 3),
        }
        write_json(summary)


def _tell(delta: Delta, out: Path, state: State, seconds: float) -> None:
    size = byte_size(_weights_bytes(state))
    say(f"wrote {out}: {size} of weights, {delta.changed:,} changed, {seconds:.2f} s")
    say(f"verified: {_verified(delta)}")


def _verified(delta: Delta) -> str:
    """What the digests have proven: a delta of some rows only does not know the state of all."""
    if not delta.after:
        return f"what it covers, {counted(len(delta.entries), 'tensor')} in part or whole"
    return f"state {delta.after[:12]}" + (f" (from {delta.before[:12]})" if delta.before else "")


def _weights_bytes(state: State) -> int:
    return sum(tensor.dtype.nbytes(tensor.shape) or 0 for tensor in state.tensors.values())
