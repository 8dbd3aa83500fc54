"""How long a vLLM server stands still for an update of its weights, while it streams to clients, against the bars.

    python benchmarks/pause.py              # synthetic steps of Qwen3-0.6B's shape
    python benchmarks/pause.py RECORDING    # a directory that record.py wrote
    python benchmarks/pause.py --json ...   # the same for machines

A real vLLM on this machine's processor, with our backend, and clients that stream completions from it all the time. In
every round it is given the same step in three ways, and nothing for as long:

- ours: a trainer publishes the step; a follower in a process of its own finds it, and patches the engine.
- patches: vLLM's own checkpoint patches take the step back, from a file in shared memory (checkpoint_patches.py).
- reload: vLLM reloads all weights from the step's checkpoint, which lies on this machine.

After each of them the server's own checksums of its weights must be those of the checkpoint that it should hold, as
vLLM loaded it. The first round does not count.

A pause is the time in which nothing is generated: from the last token that came to any client until the server has said
that it goes on. From the order to pause on, it is longer by the tokens that were being made just then. A pause empties
vLLM's caches, whoever asks for it: what the streams had is computed anew afterwards. Clients see all of that as one gap
between two tokens.

Then the same clients stream from a vLLM without our backend. On a processor vLLM packs weights where nothing can be
patched in place; with our backend they stay as they are, and what that costs is told. There vLLM's patches cannot be
loaded at all; the reload is timed once more.

Needs torch, transformers, vLLM (built for CPUs), 12 GB of memory and Linux.
"""

from __future__ import annotations

import argparse
import json
import os
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
from stream_gaps import Played, Slot
from streams import Arrival
from table import Report
from training import open_training
from vllm_server import VLLM, Admin, make_model, serving

import weightwire
from weightwire import Event, Publisher

SHARED_MEMORY = Path("/dev/shm")
CLIENTS, TOKENS = 4, 96
SLOT = 5.0  # seconds of streaming that an update is looked at in, at least
SETTLE = 2.5  # seconds after an update in which its consequences show
PLAIN_ROUNDS = 3

# In less than a gigabyte of weights, the way to the server is what one sees.
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
    ours = play_all(model, checkpoints, count, scratch / "ours")
    without = play_without(model, checkpoints, scratch / "without")
    rows = [*pause_rows(ours, nbytes >= JUDGED_FROM), *stream_rows(ours, without), *other_rows(ours, without)]
    title = f"{title}\n  load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    return Report(title, facts, 0, 0, [], rows)


# ---- updates, and what happens meanwhile ----


class Streams(Child):
    """The clients, and all that came to them."""

    def __init__(self, server: VLLM) -> None:
        super().__init__("streams.py", server.url, server.model, str(CLIENTS), str(TOKENS))
        self.arrivals: list[Arrival] = []

    def __enter__(self) -> Self:
        """Once all of them have had some tokens."""
        try:
            self.next_line()
        except BaseException:
            self.kill()
            raise
        return self

    def take(self) -> None:
        self.tell("take")
        self.arrivals += [tuple(one) for one in json.loads(self.next_line())["arrivals"]]

    def finish(self) -> dict[str, Any]:
        """Lets them have what they asked for. How many requests and tokens there were, and what was wrong with them."""
        self.take()
        self.end()
        ended: dict[str, Any] = json.loads(self.next_line())
        return ended


def look(what: str, work: Callable[[], tuple[float, float, float, Times]]) -> Slot:
    """Something is done to a server, and then nothing until its consequences are over."""
    busy_before, called = processor_seconds_of_others(), time.time()
    began, ready, ended, times = work()
    until = max(began + SLOT, ended + SETTLE)
    time.sleep(max(0.0, until - time.time()))
    others = (processor_seconds_of_others() - busy_before) / (time.time() - called)
    return Slot(what, began, ready, ended, until, times | {OTHERS: others})


