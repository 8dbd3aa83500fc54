"""Measures what signatures and verification cost in one sync, against the bar of 10%.

    python benchmarks/trust.py               # synthetic steps of Qwen3-0.6B's shape
    python benchmarks/trust.py RECORDING     # a directory that record.py wrote
    python benchmarks/trust.py --json ...    # the same as JSON

Each round publishes one signed step into a local directory and follows it with a trusted key, in one process and
without a network: the shortest sync there is, so the shares are upper bounds. In the same round, the parts are timed
alone, as often as publisher and follower do them:

- signatures: one is made, one is verified.
- rules: the commit is decoded and checked against the one before it.
- SHA-256: the delta is hashed once by the publisher and once by the follower.
- digests: both sides digest the old and the new value of every word that changed, here on one thread.

Needs numpy and Linux.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from arguments import benchmark_parser, recording_path
from benchmark_run import run_benchmark
from rounds import Round, Spread, Times, range_of
from table import Bar, Report, Row
from training import Training, open_training

import weightwire
from weightwire.chain import Commit, PrivateKey, commit_path, seal
from weightwire.chain.records import Sealed, unseal
from weightwire.chain.rules import check_follows

ROUNDS = 7
WORD = 8  # bytes that a digest takes at once
PARTS = ("signatures", "rules", "SHA-256", "digests")


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("What signatures and verification cost in one sync.")
    parser.add_argument("recording", nargs="?", type=recording_path, help="a directory that record.py wrote")
    return parser.parse_args()


class SignedSync:
    """A publisher with a key, and a follower that trusts it."""

    def __init__(self, training: Training, scratch: Path) -> None:
        self._training, self._bucket, self._key = training, scratch / "bucket", PrivateKey.generate()
        self._publisher = weightwire.Publisher(self._bucket, key=self._key, on_event=_ignore)
        self._publisher.publish(training.live.bf16).wait()
        self._follower = weightwire.Follower(
            self._bucket, into=scratch / "replica", trust=str(self._key.public), on_event=_ignore
        )
        self._follower.once()

    def close(self) -> None:
        self._publisher.close()
        self._follower.close()

    def round(self) -> Times:
        before = self._training.live.flat.copy()
        self._training.step()
        this = Round()
        version = this.time("sync", self._sync)
        parent, commit = self._commit(version - 1), self._commit(version)
        (file,) = commit.record.files
        delta = (self._bucket / file.path).read_bytes()
        changed = _changed_words(before, self._training.live.flat)
        for _ in range(5):
            this.time("signatures", lambda: self._sign_and_verify(commit.record))
            this.time("rules", lambda: _check(parent, commit.data))
            this.time("SHA-256", lambda: [hashlib.sha256(delta).digest() for _ in range(2)])
            this.time("digests", lambda: [weightwire.digest({"w": changed}, threads=1) for _ in range(4)])
        return this.times

    def _sync(self) -> int:
        version = self._publisher.publish(self._training.live.bf16).wait()
        if self._follower.once() != version:
            raise SystemExit(f"the follower did not reach version {version}")
        return version

    def _commit(self, version: int) -> Sealed[Commit]:
        path = commit_path(version)
        return unseal((self._bucket / path).read_bytes(), Commit, path)

    def _sign_and_verify(self, commit: Commit) -> None:
        if not seal(commit, self._key).is_authentic:
            raise SystemExit("a signature was refused")


def _check(parent: Sealed[Commit], data: bytes) -> None:
    check_follows(parent, unseal(data, Commit, "").record, "")


def _changed_words(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The words that changed, one after the other."""
    size = before.nbytes // WORD * WORD
    old, new = (flat.view(np.uint8)[:size].view(np.uint64) for flat in (before, after))
    return new[old != new]


def _ignore(_: object) -> None:
    pass


def measure(recording: Path | None, scratch: Path) -> Iterator[Report]:
    training = open_training(recording, scratch)
    sync = SignedSync(training, scratch)
    try:
        sync.round()  # to warm up
        rounds = [sync.round() for _ in range(ROUNDS)]
    finally:
        sync.close()
    seconds = statistics.median(times["sync"] for times in rounds)
    rows = [Row("one sync, publish to applied (s)", seconds, "{:.3f}", None)]
    rows += [_share(rounds, part, [part], None) for part in PARTS]
    rows.append(_share(rounds, "signatures and verification", [*PARTS], Bar(0.1)))
    yield Report(training.title, training.shown_facts, 1, 1, [], rows)


def _share(rounds: list[Times], measure: str, parts: list[str], bar: Bar | None) -> Row:
    spread = Spread.of(rounds, lambda times: sum(times[part] for part in parts) / times["sync"])
    alone = Spread.of(rounds, lambda times: sum(times[part] for part in parts)).median
    note = f"{range_of(spread, rounds, '{:.2%}')}; {1000 * alone:.2f} ms"
    return Row(f"{measure}: share of the sync", spread.median, "{:.2%}", bar, note)


def main() -> None:
    given = parse_arguments()
    run_benchmark(lambda scratch: measure(given.recording, scratch), as_json=given.json)


if __name__ == "__main__":
    main()
