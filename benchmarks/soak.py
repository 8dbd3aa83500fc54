"""Runs a trainer, gc and followers under random faults for a stated time, and judges bits and resources.

    python benchmarks/soak.py                        # 10 minutes
    python benchmarks/soak.py --minutes 60 --seed 7

The store is a real SeaweedFS. Every process reaches it through a proxy of its own. Faults strike at random, one every
few seconds: SIGKILL, SIGSTOP, full disks, cut and slow networks, lost and truncated replies, also of the store itself.
Every version that an engine serves is compared bit by bit with weights that depend only on seed and step. Full disks
need root, because they are tmpfs mounts (in a mount namespace of this process).

Exits with 1 if a promise is broken or a resource grows.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from build import machine
from table import Bar, Report, Row, print_report, print_verdict

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from faults.promises import Violation
from faults.resources import processes
from faults.small_disks import mount_tmpfs, unshare_mounts
from faults.soak_run import SHARED_MEMORY, Plan, Soak
from support.stores import SeaweedFS, running

WARM_UP = 30.0  # seconds after the first useful work of a process, whose growth is not judged
LONG_LIFE = 0.35  # share of the time that a process must have lived for its growth to be judged
LEAST_LIFE = 120.0  # seconds, at least: a process that catches up opens dozens of connections for a moment
STEADY = 300.0  # seconds after which the bucket is judged: leases and retention span two minutes
MOST_DATA_GROWTH = 0.5  # of the peak: a chain that is never swept grows by two thirds of it
OLDEST_DATA = 300.0  # seconds; a lease of 60, retention of 15, two anchors, and the longest faults
MOST_RECORDS = 3.0  # commits, epochs and gc records per version; they are kept by design


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    problem = unshare_mounts()
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    print(f"{machine()}\nseed {seed}, {args.minutes:g} minutes, {args.followers} followers", flush=True)
    if problem:
        print(f"without full disks and the count of shared memory: {problem}", flush=True)
    with tempfile.TemporaryDirectory(prefix="weightwire-soak-", ignore_cleanup_errors=True) as directory:
        room = Path(directory)
        has_memory = not problem and not room.is_relative_to(SHARED_MEMORY) and not mount_tmpfs(SHARED_MEMORY, 256)
        small_disks = 0 if problem else 2
        plan = Plan(seed, 60 * args.minutes, args.followers, args.pace, small_disks, has_memory)
        sys.exit(not play(room, plan))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults strike (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="weights and order of the faults (default: random)")
    parser.add_argument("--followers", type=int, default=8)
    parser.add_argument("--pace", type=float, default=0.5, help="seconds between versions (default: %(default)s)")
    return parser.parse_args()


def play(room: Path, plan: Plan) -> bool:
    """Runs it and prints the table. Returns whether every bar is passed."""
    for name in ("server", "actors"):
        (room / name).mkdir()
    server = SeaweedFS(room / "server")
    began, violation = time.monotonic(), ""
    with running(server):
        soak = Soak(server, room / "actors", plan, lambda line: print(line, flush=True))
        try:
            with soak.playing():
                soak.run()
                print(f"the last fault has ended: {soak.describe()}", flush=True)
                soak.finish()
        except (Violation, KeyboardInterrupt) as problem:
            violation = f"{type(problem).__name__}: {problem}"
    left = Row("processes left behind", len(list(processes(os.getpid()))), "{:.0f}", Bar(0))
    title = f"soak of {time.monotonic() - began:.0f} s, seed {plan.seed}"
    report = Report(title, {}, 0, 0, [], [*rows(soak), left])
    print_report(report)
    print_verdict([report])
    if violation:
        print(f"\nBROKEN: {violation}", flush=True)
    return not violation and all(row.verdict != "MISS" for row in report.rows)


# --- the table -------------------------------------------------------------------------------------------------------


def rows(soak: Soak) -> list[Row]:
    return [*promise_rows(soak), *fault_rows(soak), *process_rows(soak), *place_rows(soak)]


def promise_rows(soak: Soak) -> list[Row]:
    tally, promises = soak.tally, soak.promises
    lost = len(promises.acknowledged) - promises.checked
    found = [
        Row("versions", len(promises.commits), "{:.0f}", Bar(1, at_least=True)),
        Row("acknowledged versions", len(promises.acknowledged), "{:.0f}", Bar(1, at_least=True)),
        Row("acknowledged versions that are lost or unchecked", lost, "{:.0f}", Bar(0)),
        Row("served versions with wrong bits", tally.wrong, "{:.0f}", Bar(0)),
        Row("seconds until everyone had caught up", tally.caught_up_after, "{:.1f}", None),
    ]
    for engine in ("patches", "torch"):
        count = tally.served[engine]
        found.append(Row(f"versions compared bit by bit, engine: {engine}", count, "{:.0f}", Bar(1, at_least=True)))
    return found


def fault_rows(soak: Soak) -> list[Row]:
    found = [Row(f"faults: {what}", count, "{:.0f}", None) for what, count in sorted(soak.chaos.happened.items())]
    moved = sum(one.proxy.nbytes for one in soak.members) / 1e6
    return [
        *found,
        Row("restarts of followers that a full disk had ended", soak.tally.restarts_on_full_disk, "{:.0f}", None),
        Row("bytes to and from the store, MB", moved, "{:.1f}", None),
        Row("objects that gc deleted", soak.tally.swept, "{:.0f}", Bar(1, at_least=True)),
    ]


def process_rows(soak: Soak) -> list[Row]:
    """Growth is judged for processes that lived long: others may still have been starting.

    The bars allow for what fills up once: the cache of 1,024 commits (5 MB), and the connections and threads that
    obstore keeps after a burst.
    """
    found = []
    for measure, unit, form, most in (
        ("memory", 1e6, "{:.1f}", 16.0),
        ("handles", 1, "{:.0f}", 24),
        ("threads", 1, "{:.0f}", 24),
    ):
        name = "memory, MB" if measure == "memory" else measure
        for owner in ("trainer", "gc", "follower"):
            peak, final = (getattr(soak.resources, how)(measure, owner) / unit for how in ("peak", "final"))
            found.append(Row(f"{name}: {owner}, final", final, form, None, f"peak {form.format(peak)}"))
        found += growth_rows(soak, measure, f"{name}: most growth of a process", unit, form, most, WARM_UP)
    return found


def place_rows(soak: Soak) -> list[Row]:
    log, found = soak.resources, []
    for measure, name, unit, most in (
        ("replica files", "files in a replica", 1, 8),
        ("replica bytes", "disk of a replica, MB", 1e6, 8),
    ):
        note = f"peak {log.peak(measure) / unit:.1f}"
        found.append(Row(f"{name}, final", log.final(measure) / unit, "{:.1f}", None, note))
        found += growth_rows(soak, measure, f"{name}: most growth", unit, "{:.1f}", most, WARM_UP)
    found.append(Row("temporary files of a process, final", log.final("temporary files"), "{:.0f}", Bar(0)))
    if soak.plan.own_shared_memory:
        found.append(Row("files in /dev/shm, final", log.final("shared memory files"), "{:.0f}", Bar(0)))
    return [*found, *bucket_rows(soak)]


def bucket_rows(soak: Soak) -> list[Row]:
    log, found = soak.resources, []
    for measure, name, unit in (("data objects", "data objects in the bucket", 1), ("data bytes", "data, MB", 1e6)):
        note = f"peak {log.peak(measure) / unit:.1f}"
        found.append(Row(f"{name}, final", log.final(measure) / unit, "{:.1f}", None, note))
        if soak.plan.seconds >= STEADY:
            most = MOST_DATA_GROWTH * log.peak(measure) / unit
            found += growth_rows(soak, measure, f"{name}: growth", unit, "{:.1f}", most, STEADY / 2)
    found.append(Row("age of the oldest data, s, at most", log.peak("data age"), "{:.0f}", Bar(OLDEST_DATA)))
    records = log.final("record objects") / max(1, len(soak.promises.commits))
    found.append(Row("records per version", records, "{:.2f}", Bar(MOST_RECORDS)))
    return found


def growth_rows(soak: Soak, measure: str, name: str, unit: float, form: str, most: float, warm_up: float) -> list[Row]:
    worst = soak.resources.worst(measure, warm_up, max(LEAST_LIFE, LONG_LIFE * soak.plan.seconds))
    if worst is None:
        return []
    owner, growth = worst
    note = f"{owner}: {form.format(growth.first / unit)} -> {form.format(growth.last / unit)} in {growth.seconds:.0f} s"
    return [Row(name, growth.value / unit, form, Bar(most), note)]


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
