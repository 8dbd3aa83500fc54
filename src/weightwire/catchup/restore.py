"""Restores the weights of one version from the bucket: an anchor or base first, then the deltas.

Writes into memory of the caller: a copy, a new replica or a new checkpoint. It is valid only after success.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from weightwire.catchup.fetch import Fetcher
from weightwire.catchup.plan import ChainPath, Start
from weightwire.chain import ANCHOR, BASE, Commit
from weightwire.delta import Delta, State, apply_in_place, digest
from weightwire.errors import CorruptDelta, WrongBase
from weightwire.system import Runtime
from weightwire.telemetry import StartProgress, ignore_progress, start_progress
from weightwire.weights import Checkpoint, Weights, copy_weights, nbytes_of

__all__ = ["apply_version", "load_anchor", "restore_weights"]

_NO_PROGRESS = start_progress(ignore_progress)

VersionListener = Callable[[int], None]
"""Called with each version reached."""


async def restore_weights(
    path: ChainPath,
    fetcher: Fetcher,
    targets: Weights,
    runtime: Runtime,
    *,
    base: Weights | None = None,
    threads: int | None = None,
    on_version: VersionListener | None = None,
    progress: StartProgress = _NO_PROGRESS,
) -> State:
    """Fills `targets` with the weights of the path's target and returns their state. The path must have a start."""
    if path.start is None:
        raise ValueError("this path has no start: it continues from a version held")
    state = await _begin(path.start, fetcher, targets, runtime, base, threads, progress)
    if on_version:
        on_version(path.origin.record.version)
    fetcher.on_read = progress("fetch", sum(commit.record.nbytes for commit in path.commits))
    async for commit, fetched in fetcher.in_turn(path.commits):
        record = commit.record
        with fetcher.noting_lost(record.files):
            state = await runtime.run_in_thread(apply_version, targets, fetched.deltas, state, record.after, threads)
        if on_version:
            on_version(commit.record.version)
    return state


async def _begin(
    start: Start,
    fetcher: Fetcher,
    targets: Weights,
    runtime: Runtime,
    base: Weights | None,
    threads: int | None,
    progress: StartProgress,
) -> State:
    if isinstance(start, Commit) and start.kind == BASE:
        return await runtime.run_in_thread(_begin_with_base, start, fetcher.url, targets, base, threads, progress)
    fetcher.on_read = progress("fetch", start.nbytes)
    fetched = await fetcher.fetch(start.files, ANCHOR)
    try:
        with fetcher.noting_lost(start.files):
            return await runtime.run_in_thread(
                _begin_with_anchor, targets, fetched.deltas, start.after, threads, progress
            )
    finally:
        fetcher.release(fetched)


def _begin_with_base(
    start: Commit, url: str, targets: Weights, base: Weights | None, threads: int | None, progress: StartProgress
) -> State:
    if base is None:
        base = _find_base(start, url)
    base = {name: base[name] for name in targets if name in base}  # without duplicates of tied weights
    state = digest(base, threads=threads, progress=progress("verify", nbytes_of(base)))
    if state.hex != start.after:
        raise WrongBase(
            f"the base does not hold the weights that the run starts from: its state is {state.hex[:12]}, not "
            f"{start.after[:12]}",
            hint=f"get the base from {start.source or 'the owner of the run'}",
        )
    copy_weights(base, targets, progress("read", nbytes_of(base)))
    return state


def _find_base(start: Commit, url: str) -> Weights:
    """The base at the source named by the run, if both are local directories.

    Whoever writes to a store elsewhere must not choose which paths of this machine are opened.
    """
    is_local = "://" not in url  # only directories have a plain path
    if is_local and os.path.isabs(start.source) and os.path.isdir(start.source):
        return Checkpoint(start.source)
    base = f"the run starts from a base checkpoint ({start.source or 'source unknown'})"
    if not is_local and os.path.isabs(start.source):
        raise WrongBase(
            f"{base} that is not in the bucket",
            hint="pass its directory: --base DIR, or base= in Python; a path that a store names is not opened",
        )
    raise WrongBase(
        f"{base} that is not on this machine",
        hint="download it and pass its directory: --base DIR, or base= in Python",
    )


def load_anchor(
    targets: Weights,
    deltas: Sequence[Delta],
    threads: int | None = None,
    *,
    keep: bool = False,
    progress: Callable[[int], None] | None = None,
) -> State:
    """Loads all weights from the parts of an anchor. With `keep`, a corrupt part changes nothing."""
    state = State({})
    for delta in deltas:
        state = apply_in_place(targets, delta, state, threads=threads, keep=keep, progress=progress).state
    return digest(targets, threads=threads) if len(deltas) > 1 else state


def _begin_with_anchor(
    targets: Weights, deltas: Sequence[Delta], after: str, threads: int | None, progress: StartProgress
) -> State:
    state = load_anchor(targets, deltas, threads, progress=progress("apply", nbytes_of(targets)))
    if state.hex != after:
        raise CorruptDelta(
            f"{deltas[0].where}: leads to another state than its commit names", hint="run `weightwire verify URL`"
        )
    return state


def apply_version(
    targets: Weights, deltas: Sequence[Delta], state: State, after: str, threads: int | None = None
) -> State:
    """Applies one version. `deltas` are the parts of its ranks, or empty if nothing changed."""
    for delta in deltas:
        state = apply_in_place(targets, delta, state, threads=threads, keep=False).state
    if state.hex != after:
        where = deltas[0].where if deltas else "this version"
        raise CorruptDelta(f"{where}: leads to another state than its commit names", hint="run `weightwire verify URL`")
    return state
