"""Measures how long a vLLM server pauses for a weight update while it streams to clients, against its bars.

    python benchmarks/pause.py              # synthetic steps of Qwen3-0.6B's shape
    python benchmarks/pause.py RECORDING    # a directory that record.py wrote
    python benchmarks/pause.py --json ...   # the same as JSON

A real vLLM runs on this machine's CPU with our backend, and clients stream completions from it all the time. In every
round the server gets the same step in three ways, and no update for the same time:

- ours: a trainer publishes the step; a follower in another process finds it and patches the engine.
- patches: vLLM's own checkpoint patches undo the step, from a file in shared memory (checkpoint_patches.py).
- reload: vLLM reloads all weights from the step's checkpoint on this machine.

After each update the server's own checksums of its weights must match those of the expected checkpoint, as vLLM loaded
it. The first round does not count.

A pause is the time in which nothing is generated: from the last token that any client received until the server reports
that it has resumed. The time from the pause request on is longer, because tokens in progress are finished first. Every
pause empties vLLM's caches, so the KV cache of running streams is computed again. Clients see all of this as one gap
between two tokens.

Then the same clients stream from a vLLM without our backend. On a CPU, vLLM packs weights, and packed weights cannot be
patched in place. Our backend keeps them unpacked; the table shows what that costs. vLLM's own patches cannot be loaded
into packed weights, so only the reload is timed again.

Needs torch, transformers, vLLM (built for CPUs), 12 GB of memory and Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Self

from arguments import benchmark_parser, recording_path
from benchmark_run import run_benchmark
from child_process import PATIENCE, Child
from pause_table import other_rows, pause_rows, stream_rows
from process_tree import processor_seconds_of_others
from rounds import OTHERS, Times
from stream_gaps import Measured, Slot
from streams import Arrival
from table import Report
from training import open_training
from vllm_server import VLLM, Admin, make_model, serving

import weightwire
from weightwire import Event, Publisher

SHARED_MEMORY = Path("/dev/shm")
CLIENTS, TOKENS, PROMPT = 4, 96, 4
SLOT = 5.0  # least seconds of streaming around an update
SETTLE = 2.5  # seconds to observe after an update
PLAIN_ROUNDS = 3

# With less than a gigabyte of weights, requests to the server dominate.
JUDGED_FROM = 1e9


def main() -> None:
    arguments = parse_arguments()
    run_benchmark(lambda scratch: [measure(arguments.recording, arguments.rounds, scratch)], as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("Measure how long a vLLM server pauses for an update of its weights.")
    parser.add_argument(
        "recording", nargs="?", type=recording_path, help="a directory that record.py wrote, of a Qwen3 model"
    )
    parser.add_argument("--rounds", type=int, default=5, help="updates of each kind (default: 5)")
    return parser.parse_args()


def measure(recording: Path | None, count: int, scratch: Path) -> Report:
    training = open_training(recording, scratch)
    title, facts, nbytes = training.title, training.shown_facts, training.live.flat.nbytes
    checkpoints = [training.directory / name for name in facts["checkpoints"]]
    del training
    model, load = make_model(checkpoints[0], scratch / "model"), os.getloadavg()[0]
    ours = measure_with_backend(model, checkpoints, count, scratch / "ours")
    without = measure_without_backend(model, checkpoints, scratch / "without")
    rows = [*pause_rows(ours, nbytes >= JUDGED_FROM), *stream_rows(ours, without), *other_rows(ours, without)]
    title = f"{title}\n  load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    return Report(title, facts, 0, 0, [], rows)


# ---- updates under load ----


class Streams(Child):
    """The client process, and the tokens that it received."""

    def __init__(self, server: VLLM, tokens: int = TOKENS, prompt: int = PROMPT) -> None:
        super().__init__("streams.py", server.url, server.model, str(CLIENTS), str(tokens), str(prompt))
        self.arrivals: list[Arrival] = []

    def __enter__(self) -> Self:
        """Returns when every client has received tokens."""
        try:
            self.next_line()
        except BaseException:
            self.kill()
            raise
        return self

    def take(self) -> None:
        self.send("take")
        self.arrivals += [tuple(arrival) for arrival in json.loads(self.next_line())["arrivals"]]

    def finish(self) -> dict[str, Any]:
        """Waits for the running requests. Returns the number of requests and tokens, and all errors."""
        self.take()
        self.end()
        ended: dict[str, Any] = json.loads(self.next_line())
        return ended


def observe(what: str, work: Callable[[], tuple[float, float, float, Times]]) -> Slot:
    """Runs an update, then waits until its effects are over."""
    busy_before, called = processor_seconds_of_others(), time.time()
    began, ready, ended, times = work()
    until = max(began + SLOT, ended + SETTLE)
    time.sleep(max(0.0, until - time.time()))
    others = (processor_seconds_of_others() - busy_before) / (time.time() - called)
    return Slot(what, began, ready, ended, until, times | {OTHERS: others})


def no_update() -> tuple[float, float, float, Times]:
    now = time.time()
    return now, now, now, {}


def by_admin(admin: Admin, work: Callable[[], None]) -> Callable[[], tuple[float, float, float, Times]]:
    def timed() -> tuple[float, float, float, Times]:
        admin.begin()
        began = time.time()
        work()
        ended = time.time()
        return began, began, ended, admin.times | {"ordered": ended - began, "all": ended - began}

    return timed


# ---- one server, three ways ----


class Ours:
    """A trainer, and a follower process that keeps the server up to date."""

    def __init__(self, stack: ExitStack, server: VLLM, first: Path, scratch: Path, cache: str = "flush") -> None:
        self._server = server
        self._events: dict[str, dict[int | None, Event]] = defaultdict(dict)
        url = scratch / "bucket"
        publisher = Publisher(url, base=first, files={}, on_event=self._record)
        self._publisher = stack.enter_context(publisher)
        self._keeper = stack.enter_context(Child("keeper.py", str(url), scratch / "replica", first, server.url, cache))
        until = time.monotonic() + PATIENCE
        while server.weight_version != str(publisher.version):
            if time.monotonic() > until:
                raise SystemExit(f"the follower did not attach to the server:\n{server.log()[-3000:]}")
            time.sleep(0.2)

    def _record(self, event: Event) -> None:
        self._events[event.stage][event.version] = event

    def update(self, checkpoint: Path) -> tuple[float, float, float, Times]:
        """Times start at the commit. The trainer's part is not measured here."""
        version = self._publisher.publish(checkpoint).wait(PATIENCE)
        self._keeper.send("wake")
        events = self._wait_for_swap(version)
        apply, stage, swap = events["apply"], events["stage"], events["swap"]
        began, ended = self._events["commit"][version].at, swap["at"]
        paused, staged = (event["at"] - event["began"] for event in (swap, stage))
        times = {
            "commit to applied": apply["at"] - began,
            "staged": staged,
            "ordered": paused,
            "all": staged + paused,
            "commit to served": ended - began,
        }
        return began, swap["began"], ended, times

    def _wait_for_swap(self, version: int) -> dict[str, dict[str, Any]]:
        events: dict[str, dict[str, Any]] = {}
        while "swap" not in events:
            event = json.loads(self._keeper.next_line())
            if event["stage"] == "warning":  # the server answers nobody while it reloads, for example
                print(f"ours: {event['message']}", file=sys.stderr)
            if event.get("version") == version:
                events[event["stage"]] = event
        return events


