"""The weights of one version, from the bucket: an anchor or base first, then delta after delta.

Writes into memory that the caller provides (a publisher's copy, a new replica, a checkpoint to be). Nobody must look
at it before this has ended well.
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
from weightwire.weights import Checkpoint, Weights, copy_weights

__all__ = ["apply_version", "load_anchor", "restore_weights"]

Told = Callable[[int], None]
"""Hears which version has been reached."""


async def restore_weights(
    path: ChainPath,
    fetcher: Fetcher,
    targets: Weights,
    runtime: Runtime,
    *,
    base: Weights | None = None,
    threads: int | None = None,
    told: Told | None = None,
) -> State:
    """Fills targets with the weights of the version that a path from nothing leads to; returns their state."""
    if path.start is None:
        raise ValueError("this path does not begin from nothing")
    state = await _begin(path.start, fetcher, targets, runtime, base, threads)
    if told:
        told(path.origin.record.version)
    async for commit, fetched in fetcher.in_turn(path.commits):
        record = commit.record
        with fetcher.noting_lost(record.files):
            state = await runtime.run_in_thread(apply_version, targets, fetched.deltas, state, record.after, threads)
        if told:
            told(commit.record.version)
    return state


async def _begin(
    start: Start, fetcher: Fetcher, targets: Weights, runtime: Runtime, base: Weights | None, threads: int | None
) -> State:
    if isinstance(start, Commit) and start.kind == BASE:
        return await runtime.run_in_thread(_begin_with_base, start, targets, base, threads)
    fetched = await fetcher.fetch(start.files, ANCHOR)
    try:
        with fetcher.noting_lost(start.files):
            return await runtime.run_in_thread(_begin_with_anchor, targets, fetched.deltas, start.after, threads)
    finally:
        fetcher.release(fetched)


def _begin_with_base(start: Commit, targets: Weights, base: Weights | None, threads: int | None) -> State:
    if base is None:
        base = _find_base(start)
    base = {name: base[name] for name in targets if name in base}  # of tied weights one is enough
    state = digest(base, threads=threads)
    if state.hex != start.after:
        raise WrongBase(
            f"these are not the weights that the run started from: their state is {state.hex[:12]}, not "
            f"{start.after[:12]}",
            hint=f"get them from {start.source or 'whoever started the run'}",
        )
    copy_weights(base, targets)
    return state


def _find_base(start: Commit) -> Weights:
    """Where the run says, if that is a place on this machine."""
    if start.source and os.path.isdir(start.source):
        return Checkpoint(start.source)
    raise WrongBase(
        f"the run starts from a base checkpoint ({start.source or 'of unknown origin'}) that is not here",
        hint="download it and say where it is: --base DIR",
    )


def load_anchor(targets: Weights, deltas: Sequence[Delta], threads: int | None = None, *, keep: bool = False) -> State:
    """All weights, from the parts of an anchor. With `keep`, one that is corrupt changes nothing."""
    state = State({})
    for delta in deltas:
        state = apply_in_place(targets, delta, state, threads=threads, keep=keep).state
    return digest(targets, threads=threads) if len(deltas) > 1 else state


def _begin_with_anchor(targets: Weights, deltas: Sequence[Delta], after: str, threads: int | None) -> State:
    state = load_anchor(targets, deltas, threads)
    if state.hex != after:
        raise CorruptDelta(f"{deltas[0].where}: leads to another state than it should", hint="run `weightwire verify`")
    return state


def apply_version(
    targets: Weights, deltas: Sequence[Delta], state: State, after: str, threads: int | None = None
) -> State:
    """One version further. Its files are the parts of several ranks, or one, or none if nothing changed."""
    for delta in deltas:
        state = apply_in_place(targets, delta, state, threads=threads, keep=False).state
    if state.hex != after:
        where = deltas[0].where if deltas else "this version"
        raise CorruptDelta(f"{where}: leads to another state than it should", hint="run `weightwire verify`")
    return state
