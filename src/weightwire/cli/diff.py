"""`weightwire diff`: writes the delta between two checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

import weightwire
from weightwire import Delta, OutputError
from weightwire.cli.shared.file_output import DiffOutput
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.cli.shared.stop_signal import interrupt_leaves, output_left
from weightwire.cli.shared.terminal import (
    AsJson,
    Threads,
    byte_size,
    counted,
    note_if_slow,
    percent,
    say,
)
from weightwire.weights import Checkpoint, file_to_replace, nbytes_of

__all__ = ["diff"]


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Safetensors file or checkpoint directory.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The same with newer weights.")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="DELTA", help="File to write.")],
    coo: Annotated[
        bool, typer.Option("--coo", help="Write positions and values: larger, but readable without OLD.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write the delta that turns OLD into NEW.

    The delta is exact: patching OLD with it gives the weights of NEW, bit for bit.
    """
    began = time.perf_counter()
    before, after = Checkpoint(old), Checkpoint(new)
    _check_output(out, (file.path for file in (*before.files, *after.files)))
    total = nbytes_of(after)
    note_if_slow()
    with interrupt_leaves(output_left(out)), progress_bar("diffing", total) as bar:
        delta = weightwire.diff(before, after, coo=coo, threads=threads, progress=bar.add)
        bar.begin("writing")
        delta.write(out)
    summary = _summarise(delta, after, out, time.perf_counter() - began)
    _tell(summary)
    if as_json:
        write_json(summary)


def _check_output(out: Path, inputs: Iterable[Path]) -> None:
    """Checked first, because the comparison may take minutes."""
    if file_to_replace(out) in {path.resolve() for path in inputs}:
        raise OutputError(f"{out}: is one of the files to compare", hint="write the delta to another file")


def _summarise(delta: Delta, new: Checkpoint, out: Path, seconds: float) -> DiffOutput:
    return DiffOutput(
        delta=str(out),
        before=delta.before or None,
        after=delta.after or None,
        changed=delta.changed,
        weights=sum(tensor.count for tensor in new.values()),
        weights_bytes=nbytes_of(new),
        bytes=delta.nbytes,
        bytes_per_change=delta.nbytes / delta.changed if delta.changed else None,
        tensors_changed=sum(entry.changed > 0 and not entry.fresh for entry in delta.entries.values()),
        tensors_new=sum(entry.fresh for entry in delta.entries.values()),
        tensors_removed=len(delta.removed),
        seconds=round(seconds, 3),
    )


def _tell(summary: DiffOutput) -> None:
    changed, weights, nbytes = summary.changed or 0, summary.weights, summary.bytes
    share = f"{changed:,} changed of {weights:,} weights ({percent(changed, weights)})"
    if not (changed or summary.tensors_new or summary.tensors_removed):
        same = "no change: the weights are identical"
        say(f"wrote {summary.delta}: {byte_size(nbytes)}, {same}, {summary.seconds:.2f} s")
        return
    say(f"wrote {summary.delta}: {byte_size(nbytes)} for {share}")
    smaller = summary.weights_bytes / nbytes
    new, removed = summary.tensors_new, summary.tensors_removed
    facts = [
        f"{summary.bytes_per_change:.3f} bytes per change" if changed else "",
        f"{smaller:,.{0 if smaller > 10 else 1}f}x smaller than the weights" if changed and smaller > 1.05 else "",
        f"{counted(new, 'tensor')} new" if new else "",
        f"{counted(removed, 'tensor')} removed" if removed else "",
        f"{summary.seconds:.2f} s",
    ]
    say(", ".join(filter(None, facts)))
