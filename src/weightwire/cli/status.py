"""`weightwire status`: a run at one glance: its publisher, its versions, its replicas and how far behind they are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from weightwire.cli.shared.bucket_command import Url, ago, stage_time, with_bucket
from weightwire.cli.shared.terminal import AsJson, byte_size, counted, print_facts, print_rows, write_json
from weightwire.inspection import ReplicaStatus, RunStatus, read_status
from weightwire.system import Runtime

__all__ = ["status"]

_HEADINGS = ("replica", "version", "serves", "behind", "seen", "alive", "fetch", "apply", "pause", "trouble")
_WORDS = ("replica", "alive", "trouble")


def status(url: Url, as_json: AsJson = False) -> None:
    """Show the run at URL: who publishes, what there is, and which replicas follow."""
    found = with_bucket(url, lambda bucket: read_status(bucket, Runtime()))
    if as_json:
        write_json(_as_json(found))
        return
    print_facts(_facts(found))
    if found.replicas:
        print()
        print_rows(_HEADINGS, [_cells(one) for one in found.replicas], _WORDS)


def _as_json(found: RunStatus) -> dict[str, Any]:
    """One flat object, but for the lists and what may be missing."""
    fields = msgspec.to_builtins(found)
    inner = fields.pop("weights") | fields.pop("deltas")
    return {**fields, **inner}


def _facts(found: RunStatus) -> Iterator[tuple[str, str]]:
    now = time.time()
    yield "run", f"{found.run[:12]} at {found.url}, started {ago(now - found.started)}"
    if found.mode != "strict":
        yield "mode", f"{found.mode}: nothing stops a second publisher, so see to it that there is only one"
    counts = f"{counted(found.weights.tensors, 'tensor')}, {counted(found.weights.parameters, 'parameter')}"
    yield "weights", f"{counts}, {byte_size(found.weights.nbytes)}"
    if found.publisher is not None:
        who, since = found.publisher.host or "an unknown host", ago(now - found.publisher.time)
        yield "publisher", f"{who}, epoch {found.publisher.epoch}, since {since}"
    yield "newest", _newest(found)
    deltas = found.deltas
    if deltas.average is not None and deltas.ratio is not None:
        small = f", {deltas.ratio:,.{0 if deltas.ratio > 10 else 1}f}x smaller than all weights"
        yield "deltas", f"{byte_size(round(deltas.average))} on average of the last {deltas.recent}{small}"
    anchor = found.anchor
    yield "anchor", "none yet" if anchor is None else f"version {anchor.version}, {byte_size(anchor.nbytes)}"
    if found.below:
        yield "retention", f"data below version {found.below} may be gone"
    yield "replicas", _replicas(found.replicas)


def _replicas(all_of_them: Sequence[ReplicaStatus]) -> str:
    if not all_of_them:
        return "none heard of"
    alive, stopped = sum(one.alive for one in all_of_them), sum(one.stopped for one in all_of_them)
    return f"{alive} alive of {len(all_of_them)}" + (f", {stopped} stopped" if stopped else "")


def _newest(found: RunStatus) -> str:
    if found.head is None or found.age is None:
        return "no version yet"
    step = f", step {found.head.step}" if found.head.step is not None else ""
    kind = " (a fence: no change of weights)" if found.head.kind == "fence" else ""
    return f"version {found.head.version}{step}, {ago(found.age)}{kind}"


def _cells(one: ReplicaStatus) -> list[str]:
    times = (stage_time(one.stages.get(stage)) for stage in ("fetch", "apply", "swap"))
    alive = "yes" if one.alive else "stopped" if one.stopped else "no"
    return [one.name, *_position(one), ago(one.seen), alive, *times, one.trouble or "-"]


def _position(one: ReplicaStatus) -> tuple[str, str, str]:
    """Its own version, that of its engines, and how far they are behind."""
    if one.version < 0:
        return "-", "-", "-"
    served = "-" if one.served is None else "none" if one.served < 0 else str(one.served)
    return str(one.version), served, str(one.behind)
