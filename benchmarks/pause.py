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
import http.client
import json
import os
import shutil
import statistics
import sys
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from typing import Any

from family import seconds_of_others
from rounds import OTHERS, Spread, Times, range_of, ratio_row
from streams import Arrival
from sync import PATIENCE, Child
from table import Bar, Report, Row
from training import open_training
from whole import run_whole

import weightwire
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.serving import VLLM
from support.stores import running

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")
CLIENTS, TOKENS = 4, 96
LONGEST = 256  # tokens of a request, prompt included
SLOT = 5.0  # seconds of streaming that an update is looked at in, at least
SETTLE = 2.5  # seconds after an update in which its consequences show
PLAIN_ROUNDS = 3

# In less than a gigabyte of weights, the way to the server is what one sees.
JUDGED_FROM = 1e9
OF_RELOAD, OF_PATCHES = Bar(0.1), Bar(1.0)
NONE_LOST = Bar(0.0)


def main() -> None:
    arguments = parse_arguments()
    run_whole(lambda scratch: [measure(arguments.recording, arguments.rounds, scratch)], as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how long a vLLM server pauses for an update of its weights.")
    parser.add_argument("recording", nargs="?", type=Path, help="a directory that record.py wrote, of a Qwen3 model")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each kind (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
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


# ---- what is served ----


def make_model(checkpoint: Path, directory: Path) -> Path:
    """A checkpoint as vLLM takes it: with a config, and a tokenizer that has a word for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    directory.mkdir()
    (directory / "model.safetensors").symlink_to((checkpoint / "model.safetensors").resolve())
    if (checkpoint / "config.json").exists():
        shutil.copy(checkpoint / "config.json", directory)
    else:
        qwen3_config().save_pretrained(directory)
    config = AutoConfig.from_pretrained(directory)
    if config.architectures != ["Qwen3ForCausalLM"]:
        raise SystemExit(f"{checkpoint}: is no model that generates: record one with record.py --model qwen3")
    words = {f"t{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1").save_pretrained(directory)
    return directory


def qwen3_config() -> Any:
    """That of `synthetic.qwen3_shapes`."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )


@contextmanager
def serving(model: Path, scratch: Path, backend: str | None) -> Iterator[VLLM]:
    """The same server with and without our backend. It sees one module of this directory, and not its neighbours."""
    extension = scratch / "extension"
    extension.mkdir(parents=True)
    shutil.copy(HERE / "checkpoint_patches.py", extension)
    options = ["--max-model-len", str(LONGEST), "--max-num-seqs", str(2 * CLIENTS)]
    options += ["--worker-extension-cls", "checkpoint_patches.CheckpointPatches"]
    path = os.pathsep.join(filter(None, [str(extension), os.environ.get("PYTHONPATH")]))
    server = VLLM(scratch, model, backend=backend, options=options, env={"PYTHONPATH": path})
    with running(server):
        yield server


# ---- what is done to it ----


@dataclass(frozen=True)
class Slot:
    """Some seconds of streaming, and what was done to the server meanwhile."""

    what: str
    began: float
    ready: float  # when the pause began
    ended: float
    until: float
    times: Times


class Admin:
    """Gives a server orders, over one connection as our engine does; and says how long each took."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
        self.times: Times = {}

    def begin(self) -> None:
        """The server closes a connection that nobody uses for some seconds."""
        self.times = {}
        self._connection.close()
        self._connection.connect()

    def order(self, name: str, path: str, body: dict[str, Any] | None = None) -> Any:
        began = time.perf_counter()
        self._connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise SystemExit(f"{path}: HTTP {response.status}: {text[:500]!r}")
        self.times[name] = time.perf_counter() - began
        return json.loads(text) if text else None

    def reload(self, checkpoint: Path) -> None:
        self.order("to pause", "/pause?mode=keep")
        about = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        self.order("to update", "/collective_rpc", about)
        self.order("to resume", "/resume")

    def load_patches(self, file: Path) -> None:
        self.order("to pause", "/pause?mode=keep")
        self.order("to start", "/start_weight_update")
        told = self.order("to update", "/collective_rpc", {"method": "load_patches_from", "args": [str(file)]})
        self.order("to finish", "/finish_weight_update")
        self.order("to resume", "/resume")
        self.times |= told["results"][0]


class Streams(Child):
    """The clients, and all that came to them."""

    def __init__(self, server: VLLM) -> None:
        super().__init__("streams.py", server.url, server.model, str(CLIENTS), str(TOKENS))
        self.arrivals: list[Arrival] = []
        self.next_line()

    def take(self) -> None:
        self.tell("take")
        self.arrivals += [tuple(one) for one in json.loads(self.next_line())["arrivals"]]

    def finish(self) -> dict[str, Any]:
        """Lets them have what they asked for. How many requests and tokens there were, and what was wrong with them."""
        self.take()
        self.end()
        ended: dict[str, Any] = json.loads(self.next_line())
        return ended


@dataclass
class Played:
    """All that happened to a server."""

    slots: list[Slot] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    ended: dict[str, Any] = field(default_factory=dict)
    patch_bytes: int = 0

    def of(self, what: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.what == what]

    def times(self, what: str) -> list[Times]:
        return [slot.times | {"pause": self._pause_in(slot)} for slot in self.of(what)]

    def _pause_in(self, slot: Slot) -> float:
        return slot.ended - max(at for _, _, at, _ in self.arrivals if at <= slot.ended)


def look(what: str, work: Callable[[], tuple[float, float, float, Times]]) -> Slot:
    """Something is done to a server, and then nothing until its consequences are over."""
    busy_before, called = seconds_of_others(), time.time()
    began, ready, ended, times = work()
    until = max(began + SLOT, ended + SETTLE)
    time.sleep(max(0.0, until - time.time()))
    others = (seconds_of_others() - busy_before) / (time.time() - called)
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
        server = stack.enter_context(serving(model, scratch, "weightwire"))
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
        server = stack.enter_context(serving(model, scratch, None))
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


# ---- what clients saw ----


@dataclass(frozen=True)
class Gap:
    """The time between two arrivals of the same request."""

    client: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def gaps(played: Played) -> list[Gap]:
    last: dict[int, float] = {}
    found = []
    for request, client, at, _ in played.arrivals:
        if request in last:
            found.append(Gap(client, last[request], at))
        last[request] = at
    return found


def gaps_in(all_gaps: list[Gap], slots: list[Slot]) -> list[float]:
    """Those that began while it was looked at, sorted."""
    return sorted(gap.seconds for gap in all_gaps for slot in slots if slot.began < gap.began <= slot.until)


def gaps_before_pause(all_gaps: list[Gap], slots: list[Slot]) -> list[float]:
    """Of those that ended before the pause began: what getting ready for it costs."""
    return sorted(gap.seconds for gap in all_gaps for slot in slots if slot.began < gap.ended <= slot.ready)


def stalls(all_gaps: list[Gap], slots: list[Slot]) -> list[float]:
    """The gap of each client that an update lies in, for each update."""
    return [gap.seconds for gap in all_gaps for slot in slots if gap.began < slot.ended <= gap.ended]


def tokens_per_second(played: Played) -> list[Times]:
    """While nothing was done to the server, by slot."""
    so_far: dict[int, int] = {}
    came = []
    for request, _, at, tokens in played.arrivals:
        came.append((at, tokens - so_far.get(request, 0)))
        so_far[request] = tokens
    return [
        {"rate": sum(tokens for at, tokens in came if slot.began < at <= slot.until) / (slot.until - slot.began)}
        for slot in played.of("nothing")
    ]


# ---- the table ----

PARTS = ["staged", "to pause", "to start", "to update", "to finish", "to resume", "read", "load"]
WAYS = {"ours": "ours", "patches": "vLLM's patches", "reload": "vLLM's reload"}


def pause_rows(played: Played, judge: bool) -> list[Row]:
    rows = []
    for what, name in WAYS.items():
        times = played.times(what)
        rows.append(milliseconds_row(f"{name}: pause, ms", times, "pause"))
        rows.append(milliseconds_row(f"{name}: from the order to pause on, ms", times, "ordered", parts_of(times)))
        rows.append(milliseconds_row(f"{name}: update with the data at hand, ms", times, "all"))
    rows.append(milliseconds_row("ours: commit to served, ms", played.times("ours"), "commit to served"))
    rounds = [
        dict(zip(WAYS, (times["pause"] for times in same), strict=True))
        for same in zip(*map(played.times, WAYS), strict=True)
    ]
    rows.append(ratio_row(rounds, "pause: ours / vLLM's reload", "ours", "reload", OF_RELOAD if judge else None))
    rows.append(ratio_row(rounds, "pause: ours / vLLM's patches", "ours", "patches", OF_PATCHES if judge else None))
    return rows


def parts_of(rounds: list[Times]) -> str:
    """What it was spent on, as far as is known."""
    medians = {key: 1000 * Spread.of(rounds, itemgetter(key)).median for key in rounds[0]}
    return ", ".join(f"{key} {medians[key]:.0f}" for key in PARTS if key in medians)


def milliseconds_row(measure: str, rounds: list[Times], what: str, more: str = "") -> Row:
    spread = Spread.of(rounds, lambda times: 1000 * times[what])
    note = range_of(spread, rounds, "{:.0f}")
    return Row(measure, spread.median, "{:.0f}", None, f"{note}; {more}" if more else note)


def stream_rows(played: Played, without: Played) -> list[Row]:
    seen = gaps(played)
    rows = [gap_row("no update", gaps_in(seen, played.of("nothing")))]
    for what, name in WAYS.items():
        rows.append(gap_row(f"an update by {name}", gaps_in(seen, played.of(what))))
    rows.append(gap_row("ours, from commit to pause", gaps_before_pause(seen, played.of("ours"))))
    for what, name in WAYS.items():
        found = stalls(seen, played.of(what))
        note = f"{1000 * min(found):.0f} to {1000 * max(found):.0f} in {len(found)} streams"
        rows.append(Row(f"{name}: gap that an update is in, ms", 1000 * statistics.median(found), "{:.0f}", None, note))
    lost = [*played.ended["wrong"], *without.ended["wrong"]]
    requests, tokens = (played.ended[key] + without.ended[key] for key in ("requests", "tokens"))
    note = f"of {requests} with {tokens} tokens; {lost[0]}" if lost else f"of {requests} with {tokens} tokens"
    return [*rows, Row("requests with tokens lost or twice", len(lost), "{:.0f}", NONE_LOST, note)]


def gap_row(when: str, seconds: list[float]) -> Row:
    middle, late = (1000 * seconds[int(part * (len(seconds) - 1))] for part in (0.5, 0.99))
    note = f"p50 {middle:.0f}, longest {1000 * seconds[-1]:.0f}, of {len(seconds)} gaps"
    return Row(f"gap between tokens, {when}: p99, ms", late, "{:.0f}", None, note)


def other_rows(played: Played, without: Played) -> list[Row]:
    rates = [tokens_per_second(one) for one in (played, without)]
    ours, plain = (Spread.of(rounds, itemgetter("rate")) for rounds in rates)
    reloads = without.times("reload")
    slots = [slot.times for slot in (*played.slots, *without.slots)]
    others = Spread.of(slots, itemgetter(OTHERS))
    return [
        Row("tokens/s with our backend, weights unpacked", ours.median, "{:.1f}", None, range_of(ours, rates[0])),
        Row("tokens/s without, weights packed by vLLM", plain.median, "{:.1f}", None, range_of(plain, rates[1])),
        Row("tokens/s with / without", ours.median / plain.median, "{:.2f}", None),
        milliseconds_row("without our backend: vLLM's reload: pause, ms", reloads, "pause", parts_of(reloads)),
        Row("a patch, MB", played.patch_bytes / 1e6, "{:.1f}", None),
        Row("cores that other processes kept busy", others.median, "{:.2f}", None, range_of(others, slots)),
    ]


if __name__ == "__main__":
    main()