class Proof:
    """Compares the server's own checksums with those of the checkpoint that it should hold."""

    def __init__(self, server: VLLM, first: Path) -> None:
        self._server = server
        self._known = {first: server.checksums()}

    def check(self, checkpoint: Path, what: str) -> None:
        held = self._server.checksums()
        if self._known.setdefault(checkpoint, held) != held:
            raise SystemExit(f"{what}: the weights in the server differ from {checkpoint.name}")


def measure_with_backend(model: Path, checkpoints: list[Path], count: int, scratch: Path) -> Measured:
    measured = Measured()
    file = SHARED_MEMORY / f"{scratch.parent.name}.safetensors"
    with ExitStack() as stack:
        stack.callback(file.unlink, missing_ok=True)
        server = stack.enter_context(serving(model, scratch, "weightwire", 2 * CLIENTS))
        proof, admin = Proof(server, checkpoints[0]), Admin(server.url)
        ours = Ours(stack, server, checkpoints[0], scratch)
        streams = stack.enter_context(Streams(server))
        steps = cycle([*checkpoints[1:], *reversed(checkpoints[:-1])])
        before = checkpoints[0]
        for index, after in zip(range(count + 1), steps, strict=False):
            measured.patch_bytes = write_patch(after, before, file)
            slots = [observe("nothing", no_update), observe("ours", partial(ours.update, after))]
            proof.check(after, "ours")
            slots.append(observe("patches", by_admin(admin, partial(admin.load_patches, file))))
            proof.check(before, "vLLM's patches")
            slots.append(observe("reload", by_admin(admin, partial(admin.reload, after))))
            proof.check(after, "vLLM's reload")
            measured.slots += slots if index else []
            streams.take()
            before = after
        measured.ended = streams.finish()
        measured.arrivals = streams.arrivals
    return measured


def write_patch(old: Path, new: Path, file: Path) -> int:
    """Writes positions and values, as our follower gives them to an engine. Returns the size."""
    delta = weightwire.diff(old, new, coo=True)
    with file.open("wb") as out:
        for chunk in delta.chunks():
            out.write(chunk)
    return file.stat().st_size


def measure_without_backend(model: Path, checkpoints: list[Path], scratch: Path) -> Measured:
    measured = Measured()
    with ExitStack() as stack:
        server = stack.enter_context(serving(model, scratch, None, 2 * CLIENTS))
        admin = Admin(server.url)
        streams = stack.enter_context(Streams(server))
        for index in range(PLAIN_ROUNDS + 1):
            checkpoint = checkpoints[(index + 1) % 2]
            reload = by_admin(admin, partial(admin.reload, checkpoint))
            slots = [observe("nothing", no_update), observe("reload", reload)]
            measured.slots += slots if index else []
        measured.ended = streams.finish()
        measured.arrivals = streams.arrivals
    return measured


if __name__ == "__main__":
    main()
