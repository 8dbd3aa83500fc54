"""`weightwire status`: the publisher, the newest version and the replicas of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from weightwire.chain import PublicKey
from weightwire.cli.shared.bucket_command import Url, ago, stage_time, warn_of_damage, with_bucket
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.run_output import StatusOutput
from weightwire.cli.shared.terminal import AsJson, byte_size, counted, print_facts, print_rows
from weightwire.cli.shared.trust_options import Trusted, trust_of
from weightwire.inspection import ReplicaStatus, RunStatus, read_status
from weightwire.system import Runtime

__all__ = ["status"]

_HEADINGS = ("replica", "version", "serves", "behind", "seen", "alive", "fetch", "apply", "pause", "trouble")
_WORDS = ("replica", "alive", "trouble")


def status(url: Url, trust: Trusted = None, as_json: AsJson = False) -> None:
    """Show publisher, newest version and replicas of the run at URL."""
    trusted = trust_of(trust)
    found = with_bucket(url, lambda bucket: read_status(bucket, Runtime(), warn_of_damage, trusted))
    if as_json:
        write_json(StatusOutput.of(found))
        return
    print_facts(_facts(found, checked=trusted is not None))
    if found.replicas:
        print()
        print_rows(_HEADINGS, [_cells(one) for one in found.replicas], _WORDS)


def _facts(found: RunStatus, checked: bool) -> Iterator[tuple[str, str]]:
    now = time.time()
    yield "run", f"{found.run[:12]} at {found.url}, started {ago(now - found.started)}"
    if found.rights.mode != "strict":
        yield "mode", f"{found.rights.mode}: nothing stops a second publisher; make sure that only one runs"
    counts = f"{counted(found.weights.tensors, 'tensor')}, {counted(found.weights.parameters, 'parameter')}"
    yield "weights", f"{counts}, {byte_size(found.weights.nbytes)}"
    if found.publisher is not None:
        host, claimed = found.publisher.host or "an unknown host", ago(now - found.publisher.time)
        yield "publisher", f"{host}, epoch {found.publisher.epoch}, claimed {claimed}"
    yield "signed by", _signers(found, checked)
    yield "newest", _newest(found)
    deltas = found.deltas
    if deltas.average is not None and deltas.ratio is not None:
        small = f", {deltas.ratio:,.{0 if deltas.ratio > 10 else 1}f}x smaller than all weights"
        size = byte_size(round(deltas.average))
        one = deltas.recent == 1
        yield "deltas", (f"the last delta: {size}" if one else f"{size} on average of the last {deltas.recent}") + small
    anchor = found.anchor
    yield "anchor", "none yet" if anchor is None else f"version {anchor.version}, {byte_size(anchor.nbytes)}"
    if found.below:
        yield "retention", f"data below version {found.below} is deleted"
    yield "replicas", _replicas(found.replicas)


def _signers(found: RunStatus, checked: bool) -> str:
    if not found.rights.keys:
        return "nobody: anyone who can write to the bucket can publish weights"
    keys = ", ".join(PublicKey(key).short for key in found.rights.keys)
    return f"{keys} ({'a trusted key signed the newest version' if checked else 'not checked: pass --trust'})"


def _replicas(all_of_them: Sequence[ReplicaStatus]) -> str:
    if not all_of_them:
        return "none"
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
    """Its version, the version of its engines, and how many versions they are behind."""
    if one.version < 0:
        return "-", "-", "-"
    served = "-" if one.served is None else "none" if one.served < 0 else str(one.served)
    return str(one.version), served, "-" if one.behind is None else str(one.behind)
