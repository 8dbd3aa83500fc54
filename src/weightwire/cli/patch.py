"""`weightwire patch`: applies a delta to a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from weightwire import Delta, OutputError, State
from weightwire.chain import ANCHOR
from weightwire.cli.shared.file_output import PatchOutput
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.cli.shared.stop_signal import interrupt_leaves, output_left
from weightwire.cli.shared.terminal import (
    AsJson,
    Threads,
    byte_size,
    counted,
    note_if_slow,
    say,
)
from weightwire.delta import patch_checkpoint
from weightwire.weights import Checkpoint, nbytes_of

__all__ = ["patch"]


def patch(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Safetensors file or checkpoint directory.")],
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="Delta that was made from BASE, or an anchor.")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="File or directory to write, like BASE.")],
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Apply DELTA to BASE and write the result.

    BASE and the result are verified by their digests. OUT appears complete or not at all, with the shards and side
    files of BASE.
    """
    began = time.perf_counter()
    opened = Delta.open(delta)
    if out.exists() and out.samefile(delta):
        raise OutputError(f"{out}: is the delta itself", hint="write the result to another place")
    note_if_slow()
    total = nbytes_of(Checkpoint(base))
    with interrupt_leaves(output_left(out)), progress_bar("patching", 2 * total) as bar:
        state = patch_checkpoint(base, opened, out, threads=threads, progress=bar.add)
    seconds = time.perf_counter() - began
    _tell(opened, out, state, seconds)
    if as_json:
        summary = PatchOutput(
            base=str(base),
            delta=str(delta),
            checkpoint=str(out),
            before=opened.before or None,
            after=opened.after or None,
            changed=None if opened.kind == ANCHOR else opened.changed,
            weights_bytes=_weights_bytes(state),
            seconds=round(seconds, 3),
        )
        write_json(summary)


def _tell(delta: Delta, out: Path, state: State, seconds: float) -> None:
    size = byte_size(_weights_bytes(state))
    say(f"wrote {out}: {size} of weights, {delta.changed:,} changed, {seconds:.2f} s")
    say(f"verified: {_verified(delta)}")


def _verified(delta: Delta) -> str:
    """What the digests prove. A delta of some rows does not know the state of all weights."""
    if not delta.after:
        return f"the covered rows of {counted(len(delta.entries), 'tensor')}"
    return f"state {delta.after[:12]}" + (f" (from {delta.before[:12]})" if delta.before else "")


def _weights_bytes(state: State) -> int:
    return sum(tensor.dtype.nbytes(tensor.shape) or 0 for tensor in state.tensors.values())
