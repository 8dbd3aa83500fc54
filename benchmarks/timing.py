"""Times weightwire, memcpy, Basilica and the command line on the same weights, in turns.

The speed of a shared machine varies from second to second, so everything is timed in every round, and only times of the
same round are compared. Every result is checked, outside the timed part.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import peers
from flat_weights import FlatWeights, check_same
from process_tree import processor_seconds_of_others
from rounds import OTHERS, Round, Times

import weightwire

# The installed command, as users run it.
COMMAND = Path(sys.executable).with_name("weightwire")

FEWEST_ROUNDS, MOST_ROUNDS = 5, 25
ENOUGH_SECONDS = 4.0


@dataclass(frozen=True)
class Contest:
    """Two states, in memory and as checkpoint directories, and `target`, in which the old becomes the new one.

    The copy of the old state into `target` before every decode is the memcpy that all times are compared with.
    """

    old: FlatWeights
    new: FlatWeights
    target: FlatWeights
    before: weightwire.State
    delta: bytes
    directories: tuple[Path, Path]
    scratch: Path

    def run(self) -> list[Times]:
        """As many rounds as fit in a few seconds, but enough for a median, after one round to warm up."""
        self._round()
        rounds: list[Times] = []
        started = time.perf_counter()
        while len(rounds) < FEWEST_ROUNDS or (
            len(rounds) < MOST_ROUNDS and time.perf_counter() - started < ENOUGH_SECONDS
        ):
            rounds.append(self._round())
        return rounds

    def _round(self) -> Times:
        this = Round()
        started, busy_before = time.perf_counter(), processor_seconds_of_others()
        this.time("encode, one thread", lambda: self._encode(1))
        self._decode(this, "decode, one thread", lambda: self._patch(1))
        this.time("encode, two threads", lambda: self._encode(2))
        self._decode(this, "decode, two threads", lambda: self._patch(2))
        blobs = this.time("encode, Basilica", self._encode_basilica)
        self._decode(this, "decode, Basilica", lambda: self._apply_basilica(blobs))
        this.time("digest", lambda: weightwire.digest(self.old.bf16, threads=1))
        this.time("encode, threads by default", lambda: self._encode(None))
        self._run_command(this)
        others = (processor_seconds_of_others() - busy_before) / (time.perf_counter() - started)
        return this.times | {OTHERS: others}

    def _encode(self, threads: int | None) -> None:
        weightwire.diff(self.old.bf16, self.new.bf16, before=self.before, threads=threads)

    def _patch(self, threads: int) -> None:
        weightwire.patch(self.target.bf16, self.delta, before=self.before, threads=threads)

    def _encode_basilica(self) -> list[peers.BasilicaBlob]:
        return [peers.basilica_encode(*pair) for pair in peers.tensors(self.old.bits, self.new.bits)]

    def _apply_basilica(self, blobs: list[peers.BasilicaBlob]) -> None:
        for tensor, blob in zip(self.target.bits.values(), blobs, strict=True):
            peers.basilica_apply(tensor, blob)

    def _decode(self, this: Round, what: str, work: Callable[[], None]) -> None:
        this.time("memcpy", lambda: np.copyto(self.target.flat, self.old.flat))
        this.time(what, work)
        check_same(self.target, self.new, what)

    def _run_command(self, this: Round) -> None:
        for directory in self.directories:
            warm_up(directory)
        out = self.scratch / "command.safetensors"
        command: list[str | Path] = [COMMAND, "diff", *self.directories, "-o", out]
        ended = this.time("command line", lambda: subprocess.run(command, capture_output=True, text=True))
        if ended.returncode:
            raise SystemExit(f"weightwire diff failed: {ended.stderr}")
        if out.read_bytes() != self.delta:
            raise SystemExit("`weightwire diff` and weightwire.diff made different deltas")
        out.unlink()


def warm_up(directory: Path) -> None:
    """Reads all of a checkpoint, because the page cache may have dropped it since the last round."""
    buffer = bytearray(1 << 24)
    for path in directory.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