def nothing() -> tuple[float, float, float, Times]:
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
    """A trainer, and a follower that keeps the server up to date."""

    def __init__(self, stack: ExitStack, server: VLLM, first: Path, scratch: Path) -> None:
        self._server = server
        self._said: dict[str, dict[int | None, Event]] = defaultdict(dict)
        url = scratch / "bucket"
        publisher = Publisher(url, base=first, files={}, on_event=self._hear)
        self._publisher = stack.enter_context(publisher)
        self._keeper = stack.enter_context(Child("keeper.py", str(url), scratch / "replica", first, server.url))
        until = time.monotonic() + PATIENCE
        while server.weight_version != str(publisher.version):
            if time.monotonic() > until:
                raise SystemExit(f"the server was not taken on:\n{server.log()[-3000:]}")
            time.sleep(0.2)

    def _hear(self, event: Event) -> None:
        self._said[event.stage][event.version] = event

    def update(self, checkpoint: Path) -> tuple[float, float, float, Times]:
        """Begins when the step is committed: what the trainer does before is another story."""
        version = self._publisher.publish(checkpoint).wait(PATIENCE)
        self._keeper.tell("wake")
        told = self._wait_for_swap(version)
        apply, stage, swap = told["apply"], told["stage"], told["swap"]
        began, ended = self._said["commit"][version].at, swap["at"]
        paused, staged = (one["at"] - one["began"] for one in (swap, stage))
        times = {
            "commit to applied": apply["at"] - began,
            "staged": staged,
            "ordered": paused,
            "all": staged + paused,
            "commit to served": ended - began,
        }
        return began, swap["began"], ended, times

    def _wait_for_swap(self, version: int) -> dict[str, dict[str, Any]]:
        told: dict[str, dict[str, Any]] = {}
        while "swap" not in told:
            one = json.loads(self._keeper.next_line())
            if one["stage"] == "warning":
                raise SystemExit(f"ours: {one['message']}")
            if one.get("version") == version:
                told[one["stage"]] = one
        return told


class Proof:
    """What the server's own checksums are, by the checkpoint that it holds."""

    def __init__(self, server: VLLM, first: Path) -> None:
        self._server = server
        self._known = {first: server.checksums()}

    def check(self, checkpoint: Path, what: str) -> None:
        held = self._server.checksums()
        if self._known.setdefault(checkpoint, held) != held:
            raise SystemExit(f"{what}: the server does not hold {checkpoint.name} bit for bit")


def play_all(model: Path, checkpoints: list[Path], count: int, scratch: Path) -> Played:
    played = Played()
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
            played.patch_bytes = write_patch(after, before, file)
            slots = [look("nothing", nothing), look("ours", partial(ours.update, after))]
            proof.check(after, "ours")
            slots.append(look("patches", by_admin(admin, partial(admin.load_patches, file))))
            proof.check(before, "vLLM's patches")
            slots.append(look("reload", by_admin(admin, partial(admin.reload, after))))
            proof.check(after, "vLLM's reload")
            played.slots += slots if index else []
            streams.take()
            before = after
        played.ended = streams.finish()
        played.arrivals = streams.arrivals
    return played


def write_patch(old: Path, new: Path, file: Path) -> int:
    """What our follower hands to an engine too: positions and values. Returns its size."""
    delta = weightwire.diff(old, new, coo=True)
    with file.open("wb") as out:
        for chunk in delta.chunks():
            out.write(chunk)
    return file.stat().st_size


def play_without(model: Path, checkpoints: list[Path], scratch: Path) -> Played:
    """vLLM without our backend."""
    played = Played()
    with ExitStack() as stack:
        server = stack.enter_context(serving(model, scratch, None, 2 * CLIENTS))
        admin = Admin(server.url)
        streams = stack.enter_context(Streams(server))
        for index in range(PLAIN_ROUNDS + 1):
            checkpoint = checkpoints[(index + 1) % 2]
            reload = by_admin(admin, partial(admin.reload, checkpoint))
            slots = [look("nothing", nothing), look("reload", reload)]
            played.slots += slots if index else []
        played.ended = streams.finish()
        played.arrivals = streams.arrivals
    return played


if __name__ == "__main__":
    main()
